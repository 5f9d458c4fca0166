"""Outrider: speculative decoding made practical.  A drafter rides ahead, the target decides, the output is the target's
own."""

from __future__ import annotations

import importlib
import logging
from typing import Any

# transformers loads torchao where it is installed, which warns of every extension for another machine
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_HOMES = {
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
"""Public names, and the module of each; after a colon its name there."""
_CONFIGS = "EvaluateConfig for evaluate, TrainConfig for train, and DrafterConfig for a drafter of your own"

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    # loaded on first use, so that `import outrider` and `outrider --help` need no torch
    if name == "__version__":
        value: Any = importlib.import_module("importlib.metadata").version("outrider")
    elif name in _HOMES:
        module, _, own = _HOMES[name].partition(":")
        value = getattr(importlib.import_module(f"outrider.{module}"), own or name)
    else:
        hint = f"; there are {_CONFIGS}" if name == "Config" else ""
        raise AttributeError(f"module 'outrider' has no attribute {name!r}{hint}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
