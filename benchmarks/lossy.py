"""What the lossy rules cost and what they buy, on the demo target with the small model that ships.

    python benchmarks/lossy.py [--prompts 24] [--tokens 96] [--calibrated 48] [--temperature 0] [--out FILE]

Cue words of `relay` are calibrated first, on other prompts of the standard library.  Then every prompt is continued by
the target alone, by the exact rule and by each lossy one, one request at a time and the ways by turns.  `distance` is
the total variation of an emitted token from the target's distribution, `nats` the target's own surprise at a token of
the text, at temperature 1: what a text is worth to it.  `tokens_per_step` are tokens per pass of the target; a pass of
the counterfactual rule has a second row for its second text.  Intervals are 1.96 standard errors over prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from batch_time import prompts_of, write

from outrider import demo, load_drafter, load_target
from outrider.decoding.state import Request
from outrider.generation import batch, serve
from outrider.lab.judges.counterfactual import Counterfactual
from outrider.lab.judges.relay import Relay
from outrider.lab.judges.scorer import ScoredBlocks
from outrider.policies.lossy import LossyJudge
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.fitting import cues

WORDS = (
    "def", "return", "if", "else", "for", "in", "self", "import", "from", "raise", "class", "not", "is", "None",
    "True", "False", "the", "The", "a", "of", "to", "and", "or", "with", "try", "except", "elif", "as", "=", ":",
)  # fmt: skip
"""Words of Python and of its comments: the demo writes library source."""
SWAP = {"True": "False", "False": "True", "None": "True", "self": "cls", "get": "set", "set": "get"}
"""Words that change what source means, since the demo knows no people."""
TAUS = (float("-inf"), -4.0, -2.0, -1.0, -0.5, float("inf"))
Judges = dict[str, tuple[str, Callable[[], SamplingJudge]]]
"""By way: the drafter's name, and a new judge."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--calibrated", type=int, default=48, help="prompts that cue words are ranked on")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target = load_target("demo", compile=False)
    target.ends = frozenset()
    drafters: dict[str, Any] = {
        "chain of 8": load_drafter("small_model", target, length=8),
        "3 candidates": load_drafter("small_model", target, length=1, width=3, nodes=3),
        "none": None,
    }
    prompts = prompts_of(target, options.prompts)
    table = calibrated(target, drafters["chain of 8"].model, options.calibrated, options.tokens)
    ways = judges(table)
    began = time.perf_counter()
    decoded(target, prompts[0], drafters["none"], SamplingJudge(), options.tokens, options.temperature, 0)
    seconds = time.perf_counter() - began
    whole = seconds * len(ways) * len(prompts)
    print(f"{len(ways)} ways on {len(prompts)} prompts: about {whole:.0f} s", file=sys.stderr, flush=True)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for n, prompt in enumerate(prompts):
        for way, (drafter, judge) in ways.items():
            found[way].append(
                decoded(target, prompt, drafters[drafter], judge(), options.tokens, options.temperature, n)
            )
        print(f"prompt {n + 1} of {len(prompts)}", file=sys.stderr, flush=True)
    rows = {way: summed(of_way, found["plain"]) for way, of_way in found.items()}
    write(
        {
            "promises": promises(rows, options.temperature), "temperature": options.temperature,
            "prompts": len(prompts), "tokens": options.tokens, "rows": rows,
            "cues": {"selected": table.selected, "ranked": [vars(cue) for cue in table.cues], "mean": table.mean},
        },
        options.out,
    )  # fmt: skip


def judges(table: cues.Table) -> Judges:
    ways: Judges = {
        "plain": ("none", SamplingJudge), "exact": ("chain of 8", SamplingJudge),
        "relay, calibrated cues": ("chain of 8", lambda: LossyJudge(Relay(table.selected))),
        "relay, the other words": (
            "chain of 8",
            lambda: LossyJudge(Relay([cue.word for cue in table.cues if cue.word not in table.selected])),
        ),
    }  # fmt: skip
    for tau in TAUS:
        make = lambda tau=tau: LossyJudge(ScoredBlocks(tau, "min", 8))
        ways[f"scorer, blocks of 8, minimum, tau {tau:g}"] = "chain of 8", make
    for beta in (0.0, 1.0, 4.0):
        ways[f"counterfactual, 3 candidates, beta {beta:g}"] = (
            "3 candidates", lambda beta=beta: LossyJudge(Counterfactual(SWAP, beta))
        )  # fmt: skip
    return ways


def calibrated(target: TransformersTarget, small_model: Any, count: int, tokens: int) -> cues.Table:
    """Cue words ranked on answers to prompts that are not measured."""
    prompts = [target.encode(text) for _, text in demo.prompts("train", count)]
    print(f"cue words are ranked on {count} answers of {tokens} tokens", file=sys.stderr, flush=True)
    return cues.calibrate(target, small_model, prompts, max_new_tokens=tokens, words=WORDS)


@torch.inference_mode()
def decoded(
    target: TransformersTarget, prompt: list[int], drafter: Any, judge: SamplingJudge, tokens: int, temperature: float,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    request = Request(prompt, tokens, Sampling(temperature, seed=seed))
    state = batch(target, 1, judge, shared_noise=False, ends=frozenset())
    began, text, steps = time.perf_counter(), list[int](), 0
    for progress in serve(target, [request], drafter, policy="fixed", state=state):
        text += progress.tokens
        steps += 1
    seconds = time.perf_counter() - began
    hidden = target.read(torch.tensor([[*prompt, *text]]), ())[0]
    logs = target.head(hidden[0, len(prompt) - 1 : -1]).log_softmax(-1)
    nats = -float(logs.gather(1, torch.tensor(text)[:, None]).mean())
    figures = judge.figures if isinstance(judge, LossyJudge) else {"distance": 0.0}
    return {"text": text, "steps": steps, "seconds": seconds, "nats": nats, **figures}


def summed(runs: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]) -> dict[str, Any]:
    per_prompt = {
        "tokens_per_step": [len(run["text"]) / run["steps"] for run in runs],
        "nats": [run["nats"] for run in runs],
        **{key: [run[key] for run in runs] for key in runs[0] if key not in {"text", "steps", "seconds", "nats",
                                                                             "tokens_per_step"}},
    }  # fmt: skip
    tokens = sum(len(run["text"]) for run in runs)
    return {
        **{key: interval(values) for key, values in per_prompt.items()},
        "passes_saved": 1 - sum(run["steps"] for run in runs) / tokens,
        "texts_as_plain": sum(run["text"] == own["text"] for run, own in zip(runs, plain, strict=True)),
        "seconds": sum(run["seconds"] for run in runs),
    }


def interval(values: Sequence[float]) -> dict[str, float]:
    mean = statistics.fmean(values)
    half = 1.96 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return {"mean": mean, "low": mean - half, "high": mean + half}


def promises(rows: dict[str, dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """What must hold whatever the figures are."""
    distance = lambda way: rows[way]["distance"]["mean"]
    by_tau = [distance(way) for way in rows if way.startswith("scorer")]
    exact = [way for way in rows if way in ("plain", "exact") or way.endswith("tau inf")]
    found = [
        ("distance at tau infinity", 0.0, by_tau[-1], by_tau[-1] == 0.0),
        ("distance at tau -infinity is the highest", max(by_tau), by_tau[0], by_tau[0] == max(by_tau)),
    ]
    if temperature == 0:
        differing = sum(rows["plain"]["texts_as_plain"] - rows[way]["texts_as_plain"] for way in exact)
        found.append(("texts of exact ways that differ from plain decoding's", 0, differing, differing == 0))
    return [dict(zip(("promise", "wanted", "found", "holds"), one, strict=True)) for one in found]


if __name__ == "__main__":
    main()
