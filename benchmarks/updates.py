"""When a drafter that learns should be updated: fixed counts of texts against updates that pay, over one recorded
stream whose traffic changes in the middle.

    python benchmarks/updates.py --out benchmarks/results/updates.json

The stream is source code, then source code in capitals, each answered by the target once.  SpecBlock (arXiv 2605.07243)
was trained on source code before.  Each way drafts for all texts in turn, trains on the newest ones when its rule says
so, and takes a version that the gate passes, with the functions that the server uses.  An update's time is given in
steps of the stream: CPU seconds of all updates over those of a decoding step, both measured in this process.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import write  # noqa: E402
from benchmarks.learning import capitals  # noqa: E402
from outrider import checkpoint, demo, generation, load_drafter, load_target  # noqa: E402
from outrider.decoding.state import Request  # noqa: E402
from outrider.drafters import find  # noqa: E402
from outrider.sampling.settings import Sampling  # noqa: E402
from outrider.serve.learning.buffer import Text  # noqa: E402
from outrider.serve.learning.job import settings_of, trained  # noqa: E402
from outrider.serve.learning.live_acceptance import counts_of  # noqa: E402
from outrider.serve.learning.trial import compared  # noqa: E402
from outrider.serve.learning.updates import Updates  # noqa: E402
from outrider.training.config import Config as TrainConfig  # noqa: E402

DRAFTER = {"layers": 2, "kv_heads": 2, "slots": 4, "blocks": 2, "nodes": 4, "anchors": 24}
HELD_OUT, SLOTS, LENGTH, PROMPT = 4, 8, 192, 300
Way = Callable[[Updates, int, float], bool]
"""Is an update due, after so many new texts, with so much decoding ahead?"""


class Run(NamedTuple):
    """What one way did."""

    counts: list[tuple[int, int]]
    """Tokens and steps of every text."""
    updates: list[int]
    """The text after which each was begun."""
    passed: int
    cost_steps: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--texts", type=int, default=384, help="of each of the two kinds")
    parser.add_argument("--new", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--first-steps", type=int, default=120, help="training before the stream")
    parser.add_argument("--steps", type=int, default=16, help="of an update")
    parser.add_argument("--counts", default="64,128,256", help="texts between two updates, for each fixed schedule")
    parser.add_argument("--fewest", type=int, default=64, help="texts before an update that pays")
    parser.add_argument("--horizon", type=float, default=1024, help="texts that an update should pay for itself in")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = load_target(options.target, compile=False)
    training = TrainConfig(steps=options.first_steps, batch=4, lr=8e-3, optimizer="muon", loss={"kl": 1.0})
    plain, other = (lambda name, text: text), capitals
    before = texts(target, "train", plain, 4 * options.first_steps, options)
    stream = [text for kind in (plain, other) for text in texts(target, "held_out", kind, options.texts, options)]
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(options.seed)
        given, model = Path(scratch) / "given", find("specblock")
        checkpoint.save(
            given, model.Model(model.Config(**DRAFTER), target), {"config": training.model_dump(mode="json")}
        )
        first = trained(target, given, before, training, Path(scratch) / "first", LENGTH)
        runs = {"never": replayed(target, first, stream, lambda *_: False, options, Path(scratch) / "never")}
        for count in map(int, options.counts.split(",")):
            runs[f"every {count} texts"] = replayed(
                target, first, stream, lambda _, new, __, count=count: new >= count, options, Path(scratch) / str(count)
            )
        runs["if it pays"] = replayed(
            target, first, stream, lambda updates, new, ahead: new >= options.fewest and updates.payoff(ahead).is_due,
            options, Path(scratch) / "pays",
        )  # fmt: skip
    rows = [row(way, run, runs["never"], options.texts) for way, run in runs.items()]
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    write({"settings": settings, "texts": len(stream), "rows": rows}, options.out)


def texts(target: Any, split: Any, kind: Callable[[str, str], str], count: int, options: Any) -> list[Text]:
    """Prompts of this kind with the target's own answers."""
    prompts = [target.encode(kind(name, text)[:PROMPT]) for name, text in demo.prompts(split, count, options.seed)]
    answers = generation.generate(target, prompts, max_new_tokens=options.new, sampling=Sampling())
    return [Text(prompt, one.tokens, []) for prompt, one in zip(prompts, answers, strict=True) if len(one.tokens) > 4]


def replayed(target: Any, first: Path, stream: Sequence[Text], is_due: Way, options: Any, place: Path) -> Run:
    """Serve the stream with updates where `is_due`."""
    drafter, current, updates = load_drafter(first, target), first, Updates()
    counts: list[tuple[int, int]] = []
    begun: list[int] = []
    learnt, held_out = list[Text](), list[Text]()
    new, passed, decoding_s, training_s = 0, 0, 0.0, 0.0
    for start in range(0, len(stream), SLOTS):
        part, began = stream[start : start + SLOTS], time.process_time()
        steps = drafts_of(target, drafter, part)
        decoding_s += time.process_time() - began
        for number, (text, drafts) in enumerate(zip(part, steps, strict=True), start):
            counts.append((len(text.answer), len(drafts)))
            updates.add(counts_of(text._replace(drafts=drafts), drafter.limit))
            (learnt if number % HELD_OUT else held_out).append(text)
            new += 1
        if not is_due(updates, new, options.horizon * decoding_s / len(counts)):
            continue
        began, new = time.process_time(), 0
        begun.append(len(counts))
        training = settings_of(checkpoint.manifest_of(first), options.steps, None, seed=len(begun))
        made = trained(
            target, current, learnt[-options.steps * training.batch :], training, place / str(len(begun)), LENGTH
        )
        trial = compared(target, load_drafter(made, target), drafter, held_out[-32:], options.new, 8)
        cost_s = time.process_time() - began
        training_s += cost_s
        updates.ended({"gain": trial.gain, "cpu_s": cost_s})
        if trial.passes:
            drafter, current, passed = load_drafter(made, target), made, passed + 1
        print(f"{place.name}: after {len(counts)}: {trial.reason}", file=sys.stderr, flush=True)
    return Run(counts, begun, passed, training_s / decoding_s * sum(steps for _, steps in counts))


def drafts_of(target: Any, drafter: Any, part: Sequence[Text]) -> list[list[tuple[int, int]]]:
    """Depth and accepted tokens of every step."""
    steps: list[list[tuple[int, int]]] = [[] for _ in part]
    requests = [Request(text.prompt, len(text.answer), Sampling()) for text in part]
    for progress in generation.serve(target, requests, drafter, policy="fixed", slots=SLOTS):
        steps[progress.request].append((progress.reached, progress.accepted))
    return steps


def row(way: str, run: Run, never: Run, shift: int) -> dict[str, Any]:
    """Tokens per step before and after the change, and over the way without updates, with a 95 % interval over texts;
    `paid` counts the updates' time as steps."""
    noise, texts = random.Random(0), range(len(run.counts))
    drawn = [noise.choices(texts, k=len(texts)) for _ in range(2000)]
    ratios = sorted(rate([run.counts[n] for n in some]) / rate([never.counts[n] for n in some]) for some in drawn)
    tokens, steps = (sum(values) for values in zip(*run.counts, strict=True))
    return {
        "way": way, "updates": len(run.updates), "begun_after": run.updates, "passed": run.passed,
        "before": rate(run.counts[:shift]), "after": rate(run.counts[shift:]), "tokens_per_step": tokens / steps,
        "over_never": tokens / steps / rate(never.counts), "low": ratios[50], "high": ratios[-50],
        "cost_steps": round(run.cost_steps), "paid": tokens / (steps + run.cost_steps),
    }  # fmt: skip


def rate(counts: Sequence[tuple[int, int]]) -> float:
    return sum(tokens for tokens, _ in counts) / sum(steps for _, steps in counts)


if __name__ == "__main__":
    main()
