"""Feature caches: bytes a token, what rounding costs in acceptance, how fast they are read and written.

    python benchmarks/features.py [--answers runs/demo-answers] [--steps 120] [--seeds 0,1,2]
        [--parts sizes,reading,writing,training] [--out FILE]

`sizes` and `reading` are of rows as wide as Qwen3-4B's (hidden 2,560; five taps and the final state), random, with
outliers as large models have them; bytes are those of the files, scales and indices included, and every token's final
state is stored.  Reading is one thread's, from the page cache, into bfloat16 and float32: MB of decoded
states a second of the processor.
`writing` is the demo target's own states: seconds of its passes alone, of encoding and writing alone, and of both as
`prepare` does them.  `training`: dspark on the demo target from each way, beside live features, paired by seed;
`tokens_per_step` is what is expected at temperature 1 on answers that were held out, always of live features.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from batch_time import write
from torch import Tensor

from outrider import load_target
from outrider.data.answers.store import ANSWERS, Answer, read_answers
from outrider.data.features import cache, encodings
from outrider.data.features import shards as feature_shards
from outrider.data.features.cache import Binding, build
from outrider.data.features.cached import CachedFeatures, target_states
from outrider.data.features.live import LiveFeatures
from outrider.data.features.rotation import Rotation
from outrider.data.features.shards import Stored
from outrider.data.texts import usable
from outrider.decoding.accept import overlap
from outrider.drafters import trained
from outrider.nn.draft_model import DraftModel
from outrider.runs.file import RunConfig, load
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.step import chunk_size
from outrider.training.trainer import train, with_dtype

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "demo.yaml"
HIDDEN, LAYERS, TAPS = 2560, 36, (1, 9, 17, 25, 33)
"""Of Qwen3-4B, and the taps that our drafters choose there."""
PUBLIC = 30_726
"""Bytes a token of the best-known public pipeline: five taps and the final state in bf16."""
WAYS: dict[str, dict[str, Any]] = {
    "bf16": {"encoding": "bf16"}, "fp8": {"encoding": "fp8"}, "int8": {"encoding": "int8"},
    "int4": {"encoding": "int4"}, "int4, top 64": {"encoding": "int4", "top_logprobs": 64},
    "int8 rotated to a fifth, top 64": {"encoding": "int8", "top_logprobs": 64, "rotate": 5},
    "int4 rotated to two fifths, top 64": {"encoding": "int4", "top_logprobs": 64, "rotate": 2.5},
}  # fmt: skip
"""`rotate`: numbers of a token's taps for one of what is stored."""
TRAINED = ("int8", "int4", "int4, top 64", "int8 rotated to a fifth, top 64")
MOST_BYTES = {"int8": 15_700, "fp8": 15_700, "int4": 8_200, "int4, top 64": 7_300}
MOST_LOST = {"int8": 0.01, "int4": 0.03, "int4, top 64": 0.03}
ROTATED_BYTES = 4_100
SHARD = 4096
"""Tokens of a shard in `sizes`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=Path, default=Path("runs/demo-answers"))
    parser.add_argument("--steps", type=int, default=120, help="training steps of each drafter")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--held-out", type=int, default=335, help="answers that acceptance is measured on")
    parser.add_argument("--parts", default="sizes,reading,writing,training")
    parser.add_argument("--ways", default=";".join(TRAINED), help="ways that are trained on, divided by semicolons")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    found: dict[str, Any] = {"promises": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if "sizes" in parts or "reading" in parts:
            found["sizes"] = sizes(folder)
            found["promises"] += of_sizes(found["sizes"])
        if "reading" in parts:
            found["reading"] = [reading(folder, way) for way in WAYS if "rotate" not in WAYS[way]]
            found["promises"] += of_reading(found["reading"])
        if "writing" in parts or "training" in parts:
            target, answers = load_target("demo", compile=False), read_answers(options.answers / ANSWERS)
            if "writing" in parts:
                found["writing"] = writing(target, answers, folder / "written")
                found["promises"] += of_writing(found["writing"])
            if "training" in parts:
                found["training"] = Trainings(target, answers, folder, options).measured()
                found["promises"] += of_training(found["training"])
    write(found, options.out)


# ── a large target's rows ─────────────────────────────────────────────────────────────────────────────────────────────


def binding(way: str, hidden: int, taps: tuple[int, ...], target: dict[str, Any] | None = None, **more: Any) -> Binding:
    how = dict(WAYS[way])
    if "rotate" in how:
        how["rotate"] = int(len(taps) * hidden / how["rotate"]) // 64 * 64
    about = target or {"name": "Qwen3-4B's shape", "revision": None, "layers": LAYERS, "hidden": hidden}
    return Binding(about, None, taps, **({"dtype": "float32"} | how | more))


def random_states(texts: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """States of which a few channels are large, and those of the first token very large."""
    loud = torch.ones(HIDDEN)
    loud[::512] = 60
    for number, text in enumerate(texts):
        noise = torch.Generator().manual_seed(text.tokens[1])
        states = torch.randn(len(text.tokens), len(TAPS) + 1, HIDDEN, generator=noise) * loud
        states[0] *= 100
        yield number, states[:, :-1], states[:, -1]


def texts(count: int = 4, length: int = 1024) -> list[Answer]:
    noise = torch.Generator().manual_seed(0)
    drawn = torch.randint(150_000, (count, length), generator=noise).tolist()
    return [Answer(str(number), tokens, [(length // 4, length)]) for number, tokens in enumerate(drawn)]


def sizes(folder: Path) -> list[dict[str, Any]]:
    """Bytes a token of each way, of real shards."""
    answers, rows = texts(), []
    tokens = sum(len(text.tokens) for text in answers)
    head = torch.randn(HIDDEN, 4096, generator=torch.Generator().manual_seed(1)) / HIDDEN**0.5
    for way in WAYS:
        began = time.perf_counter()
        mine = binding(way, HIDDEN, TAPS)
        if mine.rotate:
            given_rotation(folder / way, mine.rotate)
        build(folder / way, answers, random_states, mine, head=lambda rows: rows @ head, shard_tokens=SHARD)
        shards = [*(folder / way).glob("features-*")]
        taken = sum(path.stat().st_size for path in shards) / tokens
        rows.append(
            {
                "way": way, "bytes_per_token": taken, "said_before": encodings.bytes_per_token(
                    mine.encoding, HIDDEN, len(TAPS), mine.top_logprobs, mine.rotate
                ),
                "times_less_than_public": PUBLIC / taken, "rotated_to": mine.rotate,
                "rotation_bytes": (folder / way / cache.ROTATION).stat().st_size if mine.rotate else 0,
                "tokens": tokens, "shards": len(shards), "seconds": time.perf_counter() - began,
            }
        )  # fmt: skip
        print(f"{way}: {taken:,.0f} bytes a token", file=sys.stderr, flush=True)
    return rows


def given_rotation(folder: Path, directions: int) -> None:
    """A rotation of the right size: what it holds of random states does not matter."""
    width = len(TAPS) * HIDDEN
    folder.mkdir(parents=True)
    basis = torch.randn(width, directions, generator=torch.Generator().manual_seed(2)) / width**0.5
    Rotation(TAPS, torch.ones(len(TAPS)), torch.zeros(width), basis, 0.0).save(folder / cache.ROTATION)


def of_sizes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = {row["way"]: row["bytes_per_token"] for row in rows}
    limits = MOST_BYTES | {way: ROTATED_BYTES for way in WAYS if "rotate" in WAYS[way]}
    return [at_most(f"bytes a token, {way}", most, found[way]) for way, most in limits.items()]


def reading(folder: Path, way: str) -> dict[str, Any]:
    """Decoded MB/s of one thread, of shards that are in the page cache, by the type that is decoded to."""
    threads, row = torch.get_num_threads(), {"way": way}
    torch.set_num_threads(1)
    shards = [feature_shards.open_shard(path) for path in sorted((folder / way).glob("features-*"))]
    rotated = cache.open_rotation(folder / way, shards[0])
    for dtype in (torch.bfloat16, torch.float32):
        for turn in range(2):  # the first reads the disk
            began, size = time.process_time(), 0  # of this thread: a busy machine does not count
            for shard in shards:
                for key in shard.keys:
                    states = shard.read(key, TAPS, dtype, torch.device("cpu"), rotated)
                    size += states.taps.nbytes + states.hidden.nbytes
            if turn:
                row[str(dtype).removeprefix("torch.")] = size / 1e6 / (time.process_time() - began)
    torch.set_num_threads(threads)
    print(f"{way}: read {row}", file=sys.stderr, flush=True)
    return row


def of_reading(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        at_least(f"decoded MB/s of one core, {row['way']}", 500, row["bfloat16"])
        for row in rows
    ]  # fmt: skip


# ── the demo target ───────────────────────────────────────────────────────────────────────────────────────────────────


def writing(target: TransformersTarget, answers: list[Answer], folder: Path) -> dict[str, Any]:
    """Seconds of the target's passes, of encoding and writing, and of both at once."""
    mine = Binding.of(target, None, (1, 4, 7, 10, 13), "float32", encoding="int8")
    cut, states = usable(answers, 384), target_states(target, mine.taps, "float32")
    shards = cache.planned(cut, 8192)
    began = time.perf_counter()
    found = [list(states(shard)) for shard in shards]
    passes = time.perf_counter() - began
    by_text = {shard[0].id: of for shard, of in zip(shards, found, strict=True)}
    began = time.perf_counter()
    build(folder / "alone", cut, lambda shard: iter(by_text[shard[0].id]), mine, head=target.head, shard_tokens=8192)
    alone = time.perf_counter() - began
    del found
    began = time.perf_counter()
    build(folder / "both", cut, states, mine, head=target.head, shard_tokens=8192)
    both = time.perf_counter() - began
    return {
        "passes_s": passes, "encoding_and_writing_s": alone, "both_s": both, "shards": len(shards),
        "tokens": sum(len(text.tokens) for text in cut),
        "share_of_writing_that_is_hidden": (passes + alone - both) / alone,
    }  # fmt: skip


def of_writing(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [at_most("seconds of passes and writing at once, of both after each other", 1.0,
                    row["both_s"] / (row["passes_s"] + row["encoding_and_writing_s"]))]  # fmt: skip


class Trainings:
    """dspark from every way, by seed, and what each gives on held-out answers."""

    def __init__(self, target: TransformersTarget, answers: list[Answer], folder: Path, options: argparse.Namespace):
        self.target, self.folder, self.options, self.ways = target, folder, options, options.ways.split(";")
        self.read: dict[int, Stored] = {}
        """States of the texts that train, once they were read."""
        self.unseen: LiveFeatures | None = None
        self.rows = (options.out or folder / "features").with_suffix(".jsonl")
        self.held_out, self.learnt = answers[: options.held_out], answers[options.held_out :]
        steps = [f"train.steps={options.steps}", f"train.save_every={options.steps}"]
        self.settings: RunConfig = load(RECIPE, steps)[0]
        self.length = self.settings.prepare.length

    def measured(self) -> dict[str, Any]:
        rows = []
        for seed in map(int, self.options.seeds.split(",")):
            live = self.once(None, seed)
            rows.append(live)
            for way in self.ways:
                row = dict(self.once(way, seed))
                row["lost"] = 1 - row["tokens_per_step"] / live["tokens_per_step"]
                rows.append(row)
        return {"rows": rows, "ways": [self.summary(way, rows) for way in self.ways], "steps": self.options.steps}

    def once(self, way: str | None, seed: int) -> dict[str, Any]:
        """A row, taken from the file of rows where an earlier run has it."""
        named = {"way": way or "live", "seed": seed, "steps": self.options.steps, "held_out": self.options.held_out}
        there = self.rows.read_text().splitlines() if self.rows.exists() else []
        for row in map(json.loads, there):
            if named.items() <= row.items():
                return row
        row = named | self.one(way, seed)
        print(row, file=sys.stderr, flush=True)
        with self.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def summary(self, way: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
        mine = [row for row in rows if row["way"] == way]
        lost = [row["lost"] for row in mine]
        return {
            "way": way, "lost": statistics.mean(lost),
            "lost_error": statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else None,
            "waited": max(row["waited"] for row in mine), "rotation_holds": mine[0]["rotation_holds"],
        }  # fmt: skip

    def one(self, way: str | None, seed: int) -> dict[str, Any]:
        """Train one drafter and measure it."""
        assert self.settings.train is not None
        config = self.settings.train.model_copy(update={"seed": seed})
        place = self.folder / "trained" / f"{way}-{seed}"
        config = with_dtype(config, place, self.target.device)
        torch.manual_seed(seed)
        model: DraftModel = trained("dspark")(self.settings.drafter_config, self.target)
        common: dict[str, Any] = {"batch": config.batch, "length": self.length, "seed": seed}
        source: Any = LiveFeatures(self.target, self.learnt, model.taps, dtype=config.dtype, **common)
        source._cache = self.read  # passes are those of the first training
        if way is not None:
            source = self.cached(way, source, model, common)
        began = time.monotonic()
        train(model, source, config, place)
        seconds = time.monotonic() - began
        waited = getattr(source, "waited_s", 0.0)
        return {**self.acceptance(model), "waited": waited / seconds,
                "rotation_holds": self.share(way), "seconds": seconds}  # fmt: skip

    def cached(self, way: str, live: LiveFeatures, model: DraftModel, common: dict[str, Any]) -> CachedFeatures:
        target = Binding.of(self.target, None, model.taps, live.dtype).target
        mine = binding(way, self.target.spec.hidden, model.taps, target, only_learnt=True, dtype=live.dtype)
        folder, number = self.folder / "demo" / way, {text.id: i for i, text in enumerate(live.texts)}

        def states(texts: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
            for n, text in enumerate(texts):
                i = number[text.id]
                taps, hidden, _ = live._states([i])[i]
                yield n, taps, hidden

        build(folder, live.texts, states, mine, head=self.target.head, shard_tokens=16_384)
        return CachedFeatures(self.target, self.learnt, mine, folder, **common)

    def share(self, way: str | None) -> float | None:
        """Of the variance of the taps, what a rotation holds."""
        path = self.folder / "demo" / str(way) / cache.ROTATION
        return cache.rotation_of(path.parent).share if path.exists() else None

    @torch.no_grad()
    def acceptance(self, model: DraftModel) -> dict[str, Any]:
        """Expected tokens per step at temperature 1 over all positions of the held-out answers."""
        if self.unseen is None:
            self.unseen = LiveFeatures(self.target, self.held_out, model.taps, batch=8, length=self.length)
        source = self.unseen
        anchors, model.config.__dict__["anchors"] = model.config.anchors, 10_000
        sums, counts = torch.zeros(64), torch.zeros(64)
        try:
            for step in range(source.steps_per_pass):
                rows = model.predict(source.batch(step))
                for draft, target, part in rows.chunks(chunk_size(rows)):
                    learnt = rows.weight[part] > 0
                    share = overlap(target[learnt].float().softmax(-1), draft[learnt].float().softmax(-1))
                    depth = rows.depth[part][learnt]
                    sums.index_add_(0, depth, share.float())
                    counts.index_add_(0, depth, torch.ones_like(share, dtype=torch.float32))
        finally:
            model.config.__dict__["anchors"] = anchors
        by_depth = (sums / counts.clamp(min=1))[counts > 0]
        return {"tokens_per_step": 1 + float(by_depth.cumprod(0).sum()), "by_depth": by_depth.tolist(),
                "positions": int(counts[0]), "rows": int(counts.sum())}  # fmt: skip


def of_training(found: dict[str, Any]) -> list[dict[str, Any]]:
    ways = {row["way"]: row for row in found["ways"]}
    promises = [
        at_most(f"share of tokens per step that is lost, {way}", most, ways[way]["lost"])
        for way, most in MOST_LOST.items() if way in ways
    ]  # fmt: skip
    positions = min(row["positions"] for row in found["rows"])
    waits = max(row["waited"] for row in found["ways"])
    return [
        *promises, at_least("held-out positions that it is measured on", 50_000, positions),
        at_most("share of a training's time that it waits for features", 0.05, waits),
    ]  # fmt: skip


def at_most(what: str, most: float, found: float) -> dict[str, Any]:
    """One line of `promises`."""
    return {"promise": what, "wanted": most, "found": found, "holds": found <= most}


def at_least(what: str, least: float, found: float) -> dict[str, Any]:
    """As `at_most`."""
    return {"promise": what, "wanted": least, "found": found, "holds": found >= least}


if __name__ == "__main__":
    main()
