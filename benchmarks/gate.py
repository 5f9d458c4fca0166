"""Does the gate stop regressions, and nothing else?  Simulated pairs of reports with the noise of real runs, as real
files.

    python benchmarks/gate.py [--times 200] [--noise FILE] [--out FILE]

Nine tasks, 200 prompts in all, every rule on.  First the demo target is measured twice with the n-gram drafter: the
difference between the two runs, prompt by prompt, is pure noise.  It is centered, scaled to a standard deviation of
0.08 of the paired log-ratio of speed-ups, and added to every simulated run, sampled with replacement: its shape is
real, its size is fixed, and the measured size is in the result.  In addition, each run's machine is faster or slower as
a whole by 3 %, and every step's acceptance is resampled, so that no rule has an easy task.  Both reports are written as
JSON, read back and judged; some go through the command line. --noise takes the measured noise from an earlier result
and needs no model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from outrider.gate.verdict import gate
from outrider.report.schema import Report

TASKS = {"a": 23, "b": 23, "c": 22, "d": 22, "e": 22, "f": 22, "g": 22, "h": 22, "i": 22}
SIGMA, DEPTH, TOKENS, DRIFT = 0.08, 4, 96, 0.03
COMMAND = "from outrider.cli import main; main()"
Noise = np.ndarray
"""[prompts, 2]: log of new/old tokens per second, drafted and alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--times", type=int, default=200, help="pairs of reports for the promised cases; the others have a fifth"
    )
    parser.add_argument("--noise", type=Path, help="an earlier result, whose measured noise is taken")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = np.array(json.loads(options.noise.read_text())["noise"]["logs"]) if options.noise else measure_noise()
    noise, sigma = scaled(measured)
    one = {"stdlib": 24}
    cases: dict[str, dict[str, Any]] = {
        "A/A": {}, "3 % slower": {"slower": 0.03}, "one token wrong": {"wrong": True}, "1 % slower": {"slower": 0.01},
        "2 % slower": {"slower": 0.02}, "5 % slower": {"slower": 0.05}, "A/A, 24 prompts": {"tasks": one},
        "10 % slower, 24 prompts": {"tasks": one, "slower": 0.1},
    }  # fmt: skip
    began, found = time.process_time(), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, settings) in enumerate(cases.items()):
            times = options.times if name in WANTED else max(1, options.times // 5)
            found[name] = judged(Path(folder), noise, settings, times, 1000 * number)
            print(f"{name}: {found[name]['stopped']} of {times} stopped, {found[name]['warned']} warned", flush=True)
        shell = {name: through_shell(Path(folder), noise, cases[name]) for name in SHELL}
    promises = [
        {"promise": f"{name}: share stopped of {options.times}", "wanted": [low, high],
         "found": found[name]["stopped"] / options.times,
         "holds": low <= found[name]["stopped"] / options.times <= high}
        for name, (low, high) in WANTED.items()
    ] + [{"promise": "exit codes of the command line", "wanted": SHELL, "found": shell,
    "holds": shell == SHELL}]  # fmt: skip
    result = {
        "command": "python benchmarks/gate.py",
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "promises": promises,
        "cases": found,
        "settings": {
            "times": options.times,
            "tasks": TASKS,
            "drift": DRIFT,
            "sigma": float(np.std(noise[:, 0] - noise[:, 1])),
        },
        "noise": {"sigma_measured": sigma, "logs": measured.round(6).tolist()},
        "cpu_seconds": round(time.process_time() - began),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"promises": promises, "sigma_measured": sigma, "cpu_seconds": result["cpu_seconds"]}, indent=1))
    sys.exit(not all(promise["holds"] for promise in promises))


WANTED = {"A/A": (0.0, 0.05), "3 % slower": (0.8, 1.0), "one token wrong": (1.0, 1.0)}
"""Minimum and maximum share that is stopped."""
SHELL = {"A/A": 0, "5 % slower": 1, "one token wrong": 1}


def measure_noise() -> Noise:
    """Two identical runs: the demo target with the n-gram drafter."""
    from outrider import load_drafter, load_target
    from outrider.measure.config import Config
    from outrider.measure.run import evaluate

    target = load_target("demo")
    config = Config(prompts=24, max_new_tokens=TOKENS, temperatures=(0.0,), traced_prompts=0)
    runs = [evaluate(target, {"ngram": load_drafter("ngram", target)}, config).rows[0].per_prompt for _ in range(2)]
    return np.log(
        [
            [a.tokens_per_s / b.tokens_per_s, a.plain_tokens_per_s / b.plain_tokens_per_s]
            for a, b in zip(*runs, strict=True)
        ]
    )


def scaled(measured: Noise) -> tuple[Noise, float]:
    """Centered, with the desired spread of speed-ups; and the measured spread."""
    centered = measured - measured.mean(axis=0)
    sigma = float(np.std(centered[:, 0] - centered[:, 1], ddof=1))
    return centered * SIGMA / float(np.std(centered[:, 0] - centered[:, 1])), sigma


# ── simulated reports ─────────────────────────────────────────────────────────────────────────────────────────────────


def reports(
    draw: np.random.Generator, noise: Noise, tasks: dict[str, int] = TASKS, slower: float = 0.0, wrong: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A candidate and a baseline: the same prompts and drafter, with the planted change in the candidate."""
    base = {
        task: {"rate": draw.beta(5, 5, count), "speed": np.exp(draw.normal(4.5, 0.2, count)),
               "gain": np.exp(draw.normal(0.4, 0.15, count))}
        for task, count in tasks.items()
    }  # fmt: skip
    machines = np.exp(draw.normal(0, DRIFT, 2))
    made = []
    for machine, loss, is_new in ((machines[0], slower, True), (machines[1], 0.0, False)):
        rows = [
            row(draw, task, own, noise if is_new else np.zeros((1, 2)), machine, loss) for task, own in base.items()
        ]
        made.append(
            {"schema": 1, "target": "demo", "rows": rows, "share_left_out": 0.05, "fingerprint": {"cpu": "simulated"}}
        )
    if wrong:
        at = draw.integers(len(rows))
        broken = made[0]["rows"][at]
        broken["exact"] = False
        prompt = broken["per_prompt"][draw.integers(len(broken["per_prompt"]))]
        prompt |= {"exact": False, "first_difference": int(draw.integers(TOKENS))}
    return made[0], made[1]


def steps_of(draw: np.random.Generator, rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens accepted in each step [prompts, TOKENS], and how many steps a prompt takes."""
    tried = draw.random((len(rate), TOKENS, DEPTH)) < rate[:, None, None]
    kept = np.minimum.accumulate(tried, axis=2).sum(axis=2)
    return kept, (np.cumsum(kept + 1, axis=1) < TOKENS).sum(axis=1) + 1


def predicted() -> list[float]:
    """Acceptance by depth over enough prompts to stand in for the prediction made in training."""
    draw = np.random.default_rng(0)
    kept, steps = steps_of(draw, draw.beta(5, 5, 5000))
    return [float((kept[np.arange(TOKENS) < steps[:, None]] > depth).mean()) for depth in range(DEPTH)]


PREDICTED = predicted()


def row(
    draw: np.random.Generator, task: str, base: dict[str, np.ndarray], noise: Noise, machine: float, loss: float
) -> dict[str, Any]:
    count = len(base["rate"])
    kept, steps = steps_of(draw, base["rate"])
    happened = np.arange(TOKENS) < steps[:, None]
    histogram = [[0] * (deep + 1) for deep in range(DEPTH)] + [
        np.bincount(kept[happened], minlength=DEPTH + 1).tolist()
    ]
    strayed = np.exp(noise[draw.integers(0, len(noise), count)]) * machine
    alone, drafted = base["speed"] * strayed[:, 1], base["speed"] * base["gain"] * (1 - loss) * strayed[:, 0]
    prompts = [
        {
            "id": f"{task}{i}", "tokens": TOKENS, "steps": int(steps[i]), "tokens_per_s": float(drafted[i]),
            "plain_tokens_per_s": float(alone[i]), "speedup": float(drafted[i] / alone[i]), "exact": True,
            "tpot_ms": float(1000 / drafted[i]), "plain_tpot_ms": float(1000 / alone[i]), "contaminated": i == 0,
        }
        for i in range(count)
    ]  # fmt: skip
    shares = [float((kept[happened] > depth).mean()) for depth in range(DEPTH)]
    return {
        "drafter": "ngram", "task": task, "prompts": count, "temperature": 0.0,
        "tokens_per_step": float(TOKENS * count / steps.sum()), "accepted_by_depth": shares,
        "tokens_per_s": float(drafted.mean()), "plain_tokens_per_s": float(alone.mean()),
        "speedup": float(drafted.mean() / alone.mean()), "exact": True, "plain_exact": True,
        "compared_tokens": TOKENS * count,
        "share": {}, "ttft_ms": {}, "itl_ms": {}, "accepted_histogram": histogram, "lossless": True,
        "predicted_by_depth": PREDICTED, "clean": {"contaminated": [f"{task}0"], "checked": count},
        "per_prompt": prompts,
    }  # fmt: skip


# ── judged ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def written(folder: Path, draw: np.random.Generator, noise: Noise, settings: dict[str, Any]) -> tuple[Path, Path]:
    paths = folder / "candidate.json", folder / "baseline.json"
    for path, report in zip(paths, reports(draw, noise, **settings), strict=True):
        path.write_text(json.dumps(report))
    return paths


def judged(folder: Path, noise: Noise, settings: dict[str, Any], times: int, seed: int) -> dict[str, Any]:
    """How often each rule stopped the candidate."""
    verdicts: Counter[str] = Counter()
    by_rule: Counter[str] = Counter()
    warned: Counter[str] = Counter()
    for number in range(times):
        new, old = written(folder, np.random.default_rng(seed + number), noise, settings)
        outcome = gate(Report.load(new), Report.load(old))
        verdicts[outcome.verdict] += 1
        by_rule.update(found.rule for found in outcome.findings if found.verdict == "stop")
        warned.update(found.rule for found in outcome.findings if found.verdict == "warn")
    return {
        "times": times,
        "stopped": verdicts["stop"],
        "warned": verdicts["warn"],
        "stops_by_rule": dict(by_rule),
        "warnings_by_rule": dict(warned),
    }


def through_shell(folder: Path, noise: Noise, settings: dict[str, Any]) -> int:
    """The exit code of the real command on three pairs; -1 if they differ."""
    codes = set()
    for seed in range(3):
        new, old = written(folder, np.random.default_rng(90_000 + seed), noise, settings)
        command = [sys.executable, "-c", COMMAND, "gate", str(new), "--baseline", str(old)]
        codes.add(subprocess.run(command, capture_output=True, check=False).returncode)
    return codes.pop() if len(codes) == 1 else -1


if __name__ == "__main__":
    main()
