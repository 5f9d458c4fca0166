"""What a drafter does, measured against the target alone in the same run: acceptance, speed, latency, exactness.

`outrider.evaluate` is this package and the function of that name at once: calling the package calls `measure.run.evaluate`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *args: Any, **options: Any) -> Any:
        from outrider.measure.run import evaluate

        return evaluate(*args, **options)


sys.modules[__name__].__class__ = _Callable
