"""Which conversations of a source are used: without duplicates and held-out ones, up to the requested number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.data.config import Config, Source
from outrider.data.sources.duplicates import Signatures, content_key, repeated

NOT_CHOSEN = "not chosen"
"""Reason for a conversation that is left out only because fewer were requested."""


@dataclass(eq=False)
class ScannedSource:
    """One source after its first reading; arrays have an element for each of its n conversations."""

    source: Source
    keys: np.ndarray
    """[n] uint64: hash of the questions, or of the whole conversation if its own answers are trained on."""
    ids: np.ndarray
    openings: np.ndarray
    """[n] uint64: hash of everything up to the first turn of the user."""
    prompts: np.ndarray
    """[n] uint64: the hash under which its answer is stored, if neither its id nor its content is repeated."""
    characters: np.ndarray
    """[n] uint32, of all its texts."""
    num_questions: np.ndarray
    """[n] uint16, turns of the user."""
    is_used: np.ndarray
    """[n] bool."""
    is_numbered: np.ndarray
    """[n] bool: its id is a repetition, so it is numbered."""
    left_out: Counter[str]
    """Number of conversations left out, by reason."""
    unreadable: int = 0
    is_held_out: bool = field(default=False, init=False)
    """Its answers are never trained on."""
    sample: list[str] = field(default_factory=list)
    """Beginnings of its first texts, to estimate the number of tokens."""

    @property
    def is_library(self) -> bool:
        return self.source.is_built_in

    @property
    def label(self) -> str:
        return str(self.source.path or self.source.name)

    @property
    def count(self) -> int:
        return int(self.is_used.sum())


def leave_out_held_out(parts: Sequence[ScannedSource], held_out: ScannedSource) -> None:
    """Leave out conversations whose questions are in the held-out source."""
    for part in parts:
        is_held_out = part.is_used & np.isin(part.keys, held_out.keys[held_out.is_used])
        part.is_used &= ~is_held_out
        part.left_out["held out"] += int(is_held_out.sum())


def leave_out_duplicates(parts: Sequence[ScannedSource], signatures: Signatures | None) -> None:
    """Keep only the first of conversations with equal or, with `signatures`, nearly equal questions."""
    used = np.concatenate([part.is_used for part in parts])
    numbers = np.flatnonzero(used)
    exact = repeated(np.concatenate([part.keys for part in parts])[numbers])
    reasons = {"duplicate": exact}
    if signatures is not None:
        reasons["nearly a duplicate"] = signatures.duplicates() & ~exact
        signatures.close()
    for reason, mask in reasons.items():
        is_left_out = np.zeros(len(used), bool)
        is_left_out[numbers[mask]] = True
        for part, is_duplicate in zip(parts, split_by_source(parts, is_left_out), strict=True):
            part.is_used &= ~is_duplicate
            part.left_out[reason] += int(is_duplicate.sum())


def split_by_source(parts: Sequence[ScannedSource], values: np.ndarray) -> list[np.ndarray]:
    """Split values of all conversations by source."""
    return np.split(values, np.cumsum([len(part.keys) for part in parts])[:-1])


def choose(parts: Sequence[ScannedSource], config: Config) -> None:
    """Limit each source to what its own count, the weights and the total count allow."""
    for part in parts:
        if part.source.count is not None:
            keep(part, part.source.count, config.seed)
    counts = [part.count for part in parts]
    if any(part.source.weight is not None for part in parts):
        weights = np.array([part.source.weight or 1.0 for part in parts])
        weights /= weights.sum()
        whole = int(min(count / weight for count, weight in zip(counts, weights, strict=True)) + 1e-6)
        whole = whole if config.count is None else min(whole, config.count)
        for part, count in zip(parts, apportioned(whole, weights), strict=True):
            keep(part, count, config.seed)
    elif config.count is not None and config.count < sum(counts):
        priorities = np.concatenate([_priority(part, config.seed) for part in parts])
        first = np.argsort(priorities, kind="stable")[: config.count]
        owners = np.repeat(np.arange(len(parts)), counts)[first]
        for part, count in zip(parts, np.bincount(owners, minlength=len(parts)), strict=True):
            keep(part, int(count), config.seed)


def apportioned(whole: int, shares: np.ndarray) -> list[int]:
    """Divide a whole number into these shares by Webster's method; a larger whole never makes a part smaller."""
    counts = np.floor(np.maximum(whole - len(shares), 0) * shares + 0.5).astype(np.int64)
    while counts.sum() < whole:
        counts[np.argmin((counts + 0.5) / shares)] += 1
    return [int(count) for count in counts]


def _priority(part: ScannedSource, seed: int) -> np.ndarray:
    """[n] uint64: pseudo-random numbers of the used conversations, from their questions and the seed."""
    mixed = (part.keys[part.is_used] ^ np.uint64(content_key(seed))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


def keep(part: ScannedSource, count: int, seed: int) -> None:
    """Keep the first `count` by priority, so that a larger count keeps the same ones and more."""
    numbers = np.flatnonzero(part.is_used)
    if len(numbers) <= count:
        return
    dropped = numbers[np.argsort(_priority(part, seed), kind="stable")[count:]]
    part.is_used[dropped] = False
    part.left_out[NOT_CHOSEN] += len(dropped)
