"""What is remembered of texts across requests, one memory a tenant: nothing that one wrote shows in another's drafts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByTenant(Generic[T]):
    """A memory for each tenant, made when it is first asked for."""

    def __init__(self, make: Callable[[], T], most: int):
        """most: tenants that are remembered; of more, the one that asked least recently goes."""
        self.make, self.most = make, most
        self.kept: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tenant: str) -> T:
        with self._lock:
            if tenant in self.kept:
                self.kept.move_to_end(tenant)
                return self.kept[tenant]
            self.kept[tenant] = made = self.make()
            if len(self.kept) > self.most:
                self.kept.popitem(last=False)
            return made
