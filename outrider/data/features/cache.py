"""A folder of shards: what it is bound to, which texts it has, and how it is filled.

    cache.json                  what the states are of, and how they are encoded
    rotation.safetensors        directions that the taps are rotated to, where they are
    features-HASH.safetensors   shards, each named after its texts

Which texts share a shard depends on the answers' order and on `shard_tokens` alone, and a shard is named after them.
So several processes fill one folder, each taking shards that no other has; one that is killed loses the shard it was
at, and what is written at last is the same, byte for byte.  Shards are written while the next one's states are
computed.
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
from safetensors import SafetensorError
from torch import Tensor

from outrider.data.answers.store import Answer
from outrider.data.features import encodings, rotation
from outrider.data.features import shards as feature_shards
from outrider.data.features.rotation import Rotation
from outrider.data.features.shards import Layout, Shard, key_of, name_of
from outrider.errors import DataError
from outrider.nn.draft_model import binding
from outrider.nn.top_logprobs import TopLogprobs
from outrider.storage.atomic import replacing
from outrider.storage.lock import Claim
from outrider.targets.protocol import Target

MANIFEST, ROTATION = "cache.json", "rotation.safetensors"
States = Callable[[Sequence[Answer]], Iterator[tuple[int, Tensor, Tensor]]]
"""From texts to the number, taps [S, T, H] and final hidden states [S, H] of each, in any order."""
OnShard = Callable[[int, int], None]
"""Called with the number of shards that are there, and of all."""


@dataclass(frozen=True, slots=True)
class Binding:
    """What a cache's states are of, and how they are stored."""

    target: dict[str, Any]
    """Name, revision, shape, tokenizer's and weights' hashes; precision says which quantisation was run."""
    template: str | None
    """Hash of the chat template."""
    taps: tuple[int, ...]
    dtype: str
    """Of the passes: float32 or bfloat16."""
    encoding: encodings.Kind = "int8"
    top_logprobs: int = 0
    """Likeliest tokens stored in place of a final hidden state; 0 stores the state."""
    rotate: int = 0
    """Numbers that a token's taps are rotated to; 0 stores the taps."""
    only_learnt: bool = False
    """Final states are stored only where they predict a token that is one to learn."""
    source: str = "target"
    """`target`, or the engine that computed the states."""

    @classmethod
    def of(cls, target: Target, template: str | None, taps: tuple[int, ...], dtype: str, **how: Any) -> Binding:
        """The binding of this target's states."""
        spec = target.spec
        about = {"name": spec.name, "revision": spec.revision, "precision": spec.precision} | binding(target)
        return cls(about, template, taps, dtype, **how)

    def as_json(self) -> dict[str, Any]:
        """As cache.json has it."""
        return asdict(self) | {"taps": list(self.taps)}


def differences(mine: Binding, theirs: Binding) -> list[str]:
    """What keeps a cache of `theirs` from serving a reader of `mine`, with both values; it may have more taps, and
    more final states."""
    free = {"taps", "only_learnt", "target"}
    # a folder may be moved, a revision named otherwise: the weights decide, where both know them
    found = {f"target.{key}": (mine.target[key], theirs.target.get(key)) for key in mine.target if key != "name"}
    found |= {key: (getattr(mine, key), getattr(theirs, key)) for key in Binding.__slots__ if key not in free}
    blanks = (("revision", None), ("weights_hash", ""))
    unknown = {f"target.{key}" for key, blank in blanks if blank in (mine.target.get(key), theirs.target.get(key))}
    if not set(mine.taps) <= set(theirs.taps):
        found["taps"] = (list(mine.taps), list(theirs.taps))
    if theirs.only_learnt and not mine.only_learnt:
        found["only_learnt"] = (mine.only_learnt, theirs.only_learnt)
    return [
        f"{key} {there!r}, wanted {here!r}"
        for key, (here, there) in found.items()
        if here != there and key not in unknown
    ]


def bound(folder: Path) -> Binding | None:
    """What a folder's cache is bound to; None where there is none.  Raises DataError for a damaged cache.json."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return Binding(**found | {"taps": tuple(found["taps"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise DataError(f"{folder / MANIFEST} can't be read ({error}); delete {folder} and run again") from None


def check(folder: Path, mine: Binding) -> Binding:
    """What the cache is bound to.  Raises DataError where it can't serve, with both values of all that differs."""
    theirs = bound(folder)
    if theirs is None:
        raise DataError(f"no feature cache in {folder}; run `outrider prepare` first, or set prepare.features to live")
    if wrong := differences(mine, theirs):
        raise DataError(
            f"the feature cache in {folder} has {'; '.join(wrong)}; name another prepare.feature_folder, or delete it"
        )
    return theirs


# ── filling it ────────────────────────────────────────────────────────────────────────────────────────────────────────


def planned(texts: Sequence[Answer], shard_tokens: int) -> list[list[Answer]]:
    """The texts of each shard: as many as have `shard_tokens` tokens together, in their order."""
    shards, room = list[list[Answer]](), 0
    for text in texts:
        if not shards or len(text.tokens) > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(text)
        room -= len(text.tokens)
    return shards


def build(
    folder: Path, texts: Sequence[Answer], states: States, mine: Binding, *, head: Callable[[Tensor], Tensor],
    shard_tokens: int, on_shard: OnShard | None = None,
) -> None:  # fmt: skip
    """Write the states of all texts that the folder lacks; other processes may do so at the same time.

    states: computes them.  head: the target's, for `top_logprobs`.
    Raises DataError where the folder is bound to something else, and where it can't be written: what is there stays.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mine = replace(_claimed(folder, mine), target=mine.target)
        shards = missing(folder, planned(texts, shard_tokens), mine)
        if not shards:
            return
        with _Writer(folder, mine, head) as writer:
            if mine.rotate:
                writer.rotation = _fitted(folder, planned(texts, shard_tokens)[0], states, mine)
            _fill(folder, shards, states, writer, on_shard or (lambda done, total: None))
    except OSError as error:
        there = len(list(folder.glob("features-*.safetensors"))) if folder.is_dir() else 0
        why = f"{error.strerror or error}; {there} shards are there and stay valid"
        raise DataError(f"can't write features to {folder}: {why}; make room and run again") from error


def _claimed(folder: Path, mine: Binding) -> Binding:
    """What the folder is bound to: to `mine`, where it was bound to nothing.  Raises as `check`."""
    while bound(folder) is None:
        claim = Claim.take(folder / f"{MANIFEST}.claim")
        if claim is None:  # another is writing it
            time.sleep(0.01)
            continue
        try:
            if bound(folder) is None:
                _write_json(folder / MANIFEST, mine.as_json())
        finally:
            claim.release()
    return check(folder, mine)


def missing(folder: Path, shards: Iterable[list[Answer]], mine: Binding) -> dict[str, list[Answer]]:
    """Shards that are to be written, by name: not there, and with a text that no other shard has."""
    known = dict[str, list[int]]()
    for path in sorted(folder.glob("features-*.safetensors")):
        with path.open("rb") as file:
            known[path.name] = feature_shards.keys_in(file, path)
    there = {key for keys in known.values() for key in keys}
    found = {}
    for shard in shards:
        keys = [key_of(text, mine.only_learnt) for text in shard]
        name = name_of(keys)
        if known.get(name, keys) != keys:
            raise DataError(f"{folder / name} is damaged: it names other texts than its own; delete it and run again")
        if not there.issuperset(keys):
            found[name] = shard
    return found


def _fill(
    folder: Path, shards: dict[str, list[Answer]], states: States, writer: _Writer, on_shard: OnShard
) -> None:  # fmt: skip
    """Write these shards; returns when all are there, whoever wrote them."""
    while left := [name for name in shards if not (folder / name).exists()]:
        idle = True
        for name in left:
            claim = Claim.take(folder / f"{name}.claim")
            if claim is None:
                continue
            if (folder / name).exists():  # another wrote it meanwhile
                claim.release()
                continue
            idle = False
            try:
                rows = feature_shards.layout(shards[name], writer.mine.only_learnt)
                collected = _collected(rows, states)
            except BaseException:
                claim.release()
                raise
            writer.put(name, rows, *collected, claim)
            on_shard(sum((folder / one).exists() for one in shards), len(shards))
        writer.finish()
        if idle:  # others are at the rest; what one that dies leaves is taken over
            time.sleep(0.1)
    on_shard(len(shards), len(shards))
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Remove what killed processes left."""
    for path in folder.glob("*.claim"):
        claim = Claim.take(path)
        if claim is not None:
            path.with_suffix(".part").unlink(missing_ok=True)
            claim.release()


def _collected(rows: Layout, states: States) -> tuple[Tensor, Tensor]:
    """Taps [R, T, H] and final states [R', H] of a shard's rows, from one pass over its texts."""
    new, starts = rows.new, rows.starts.tolist()
    taps: Tensor | None = None
    hidden: Tensor | None = None
    for number, tapped, final in states(rows.texts):
        text = rows.texts[number]
        if len(final) != len(text.tokens) or not bool(final.isfinite().all() and tapped.isfinite().all()):
            raise DataError(
                f"the states of text {text.id} are {len(final)} rows for {len(text.tokens)} tokens, or not all finite; "
                "load the target in float32 or bfloat16, or look at the engine's log"
            )
        if taps is None or hidden is None:
            stored = int((rows.hidden_at >= 0).sum())
            taps = tapped.new_empty(len(rows.hidden_at), *tapped.shape[1:])
            hidden = final.new_empty(stored, final.shape[1])
        own = slice(starts[number], starts[number + 1])
        mine = rows.rows[own][new[own]]
        tapped, final = tapped[new[own].to(tapped.device)], final[new[own].to(final.device)]
        taps[mine.to(taps.device)] = tapped
        at = rows.hidden_at[mine]
        hidden[at[at >= 0].to(hidden.device)] = final[(at >= 0).to(final.device)]
    assert taps is not None and hidden is not None
    return taps, hidden


class _Writer:
    """Encodes and writes shards in a thread of its own; at most one is on its way while the next is computed."""

    def __init__(self, folder: Path, mine: Binding, head: Callable[[Tensor], Tensor]):
        self.folder, self.mine, self._head = folder, mine, head
        self.rotation: Rotation | None = None
        self._pool = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def put(self, name: str, rows: Layout, taps: Tensor, hidden: Tensor, claim: Claim) -> None:
        """Write a shard soon; raises what the one before it raised."""
        try:
            self.finish()
        except BaseException:
            claim.release()
            raise
        self._last = self._pool.submit(self._write, name, rows, taps, hidden, claim)

    def finish(self) -> None:
        """Return when all is written; raises what writing raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    @torch.no_grad()
    def _write(self, name: str, rows: Layout, taps: Tensor, hidden: Tensor, claim: Claim) -> None:
        try:
            keys = [key_of(text, self.mine.only_learnt) for text in rows.texts]
            states = self._encoded(taps, hidden)
            rotated = self.rotation and self.rotation.hash
            facts = {"encoding": self.mine.encoding, "rotation": rotated, "hidden": hidden.shape[1]}
            feature_shards.write(self.folder / name, keys, rows, states, facts)
        finally:
            claim.release()

    def _encoded(self, taps: Tensor, hidden: Tensor) -> dict[str, Tensor]:
        kind, whole = self.mine.encoding, {}
        if self.rotation is not None:
            whole["rotated"] = self.rotation.coordinates(taps.cpu())
        else:
            whole |= {f"tap.{tap}": taps[:, number] for number, tap in enumerate(self.mine.taps)}
        found = dict[str, Tensor]()
        if self.mine.top_logprobs:
            found = _top(hidden, self._head, self.mine.top_logprobs)
        else:
            whole["hidden"] = hidden
        for name, rows in whole.items():
            found |= {f"{name}.{key}": part for key, part in encodings.encode(kind, rows).items()}
        return found


def _top(hidden: Tensor, head: Callable[[Tensor], Tensor], count: int) -> dict[str, Tensor]:
    """The likeliest tokens after final states [n, H]: ids and logprobs [n, count], and the rest's mass [n]."""
    parts = [TopLogprobs.of(head(rows), count) for rows in hidden.split(256)]
    return {
        "top.ids": torch.cat([part.ids for part in parts]).int(),
        "top.logprobs": torch.cat([part.logprobs for part in parts]).half(),
        "top.rest": torch.cat([part.rest for part in parts]).half(),
    }


def _fitted(folder: Path, texts: list[Answer], states: States, mine: Binding) -> Rotation:
    """The folder's rotation, fitted on the texts of the first shard by whoever comes first."""
    path = folder / ROTATION
    while not path.exists():
        claim = Claim.take(folder / f"{ROTATION}.claim")
        if claim is None:
            time.sleep(0.1)
            continue
        try:
            if not path.exists():
                taps, _ = _collected(feature_shards.layout(texts, only_learnt=True), states)
                rotation.fit(taps.cpu(), mine.taps, mine.rotate).save(path)
        finally:
            claim.release()
    return rotation_of(folder)


def rotation_of(folder: Path) -> Rotation:
    """The rotation of a cache.  Raises DataError where it can't be read."""
    try:
        return rotation.load(folder / ROTATION)
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(
            f"{folder / ROTATION} can't be read ({error}), and without it no shard can; delete {folder} and run again"
        ) from None


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as part:
        part.write_text(json.dumps(value, indent=2), encoding="utf-8")


# ── looking at it ─────────────────────────────────────────────────────────────────────────────────────────────────────


def damaged(folder: Path) -> dict[Path, str]:
    """Shards whose content is not that of their hash, and why; reads all of them once."""
    found = {}
    for path in sorted(folder.glob("features-*.safetensors")):
        try:
            feature_shards.open_shard(path)
        except DataError as error:
            found[path] = str(error)
    return found


def size_of(folder: Path) -> int:
    """Bytes of all files of a cache."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def free_bytes(folder: Path) -> int:
    """Bytes left on the disk that a folder is, or will be, on."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free


def open_rotation(folder: Path, shard: Shard) -> Rotation | None:
    """The rotation that a shard was written with; None where it has its taps.  Raises DataError for another one."""
    wanted = shard.facts.get("rotation")
    if wanted is None:
        return None
    found = rotation_of(folder)
    if found.hash != wanted:
        raise DataError(
            f"{shard.path} was written with rotation {wanted}, but {folder / ROTATION} is {found.hash}; delete "
            f"{folder} and run `outrider prepare` again"
        )
    return found
