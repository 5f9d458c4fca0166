"""Tokens per step after a given number of minutes of training: with the choices of `init --minutes`, the defaults, or a
hand-written recipe.

    python benchmarks/minutes.py ANSWERS KIND=FILE.jsonl ... [--minutes 15,30] [--seeds 0,1,2] [--prompts 16]
                                 [--recipes planned,hand,defaults] [--work FOLDER] [--out FILE]

ANSWERS: a folder filled by `outrider prepare` for smollm2; all recipes train on it.  KIND=FILE: held-out prompts, whose
rows have `turns`; drafts are verified greedily, with all of a drafter's columns in every step.

`defaults` are those of commit 761224d4: dspark of five layers and blocks of 7, 512 anchors, AdamW at 6e-4 for up to ten
passes, stopped when the minutes are over.  `hand`: two layers, blocks of 5, 48 anchors, rank 128, AdamW at 6e-4.
`planned`: the output of `init --minutes`.  The last two get as many steps as fit into the minutes; steps are timed
first, one recipe after the other.  Measurements are kept in --work; rerun the same command to resume.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import promise, write  # noqa: E402
from benchmarks.same_text import read  # noqa: E402
from outrider import generate, load_drafter, machine  # noqa: E402
from outrider.data.answers.store import ANSWERS, iterate_answers  # noqa: E402
from outrider.runs.file import load  # noqa: E402
from outrider.runs.forecast import budget  # noqa: E402
from outrider.targets.load import load_target  # noqa: E402

LOADING_S = 20.0
"""Seconds of a training before its first step."""
BASE = {"lr": 6e-4, "batch": 8, "log_every": 20}
HAND = {"kind": "dspark", "layers": 2, "block": 5, "anchors": 48, "rank": 128}
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults": ({"kind": "dspark"}, BASE | {"epochs": 10}),
    "hand": (HAND, BASE),
    "planned": (
        {"kind": "dspark"} | budget.sizes("dspark", 49_152),
        BASE | {"lr": 8e-3, "optimizer": "muon", "loss": {"kl": 1.0}},
    ),
}
"""Settings of drafter and training."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("answers", type=Path)
    parser.add_argument("kinds", nargs="+", metavar="KIND=FILE")
    parser.add_argument("--minutes", type=lambda text: [float(each) for each in text.split(",")], default=[15.0, 30.0])
    parser.add_argument("--seeds", type=lambda text: [int(each) for each in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--recipes", type=lambda text: text.split(","), default=list(RECIPES))
    parser.add_argument("--prompts", type=int, default=16, help="of each kind")
    parser.add_argument("--new", type=int, default=96, help="tokens a prompt")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "minutes")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    machine.set_up_process()
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.work / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = {(row["recipe"], row["seed"], row["minutes"]) for row in rows}
    wanted = [(r, s, m) for s in options.seeds for m in options.minutes for r in options.recipes]
    if not done.issuperset(wanted):
        target = load_target("smollm2", compile="auto")
        prompts = {
            kind: read(target, path, options.prompts) for kind, _, path in (k.partition("=") for k in options.kinds)
        }
        seconds = timed(options, target)
        for recipe, seed, minutes in wanted:
            if (recipe, seed, minutes) in done:
                continue
            row = trained(options, recipe, seed, minutes, seconds[recipe])
            row["tokens_per_step"] = accepted(target, row.pop("checkpoint"), prompts, options.new)
            rows.append(row)
            with kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), file=sys.stderr, flush=True)
    write({"promises": promises(rows, options.minutes), "rows": rows}, options.out)
    return 0


def run_file(options: argparse.Namespace, recipe: str, name: str, **train: Any) -> Path:
    """A run file in --work."""
    drafter, training = RECIPES[recipe]
    prepare = {"conversations": "instructions:train", "folder": str(options.answers.resolve()), "length": 384,
               "max_new_tokens": 224, "temperature": 0.7, "top_p": 1.0, "top_k": 0}  # fmt: skip
    path: Path = options.work / f"{name}.yaml"
    path.write_text(
        yaml.safe_dump({"target": "smollm2", "drafter": drafter, "prepare": prepare, "train": training | train})
    )
    return path


def timed(options: argparse.Namespace, target: Any) -> dict[str, tuple[float, float]]:
    """Seconds to read all texts once, and per step, for each recipe; timed once."""
    every, place = list(iterate_answers(options.answers / ANSWERS)), options.work / "rates.json"
    found: dict[str, tuple[float, float]] = json.loads(place.read_text()) if place.exists() else {}
    for recipe in set(options.recipes) - found.keys():
        settings, _ = load(run_file(options, recipe, f"timed-{recipe}", steps=1, epochs=None))
        read, step = budget.training_rates(settings, target, every[:64])
        found[recipe] = len(every) * read, step
    place.write_text(json.dumps(found))
    print(json.dumps({"seconds of reading and of a step": found}), file=sys.stderr, flush=True)
    return found


def trained(
    options: argparse.Namespace, recipe: str, seed: int, minutes: float, rates: tuple[float, float]
) -> dict[str, Any]:  # fmt: skip
    """Train for this many minutes in a separate process."""
    name, (read, step) = f"{recipe}-{seed}-{minutes:g}", rates
    steps = {} if recipe == "defaults" else {"steps": max(1, int((60 * minutes - read) / step))}
    file = run_file(options, recipe, name, seed=seed, **steps)
    process = subprocess.Popen(
        [sys.executable, "-m", "outrider", "train", file.name], cwd=options.work, stdout=subprocess.DEVNULL
    )
    end, peak, is_stopped = time.monotonic() + 60 * minutes + LOADING_S, 0, False
    while process.poll() is None:
        peak = max(peak, memory_peak(process.pid))
        if not steps and time.monotonic() > end and not is_stopped:
            process.send_signal(signal.SIGTERM)
            is_stopped = True
        time.sleep(0.5)
    folder = options.work / "runs" / name
    manifest = json.loads((folder / "checkpoint" / "outrider.json").read_text())["training"]
    return {
        "recipe": recipe, "seed": seed, "minutes": minutes, "steps": manifest["step"], "seconds": manifest["seconds"],
        "planned_steps": steps.get("steps"), "is_stopped": is_stopped, "peak_gb": round(peak / 2**20, 2),
        "checkpoint": str(folder / "checkpoint"),
    }  # fmt: skip


def memory_peak(pid: int) -> int:
    """Peak resident size of a process so far, in KiB; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def accepted(target: Any, checkpoint: str, prompts: dict[str, list[list[int]]], new: int) -> dict[str, float]:
    """Tokens per step by kind of prompt, greedy."""
    drafter, found = load_drafter(checkpoint, target), {}
    for kind, asked in prompts.items():
        texts = generate(target, asked, drafter, max_new_tokens=new, temperature=0, policy="fixed")
        found[kind] = round(sum(len(one.tokens) for one in texts) / sum(one.steps for one in texts), 4)
    return found


def promises(rows: list[dict[str, Any]], minutes: list[float]) -> list[dict[str, Any]]:
    """The planned recipe's gain above 1 token per step, over that of the others in the same minutes."""

    def gained(recipe: str, at: float) -> float | None:
        own = [row for row in rows if row["recipe"] == recipe and row["minutes"] == at]
        return statistics.mean(statistics.mean(row["tokens_per_step"].values()) - 1 for row in own) if own else None

    found = []
    for at in minutes:
        for recipe, least in (("defaults", 1.5), ("hand", 1.15)):
            mine, other = gained("planned", at), gained(recipe, at)
            if mine is not None and other:
                found.append(promise(f"{at:g} minutes: gain over {recipe}", least, round(mine / other, 3)))
    peaks = {
        recipe: max((row["peak_gb"] for row in rows if row["recipe"] == recipe), default=None) for recipe in RECIPES
    }
    if peaks["planned"] and peaks["hand"]:
        found.append(promise("peak memory of hand over planned", 1.0, round(peaks["hand"] / peaks["planned"], 3)))
    return found


if __name__ == "__main__":
    sys.exit(main())
