"""What the training tests share: small answers, small models of every kind that trains, and one training of a few
steps."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tiny import DRAFTER, randomise

from outrider import drafters
from outrider.config import build
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.nn.draft_model import DraftModel
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.trainer import train

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {key: value for key, value in DRAFTER.items() if key != "rank"} | {"kind": "dflash"},
    "vanilla": DRAFTER | {"markov": "vanilla"},
    "gated": DRAFTER | {"markov": "gated", "confidence": False},
    "rnn": DRAFTER | {"markov": "rnn"},
}
"""Every kind that trains, with every head; fewer anchors than places, so that they are drawn at random."""
OTHERS: dict[str, dict[str, Any]] = {
    "domino": DRAFTER | {"kind": "domino", "gru": 8, "curriculum": 1.0},
    "grouped": DRAFTER | {"heads": 8, "kv_heads": 4, "layers": 2},
    "dflash_grouped": KINDS["dflash"] | {"heads": 4, "kv_heads": 2},
}
"""Kinds that few tests train."""

TAPS = (1,)


def make_model(target: TransformersTarget, kind: str = "vanilla", seed: int = 1, **settings: Any) -> DraftModel:
    """A small model in float32 with no weight at its initial zero."""
    values = {"anchors": 8, "taps": TAPS} | (KINDS | OTHERS)[kind] | settings
    module = drafters.find(values["kind"])
    torch.manual_seed(seed)
    return randomise(module.Model(build(module.Config, values), target).float(), seed=seed)


def make_answers(count: int = 7, vocabulary: int = 261) -> list[Answer]:
    """Texts of unequal length whose later part trains."""
    noise = torch.Generator().manual_seed(4)
    lengths = [12 + 3 * i for i in range(count)]
    return [
        Answer(f"a{i}", torch.randint(vocabulary, (length,), generator=noise).tolist(), [(4, length)])
        for i, length in enumerate(lengths)
    ]


def make_source(target: TransformersTarget, seed: int = 0) -> LiveFeatures:
    return LiveFeatures(target, make_answers(), TAPS, batch=2, length=64, seed=seed)


SETTINGS = {"steps": 6, "batch": 2, "lr": 1e-2, "dtype": "float32", "log_every": 1, "save_every": 2}


def fit(
    folder: Path, target: TransformersTarget, kind: str = "vanilla", seed: int = 1, source: Any = None,
    on_step: Callable[[int, Mapping[str, Any]], None] | None = None,
    probe: Callable[[DraftModel], Mapping[str, Any]] | None = None, force: bool = False, **settings: Any,
) -> DraftModel:  # fmt: skip
    """Train a model in `folder`, or go on there; the model as training left it."""
    model = make_model(target, kind, seed)
    config = Config(**(SETTINGS | settings))
    train(model, source or make_source(target), config, folder, on_step=on_step, probe=probe, force=force)
    return model
