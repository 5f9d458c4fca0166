"""Does remote speculation against a real vLLM generate the same text as the server alone, and what does it cost?

    python3.11 benchmarks/engines/install.py
    python benchmarks/remote.py [--prompts 100] [--new 32] [--samples 400] [--server URL] [--out FILE]

The server is vLLM on this machine with the demo target in float32 and without its own speculation; `--server` names a
running one.  Greedy: every prompt is sent plainly and in every other way, one after another and interleaved, and all
texts are compared in token ids.  Where two diverge, the gap between the two best logits there tells whether rounding
can explain it.  Sampled: the first two tokens of many texts against the distribution of the local target, by
chi-square; a planted fault, which takes drafts for sampled tokens, must be detected.  Prints JSON; exits with 1 if a
promise does not hold, with 3 if there is no vLLM.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from scipy import stats
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import promise, prompts_of  # noqa: E402
from benchmarks.engines import install, vllm_server  # noqa: E402
from benchmarks.replay import progress_bar, provenance, publish  # noqa: E402
from outrider import demo, load_drafter, load_target  # noqa: E402
from outrider.decoding.draft import Draft  # noqa: E402
from outrider.decoding.protocols import Drafter  # noqa: E402
from outrider.decoding.state import DecodeState  # noqa: E402
from outrider.sampling.distribution import Settings, distribution  # noqa: E402
from outrider.sampling.settings import Sampling  # noqa: E402
from outrider.targets.hf.transformers import TransformersTarget  # noqa: E402
from outrider.targets.remote import rows as remote_rows  # noqa: E402
from outrider.targets.remote import target as remote  # noqa: E402
from outrider.targets.remote.target import RemoteTarget, RemoteTexts, Traffic, compare  # noqa: E402

ROUNDING = 1e-3
"""Logits closer than this may swap merely by the order of a float32 sum."""
FALSE_ALARM = 1e-6
SAMPLING = Sampling(temperature=0.9, top_k=20)
WAYS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "probes, ngram of 3": ("probes", "ngram", {"length": 3}),
    "logprobs, ngram of 7": ("logprobs", "ngram", {"length": 7}),
    "logprobs, small_model of 4": ("logprobs", "small_model", {"length": 4}),
}
"""Name to method, drafter and its settings; every step drafts as much as it can."""


class Likeliest(Drafter):
    """Proposes one token after a prompt."""

    limit = 1

    def __init__(self, token: int):
        self.token = token

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        rows = len(state.rows)
        return Draft.chain(torch.full((rows, 1), self.token), torch.ones(rows, dtype=torch.int64))


class Credulous(remote_rows.DrawnRows):
    """The planted fault: drafted tokens are taken for sampled ones."""

    def scores(self, texts: Sequence[list[int]], draft: Draft) -> tuple[Tensor, Tensor]:
        logits, choice = super().scores(texts, draft)
        choice[:, : draft.tokens.shape[1]] = draft.tokens
        return logits, choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=32, help="tokens of a text")
    parser.add_argument("--samples", type=int, default=400, help="texts of each sampled prompt")
    parser.add_argument("--server", help="address of a vLLM that serves the demo target, with /v1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    local = load_target("demo", compile=False)
    prompts = prompts_of(local, options.prompts)
    try:
        with address(options.server) as url:
            found = measured(local, url, prompts, options)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        raise SystemExit(3) from None
    publish(provenance(time.monotonic() - began) | found, options.out)
    raise SystemExit(0 if all(each["holds"] for each in found["promises"]) else 1)


def is_seen(row: dict[str, Any]) -> bool:
    return row["fault_chance"] < FALSE_ALARM


@contextmanager
def address(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with vllm_server.serving(16, prefix_caching=True) as client:
        yield f"{str(client.base_url).rstrip('/')}/v1"


def measured(
    local: TransformersTarget, url: str, prompts: list[list[int]], options: argparse.Namespace
) -> dict[str, Any]:
    greedy = compared(local, url, prompts, options.new)
    sampled = drawn(local, url, uncertain(local, prompts[:20])[:2], options.samples)
    promises = [
        promise(f"{name}: texts that are the server's own", options.prompts, row["equal"] + row["ties"])
        for name, row in greedy.items()
        if name != "plain"
    ]
    promises += [
        promise("sampled: chance of what was counted", FALSE_ALARM, min(row["chance"] for row in sampled)),
        promise("prompts on which a draft taken for a draw is seen", len(sampled), sum(map(is_seen, sampled))),
    ]
    server = {"engine": "vLLM", "version": install.VLLM, "dtype": "float32", "speculation": None}
    return {
        "promises": promises, "server": server, "new": options.new,
        "by": "one text at a time, the ways by turns, prompt by prompt", "greedy": greedy, "sampled": sampled,
    }  # fmt: skip


# ── greedy ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(local: TransformersTarget, url: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
    """Every prompt in every way, interleaved."""
    targets = {method: RemoteTarget(url, demo.TARGET, method=method, logprobs=1) for method in ("probes", "logprobs")}
    ways: dict[str, Callable[[list[int]], RemoteTexts]] = {
        "plain": lambda prompt: targets["probes"].plain([prompt], max_new_tokens=new)
    }
    for name, (method, kind, settings) in WAYS.items():
        ways[name] = _asking(targets[method], load_drafter(kind, targets[method], **settings), new)
    found: dict[str, list[RemoteTexts]] = {name: [] for name in ways}
    for way in ways.values():
        way(prompts[0])  # the first request of a kind compiles
    with progress_bar() as bar:
        for prompt in bar.track(prompts, description="greedy"):
            for name, way in ways.items():
                found[name].append(way(prompt))
    for target in targets.values():
        target.close()
    sums = {name: added(own) for name, own in found.items()}
    return {name: figures(local, prompts, sums["plain"], own) for name, own in sums.items()}


def _asking(target: RemoteTarget, drafter: Drafter, new: int) -> Callable[[list[int]], RemoteTexts]:
    return lambda prompt: target.generate([prompt], drafter, max_new_tokens=new, policy="fixed")


def added(parts: Sequence[RemoteTexts]) -> RemoteTexts:
    names = [field.name for field in fields(Traffic)]
    total = Traffic(*(sum(getattr(part.traffic, name) for part in parts) for name in names))
    return RemoteTexts([text for part in parts for text in part.texts], total)


def figures(
    local: TransformersTarget, prompts: list[list[int]], plain: RemoteTexts, own: RemoteTexts
) -> dict[str, Any]:
    pairs = zip(prompts, plain.texts, own.texts, strict=True)
    gaps = [gap(local, prompt, one.tokens, other.tokens) for prompt, one, other in pairs if one.tokens != other.tokens]
    traffic = own.traffic
    return {
        "texts": len(prompts), "equal": len(prompts) - len(gaps), "ties": sum(each < ROUNDING for each in gaps),
        "gaps": gaps, "tokens": own.tokens, "rounds": traffic.rounds, "requests": traffic.requests,
        "attempts": traffic.attempts, "tokens_sent": traffic.sent, "tokens_received": traffic.received,
        "seconds": round(traffic.seconds, 3), "tokens_per_s": own.tokens / traffic.seconds,
        "tokens_per_round": None if own is plain else own.tokens / traffic.rounds,
        "ms_per_round": None if own is plain else 1e3 * traffic.seconds / traffic.rounds,
        "speed_beside_plain": own.tokens / traffic.seconds / (plain.tokens / plain.traffic.seconds),
        "note": None if own is plain else compare(own, plain).splitlines()[-1],
    }  # fmt: skip


@torch.inference_mode()
def gap(local: TransformersTarget, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Gap between the two best logits where two texts diverge; infinite if one is only longer."""
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    hidden, _ = local.read(torch.tensor([[*prompt, *one[:at]]]), ())
    best = local.head(hidden[0, -1]).topk(2).values
    return float(best[0] - best[1])


# ── sampled ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(local: TransformersTarget, url: str, prompts: list[list[int]], count: int) -> list[dict[str, Any]]:
    rows = []
    with RemoteTarget(url, demo.TARGET) as target:
        for prompt in prompts:
            p = pairs_of(local, prompt)
            drafter = Likeliest(int(p.sum(-1).argmax()))
            own = chance(sampled(target, drafter, prompt, count), p)
            remote.DrawnRows = Credulous  # type: ignore[misc]
            try:
                fault = chance(sampled(target, drafter, prompt, count), p)
            finally:
                remote.DrawnRows = remote_rows.DrawnRows  # type: ignore[misc]
            share = float(p.sum(-1).max())
            rows.append({"texts": count, "accepted_expected": share, "chance": own, "fault_chance": fault})
    return rows


def uncertain(local: TransformersTarget, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts, starting with those after which the likeliest token is about as likely as all others together: a fault
    shows most there."""
    return sorted(prompts, key=lambda prompt: abs(float(first_of(local, prompt).max()) - 0.5))


@torch.inference_mode()
def first_of(local: TransformersTarget, text: list[int]) -> Tensor:
    """The distribution [V] of the next token, with the settings of this part."""
    logits = local.head(local.read(torch.tensor([text]), ())[0][:, -1])
    return distribution(logits, Settings.of([SAMPLING]))[0].double()


def sampled(target: RemoteTarget, drafter: Drafter, prompt: list[int], count: int) -> list[tuple[int, int]]:
    found = target.generate([prompt] * count, drafter, max_new_tokens=2, sampling=SAMPLING, policy="fixed", slots=8)
    return [(one.tokens[0], (one.tokens[1:] or [-1])[0]) for one in found.texts]


def pairs_of(local: TransformersTarget, prompt: list[int]) -> Tensor:
    """The distribution [V, V] of the first two tokens; a text that ends after the first has it in column 0."""
    first = first_of(local, prompt)
    found = torch.zeros(len(first), len(first), dtype=torch.float64)
    for token in first.nonzero().flatten().tolist():
        if token in local.ends:
            found[token, 0] = first[token]
        else:
            found[token] = first[token] * first_of(local, [*prompt, token])
    return found


def chance(found: list[tuple[int, int]], p: Tensor) -> float:
    """The chi-square p-value; pairs expected fewer than 5 times share one cell, impossible pairs give 0."""
    counts = torch.zeros_like(p)
    for one, other in found:
        counts[one, max(other, 0)] += 1
    if bool(counts[p == 0].any()):
        return 0.0
    expected = p * len(found)
    common = expected >= 5
    own, wanted = ([*x[common].tolist(), float(x[~common].sum())] for x in (counts, expected))
    if wanted[-1] < 5 and len(wanted) > 2:  # too few for a cell of their own
        own, wanted = ([*x[:-2], x[-2] + x[-1]] for x in (own, wanted))
    return float(stats.chisquare(own, [one * sum(own) / sum(wanted) for one in wanted]).pvalue)


if __name__ == "__main__":
    main()
