"""Reports to look at and to test with: one with every field filled, one all null, one hostile."""

import math
import random
import re
from html.parser import HTMLParser
from typing import Any

from outrider.report.schema import Report

VOID = {"meta", "input", "br", "link", "img", "hr"}
TEXTS = {
    "chat": "A small model guesses ahead, and the large one checks.\n\nWhat it agrees with, it need not write. " * 5,
    "code": "def merge(left: list[int]) -> list[int]:\n    i = j = 0\n    return merged + left[i:] + right[j:]\n" * 5,
    "math": "A train leaves at 9:40 and needs 2 hours: 155 × 1.25 = 193.75 minutes.\n\nAnswer: 12:54 (20 % slower). "
    * 5,
}
SKILL = {
    "dspark": {"chat": 0.74, "code": 0.88, "math": 0.82},
    "eagle3": {"chat": 0.66, "code": 0.8, "math": 0.7},
    "suffix": {"chat": 0.31, "code": 0.72, "math": 0.38},
}
DEPTHS = {"dspark": 7, "eagle3": 5, "suffix": 6}
COST = {"dspark": 1.34, "eagle3": 1.42, "suffix": 1.08}
OTHERS = [" a", " the", " this", "\n", " model", ",", ".", " (", "0", " 12", " return", "self", " of", " 가"]


def full_report(**changes: Any) -> Report:
    """Three drafters on three tasks with every field filled."""
    rows = [row(drafter, task) for task in TEXTS for drafter in SKILL]
    steps = [[step, 2.1 + 6.5 * math.exp(-step / 900) + 0.08 * math.sin(step)] for step in range(0, 6001, 40)]
    values: dict[str, Any] = {
        "schema": 1, "target": "Qwen/Qwen3-4B", "made": "2026-05-09T10:12:00Z", "rows": rows,
        "training": {
            "dspark": {"steps": 6000, "seconds": 41_200.0, "tokens": 98_304_000, "loss_curve": steps,
            "precision": "bfloat16"},
            "eagle3": {"steps": 6000, "seconds": 28_900.0, "tokens": 98_304_000,
                       "loss_curve": [[step, loss * 0.72 + 0.4] for step, loss in steps]},
        },
        "provenance": {"commit": "5f129c3", "settings": {"seed": 0, "tokens": 128}, "versions": {"outrider": "0.1.0"}},
        "fingerprint": {"device": "NVIDIA H200", "driver": "570.124", "torch": "2.13.0", "threads": 16,
        "compiled": True},
        "left_out": [{"id": "chat/31", "first_ngram_share": 0.2}], "share_left_out": 0.02,
        "notes": ["Prompts take turns with and without the drafter, so that a machine that slows down slows both."],
    }  # fmt: skip
    return Report.model_validate(values | changes)


def row(drafter: str, task: str, prompts: int = 24, observed: int = 1, **changes: Any) -> dict[str, Any]:
    noise = random.Random(f"{drafter} {task}")
    a, depths = SKILL[drafter][task], DEPTHS[drafter]
    accepted = [a ** (i * 1.08) for i in range(1, depths + 1)]
    per_step, plain = 1 + sum(accepted), 38.0
    speedup = per_step / COST[drafter]
    results = [
        prompt(f"{task}/{i}", speedup * noise.lognormvariate(0, 0.13), per_step, plain, noise) for i in range(prompts)
    ]
    steps, tokens = round(prompts * 128 / per_step), prompts * 128
    gap = 1000 / plain * COST[drafter]
    curve = [gap * (0.86 + 0.0018 * i + 0.5 * (i / 100) ** 24) for i in range(101)]
    each = [after / before for before, after in zip([1.0, *accepted], accepted, strict=False)]
    expected = [] if drafter == "suffix" else [(a * 1.06) ** i for i in range(1, depths + 1)]
    rejected = [round(steps * (before - after)) for before, after in zip([1.0, *accepted], accepted, strict=False)]
    return {
        "drafter": drafter, "task": task, "prompts": prompts, "temperature": 0.0, "tokens_per_step": per_step,
        "accepted_by_depth": accepted, "conditional_acceptance": each,
        "rejections_by_depth": rejected, "steps": steps, "tokens": tokens, "seconds": tokens / plain / speedup,
        "plain_seconds": tokens / plain, "tokens_per_s": plain * speedup, "plain_tokens_per_s": plain,
        "generate_tokens_per_s": plain * 0.94, "speedup": speedup, "exact": True, "compared_tokens": tokens,
        "share": {"draft": 0.16, "verify": 0.79, "other": 0.05}, "loop_overhead": 0.021, "plain_loop_overhead": 0.012,
        "ttft_ms": {"p50": 61.0, "p95": 88.0, "p99": 102.0}, "plain_ttft_ms": {"p50": 55.0, "p95": 79.0, "p99": 91.0},
        "itl_ms": {"p50": curve[50], "p95": curve[95], "p99": curve[99]},
        "plain_itl_ms": {"p50": 26.1, "p95": 27.0, "p99": 28.8},
        "tpot_ms": {"p50": gap / per_step, "p95": gap / per_step * 1.3, "p99": gap / per_step * 1.5},
        "plain_tpot_ms": {"p50": 1000 / plain, "p95": 1040 / plain, "p99": 1080 / plain},
        "plain_tpot_curve_ms": [1000 / plain * (0.9 + 0.002 * i) for i in range(101)],
        "itl_curve_ms": curve, "plain_itl_curve_ms": [25 + i / 50 for i in range(101)],
        "tpot_curve_ms": [gap / per_step * (0.7 + 0.007 * i) for i in range(101)],
        "token_acceptance": a, "draft_acceptance": sum(accepted) / depths, "expected_acceptance": a * 1.01,
        "accepted_histogram": [[0] * (k + 1) for k in range(depths)] + [[*rejected, steps - sum(rejected)]],
        "wasted": 1 - sum(accepted) / depths, "predicted_by_depth": expected,
        "speedup_geomean": {"center": speedup * 0.985, "low": speedup * 0.93, "high": speedup * 1.04},
        "speedup_range": {"center": speedup, "low": speedup * 0.94, "high": speedup * 1.05},
        "speedup_of_means": speedup * 1.012,
        "tokens_per_step_range": {"center": per_step, "low": per_step * 0.95, "high": per_step * 1.05},
        "memory_peak_bytes": 11_300_000_000, "rejections": patterns(a, noise),
        "traced": [{"id": f"{task}/{i}", "tokens": written(TEXTS[task], a, depths, drafter,
        noise)} for i in range(observed)],
        "clean": {"contaminated": [f"{task}/3", f"{task}/9"], "checked": prompts, "rule": "one 13-gram of words in "
        "common",
                  "tokens_per_step": per_step * 0.97, "speedup": speedup * 0.96},
        "by_group": [group(name, tokens, steps, a, speedup) for name in ("", "한국어", "русский")],
        "by_position": [place(begin, end, steps, a) for begin, end in ((0, 1024), (1024, 4096), (16384, None))],
        "plain_exact": True, "dtype": "bfloat16", "precision": "bfloat16", "trained_on": "bfloat16", "batch": 1,
        "device": "NVIDIA H200", "invalid": 0, "lossless": True, "distance": 0.0, "per_prompt": results,
    } | changes  # fmt: skip


def prompt(name: str, speedup: float, per_step: float, plain: float, noise: random.Random) -> dict[str, Any]:
    return {
        "id": name, "tokens": 128, "steps": round(128 / per_step * noise.uniform(0.9, 1.1)),
        "tokens_per_s": plain * speedup,
        "plain_tokens_per_s": plain, "speedup": speedup, "exact": True, "tpot_ms": 1000 / plain / speedup,
        "plain_tpot_ms": 1000 / plain, "contaminated": False,
    }  # fmt: skip


def group(name: str, tokens: int, steps: int, a: float, speedup: float) -> dict[str, Any]:
    return {
        "name": name, "prompts": 8, "tokens": tokens // 3, "steps": steps // 3, "judged": 1000,
        "accepted": round(1000 * a), "tokens_per_step": tokens / steps, "token_acceptance": a, "speedup": speedup,
    }  # fmt: skip


def place(begin: int, end: int | None, steps: int, a: float) -> dict[str, Any]:
    return {
        "begin": begin, "end": end, "steps": steps // 3, "tokens": steps, "judged": 1000, "accepted": round(1000 * a),
        "tokens_per_step": 3.0, "token_acceptance": a,
    }  # fmt: skip


def patterns(a: float, noise: random.Random) -> dict[str, Any]:
    """Counts that look like a real drafter's: numbers and undecided places are hard."""
    by_kind = {"word": 1.02, "punctuation": 1.1, "space": 1.12, "number": 0.62, "symbol": 0.9, "hangul": 0.4}
    by_entropy = {"below 0.1": 1.15, "0.1 to 0.5": 0.97, "0.5 to 1": 0.7, "1 to 2": 0.46, "above 2": 0.21}
    by_rank = {"1": 1.12, "2": 0.3, "3 to 5": 0.13, "6 to 20": 0.05, "beyond 20": 0.01}
    found = {}
    for name, shares in (("by_kind", by_kind), ("by_entropy", by_entropy), ("by_rank", by_rank)):
        counts = [(sort, share, noise.randint(60, 900)) for sort, share in shares.items()]
        found[name] = [
            {"name": sort, "tested": n, "accepted": round(n * min(a * share, 0.995))} for sort, share, n in counts
        ]
    return found


def written(text: str, a: float, depths: int, drafter: str, noise: random.Random) -> list[dict[str, Any]]:
    """The text as judged token by token: drafts of a depth each, cut where the target said no."""
    tokens, depth = [], 0
    for piece in re.findall(r"\n+|[ ]?[^\W\d]+|[ ]?\d+|[ ]?[^\w\s]+|[ ]+", text):
        entropy = noise.lognormvariate(-1.3, 1.0)
        depth += 1
        if depth > depths or (drafter == "suffix" and depth == 1 and noise.random() > a):
            tokens.append({"text": piece, "entropy": entropy})
            depth = 0
            continue
        accepted = noise.random() < a
        p, rank = (noise.uniform(0.5, 1), 1) if accepted else (noise.uniform(0.0005, 0.3), noise.randint(2, 40))
        bare = piece.strip()
        kind = "number" if bare.isdigit() else "word" if bare.isalpha() else "symbol" if bare else "space"
        tokens.append(
            {"text": piece, "drafted": piece if accepted else noise.choice(OTHERS), "accepted": accepted,
            "depth": depth,
             "p": p, "q": None if drafter == "suffix" else noise.uniform(0.3, 0.99), "rank": rank, "entropy": entropy,
             "kind": kind}
        )  # fmt: skip
        depth = depth if accepted else 0
    return tokens


def null_report() -> Report:
    """A row of which nothing was measured, and a training that left no trace."""
    needed = [
        "tokens_per_step", "accepted_by_depth", "tokens_per_s", "plain_tokens_per_s", "speedup", "exact",
        "compared_tokens", "share", "ttft_ms", "itl_ms",
    ]  # fmt: skip
    empty: dict[str, Any] = {"drafter": "ngram", "task": "", "prompts": 0, "temperature": 0.0} | dict.fromkeys(needed)
    return Report.model_validate({"schema": 1, "target": "tiny", "rows": [empty], "training": {"ngram": {}}})


HOSTILE = "\"'></script><script>alert(1)</script><img src=x onerror=alert(1)>$title {x} 🧨 \u202eשלום\u2066 עולם"


def hostile_report() -> Report:
    """Every string tries to become markup, turns the direction of text, or is not of the Latin script."""
    bad = HOSTILE
    token = {"text": bad, "drafted": bad, "depth": 2, "p": 0.1, "q": 0.2, "rank": 3, "entropy": 1.0, "kind": bad}
    sorts = {name: [{"name": bad, "tested": 4, "accepted": 1}] for name in ("by_kind", "by_entropy", "by_rank")}
    rows = [
        row("dspark", "chat") | {
            "drafter": bad, "task": task, "device": bad, "dtype": bad, "precision": bad, "exact": False, "rule": bad,
            "lossless": False, "invalid": 3,
            "traced": [{"id": bad, "tokens": [token, token | {"accepted": True}, {"text": bad}]}],
            "per_prompt": [{"id": bad, "speedup": 1.5, "exact": False, "first_difference": 2}], "rejections": sorts,
            "plain_exact": False,
            "clean": {"contaminated": [bad], "checked": 4, "rule": bad},
        }
        for task in (bad, "other")
    ]  # fmt: skip
    return full_report(
        rows=rows, target=bad, made=bad, notes=[bad], provenance={bad: bad, "deep": {bad: [bad]}},
        fingerprint={bad: bad},
        training={bad: {"seconds": 3.0, "loss_curve": [[0, 1], [1, 2]]}}, left_out=[{"id": bad}],
    )  # fmt: skip


class Parsed(HTMLParser):
    """Tags, attributes and text; fails where an element is closed that is not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.pieces.append(data)

    @property
    def ids(self) -> set[str]:
        return {value for name, value in self.attributes if name == "id"}

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())
