"""Outrider: speculative decoding.  A drafter proposes tokens, the target verifies them, and the output is exactly the
target's."""

from __future__ import annotations

import importlib
import logging
from typing import Any

# transformers imports torchao if installed, which warns about every extension built for other machines
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_MODULES = {
    "Accepted": "decoding.accept",
    "Draft": "decoding.draft",
    "Drafter": "decoding.protocols",
    "DrafterConfig": "config:Config",
    "EvaluateConfig": "measure.config:Config",
    "Generation": "generation",
    "Grammar": "sampling.grammar",
    "Report": "report.schema",
    "Sampling": "sampling.settings",
    "TrainConfig": "training.config:Config",
    "accept": "decoding.accept",
    "evaluate": "measure.run",
    "generate": "generation",
    "load_drafter": "loading",
    "load_target": "targets.load",
    "overlap": "decoding.accept",
    "run": "runs.stages",
    "stream": "generation",
    "train": "training.trainer",
}
"""Public name → its module, with a different name there after a colon."""
_CONFIGS = "EvaluateConfig for evaluate, TrainConfig for train, and DrafterConfig for a drafter of your own"

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    # imported on first use, so that `import outrider` and `outrider --help` do not import torch
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("outrider")
    elif name in _MODULES:
        module, _, attribute = _MODULES[name].partition(":")
        value = getattr(importlib.import_module(f"outrider.{module}"), attribute or name)
    else:
        hint = f"; there are {_CONFIGS}" if name == "Config" else ""
        raise AttributeError(f"module 'outrider' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
