"""Outrider: speculative decoding made practical.  A drafter rides ahead, the target decides, the output is the target's own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.config import Config
    from outrider.decoding.accept import Accepted, accept, overlap
    from outrider.decoding.draft import Draft
    from outrider.decoding.protocols import Drafter
    from outrider.generation import Generation, generate, stream
    from outrider.loading import load_drafter
    from outrider.measure.run import evaluate
    from outrider.report.schema import Report
    from outrider.runs.stages import run
    from outrider.sampling.grammar import Grammar
    from outrider.sampling.settings import Sampling
    from outrider.targets.load import load_target
    from outrider.training.trainer import train

_HOMES = {
    "Accepted": "decoding.accept",
    "Config": "config",
    "Draft": "decoding.draft",
    "Drafter": "decoding.protocols",
    "Generation": "generation",
    "Grammar": "sampling.grammar",
    "Report": "report.schema",
    "Sampling": "sampling.settings",
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

__all__ = [
    "Accepted",
    "Config",
    "Draft",
    "Drafter",
    "Generation",
    "Grammar",
    "Report",
    "Sampling",
    "accept",
    "evaluate",
    "generate",
    "load_drafter",
    "load_target",
    "overlap",
    "run",
    "stream",
    "train",
]


def __getattr__(name: str) -> Any:
    # loaded on first use, so that `import outrider` and `outrider --help` need no torch
    if name not in _HOMES:
        raise AttributeError(f"module 'outrider' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"outrider.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
