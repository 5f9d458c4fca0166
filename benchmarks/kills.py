"""kill -9 a training at random moments, resume it each time, and compare the final state with an undisturbed one, bit
for bit.

    python benchmarks/kills.py [--kills 20] [--steps 24] [--seed 0] [--work FOLDER] [--out FILE]

The demo target and a small dspark.  Half of the kills come at a random time, half inside a save: before a random one of
its system calls (fsync, link, rename, write), or in the middle of a file.  If a training ends before all kills are
spent, the next one begins.  Every file of every checkpoint is compared, and metrics.jsonl; only timings may differ.
Prints JSON; exits with 1 if a final state differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

import outrider
from benchmarks.replay import provenance, publish
from outrider import checkpoint
from outrider.training import trainer

RUN = "runs/kills"
SAVE_EVERY = 2
BEGUN = "training began"
CALLS: tuple[tuple[Any, str], ...] = (
    (os, "fsync"), (os, "link"), (Path, "rename"), (Path, "write_text"), (checkpoint, "save_file"),
)  # fmt: skip
"""The system calls with which a save changes the disk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a new folder for the trainings; a temporary one unless given")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", type=int, metavar="CALL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        child(options.train)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        found = measured(options.work or Path(temporary), options.kills, options.steps, options.seed)
    publish({"provenance": provenance(time.perf_counter() - began)} | found, options.out)
    sys.exit(0 if found["identical"] else 1)


# ── the training to kill ──────────────────────────────────────────────────────────────────────────────────────────────


def child(at: int) -> None:
    """Train in the current folder; the process is killed before call number `at` of its saves, counted from 0."""
    real, count = trainer.train, [0]

    def begun(*given: Any, **more: Any) -> Any:
        print(BEGUN, flush=True)
        for owner, name in CALLS:
            setattr(owner, name, counted(getattr(owner, name), name, count, at))
        return real(*given, **more)

    trainer.train = begun  # type: ignore[assignment]
    outrider.run("kills.yaml", stages=["train"])
    print(f"calls {count[0]}", flush=True)


def counted(real: Callable[..., Any], name: str, count: list[int], at: int) -> Callable[..., Any]:
    """A counted system call; number `at` is not made, or only half made if it writes tensors."""

    def call(*given: Any, **more: Any) -> Any:
        if count[0] == at:
            if name == "save_file":
                real(*given, **more)
                os.truncate(given[1], Path(given[1]).stat().st_size // 2)
            print(f"killed before {name}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        return real(*given, **more)

    return call


# ── kills and resumes ─────────────────────────────────────────────────────────────────────────────────────────────────


def measured(work: Path, kills: int, steps: int, seed: int) -> dict[str, Any]:
    """All kills, and whether every killed training ended like the undisturbed one."""
    draw, spent, differences = random.Random(seed), [], []
    whole = made(work / "undisturbed", steps)
    outrider.run(str(whole / "kills.yaml"), stages=["prepare"])
    began = start(whole, -1)
    took_s, said = waited(began, None)
    calls = int(said.splitlines()[-1].split()[1])
    wanted, trainings = files(whole / RUN), 0
    while len(spent) < kills:
        trainings += 1
        place = made(work / str(trainings), steps)
        while len(spent) < kills and step_of(place) < steps:
            spent.append(killed(place, draw, took_s, calls, is_save=len(spent) % 2 == 1))
            print(f"kill {len(spent)} of {kills}: {spent[-1]}", file=sys.stderr, flush=True)
        waited(start(place, -1), None)
        found = files(place / RUN)
        differences += sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    return {
        "identical": not differences, "differences": differences, "kills": len(spent), "trainings": trainings,
        "inside_saves": sum(kill["inside_save"] for kill in spent), "steps": steps, "save_every": SAVE_EVERY,
        "calls_of_saves": calls, "training_s": round(took_s, 2), "spent": spent,
    }  # fmt: skip


def made(place: Path, steps: int) -> Path:
    """A folder with the run file; the answers are next to it."""
    place.mkdir(parents=True)
    run = {
        "target": {"name": "demo", "compile": False},
        "drafter": {"kind": "dspark", "layers": 1, "kv_heads": 2, "block": 4, "anchors": 16, "rank": 16},
        "prepare": {
            "conversations": "stdlib:train", "count": 24, "length": 160, "max_new_tokens": 32,
            "folder": str(place.parent / "answers"),
        },
        "train": {
            "steps": steps, "batch": 4, "lr": 5e-3, "dtype": "float32", "log_every": 1, "save_every": SAVE_EVERY,
            "keep": 2, "held_out": 0,
        },
    }  # fmt: skip
    (place / "kills.yaml").write_text(yaml.safe_dump(run))
    return place


def start(place: Path, at: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "benchmarks.kills", "--train", str(at)]
    root = Path(__file__).resolve().parent.parent
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    with (place / "errors.log").open("a") as log:
        return subprocess.Popen(words, cwd=place, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)


def waited(process: subprocess.Popen[str], kill_after_s: float | None) -> tuple[float, str]:
    """Seconds of training until the process ended, or was killed after this many seconds; and its last output."""
    assert process.stdout is not None
    while BEGUN not in (line := process.stdout.readline()):
        if not line:
            raise SystemExit(f"the training ended before its first step, with {process.wait()}; see errors.log")
    began = time.monotonic()
    if kill_after_s is not None:
        try:
            process.wait(kill_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
    said, _ = process.communicate()
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"the training ended with {process.returncode}; see errors.log")
    return time.monotonic() - began, said


def killed(place: Path, draw: random.Random, took_s: float, calls: int, is_save: bool) -> dict[str, Any]:
    """Start the training and kill it; returns what it was doing, and the step from which it will resume.

    Times and calls are drawn from a quarter of a training, so that one training is killed several times.
    """
    before = step_of(place)
    at = draw.randrange(calls // 4) if is_save else -1
    after_s = None if is_save else draw.uniform(0, took_s / 4)
    seconds, said = waited(start(place, at), after_s)
    found = {"inside_save": "killed before" in said, "after_s": round(seconds, 3), "from_step": before}
    call = said.split("killed before ")[1].split()[0] if found["inside_save"] else None
    return found | {"before_call": call, "saved_step": step_of(place)}


def step_of(place: Path) -> int:
    """The step of the checkpoint from which the next start resumes; 0 if there is none."""
    folder = place / RUN / "checkpoint"
    if not (checkpoint.whole(folder) / checkpoint.MANIFEST).exists():
        return 0
    return int(checkpoint.manifest_of(folder)["training"]["step"])


def files(folder: Path) -> dict[str, str]:
    """The files of a training by name: the hash of each, without timings."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir() or path.name in ("provenance.json", "config.yaml"):
            continue
        content = path.read_bytes()
        if path.name in ("metrics.jsonl", checkpoint.MANIFEST):
            rows = content.splitlines() if path.suffix == ".jsonl" else [content]
            content = json.dumps([without_clocks(json.loads(row)) for row in rows]).encode()
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


def without_clocks(row: dict[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in row.items() if key not in ("seconds", "tokens_per_s", "mfu")}
    return left | ({"training": without_clocks(row["training"])} if "training" in row else {})


if __name__ == "__main__":
    main()
