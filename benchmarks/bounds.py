"""Every drafter compared with its bound, tokens per step x T(1) / (T(n) + T_draft), at temperatures 0 and 1,
interleaved.

    python benchmarks/bounds.py [--only dspark,ngram] [--one-call dspark,medusa] [--temperatures 0,1]
                                [--prompts 8] [--new 64] [--steps 60] [--out FILE]

The demo target, compiled, one request at a time, `policy="fixed"`; times exclude prompts. dspark and dflash are the
checkpoints of the last `make demo`; other trained methods get `--steps` steps on the same answers, which is enough to
draft but too little to compare them.  T is time within the models' calls, from the same runs; `of_bound` is the
measured speed-up over plain relative to the bound.  `one call`: the same with steps that are one call each, over plain
steps of that kind.  `set_by`: whether a verified pass takes longer for its bytes or for its arithmetic, at the speeds
measured in this run.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from batch_time import CHECKPOINT, Served, prompts_of, serve_in_one_call, write
from methods import METHODS, Bench
from products import SQUARE, by_turns

from outrider import load_drafter, load_target, machine
from outrider.decoding.protocols import Drafter, NoStatic
from outrider.decoding.state import Request
from outrider.fast import NotCompiled, compile_passes
from outrider.kernels import prepacked
from outrider.measure.config import Config
from outrider.measure.record import Run
from outrider.measure.timing import run_once
from outrider.runs.file import load
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

ROOT = Path(__file__).resolve().parent.parent
MADE = {"dspark": CHECKPOINT, "dflash": ROOT / "runs" / "demo-dflash" / "checkpoint"}
TRAINED = ("domino", "deer", "eagle", "eagle3", "confu", "peagle", "specblock", "medusa", "hydra", "mtp")
UNTRAINED = ("ngram", "suffix", "recycle", "jacobi", "graft", "mix", "small_model", "layer_skip")
ONE_CALL = ("dspark", "small_model", "eagle", "eagle3", "medusa", "hydra", "mtp")
WANTED = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join([*UNTRAINED, *MADE, *TRAINED]))
    parser.add_argument("--one-call", default=",".join(ONE_CALL), help="drafters that are measured so too")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=64, help="tokens a prompt")
    parser.add_argument("--steps", type=int, default=60, help="of training")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.out = options.out and options.out.absolute()
    os.chdir(ROOT)  # recipes name their answers relative to this folder
    machine.set_up_process()
    names, one_call = options.only.split(","), set(options.one_call.split(","))
    target = load_target("demo", compile=False)
    drafters = {name: load_drafter(str(made(name, target, options.steps)), target) for name in names}
    compile_all(target, drafters)
    cells = [
        Cell(name, drafter, temperature, is_one_call)
        for temperature in map(float, options.temperatures.split(","))
        for name, drafter in ({"plain": None} | drafters).items()
        for is_one_call in ([False, True] if name == "plain" or name in one_call else [False])
    ]
    prompts = prompts_of(target, options.prompts)
    cells = [cell for cell in cells if cell.warms_up(target, prompts[0], options.new)]
    for number, prompt in enumerate(prompts, 1):
        for cell in cells:
            cell.run(target, prompt, options.new)
        print(f"prompt {number} of {options.prompts}", file=sys.stderr, flush=True)
    plain = {(cell.temperature, cell.is_one_call): cell for cell in cells if cell.name == "plain"}
    floor = Floor.of(target)
    rows = [cell.says(plain[cell.temperature, cell.is_one_call], floor) for cell in cells]
    differ = sum(cell.texts != plain[0.0, False].texts for cell in cells if not cell.temperature)
    drafted = [row for row in rows if row["drafter"] != "plain"]
    promises = [
        {"promise": f"{row['drafter']}, temperature {row['temperature']:g}, {row['way']}: of its bound",
         "wanted": WANTED, "found": row["of_bound"], "holds": row["of_bound"] >= WANTED}
        for row in drafted
    ]  # fmt: skip
    promises.append(
        {"promise": "drafters whose greedy texts differ", "wanted": 0, "found": differ, "holds": not differ}
    )
    write(
        {"promises": promises, "prompts": options.prompts, "new": options.new, "training_steps": options.steps,
         **vars(floor), "rows": rows},
        options.out,
    )  # fmt: skip
    sys.exit(bool(differ))


def made(name: str, target: TransformersTarget, steps: int) -> Path | str:
    """Its checkpoint, trained if there is none; its kind if it needs no training."""
    if name in UNTRAINED:
        return name
    if name in MADE:
        if not MADE[name].exists():
            raise SystemExit(f"no {MADE[name]}: run `make demo` first, or leave out {name} by --only")
        return MADE[name]
    folder = ROOT / "runs" / "bounds" / f"{name}-{steps}"
    if not (folder / "checkpoint").exists():
        settings, _ = load(ROOT / "recipes" / f"{METHODS[name].recipe}.yaml", METHODS[name].changes)
        bench = BENCH.setdefault("bench", Bench(target, Config()))
        print(f"{name}: {bench.fit(settings, folder, steps)}", file=sys.stderr, flush=True)
    return folder / "checkpoint"


BENCH: dict[str, Bench] = {}
"""Features are computed once for all methods that train."""


def compile_all(target: TransformersTarget, drafters: dict[str, Drafter]) -> None:
    print(f"target: compiled in {target.compile():.0f} s", file=sys.stderr, flush=True)
    for name, drafter in drafters.items():
        try:
            print(f"{name}: compiled in {compile_passes(drafter):.0f} s", file=sys.stderr, flush=True)
        except NotCompiled as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Floor:
    """The best the machine achieves in this run."""

    stored_mb: float
    """Bytes of the target's linear layers."""
    read_gb_s: float
    peak_gflop_s: float
    mflop_a_row: float

    @classmethod
    def of(cls, target: TransformersTarget) -> Floor:
        stored = prepacked.stored(target.model)
        reading, square = torch.randn(stored // 4), torch.randn(SQUARE, SQUARE)
        seconds = by_turns({"read": lambda: reading.sum(), "square": lambda: square @ square})
        weights = sum(layer.weight.numel() for layer in target.model.modules() if isinstance(layer, torch.nn.Linear))
        return cls(
            stored / 1e6, reading.nbytes / seconds["read"] / 1e9, 2 * SQUARE**3 / seconds["square"] / 1e9,
            2 * weights / 1e6,
        )  # fmt: skip

    def set_by(self, rows: float) -> str:
        is_read_longer = self.stored_mb / self.read_gb_s > rows * self.mflop_a_row / self.peak_gflop_s
        return "bytes" if is_read_longer else "arithmetic"


@dataclass
class Cell:
    """A drafter at a temperature, with multi-call or one-call steps."""

    name: str
    drafter: Drafter | None
    temperature: float
    is_one_call: bool
    runs: list[Run | Served] = field(default_factory=list)
    texts: list[list[int]] = field(default_factory=list)

    def warms_up(self, target: TransformersTarget, prompt: list[int], new: int) -> bool:
        """Whether it can run; compiles what it needs."""
        try:
            self.run(target, prompt, new)
        except NoStatic as error:
            print(f"{self.name}, temperature {self.temperature:g}: {error}", file=sys.stderr, flush=True)
            return False
        self.runs.clear()
        self.texts.clear()
        return True

    def run(self, target: TransformersTarget, prompt: list[int], new: int) -> None:
        sampling = Sampling(self.temperature, seed=len(self.texts))
        if self.is_one_call:
            found, [text] = serve_in_one_call(target, [prompt], new, self.drafter, sampling=sampling)
            run: Any = found
        else:
            run = run_once(
                target, Request(prompt, new, sampling), self.drafter, "fixed", ends=False, shared_noise=False
            )
            text = run.tokens
        self.runs.append(run)
        self.texts.append(text)

    def total(self, *names: str) -> float:
        return sum(getattr(run, name) for run in self.runs for name in names)

    @property
    def steps(self) -> float:
        return self.total("steps")

    @property
    def step_ms(self) -> float:
        names = ("seconds",) if self.is_one_call else ("draft_s", "verify_s", "other_s")
        return 1e3 * self.total(*names) / self.steps

    @property
    def model_ms(self) -> float:
        return 1e3 * self.total("model" if self.is_one_call else "model_s") / self.steps

    @property
    def tokens_per_step(self) -> float:
        return sum(map(len, self.texts)) / self.steps

    def says(self, plain: Cell, floor: Floor) -> dict[str, Any]:
        speedup = self.tokens_per_step * plain.step_ms / self.step_ms
        bound = self.tokens_per_step * plain.model_ms / self.model_ms
        found = {
            "drafter": self.name, "temperature": self.temperature,
            "way": "one call" if self.is_one_call else "several calls",
            "tokens_per_step": self.tokens_per_step, "ms_per_step": self.step_ms, "model_ms_per_step": self.model_ms,
            "tokens_per_s": 1e3 * self.tokens_per_step / self.step_ms, "over_plain": speedup, "bound": bound,
            "of_bound": speedup / bound, "overhead": 1 - self.model_ms / self.step_ms,
        }  # fmt: skip
        if not self.is_one_call:
            parts = {f"{name}_ms": 1e3 * self.total(f"{name}_s") / self.steps for name in ("draft", "verify", "other")}
            rows = 1 + sum(nodes for run in self.runs for nodes in run.nodes) / self.steps  # type: ignore[union-attr]
            found |= parts | {"rows": rows, "set_by": floor.set_by(rows)}
        return found


if __name__ == "__main__":
    main()
