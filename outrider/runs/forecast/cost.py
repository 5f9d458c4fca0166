"""Cost estimates of a run's features: tokens, bytes and hours for each way to get them.

live: the target reads the texts in every pass of training, and nothing is stored.  cached: it reads them once, and its
states are stored.  engine: an engine that serves the target reads them once, elsewhere, and its states are stored.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from outrider import machine
from outrider.data.corpus import tokenizer_of
from outrider.data.features import encodings
from outrider.errors import TargetError
from outrider.runs.file import RunConfig
from outrider.runs.forecast.checks import Inputs
from outrider.targets.load import default_device

KINDS: tuple[encodings.Kind, ...] = ("bf16", "int8", "int4")
"""Encodings of stored states."""
ID_BYTES = 6
"""A token's id, and its share of the trained spans."""
PASSES_LIVE = 1.5
"""Up to this many passes over the texts, storing states does not pay off."""
CHARACTERS = 4
"""Characters per token, if the target's tokenizer can't be loaded."""


class Tokens(NamedTuple):
    """Tokens of a run."""

    source: int
    """Tokens in the sources, estimated."""
    answers: int
    """Maximum number of tokens that the target generates."""

    @property
    def all(self) -> int:
        return self.source + self.answers


class Way(NamedTuple):
    """One way to get features."""

    name: str
    disk_bytes: int
    hours: float | None
    """Hours on this CPU; None on an accelerator, whose speed is not measured."""


def tokens_of(settings: RunConfig, inputs: Inputs) -> Tokens:
    """Number of tokens, estimated from a few conversations and the target's tokenizer."""
    config = settings.prepare
    texts = [text for part in inputs.conversations.parts for text in part.sample]
    try:
        encoded = tokenizer_of(settings.target.name)(texts, add_special_tokens=False)["input_ids"]
        share = sum(map(len, encoded)) / max(1, sum(map(len, texts)))
    except TargetError:
        share = 1 / CHARACTERS
    source_tokens = int(min(inputs.conversations.characters * share, len(inputs.conversations) * config.length))
    return Tokens(source_tokens, inputs.conversations.most_tokens if config.regenerate else 0)


def bytes_per_token(settings: RunConfig, inputs: Inputs, kind: encodings.Kind) -> float:
    """Bytes per stored token: its taps and final state, or what is stored instead."""
    assert inputs.target is not None
    config, hidden = settings.prepare, inputs.target.spec.hidden
    return encodings.bytes_per_token(kind, hidden, num_taps(settings, inputs), config.top_logprobs)


def num_taps(settings: RunConfig, inputs: Inputs) -> int:
    """Number of layers that the drafter reads."""
    taps = settings.drafter.get("taps") or inputs.paper.values.get("drafter.taps")
    return len(taps) if taps else 0


def ways(settings: RunConfig, inputs: Inputs, tokens: Tokens, passes: float) -> list[Way]:
    """The three ways.  passes: number of training passes over the texts."""
    assert inputs.target is not None
    each = bytes_per_token(settings, inputs, settings.prepare.feature_encoding)
    flops = 2 * inputs.target.parameters * tokens.all
    is_cpu = default_device(settings.target.device).type == "cpu"
    hours = flops / machine.gflops(4096) / 3.6e12 if is_cpu else None
    stored = int(each * tokens.all)
    return [
        Way("live", 0, None if hours is None else hours * max(passes, 1.0)),
        Way("cached", stored, hours),
        Way("engine", stored, None),
    ]


def writing_hours(settings: RunConfig, inputs: Inputs, tokens: Tokens) -> float | None:
    """Maximum hours to generate the answers on this CPU; None on an accelerator."""
    if inputs.target is None or default_device(settings.target.device).type != "cpu":
        return None
    return 2 * inputs.target.parameters * tokens.answers / machine.gflops(settings.prepare.slots) / 3.6e12


def choice(options: list[Way], settings: RunConfig, inputs: Inputs, passes: float) -> tuple[str, str]:
    """The best way on this machine, and why."""
    assert inputs.target is not None
    weights = inputs.target.parameters * getattr(torch, inputs.target.spec.dtype).itemsize
    if default_device(settings.target.device).type == "cpu" and weights > machine.free_memory():
        return "engine", "the target does not fit into this machine's memory"
    if passes <= PASSES_LIVE:
        return "live", f"{passes:.1f} passes over the texts cost no more than storing them"
    stored = next(way.disk_bytes for way in options if way.name == "cached")
    if stored > free_disk(settings.answers):
        return "live", "the features do not fit on this disk"
    return "cached", f"{passes:.1f} passes over the texts, and the target reads them once"


def free_disk(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())).free
