"""One shard of a feature cache: the states of many texts in a memory-mapped safetensors file.

    tokens     [N] int32       tokens of all texts, one text after the other
    starts     [n + 1] int64   index of each text's first token
    keys       [n] int64       hash of each text, by which it is looked up; see `key_of`
    rows       [N] int32       row of each token's states; equal prefixes of two texts share their rows
    tap.I.*                    encoded states of decoder layer I (counted from 0), one per row
    hidden_at  [R] int32       index of a row's final state, -1 if none is stored
    hidden.*                   encoded hidden states after the final norm
    top.*                      in place of them: ids, logprobs, and rest, the logarithm of the mass of all others

The header field `outrider` has the encoding and a hash of all of this.

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
from outrider.errors import DataError
from outrider.nn.top_logprobs import TopLogprobs
from outrider.sampling.text import common_prefix
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular

FORMAT = 1
HEADER = 1 << 24
"""Maximum bytes of a shard's header."""
PREFIX = 16
"""Shared prefixes are detected at multiples of this many tokens."""


class TextStates(NamedTuple):
    """The decoded states of one text."""

    taps: Tensor
    """[S, T, H]."""
    hidden: Tensor
    """[S, H], zeros where none is stored; [S, 0] if `top` is set."""
    top: TopLogprobs | None


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The rows that a shard has for its texts."""

    texts: tuple[Answer, ...]
    rows: Tensor
    """[N] int64."""
    starts: Tensor
    """[n + 1] int64."""
    hidden_at: Tensor
    """[R] int64."""

    @property
    def new(self) -> Tensor:
        """[N] bool, True at tokens whose rows are not shared with an earlier text."""
        first = torch.full((len(self.hidden_at),), len(self.rows))
        first.scatter_reduce_(0, self.rows, torch.arange(len(self.rows)), "amin")
        return first[self.rows] == torch.arange(len(self.rows))


def layout(texts: Sequence[Answer], only_learnt: bool) -> ShardLayout:
    """Rows for these texts; a text reuses the rows of the earlier text with which it has the longest common prefix.

    only_learnt: final states are stored only where they predict a token that is trained on.
    """
    first_text: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    count = 0
    for number, text in enumerate(texts):
        tokens = np.asarray(text.tokens, np.int32)
        hashes = _prefix_hashes(tokens)
        earlier = next((first_text[prefix] for prefix in reversed(hashes) if prefix in first_text), None)
        same = 0 if earlier is None else common_prefix(text.tokens, texts[earlier].tokens)
        shared = np.empty(0, np.int64) if earlier is None else rows[earlier][:same]
        rows.append(np.concatenate([shared, np.arange(count, count + len(tokens) - same)]))
        count += len(tokens) - same
        for prefix in hashes:
            first_text.setdefault(prefix, number)
    starts = np.cumsum([0, *map(len, rows)])
    is_stored = np.zeros(count, bool)
    for text, text_rows in zip(texts, rows, strict=True):
        is_stored[text_rows[predicting(text)] if only_learnt else text_rows] = True
    hidden_at = np.where(is_stored, np.cumsum(is_stored) - 1, -1)
    return ShardLayout(tuple(texts), *(torch.from_numpy(part) for part in (np.concatenate(rows), starts, hidden_at)))


def _prefix_hashes(tokens: np.ndarray) -> list[bytes]:
    """Hashes of a text's prefixes, one every `PREFIX` tokens."""
    digest = hashlib.blake2b(digest_size=16)
    hashes = []
    for end in range(PREFIX, len(tokens) + 1, PREFIX):
        digest.update(tokens[end - PREFIX : end].tobytes())
        hashes.append(digest.copy().digest())
    return hashes


def predicting(text: Answer) -> np.ndarray:
    """Positions of a text whose final states predict a token that is trained on."""
    spans = [np.arange(max(start, 1) - 1, max(end, 1) - 1) for start, end in text.learn]
    return np.concatenate(spans) if spans else np.empty(0, np.int64)


def key_of(text: Answer, only_learnt: bool) -> int:
    """64-bit hash of a text's tokens and, with `only_learnt`, of the positions that are trained on."""
    digest = hashlib.blake2b(np.asarray(text.tokens, np.int32).tobytes(), digest_size=8)
    if only_learnt:
        digest.update(predicting(text).astype(np.int32).tobytes())
    return int.from_bytes(digest.digest(), "little", signed=True)


def name_of(keys: Sequence[int]) -> str:
    """The file name of a shard, a hash of its texts, so that every writer chooses the same name."""
    return f"features-{hashlib.blake2b(np.asarray(keys, np.int64).tobytes(), digest_size=8).hexdigest()}.safetensors"


def write(
    path: Path, keys: Sequence[int], rows: ShardLayout, states: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write a shard atomically.  states: encoded, by tensor name.  Raises OSError."""
    tensors = {
        "tokens": torch.cat([torch.as_tensor(text.tokens, dtype=torch.int32) for text in rows.texts]),
        "starts": rows.starts, "keys": torch.tensor(keys, dtype=torch.int64), "rows": rows.rows.int(),
        "hidden_at": rows.hidden_at.int(),
    } | {name: part.cpu().contiguous() for name, part in states.items()}  # fmt: skip
    about = json.dumps(dict(facts) | {"format": FORMAT, "hash": content_hash(tensors, facts)}, sort_keys=True)
    # one key, since the order of several is random; not save_file, whose temporary file would be left behind by a kill
    data = save(tensors, {"outrider": about})
    with replacing(path) as part:
        part.write_bytes(data)


def content_hash(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> str:
    """Hash, 32 hex digits, of all tensors and facts of a shard."""
    digest = hashlib.blake2b(json.dumps(dict(facts), sort_keys=True).encode(), digest_size=16)
    for name in sorted(tensors):
        part = tensors[name]
        digest.update(f"{name} {part.dtype} {tuple(part.shape)}".encode())
        if part.numel():
            digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Shard:
    """An open shard; its tensors are views of the file, read from disk on access."""

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

    def read(self, key: int, taps: Sequence[int], dtype: torch.dtype, device: torch.device) -> TextStates:
        """The states of one text at these taps."""
        rows = self._tensors["rows"][self._span(key)]
        at = _as_slice(rows)
        tapped = torch.empty(len(rows), len(taps), self.width, dtype=dtype, device=device)
        for number, tap in enumerate(taps):
            self._decoded(f"tap.{tap}", at, dtype, device, tapped[:, number])
        return TextStates(tapped, *self._final(self._tensors["hidden_at"][at], dtype, device))

    def _final(self, hidden_at: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, TopLogprobs | None]:
        """Hidden states [S, H] or top tokens at the indices `hidden_at` [S], zeros where it is -1."""
        is_stored = hidden_at >= 0
        at = _as_slice(hidden_at[is_stored])
        if "top.ids" not in self._tensors:
            return _spread(self._decoded("hidden", at, dtype, device), is_stored), None
        ids, logprobs, rest = (
            _spread(self._tensors[f"top.{name}"][at].to(device), is_stored) for name in ("ids", "logprobs", "rest")
        )
        return torch.zeros(len(hidden_at), 0, dtype=dtype, device=device), TopLogprobs(ids.long(), logprobs, rest)

    def _decoded(
        self, name: str, at: slice | Tensor, dtype: torch.dtype, device: torch.device, out: Tensor | None = None
    ) -> Tensor:
        # encoded rows are copied to the device: a half to an eighth of the bytes
        parts = {key: part.to(device) for key, part in encodings.select(self._parts[name], at).items()}
        return encodings.decode(self.facts["encoding"], parts, dtype, out)

    @functools.cached_property
    def _parts(self) -> dict[str, dict[str, Tensor]]:
        """The encoded tensors of each tap and of the final states."""
        parts: dict[str, dict[str, Tensor]] = {}
        for name, part in self._tensors.items():
            if name.startswith(("tap.", "hidden.")):
                whole, _, key = name.rpartition(".")
                parts.setdefault(whole, {})[key] = part
        return parts


def open_shard(path: Path) -> Shard:
    """Open a shard and check its content against its hash.

    Raises DataError, with its path, if it is missing, damaged or of another format.
    """
    advice = "delete it and run `outrider prepare` again, which rewrites it"
    try:
        with safe_open(regular(path), "pt") as file:
            about = parse_json(file.metadata()["outrider"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise DataError(f"{path} is missing; run `outrider prepare` again, which rewrites it") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); {advice}") from None
    if about.get("format") != FORMAT:
        raise DataError(f"{path} has format {about.get('format')!r}, but this Outrider reads {FORMAT}; {advice}")
    facts = {key: value for key, value in about.items() if key not in ("format", "hash")}
    if content_hash(tensors, facts) != about.get("hash"):
        raise DataError(f"{path} is damaged: its content does not match its hash {about.get('hash')}; {advice}")
    return Shard(path, tensors, facts)


def keys_in(file: BinaryIO, path: Path | str) -> list[int]:
    """The keys of a shard's texts; reads nothing else except the header.  Raises DataError if they can't be read."""
    try:
        size = int.from_bytes(file.read(8), "little")
        start, end = parse_json(file.read(min(size, HEADER)))["keys"]["data_offsets"]
        file.seek(8 + size + start)
        return list[int](np.frombuffer(file.read(end - start), np.int64).tolist())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is damaged ({error}); delete it and run `outrider prepare` again, which rewrites it"
        ) from None


def _as_slice(rows: Tensor) -> slice | Tensor:
    """Consecutive rows [S] as a slice, which avoids a copy; other rows as indices."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    is_consecutive = last - first == len(rows) - 1 and bool((rows.diff() == 1).all())
    return slice(first, last + 1) if is_consecutive else rows.long()


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """values [m, ...] where `mask` [S] is True, zeros elsewhere: [S, ...]."""
    if len(values) == len(mask):
        return values
    spread = values.new_zeros(len(mask), *values.shape[1:])
    spread[mask.to(values.device)] = values
    return spread
