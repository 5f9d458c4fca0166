"""Training compared with the trainer of `speculators`: the same weights on the same states, losses, tokens per second,
memory.

    python benchmarks/versus_speculators.py --install
    benchmarks/engines/.speculators/bin/python benchmarks/versus_speculators.py
        [--answers runs/demo-answers] [--steps 3] [--kinds eagle3,dflash] [--parts speed,memory] [--out FILE]

`--install` creates a separate environment that sees this one's packages, and adds `speculators` without its torchvision
and torchaudio, which are not available for CPUs here.  One of our draft models is exported to its layout and loaded by
its own class; both learn from the same eight texts of the demo target's answers, every position, features in memory,
float32, AdamW, alternating single steps.  The divergence at every depth is compared first.

Ours holds the tokens of one text in memory at once (`train.tokens`).  Its modes: `one`, one text per forward, and
`packed`, all texts in one, as its data loader joins them; rows at a text's end then learn from the next text, so losses
are compared for `one` alone.  `sdpa` attention and its eager losses, since its own attention and its fused losses do
not run on CPUs; its steps are its trainer's, without the wait for a GPU. Both count acceptance; `uncounted` is ours
without, as in 19 of 20 steps of a training.  Seconds are CPU time of one thread.  `products`: share of a step in matrix
products, which both must do; `bound`: its seconds over ours if our step did nothing else.  Peaks are measured in a
process each, above the memory in use before a second step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import training
from batch_time import write
from torch import Tensor

from outrider import demo
from outrider.checkpoint import save
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.export.writing import export_folder
from outrider.measure import peak_memory
from outrider.nn.draft_model import Batch
from outrider.training.config import Config
from outrider.training.step import optimise

HERE = Path(__file__).resolve().parent
PLACE = HERE / "engines" / ".speculators"
PACKAGES = (
    "speculators==0.9.0", "hs-connectors", "pydantic-settings", "python-dotenv", "loguru", "aiohttp", "aiosignal",
    "frozenlist", "multidict", "yarl", "propcache", "attrs", "aiohappyeyeballs",
)  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "eagle3": {"kv_heads": 2, "ttt": 5},
    "dflash": {"layers": 2, "kv_heads": 2, "block": 7, "anchors": 48, "anchor_predicts": False},
}
TEXTS, LENGTH = 8, 192
TIMES, PACKED_TIMES, SHARE, NOISE = 2.5, 4.0, 1.0, 1e-4
"""Targets: its seconds over ours, in its best mode and packed; our memory over its; relative error of a divergence."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help=f"make {PLACE.relative_to(HERE.parent)}, then end")
    parser.add_argument("--answers", type=Path, default=Path("runs/demo-answers"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--kinds", default=",".join(SETTINGS))
    parser.add_argument("--parts", default="speed,memory")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # kind and mode whose memory is measured in this process
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.install:
        return install()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(peak(Pair(*options.one.split(",")[:1], options.answers), options.one.split(",")[1])))
        return None
    found: dict[str, Any] = {"speculators": version("speculators"), "speed": [], "memory": []}
    for kind in options.kinds.split(","):
        if "speed" in options.parts:
            found["speed"].append(said(Pair(kind, options.answers).speed(options.steps)))
        if "memory" in options.parts:
            peaks = {way: in_a_process(kind, way, options.answers) for way in ("ours", "one", "packed")}
            found["memory"].append(said({"kind": kind, "peak_bytes": peaks}))
    found["promises"] = promises(found)
    write(found, options.out)
    return None


def install() -> None:
    """Create an environment that also sees these packages, and install only what is missing."""
    import site
    import venv

    venv.create(PLACE, with_pip=True)
    [libraries] = PLACE.glob("lib/python*/site-packages")
    # added as site folders, so that their own .pth files count
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    (libraries / "beneath.pth").write_text("".join(lines))
    subprocess.run([PLACE / "bin" / "python", "-m", "pip", "install", "-q", "--no-deps", *PACKAGES], check=True)


def said(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


class Pair:
    """One method: our draft model, and the same weights in the class of `speculators`."""

    def __init__(self, kind: str, answers: Path):
        training.KINDS, training.LENGTH = SETTINGS, {"demo": LENGTH}
        bench = training.Bench(training.target_of("demo"), "demo", kind, answers)
        self.kind, self.bench = kind, bench
        texts = [Answer(text.id, text.tokens, [(1, len(text.tokens))]) for text in bench.texts[: 4 * TEXTS]]
        bench.budget = LENGTH
        common = {"batch": TEXTS, "length": LENGTH, "budget": LENGTH}
        bench.source = LiveFeatures(bench.target, texts, bench.model.taps, **common)  # every token is learned
        bench.texts, bench.size = texts, TEXTS // 2
        for text in range(len(texts)):
            bench._batch([[text]])  # so that the target's passes are done
        self.config = Config(steps=100, loss={"kl": 1.0}, dtype="float32", optimizer="adamw", lr=1e-4, batch=TEXTS)
        self.mine, self.own = bench.learner()
        self.model = theirs(bench.model, bench.target)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-4)

    def ours(self, step: int, is_counted: bool = True) -> None:
        optimise(self.mine, self.own, self.bench.packed(step % 4), self.config, step, is_counted)

    def uncounted(self, step: int) -> None:
        """As our trainer's steps between two lines of its log."""
        self.ours(step, False)

    def one(self, step: int) -> None:
        """One text per forward; their gradients are accumulated, and the optimiser steps once."""
        self._step([[i] for i in self._texts(step)])

    def packed(self, step: int) -> None:
        self._step([self._texts(step)])

    def _texts(self, step: int) -> list[int]:
        return list(range(TEXTS * (step % 4), TEXTS * (step % 4 + 1)))

    def _step(self, groups: Sequence[Sequence[int]]) -> None:
        """What its trainer does with a batch."""
        self.optimizer.zero_grad()
        for texts in groups:
            _, loss, metrics = self.model(**self.given(texts))
            (loss / len(groups)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        {name: float(value) for name, value in metrics.items()}  # as its trainer logs them

    def given(self, texts: Sequence[int]) -> dict[str, Any]:
        """Inputs of its model, as its data loader builds them: texts one after the other, documents numbered."""
        from speculators.losses import resolve_loss_config

        parts = [self._part(self.bench._batch([[i]]), number) for number, i in enumerate(texts)]
        joined = {name: torch.cat([part[name] for part in parts])[None] for name in parts[0]}
        loss = {"loss_config": resolve_loss_config("kl_div", "eager")}
        if self.kind == "eagle3":
            return joined | loss | {"ttt_steps": SETTINGS["eagle3"]["ttt"], "ttt_step_loss_decay": 1.0}
        return joined | loss | {"max_anchors": self.bench.model.config.anchors * len(texts)}

    def _part(self, batch: Batch, number: int) -> dict[str, Tensor]:
        """One text.  EAGLE-3 reads a token along with the state before it."""
        tokens, taps, hidden = batch.tokens[0], batch.taps[0].flatten(1), batch.hidden[0]
        mask, positions = batch.loss_mask[0].clone(), torch.arange(len(tokens))
        if self.kind == "eagle3":
            tokens, taps, hidden, positions = tokens[1:], taps[:-1], hidden[1:], positions[1:]
            mask = torch.ones(len(tokens), dtype=torch.bool)
            mask[-1] = False  # nothing follows it
        return {
            "hidden_states": taps, "input_ids": tokens, "loss_mask": mask, "verifier_last_hidden_states": hidden,
            "document_ids": torch.full((len(tokens),), number), "position_ids": positions,
        }  # fmt: skip

    @torch.no_grad()
    def divergences(self, text: int = 0) -> dict[str, list[float]]:
        """Mean divergence by depth over one text, for both."""
        if self.kind == "eagle3":
            rows = self.bench.model.predict(self.bench._batch([[text]]))
            _, _, metrics = self.model(**self.given([text]))
            depths = SETTINGS["eagle3"]["ttt"]
            return {"ours": by_depth(rows, None), "theirs": [float(metrics[f"loss_{k}_sum"]) for k in range(depths)]}
        block, settings = self.model.block_size, self.bench.model.config
        given = self.given([text]) | {"max_anchors": LENGTH}
        given.pop("loss_config")
        _, logits, targets, mask, _ = self.model._backbone_forward(**given)
        is_learnt = mask[0].view(-1, block).bool()
        each = divergence(logits[0], targets[0]).view(-1, block)[is_learnt[:, 1]].mean(0)
        anchors, settings.__dict__["anchors"] = settings.anchors, LENGTH  # all, so nothing is random
        try:
            rows = self.bench.model.predict(self.bench._batch([[text]]))
        finally:
            settings.__dict__["anchors"] = anchors
        return {"ours": by_depth(rows, int(is_learnt[:, 1].sum())), "theirs": each[1:].tolist()}

    def speed(self, steps: int) -> dict[str, Any]:
        """Seconds of interleaved steps."""
        ways: dict[str, Callable[[int], None]] = {
            way: getattr(self, way) for way in ("ours", "uncounted", "one", "packed")
        }  # fmt: skip
        depths = self.divergences()
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(steps + 1):
            for way, act in ways.items():
                began = time.process_time()
                act(step)
                if step:  # the first one is a warm-up
                    seconds[way].append(time.process_time() - began)
        products = {way: share_of_products(act) for way, act in ways.items()}
        ratios = {
            way: [b / a for a, b in zip(seconds["ours"], seconds[way], strict=True)]
            for way in ("uncounted", "one", "packed")
        }
        times = {way: round(statistics.median(own), 2) for way, own in ratios.items()}
        tokens = TEXTS * LENGTH
        return {
            "kind": self.kind, "steps": steps, "seconds": seconds, "times": times,
            "tokens_per_s": {way: round(tokens / statistics.median(own), 1) for way, own in seconds.items()},
            "products": products,
            "bound": {way: round(ratio / products["ours"], 2) for way, ratio in times.items()},
            "divergence": depths,
            "worst_error": max(abs(a / b - 1) for a, b in zip(depths["ours"], depths["theirs"], strict=True)),
        }  # fmt: skip


def theirs(model: Any, target: Any) -> Any:
    """The same weights in their own class, loaded from the files we export."""
    from safetensors.torch import load_file
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.models.eagle3.core import Eagle3DraftModel

    kind = {"eagle3": Eagle3DraftModel, "dflash": DFlashDraftModel}[model.config.kind]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "exported"
        save(Path(place) / "checkpoint", model)
        export_folder(Path(place) / "checkpoint", "speculators", folder, target)
        written = json.loads((folder / "config.json").read_text())
        written["speculators_config"]["verifier"]["name_or_path"] = str(Path(demo.__file__).parent / "target")
        (folder / "config.json").write_text(json.dumps(written))
        config = kind.config_class.from_pretrained(folder)
        config.transformer_layer_config._attn_implementation = "sdpa"
        found = kind(config=config)
        found.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    found.load_verifier_weights()
    found.verifier_norm = torch.nn.Identity()  # our states are taken after the target's norm
    return found.float().train()


def divergence(draft: Tensor, target: Tensor) -> Tensor:
    return torch.nn.functional.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)


def by_depth(rows: Any, blocks: int | None) -> list[float]:
    """Mean divergence of our rows by depth; blocks: only this many, after the first, which it does not draft."""
    sums: dict[int, list[float]] = {}
    for draft, target, part in rows.chunks(10**12):
        numbers = {block: n for n, block in enumerate(sorted(set(rows.block[part].tolist())))}
        columns = (divergence(draft, target), rows.depth[part], rows.weight[part], rows.block[part])
        for value, depth, weight, block in zip(*(column.tolist() for column in columns), strict=True):
            if weight > 0 and (blocks is None or 1 <= numbers[block] <= blocks):
                sums.setdefault(depth, []).append(value)
    return [statistics.fmean(sums[k]) for k in sorted(sums)]


def share_of_products(act: Callable[[int], None]) -> float:
    """Share of a step's seconds spent in matrix products."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        act(1)
    parts = {one.key: one.self_cpu_time_total for one in profile.key_averages()}
    return round(sum(parts.get(f"aten::{name}", 0.0) for name in ("mm", "addmm", "bmm")) / sum(parts.values()), 3)


def in_a_process(kind: str, way: str, answers: Path) -> int:
    command = [sys.executable, __file__, "--answers", str(answers), "--one", f"{kind},{way}"]
    return int(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]))


def peak(pair: Pair, way: str) -> int:
    """Peak memory of a second step above the level before it."""
    act = getattr(pair, way)
    act(0)
    peak_memory.reset(pair.bench.target.device)
    before = peak_memory.peak_bytes(pair.bench.target.device) or 0
    act(1)
    return (peak_memory.peak_bytes(pair.bench.target.device) or 0) - before


def promises(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[tuple[str, float, float, bool]] = []
    for row in found["speed"]:
        kind, best, packed = row["kind"], min(row["times"][way] for way in ("one", "packed")), row["times"]["packed"]
        rows.append((f"times the tokens a second of speculators' best way, {kind}", TIMES, best, best >= TIMES))
        rows.append((f"times those of its packed way, {kind}", PACKED_TIMES, packed, packed >= PACKED_TIMES))
        rows.append((f"relative error of a divergence, {kind}", NOISE, row["worst_error"], row["worst_error"] <= NOISE))
    for row in found["memory"]:
        peaks = row["peak_bytes"]
        share = round(peaks["ours"] / min(peaks["one"], peaks["packed"]), 2)
        rows.append((f"of its least peak of memory, {row['kind']}", SHARE, share, share <= SHARE))
    return [dict(zip(("promise", "wanted", "found", "holds"), row, strict=True)) for row in rows]


if __name__ == "__main__":
    main()
