"""Memories of text across requests, separate per tenant: no text of one tenant shows in another's drafts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class ByTenant(Generic[T]):
    """One memory per tenant, created on first use."""

    def __init__(self, make: Callable[[], T], most: int):
        """most: maximum number of memories; beyond that, the least recently used one is removed."""
        self.make, self.most = make, most
        self.memories: OrderedDict[str, T] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, tenant: str) -> T:
        with self._lock:
            if tenant in self.memories:
                self.memories.move_to_end(tenant)
                return self.memories[tenant]
            self.memories[tenant] = made = self.make()
            if len(self.memories) > self.most:
                self.memories.popitem(last=False)
            return made
