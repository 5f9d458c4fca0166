"""Shared by the serving benchmarks: the demo's target and drafters, compiled, and the time of a batch, split into
parts."""

from __future__ import annotations

import functools
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from benchmarks.replay import command, commit, processor
from outrider import demo, generation, load_drafter, load_target
from outrider.data.sources.readers import instructions
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import Request
from outrider.fast import NotCompiled, compile_passes
from outrider.fast.runner import using
from outrider.fast.whole.package import StepPackage
from outrider.measure.timing import model_clock
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

RUNS = Path(__file__).resolve().parent.parent / "runs"
CHECKPOINTS = {"demo": RUNS / "demo-small" / "checkpoint", "smollm2": RUNS / "demo" / "checkpoint"}
"""By target: the drafter of the last `make demo`.  The small target's is trained by `make demo` without a package
index, or by `outrider run recipes/demo.yaml name=demo-small`."""
CHECKPOINT = CHECKPOINTS["demo"]


@dataclass
class Served:
    """Steps of a batch, without prefill.  Times in seconds."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    model: float = 0.0
    """Seconds within calls into the models, or into the graphs that replace them."""

    def __add__(self, other: Served) -> Served:
        return Served(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def overhead(self) -> float:
        """Share of a step spent outside the models."""
        return 1 - self.model / self.seconds

    def says(self) -> dict[str, float]:
        return {
            "tokens": self.tokens, "steps": self.steps, "tokens_per_step": self.tokens / self.steps,
            "tokens_per_s": self.tokens / self.seconds, "ms_per_step": 1e3 * self.seconds / self.steps,
            "model_ms_per_step": 1e3 * self.model / self.steps, "overhead": self.overhead,
        }  # fmt: skip


@torch.inference_mode()
def serve(
    target: TransformersTarget, prompts: Sequence[list[int]], new: int, drafter: Drafter | None = None,
    policy: Policy | None = None, slots: int = 1, sampling: Sampling | None = None,
) -> tuple[Served, list[list[int]]]:  # fmt: skip
    """Continue all prompts by `new` tokens each, ignoring ends of text, over this many slots."""
    found, texts = Served(), [[] for _ in prompts]
    state = generation.batch(target, min(slots, len(prompts)), ends=frozenset())
    requests = [Request(prompt, new, sampling or Sampling()) for prompt in prompts]
    last = None
    with model_clock(target, drafter) as clock:
        for progress in generation.serve(target, requests, drafter, policy=policy or "fixed", state=state):
            texts[progress.request] += progress.tokens
            found.tokens += len(progress.tokens)
            if state.timing.began != last:
                last = state.timing.began
                found.steps += 1
                found.seconds += state.timing.draft + state.timing.verify + state.timing.other
                found.model += clock.since(last)
    return found, texts


def serve_in_one_call(
    target: TransformersTarget, prompts: Sequence[list[int]], new: int, drafter: Drafter | None = None, slots: int = 1,
    sampling: Sampling | None = None,
) -> tuple[Served, list[list[int]]]:  # fmt: skip
    """Like `serve`, with steps that are one call each; time in the package counts as the model's."""
    seconds, real = [0.0], StepPackage.launch

    def launch(package: StepPackage, *given: Any) -> list[list[int]]:
        began = time.perf_counter()
        found = real(package, *given)
        seconds[0] += time.perf_counter() - began
        return found

    with using("built"), mock.patch.object(StepPackage, "launch", launch):
        found, texts = serve(target, prompts, new, drafter, slots=slots, sampling=sampling)
    found.model = seconds[0]
    return found, texts


def parties(
    names: Sequence[str], compiled: bool = True, name: str = "demo"
) -> tuple[TransformersTarget, dict[str, Drafter]]:  # fmt: skip
    """A target, the small one by default, and drafters by name; `dspark` is the checkpoint last trained for it.
    Compiled on request."""
    target, checkpoint = load_target(name, compile=False), CHECKPOINTS[name]
    drafters: dict[str, Drafter] = {}
    for name in names:
        if name == "dspark" and not checkpoint.exists():
            print(f"no {checkpoint}: train it first; going on without dspark", file=sys.stderr)
            continue
        drafters[name] = load_drafter(str(checkpoint) if name == "dspark" else name, target)
    if compiled:
        steps = {"target": target.compile} | {
            name: functools.partial(compile_passes, drafter) for name, drafter in drafters.items()
        }
        for name, compile_step in steps.items():
            try:
                print(f"{name}: compiled in {compile_step():.0f} s", file=sys.stderr, flush=True)
            except NotCompiled as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
    return target, drafters


def prompts_of(target: TransformersTarget, count: int) -> list[list[int]]:
    """Prompts that no drafter was trained on: for SmolLM2 our held-out instructions, repeated if there are too few; for
    others pieces of modules that the small target was not trained on either."""
    if target.spec.name == "smollm2":
        asked = itertools.islice(itertools.cycle(instructions("held_out", 0)), count)
        return [target.encode([{"role": "user", "content": row["turns"][0]}]) for row in asked]
    return [target.encode(text) for _, text in demo.prompts("held_out", count)]


def write(found: dict[str, Any], out: Path | None) -> None:
    """Print the result with its provenance, and save it if requested."""
    found = {
        "command": command(), "commit": commit(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            **processor(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__, "python": platform.python_version(),
        },
        **found,
    }  # fmt: skip
    text = json.dumps(found, indent=2)
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")


def promise(what: str, least: float, found: float) -> dict[str, Any]:
    """One line of a benchmark's `promises`, for a value that should be at least this large."""
    return {"promise": what, "wanted": least, "found": found, "holds": found >= least}
