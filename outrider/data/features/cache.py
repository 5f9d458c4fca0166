"""A feature cache: a folder of shards, bound to one target and one encoding.

    cache.json                  the target and how its states are encoded
    features-HASH.safetensors   shards, each named after the hash of its texts

Which texts share a shard depends only on the order of the answers and on `shard_tokens`.  So several processes can fill
one folder, each claiming shards that are still unclaimed.  A killed process loses only its current shard, and the final
files are byte-identical.  A shard is written while the next one's states are computed.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.data.answers.store import Answer
from outrider.data.features import encodings
from outrider.data.features import shards as feature_shards
from outrider.data.features.shards import ShardLayout, key_of, name_of
from outrider.errors import DataError
from outrider.nn import draft_model
from outrider.nn.top_logprobs import TopLogprobs
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.storage.lock import Claim
from outrider.storage.trusted import whole_text
from outrider.targets.protocol import Target

MANIFEST = "cache.json"
States = Callable[[Sequence[Answer]], Iterator[tuple[int, Tensor, Tensor]]]
"""Computes states of texts: yields the index, taps [S, T, H] and final hidden states [S, H] of each, in any order."""
OnShard = Callable[[int, int], None]
"""Called with the number of shards written so far and the total."""


@dataclass(frozen=True, slots=True)
class Binding:
    """The target whose states a cache holds, and how they are stored."""

    target: dict[str, Any]
    """Name, revision, shape, and hashes of tokenizer and weights; precision names the quantisation, if any."""
    template: str | None
    """Hash of the chat template."""
    taps: tuple[int, ...]
    dtype: str
    """Number type of the passes: float32 or bfloat16."""
    encoding: encodings.Kind = "int8"
    top_logprobs: int = 0
    """Number of likeliest tokens stored in place of a final hidden state; 0 stores the state."""
    only_learnt: bool = False
    """Final states are stored only where they predict a token that is trained on."""
    source: str = "target"
    """`target`, or the engine that computed the states."""

    @classmethod
    def of(cls, target: Target, template: str | None, taps: tuple[int, ...], dtype: str, **options: Any) -> Binding:
        """The binding of this target's states."""
        spec = target.spec
        about = {"name": spec.name, "revision": spec.revision, "precision": spec.precision}
        return cls(about | draft_model.binding(target), template, taps, dtype, **options)

    def as_json(self) -> dict[str, Any]:
        """The content of cache.json."""
        return asdict(self) | {"taps": list(self.taps)}


def differences(expected: Binding, stored: Binding) -> list[str]:
    """Why a cache bound to `stored` can't be used for `expected`, with both values.

    The cache may have more taps and more final states than expected.
    """
    # a folder may have moved, or a revision may have another name: the weights decide if both hashes are known
    values = {
        f"target.{key}": (expected.target[key], stored.target.get(key)) for key in expected.target if key != "name"
    }
    values |= {
        key: (getattr(expected, key), getattr(stored, key))
        for key in Binding.__slots__
        if key not in ("taps", "only_learnt", "target")
    }
    blanks = (("revision", None), ("weights_hash", ""))
    unknown = {f"target.{key}" for key, blank in blanks if blank in (expected.target.get(key), stored.target.get(key))}
    if not set(expected.taps) <= set(stored.taps):
        values["taps"] = (list(expected.taps), list(stored.taps))
    if stored.only_learnt and not expected.only_learnt:
        values["only_learnt"] = (expected.only_learnt, stored.only_learnt)
    return [
        f"{key} {stored_value!r}, expected {expected_value!r}"
        for key, (expected_value, stored_value) in values.items()
        if expected_value != stored_value and key not in unknown
    ]


def bound(folder: Path) -> Binding | None:
    """The binding in a folder's cache.json; None if there is no such file.  Raises DataError if it is damaged."""
    try:
        content = parse_json(whole_text(folder / MANIFEST))
        if content.pop("rotate", 0):  # an older cache
            raise ValueError("its taps are rotated, which is no longer supported")
        return Binding(**content | {"taps": tuple(content["taps"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{folder / MANIFEST} can't be read ({error}); delete {folder} and run again") from None


def check(folder: Path, expected: Binding) -> Binding:
    """The binding of a cache.  Raises DataError if there is no cache or it can't be used, with all differing values."""
    stored = bound(folder)
    if stored is None:
        raise DataError(f"no feature cache in {folder}; run `outrider prepare` first, or set prepare.features to live")
    if problems := differences(expected, stored):
        raise DataError(
            f"the feature cache in {folder} has {'; '.join(problems)}; name another prepare.feature_folder, or delete "
            "it"
        )
    return stored


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(texts: Sequence[Answer], shard_tokens: int) -> list[list[Answer]]:
    """The texts of each shard, in their order; a shard has about `shard_tokens` tokens."""
    shards, free = list[list[Answer]](), 0
    for text in texts:
        if not shards or len(text.tokens) > free:
            shards.append([])
            free = shard_tokens
        shards[-1].append(text)
        free -= len(text.tokens)
    return shards


def build(
    folder: Path, texts: Sequence[Answer], states: States, binding: Binding, *, head: Callable[[Tensor], Tensor],
    shard_tokens: int, on_shard: OnShard | None = None,
) -> None:  # fmt: skip
    """Write the states of all texts that the folder lacks; other processes may write to it at the same time.

    states: computes them.  head: the target's, for `top_logprobs`.
    Raises DataError if the folder has another binding or can't be written; existing shards are kept.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        binding = replace(_bind(folder, binding), target=binding.target)
        shards = missing(folder, planned(texts, shard_tokens), binding)
        if not shards:
            return
        with _Writer(folder, binding, head) as writer:
            _fill(folder, shards, states, writer, on_shard or (lambda done, total: None))
    except OSError as error:
        count = len(list(folder.glob("features-*.safetensors"))) if folder.is_dir() else 0
        why = f"{error.strerror or error}; {count} shards are written and remain valid"
        raise DataError(f"can't write features to {folder}: {why}; free some space and run again") from error


def _bind(folder: Path, binding: Binding) -> Binding:
    """Bind the folder if it has no binding yet; returns its binding.  Raises as `check`."""
    while bound(folder) is None:
        claim = Claim.take(folder / f"{MANIFEST}.claim")
        if claim is None:  # another process is writing it
            time.sleep(0.01)
            continue
        try:
            if bound(folder) is None:
                _write_json(folder / MANIFEST, binding.as_json())
        finally:
            claim.release()
    return check(folder, binding)


def missing(folder: Path, shards: Iterable[list[Answer]], binding: Binding) -> dict[str, list[Answer]]:
    """The shards still to be written, by name: those with a text that no existing shard has."""
    keys_by_name = dict[str, list[int]]()
    for path in sorted(folder.glob("features-*.safetensors")):
        with path.open("rb") as file:
            keys_by_name[path.name] = feature_shards.keys_in(file, path)
    stored_keys = {key for keys in keys_by_name.values() for key in keys}
    unwritten = {}
    for shard in shards:
        keys = [key_of(text, binding.only_learnt) for text in shard]
        name = name_of(keys)
        if keys_by_name.get(name, keys) != keys:
            raise DataError(f"{folder / name} is damaged: its name does not match its texts; delete it and run again")
        if not stored_keys.issuperset(keys):
            unwritten[name] = shard
    return unwritten


def _fill(
    folder: Path, shards: dict[str, list[Answer]], states: States, writer: _Writer, on_shard: OnShard
) -> None:  # fmt: skip
    """Write these shards; returns once all exist, whichever process wrote them."""
    while left := [name for name in shards if not (folder / name).exists()]:
        idle = True
        for name in left:
            claim = Claim.take(folder / f"{name}.claim")
            if claim is None:
                continue
            if (folder / name).exists():  # another process has written it in the meantime
                claim.release()
                continue
            idle = False
            try:
                rows = feature_shards.layout(shards[name], writer.binding.only_learnt)
                collected = _collected(rows, states)
            except BaseException:
                claim.release()
                raise
            writer.put(name, rows, *collected, claim)
            on_shard(sum((folder / shard).exists() for shard in shards), len(shards))
        writer.finish()
        if idle:  # other processes hold the rest; if one dies, its shard can be claimed
            time.sleep(0.1)
    on_shard(len(shards), len(shards))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Remove the leftovers of killed processes."""
    for path in folder.glob("*.claim"):
        claim = Claim.take(path)
        if claim is not None:
            path.with_suffix(".part").unlink(missing_ok=True)
            claim.release()


def _collected(rows: ShardLayout, states: States) -> tuple[Tensor, Tensor]:
    """Taps [R, T, H] and final states [R', H] of a shard's rows, from one pass over its texts."""
    new, starts = rows.new, rows.starts.tolist()
    taps: Tensor | None = None
    hidden: Tensor | None = None
    for number, tapped, final in states(rows.texts):
        text = rows.texts[number]
        if len(final) != len(text.tokens) or not bool(final.isfinite().all() and tapped.isfinite().all()):
            raise DataError(
                f"the states of text {text.id} have {len(final)} rows for {len(text.tokens)} tokens, or are not "
                "finite; load the target in float32 or bfloat16, or look at the engine's log"
            )
        if taps is None or hidden is None:
            stored = int((rows.hidden_at >= 0).sum())
            taps = tapped.new_empty(len(rows.hidden_at), *tapped.shape[1:])
            hidden = final.new_empty(stored, final.shape[1])
        span = slice(starts[number], starts[number + 1])
        is_new = new[span]
        new_rows = rows.rows[span][is_new]
        tapped, final = tapped[is_new.to(tapped.device)], final[is_new.to(final.device)]
        taps[new_rows.to(taps.device)] = tapped
        at = rows.hidden_at[new_rows]
        hidden[at[at >= 0].to(hidden.device)] = final[(at >= 0).to(final.device)]
    assert taps is not None and hidden is not None
    return taps, hidden


class _Writer:
    """Encodes and writes shards in a background thread, one at a time, while the next one's states are computed."""

    def __init__(self, folder: Path, binding: Binding, head: Callable[[Tensor], Tensor]):
        self.folder, self.binding, self._head = folder, binding, head
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def put(self, name: str, rows: ShardLayout, taps: Tensor, hidden: Tensor, claim: Claim) -> None:
        """Queue a shard once the previous one is written; raises the error of the previous one."""
        try:
            self.finish()
        except BaseException:
            claim.release()
            raise
        self._last = self._pool.submit(self._write, name, rows, taps, hidden, claim)

    def finish(self) -> None:
        """Wait until everything is written; raises the error of the last shard."""
        last = self._last
        self._last = None
        if last is not None:
            last.result()

    @torch.no_grad()
    def _write(self, name: str, rows: ShardLayout, taps: Tensor, hidden: Tensor, claim: Claim) -> None:
        try:
            keys = [key_of(text, self.binding.only_learnt) for text in rows.texts]
            facts = {"encoding": self.binding.encoding, "hidden": hidden.shape[1]}
            feature_shards.write(self.folder / name, keys, rows, self._encoded(taps, hidden), facts)
        finally:
            claim.release()

    def _encoded(self, taps: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        rows_by_name = {f"tap.{tap}": taps[:, number] for number, tap in enumerate(self.binding.taps)}
        tensors = dict[str, Tensor]()
        if self.binding.top_logprobs:
            tensors = _top(hidden, self._head, self.binding.top_logprobs)
        else:
            rows_by_name["hidden"] = hidden
        for name, rows in rows_by_name.items():
            encoded = encodings.encode(self.binding.encoding, rows)
            tensors |= {f"{name}.{key}": part for key, part in encoded.items()}
        return tensors


def _top(hidden: Tensor, head: Callable[[Tensor], Tensor], count: int) -> dict[str, Tensor]:
    """The likeliest tokens after final states [n, H]: ids and logprobs [n, count], and the log of the remaining mass
    [n]."""
    parts = [TopLogprobs.of(head(rows), count) for rows in hidden.split(256)]
    return {
        "top.ids": torch.cat([part.ids for part in parts]).int(),
        "top.logprobs": torch.cat([part.logprobs for part in parts]).half(),
        "top.rest": torch.cat([part.rest for part in parts]).half(),
    }


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2), encoding="utf-8")


# ── inspecting ────────────────────────────────────────────────────────────────────────────────────────────────────────


def size_of(folder: Path) -> int:
    """Bytes of a cache's safetensors files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk of a folder, which may not exist yet."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(existing).free
