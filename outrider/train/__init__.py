"""Train a drafter's model on features of its target.  Knows losses and rows, never a method.

`outrider.train` is this package and the function of that name at once: calling the package calls `trainer.train`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from outrider.train.trainer import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _Callable
