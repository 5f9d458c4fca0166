"""Which conversations of a source are used: without duplicates and what is held out, as many as asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.data.config import Config, Source
from outrider.data.sources.duplicates import Signatures, content_key, repeated

NOT_CHOSEN = "not chosen"
"""Why a conversation is not used that nothing is wrong with."""


@dataclass(eq=False)
class Part:
    """One source after its first reading; arrays have a place for each of its conversations."""

    source: Source
    keys: np.ndarray
    """[n] uint64: hash of what is asked, or of the whole conversation where its own answers train."""
    ids: np.ndarray
    openings: np.ndarray
    """[n] uint64: hash of all up to the first turn of the user."""
    prompts: np.ndarray
    """[n] uint64: the hash that its answer is stored under, were its id and content the only ones of their kind."""
    characters: np.ndarray
    """[n] uint32, of all its texts."""
    num_questions: np.ndarray
    """[n] uint16, turns of the user."""
    is_used: np.ndarray
    """[n] bool."""
    is_numbered: np.ndarray
    """[n] bool: its id was there before."""
    left_out: Counter[str]
    """How many were left out, by reason."""
    unreadable: int = 0
    is_held_out: bool = field(default=False, init=False)
    """Its answers never train."""
    sample: list[str] = field(default_factory=list)
    """Beginnings of its first texts, to estimate tokens by."""

    @property
    def is_library(self) -> bool:
        return self.source.is_built_in

    @property
    def label(self) -> str:
        return str(self.source.path or self.source.name)

    @property
    def count(self) -> int:
        return int(self.is_used.sum())


def leave_out_held_out(parts: Sequence[Part], held_out: Part) -> None:
    """What the held-out source asks is not trained on."""
    for part in parts:
        is_held_out = part.is_used & np.isin(part.keys, held_out.keys[held_out.is_used])
        part.is_used &= ~is_held_out
        part.left_out["held out"] += int(is_held_out.sum())


def leave_out_duplicates(parts: Sequence[Part], signatures: Signatures | None) -> None:
    """Of conversations that ask the same the first stays."""
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
        for part, own in zip(parts, shared_out(parts, is_left_out), strict=True):
            part.is_used &= ~own
            part.left_out[reason] += int(own.sum())


def shared_out(parts: Sequence[Part], values: np.ndarray) -> list[np.ndarray]:
    """Values of all conversations as those of each part."""
    return np.split(values, np.cumsum([len(part.keys) for part in parts])[:-1])


def choose(parts: Sequence[Part], config: Config) -> None:
    """Use only as many of each source as its count, the weights and the count of all allow."""
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
        every = np.concatenate([_priority(part, config.seed) for part in parts])
        first = np.argsort(every, kind="stable")[: config.count]
        owners = np.repeat(np.arange(len(parts)), counts)[first]
        for part, count in zip(parts, np.bincount(owners, minlength=len(parts)), strict=True):
            keep(part, int(count), config.seed)


def apportioned(whole: int, shares: np.ndarray) -> list[int]:
    """A whole number as whole numbers in these shares, by Webster's rule: of a larger whole no part is smaller."""
    counts = np.floor(np.maximum(whole - len(shares), 0) * shares + 0.5).astype(np.int64)
    while counts.sum() < whole:
        counts[np.argmin((counts + 0.5) / shares)] += 1
    return [int(count) for count in counts]


def _priority(part: Part, seed: int) -> np.ndarray:
    """[n] uint64, random numbers by what is asked and the seed, of the used conversations."""
    mixed = (part.keys[part.is_used] ^ np.uint64(content_key(seed))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


def keep(part: Part, count: int, seed: int) -> None:
    """Use the `count` first by priority, so that a larger count uses the same ones and more."""
    numbers = np.flatnonzero(part.is_used)
    if len(numbers) <= count:
        return
    dropped = numbers[np.argsort(_priority(part, seed), kind="stable")[count:]]
    part.is_used[dropped] = False
    part.left_out[NOT_CHOSEN] += len(dropped)
