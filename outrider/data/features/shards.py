"""One shard of a feature cache: the states of many texts in a safetensors file that is read through the page cache.

    tokens     [N] int32       tokens of all texts, one text after the other
    starts     [n + 1] int64   where each text begins
    keys       [n] int64       hash of each text, by which it is found; see `key_of`
    rows       [N] int32       row of each token's states; equal prefixes of two texts share their rows
    tap.I.*                    states of decoder layer I (counted from 0), encoded, a row each
    rotated.*                  in place of all taps: what a rotation made of them
    hidden_at  [R] int32       row of the final state that belongs to a row, -1 where none is stored
    hidden.*                   hidden states after the final norm, encoded
    top.*                      in place of them: ids, logprobs, and rest, the logarithm of the mass of all others

The header's `outrider` says what it is bound to, and the hash of all of this.

n texts, N tokens, R rows of taps, T taps, H hidden size.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from outrider.data.answers.store import Answer
from outrider.data.features import encodings
from outrider.data.features.rotation import Rotation
from outrider.errors import DataError
from outrider.nn.top_logprobs import TopLogprobs
from outrider.sampling.text import common_prefix
from outrider.storage.atomic import replacing

FORMAT = 1
HEADER = 1 << 24
"""Most bytes of a shard's header."""
PREFIX = 16
"""Shared prefixes are looked for at multiples of so many tokens."""


class Stored(NamedTuple):
    """The states of one text, as `Shard.read` gives them."""

    taps: Tensor
    """[S, T, H]."""
    hidden: Tensor
    """[S, H], 0 where none is stored; [S, 0] where `top` is."""
    top: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rows a shard has for its texts, before any state is known."""

    texts: tuple[Answer, ...]
    rows: Tensor
    """[N] int64."""
    starts: Tensor
    """[n + 1] int64."""
    hidden_at: Tensor
    """[R] int64."""

    @property
    def new(self) -> Tensor:
        """[N] bool, True at the tokens whose rows no earlier text has."""
        first = torch.full((len(self.hidden_at),), len(self.rows))
        first.scatter_reduce_(0, self.rows, torch.arange(len(self.rows)), "amin")
        return first[self.rows] == torch.arange(len(self.rows))


def layout(texts: Sequence[Answer], only_learnt: bool) -> Layout:
    """Rows for these texts; a text begins with the rows of the earlier text that it shares most of its beginning with.

    only_learnt: final states are stored where they predict a token that is one to learn.
    """
    known: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    count = 0
    for number, text in enumerate(texts):
        tokens = np.asarray(text.tokens, np.int32)
        marks = _marks(tokens)
        shared = next((known[mark] for mark in reversed(marks) if mark in known), None)
        same = 0 if shared is None else common_prefix(text.tokens, texts[shared].tokens)
        begun = np.empty(0, np.int64) if shared is None else rows[shared][:same]
        rows.append(np.concatenate([begun, np.arange(count, count + len(tokens) - same)]))
        count += len(tokens) - same
        for mark in marks:
            known.setdefault(mark, number)
    starts = np.cumsum([0, *map(len, rows)])
    wanted = np.zeros(count, bool)
    for text, own in zip(texts, rows, strict=True):
        wanted[own[predicting(text)] if only_learnt else own] = True
    hidden_at = np.where(wanted, np.cumsum(wanted) - 1, -1)
    return Layout(tuple(texts), *(torch.from_numpy(part) for part in (np.concatenate(rows), starts, hidden_at)))


def _marks(tokens: np.ndarray) -> list[bytes]:
    """Hashes of a text's beginnings, of every `PREFIX` tokens."""
    digest, found = hashlib.blake2b(digest_size=16), []
    for end in range(PREFIX, len(tokens) + 1, PREFIX):
        digest.update(tokens[end - PREFIX : end].tobytes())
        found.append(digest.copy().digest())
    return found


def predicting(text: Answer) -> np.ndarray:
    """Positions of a text whose final states predict a token that is one to learn."""
    found = [np.arange(max(start, 1) - 1, max(end, 1) - 1) for start, end in text.learn]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def key_of(text: Answer, only_learnt: bool) -> int:
    """64 bits that tell texts apart, and with `only_learnt` what of them is to learn."""
    digest = hashlib.blake2b(np.asarray(text.tokens, np.int32).tobytes(), digest_size=8)
    if only_learnt:
        digest.update(predicting(text).astype(np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def name_of(keys: Sequence[int]) -> str:
    """A shard's file is named after its texts, so that every writer gives it the same name."""
    return f"features-{hashlib.blake2b(np.asarray(keys, np.int64).tobytes(), digest_size=8).hexdigest()}.safetensors"


def write(path: Path, keys: Sequence[int], rows: Layout, states: Mapping[str, Tensor], facts: Mapping[str, Any]) -> int:
    """Write a shard whole or not at all; returns its bytes.  states: encoded, by tensor name.  Raises OSError."""
    tensors = {
        "tokens": torch.cat([torch.as_tensor(text.tokens, dtype=torch.int32) for text in rows.texts]),
        "starts": rows.starts, "keys": torch.tensor(keys, dtype=torch.int64), "rows": rows.rows.int(),
        "hidden_at": rows.hidden_at.int(),
    } | {name: part.cpu().contiguous() for name, part in states.items()}  # fmt: skip
    about = json.dumps(dict(facts) | {"format": FORMAT, "hash": content_hash(tensors, facts)}, sort_keys=True)
    # one key, since the order of several is random; save_file leaves another name when it is killed
    data = save(tensors, {"outrider": about})
    with replacing(path) as part:
        part.write_bytes(data)
    return len(data)


def content_hash(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """32 hex digits of all tensors and facts of a shard."""
    digest = hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        part = tensors[name]
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        if part.numel():
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Shard:
    """An open shard; its tensors are views of the file, read from the disk as they are asked for."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]):
        """Use `open_shard`."""
        self.path, self._tensors, self.facts = path, tensors, facts
        self.keys: list[int] = tensors["keys"].tolist()
        self._starts: list[int] = tensors["starts"].tolist()
        self.width: int = facts["hidden"]
        """H."""
        self._numbers = {key: number for number, key in enumerate(self.keys)}

    def tokens(self, key: int) -> Tensor:
        """[S] int32 of one text."""
        return self._tensors["tokens"][self._span(key)]

    def _span(self, key: int) -> slice:
        number = self._numbers[key]
        return slice(self._starts[number], self._starts[number + 1])

    def read(
        self, key: int, taps: Sequence[int], dtype: torch.dtype, device: torch.device, rotation: Rotation | None
    ) -> Stored:
        """The states of one text: these taps of those that the shard has."""
        rows = self._tensors["rows"][self._span(key)]
        at = _as_slice(rows)
        if rotation is None:
            tapped = torch.empty(len(rows), len(taps), self.width, dtype=dtype, device=device)
            for number, tap in enumerate(taps):
                self._decoded(f"tap.{tap}", at, dtype, device, tapped[:, number])
        else:
            tapped = rotation.taps(self._decoded("rotated", at, dtype, device), taps)
        return Stored(tapped, *self._final(self._tensors["hidden_at"][at], dtype, device))

    def _final(self, stored: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, TopLogprobs | None]:
        """Hidden states [S, H] or top tokens of the rows `stored` [S], zeros where it is -1."""
        there = stored >= 0
        at = _as_slice(stored[there])
        if "top.ids" not in self._tensors:
            return _spread(self._decoded("hidden", at, dtype, device), there), None
        ids, logprobs, rest = (
            _spread(self._tensors[f"top.{name}"][at].to(device), there) for name in ("ids", "logprobs", "rest")
        )
        return torch.zeros(len(stored), 0, dtype=dtype, device=device), TopLogprobs(ids.long(), logprobs, rest)

    def _decoded(
        self, name: str, at: slice | Tensor, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
    ) -> Tensor:
        parts = encodings.select(self._parts[name], at)
        # encoded bytes travel to the device, a half to an eighth of the states
        there = {key: part.to(device) for key, part in parts.items()}
        return encodings.decode(self.facts["encoding"], there, dtype, out)

    @functools.cached_property
    def _parts(self) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {}
        for name, part in self._tensors.items():
            if name.startswith(("tap.", "rotated.", "hidden.")):
                whole, _, key = name.rpartition(".")
                found.setdefault(whole, {})[key] = part
        return found


def open_shard(path: Path, checked: bool = True) -> Shard:
    """Open a shard.  Raises DataError, which names it, where it is missing, damaged or of another format.

    checked: its content is read once and compared with its hash.
    """
    advice = "delete it and run `outrider prepare` again, which writes it anew"
    try:
        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["outrider"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run `outrider prepare` again, which writes it anew") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); {advice}") from None
    if about.get("format") != FORMAT:
        raise DataError(f"{path} has format {about.get('format')!r}, but this Outrider reads {FORMAT}; {advice}")
    facts = {key: value for key, value in about.items() if key not in ("format", "hash")}
    if checked and content_hash(tensors, facts) != about.get("hash"):
        raise DataError(f"{path} is damaged: its content is not that of its hash {about.get('hash')}; {advice}")
    return Shard(path, tensors, facts)


def keys_in(file: BinaryIO, path: Path | str) -> list[int]:
    """The keys of a shard's texts, by reading its header and them alone.  Raises DataError where they can't be read."""
    try:
        size = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(min(size, HEADER)))["keys"]["data_offsets"]
        file.seek(8 + size + start)
        return list[int](np.frombuffer(file.read(end - start), np.int64).tolist())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete it and run `outrider prepare` again, which writes it anew"
        ) from None


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Rows [S] that follow each other as a slice, which needs no copy."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    whole = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
    return slice(first, last + 1) if whole else rows.long()


def _spread(found: Tensor, there: Tensor) -> Tensor:
    """Rows found [m, ...] at the places that are True in `there` [S], zeros elsewhere: [S, ...]."""
    if len(found) == len(there):
        return found
    whole = found.new_zeros(len(there), *found.shape[1:])
    whole[there.to(found.device)] = found
    return whole
