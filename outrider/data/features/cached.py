"""Features from a cache on disk: the states are read, decoded and padded while the step before trains."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.data.answers.store import Answer
from outrider.data.batches import OfTexts
from outrider.data.features import cache, encodings
from outrider.data.features import shards as feature_shards
from outrider.data.features.ahead import Ahead
from outrider.data.features.cache import Binding, States
from outrider.data.features.live import states_of
from outrider.data.features.shards import Shard, Stored, key_of
from outrider.data.overlap.hash_files import Named
from outrider.data.texts import BUFFER, Texts, usable
from outrider.errors import DataError
from outrider.nn.draft_model import Batch, Manifest
from outrider.targets.protocol import Target

log = logging.getLogger(__name__)
OPEN = 2 * BUFFER
"""Most shards that are open at a time, and of a remote cache on this disk."""
OTHER_KERNELS = 0.05
"""Relative error that an engine's own kernels add."""
UNRELATED = 0.9
"""Relative error from which rotated states are not those of this text; what a rotation leaves out is less."""


class CachedFeatures(OfTexts):
    """Batches from a feature cache, in the order of `LiveFeatures`, or where there are many shards a few at a time."""

    def __init__(
        self, target: Target, answers: Sequence[Answer], mine: Binding, folder: str | Path, *, batch: int,
        length: int, seed: int = 0, recheck_every: int = 0, skip_bad: bool = False,
        ngram_hashes: Named | None = None, copy_to: Path | None = None, budget: int | None = None,
    ):  # fmt: skip
        """folder: of the cache, or an fsspec URL, whose shards are copied to the folder `copy_to` as they are needed.

        recheck_every: texts between two that are compared with a pass of the target; 0 compares none.
        skip_bad: leave out texts of damaged shards, and those that the cache lacks.
        Raises DataError where the cache is bound to something else than `mine`, or lacks a text.
        """
        self.ngram_hashes = ngram_hashes
        """Hashes of the texts, stored with a checkpoint; None where there are none."""
        self.target, self.taps, self.size, self.dtype = target, mine.taps, batch, mine.dtype
        self._folder = open_folder(folder, copy_to)
        self.cache = cache.check(self._folder.path, mine)
        self.place, self.is_cached, self.bytes = str(folder), False, 0
        context = min(length, target.spec.context)
        self._shard_of = self._folder.shards_by_key(skip_bad)
        answers, lacks = self._known(answers, context)
        if lacks and not skip_bad:
            raise DataError(
                f"{len(lacks)} of {len(lacks) + len(answers)} texts are not in the feature cache {folder}, such as "
                f"{lacks[0]}; run `outrider prepare` again, which adds them"
            )
        if lacks:
            log.warning(
                "%d texts are left out: the feature cache %s lacks them or is damaged there", len(lacks), folder
            )
        self.order = Texts(answers, batch=batch, length=context, seed=seed, budget=budget)
        self.texts, self.left_out = self.order.answers, self.order.left_out
        self._keys = [key_of(text, self.cache.only_learnt) for text in self.texts]
        shards: dict[str, list[int]] = {}
        for i, key in enumerate(self._keys):
            shards.setdefault(self._shard_of[key], []).append(i)
        self.order.in_shards([shards[name] for name in sorted(shards)])
        self.manifest = Manifest(
            target.spec, mine.taps, mine.dtype, mine.template, len(self.texts), self.order.tokens
        )  # fmt: skip
        self._states_type = torch.bfloat16 if mine.dtype == "bfloat16" else getattr(torch, target.spec.dtype)
        self._recheck_every, self._checked = recheck_every, set[int]()
        self._ahead = Ahead(self.made, target.device)

    def _known(self, answers: Sequence[Answer], length: int) -> tuple[Sequence[Answer], list[str]]:
        """Answers whose states are there, or that have too little to learn; and the ids of the others."""

        def lacks(answer: Answer) -> bool:
            found = usable([answer], length)
            return bool(found) and key_of(found[0], self.cache.only_learnt) not in self._shard_of

        ids = [answer.id for answer in answers if lacks(answer)]
        return [answer for answer in answers if not lacks(answer)] if ids else answers, ids

    @property
    def disk_bytes(self) -> int:
        """What the cache takes on disk."""
        return self._folder.size_bytes

    @property
    def waited_s(self) -> float:
        """Seconds that training stood still for batches."""
        return self._ahead.waited_s

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`; the next one is read meanwhile."""
        return self._ahead.batch(step)

    def packed(self, steps: range) -> Iterator[Batch]:
        """As `OfTexts.packed`; the next batch is read meanwhile."""
        return self._ahead.packed(steps, len(self.order.packed(steps)))

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()

    def _states(self, texts: Sequence[int]) -> dict[int, Stored]:
        return {i: self._text(i) for i in texts}

    def _text(self, i: int) -> Stored:
        key = self._keys[i]
        shard, rotated = self._folder.open(self._shard_of[key])
        found = shard.read(key, self.taps, self._states_type, self.target.device, rotated)
        if self._recheck_every and i % self._recheck_every == 0 and i not in self._checked:
            self._recheck(i, found, shard)
            self._checked.add(i)
        return found

    def _recheck(self, i: int, found: Stored, shard: Shard) -> None:
        """Raises DataError where the states of a text are not what a pass of the target gives, but for rounding."""
        text = self.texts[i]
        taps, hidden = (
            states[0] for states in states_of(self.target, torch.tensor([text.tokens]), self.taps, self.dtype)
        )
        there = found.hidden.abs().amax(-1) > 0 if found.hidden.shape[-1] else found.hidden.new_zeros(0).bool()
        errors = [encodings.relative_error(found.hidden[there], hidden[there]) if len(there) else 0.0]
        errors += [encodings.relative_error(found.taps[:, t], taps[:, t]) for t in range(len(self.taps))]
        most = encodings.TOLERANCE[self.cache.encoding]
        if self.cache.source != "target":
            most += OTHER_KERNELS
        limits = [most, *[UNRELATED if self.cache.rotate else most] * len(self.taps)]
        names = ["the final state", *(f"tap {tap}" for tap in self.taps)]
        for name, error, limit in zip(names, errors, limits, strict=True):
            if not error <= limit:
                raise DataError(
                    f"{shard.path}, text {text.id}: {name} differs by {error:.0%} from the target's own pass, at most "
                    f"{limit:.0%} is rounding; the cache is of other weights or was written wrongly: delete it and run "
                    "`outrider prepare` again"
                )


class Folder:
    """The shards of a cache folder, a few of them open at a time."""

    def __init__(self, path: Path, names: Sequence[str], size_bytes: int):
        self.path, self.names, self.size_bytes = path, names, size_bytes
        self._open: OrderedDict[str, tuple[Shard, cache.Rotation | None]] = OrderedDict()

    def fetch(self, name: str) -> Path:
        """Where a shard is on this machine."""
        return self.path / name

    def reading(self, name: str) -> Any:
        """A shard as an open file."""
        return (self.path / name).open("rb")

    def drop(self, name: str) -> None:
        """A shard is closed, and will be fetched again when it is asked for."""

    def shards_by_key(self, skip_bad: bool) -> dict[int, str]:
        """The shard of every text, by its key.  skip_bad: read all shards, and leave out damaged ones, with a
        warning."""
        found: dict[int, str] = {}
        for name in self.names:
            try:
                if skip_bad:
                    feature_shards.open_shard(self.fetch(name))
                    self.drop(name)
                with self.reading(name) as file:
                    found |= dict.fromkeys(feature_shards.keys_in(file, self.path / name), name)
            except DataError as error:
                if not skip_bad:
                    raise
                log.warning("%s; its texts are left out", error)
        return found

    def open(self, name: str) -> tuple[Shard, cache.Rotation | None]:
        """A shard, checked when it is opened, and the rotation it was written with."""
        if name not in self._open:
            while len(self._open) >= OPEN:
                self.drop(self._open.popitem(last=False)[0])
            shard = feature_shards.open_shard(self.fetch(name))
            self._open[name] = shard, cache.open_rotation(self.path, shard)
        self._open.move_to_end(name)
        return self._open[name]


class RemoteFolder(Folder):
    """The same behind an fsspec URL: a shard is copied to a local folder while it is open."""

    def __init__(self, url: str, path: Path):
        try:
            self._files, root = fsspec.url_to_fs(url)
            listed = self._files.ls(root, detail=True)
        except (OSError, ValueError, ImportError) as error:
            raise DataError(
                f"prepare.feature_folder {url} can't be listed: {error}; check the URL and the access"
            ) from None
        self._root = root.rstrip("/")
        sizes = {str(one["name"]).rpartition("/")[2]: int(one["size"] or 0) for one in listed}
        names = sorted(name for name in sizes if name.startswith("features-") and name.endswith(".safetensors"))
        super().__init__(path, names, sum(sizes[name] for name in names))
        path.mkdir(parents=True, exist_ok=True)
        for name in (cache.MANIFEST, cache.ROTATION):
            if name in sizes:
                self._copy(name)

    def fetch(self, name: str) -> Path:
        return self.path / name if (self.path / name).exists() else self._copy(name)

    def reading(self, name: str) -> Any:
        return self._files.open(f"{self._root}/{name}", "rb")

    def drop(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def _copy(self, name: str) -> Path:
        part = self.path / f"{name}.part"
        try:
            self._files.get_file(f"{self._root}/{name}", str(part))
        except OSError as error:
            raise DataError(f"{self._root}/{name} can't be copied to {self.path}: {error}; run again") from error
        return part.rename(self.path / name)


def open_folder(folder: str | Path, copy_to: Path | None = None) -> Folder:
    """The shards of a local folder, or of an fsspec URL.  Raises DataError where there is none."""
    if "://" in str(folder):
        assert copy_to is not None
        return RemoteFolder(str(folder), copy_to)
    paths = sorted(Path(folder).glob("features-*.safetensors"))
    return Folder(Path(folder), [path.name for path in paths], sum(path.stat().st_size for path in paths))


def target_states(target: Target, taps: tuple[int, ...], dtype: str, batch: int = 16) -> States:
    """States from passes of the target, over batches of texts of similar length."""

    def states(texts: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
        for start in range(0, len(order), batch):
            group = order[start : start + batch]
            tokens = pad_sequence(
                [torch.as_tensor(texts[i].tokens, dtype=torch.int64) for i in group], batch_first=True
            )
            tapped, hidden = states_of(target, tokens, taps, dtype)
            for b, i in enumerate(group):
                length = len(texts[i].tokens)
                yield i, tapped[b, :length], hidden[b, :length]

    return states
