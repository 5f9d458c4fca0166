"""kill -9 a stage at random moments, resume it each time, and compare its results with those of an undisturbed run.

    python benchmarks/kills.py [STAGE …] [--kills 50] [--seed 0] [--work FOLDER] [--out FILE]

STAGE is prepare, train, evaluate or export; all of them unless given.  A tiny target and a small dspark.  Half of the
kills come at a random time, the other half before a random call that changes the disk (fsync, link, rename, replace,
write), or in the middle of writing a tensor file.  If a stage ends before all kills are used up, it is started again in
another folder.

What must be equal: every byte of the answers; every byte of a checkpoint and its metrics except for timings; every byte
of an export; of a report, the texts' counts: tokens, steps, acceptance, exactness.  No files may be left behind that an
undisturbed run does not leave.  Prints JSON; exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))  # the tiny target
# ruff: noqa: E402

from tiny import DRAFTER, make_folder, write_run_file

import outrider
from benchmarks.replay import provenance, publish
from outrider import checkpoint
from outrider.export.writing import export_folder

STAGES = ("prepare", "train", "evaluate", "export")
RUN, EXPORT = Path("runs/kills"), Path("export")
STEPS = 24
CALLS: tuple[tuple[Any, str], ...] = (
    (os, "fsync"), (os, "link"), (os, "replace"), (Path, "rename"), (Path, "replace"), (Path, "write_text"),
    (checkpoint, "save_file"),
)  # fmt: skip
"""The calls with which a stage changes the disk."""
FIGURES = (
    "drafter", "task", "prompts", "temperature", "tokens_per_step", "accepted_by_depth", "accepted_histogram", "exact",
    "compared_tokens", "steps", "tokens", "rejections_by_depth",
)  # fmt: skip
"""Fields of a report's rows that do not depend on the clock."""
CLOCKS = ("seconds", "tokens_per_s", "mfu", "made", "speedup")
LOGS = ("provenance.json", "config.yaml", "prompts.jsonl", "report.html", "answers.sqlite")
"""Files that contain times, and those that only a resumed run reads."""
FORK = multiprocessing.get_context("fork")  # a new process would import torch for longer than a stage takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", default=STAGES)
    parser.add_argument("--kills", type=int, default=50, help="of each stage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a new folder for the runs; a temporary one unless given")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        rows = measured(options.work or Path(temporary), options.stages, options.kills, options.seed)
    identical = all(not row["differences"] for row in rows.values())
    result = {"identical": identical, "kills": sum(row["kills"] for row in rows.values()), "stages": rows}
    publish({"provenance": provenance(time.perf_counter() - began)} | result, options.out)
    sys.exit(not identical)


# ── kills and resumes ─────────────────────────────────────────────────────────────────────────────────────────────────


def measured(work: Path, stages: list[str], kills: int, seed: int) -> dict[str, Any]:
    """The stages one after another, each with its kills; a stage starts from the result of the previous undisturbed
    one."""
    undisturbed, rows = made(work / "undisturbed"), {}
    for stage in STAGES[: 1 + max(map(STAGES.index, stages))]:
        before = work / f"before-{stage}"
        shutil.copytree(undisturbed, before)
        began = time.monotonic()
        calls = ended(start(undisturbed, stage))
        assert calls is not None, f"the undisturbed {stage} failed; see {undisturbed / 'errors.log'}"
        took_s = time.monotonic() - began
        if stage in stages:
            draw = random.Random(f"{seed} {stage}")
            rows[stage] = killed_until(stage, before, undisturbed, kills, draw, took_s, calls)
            print(f"{stage}: {rows[stage]}", file=sys.stderr, flush=True)
    return rows


def killed_until(
    stage: str, before: Path, undisturbed: Path, kills: int, draw: random.Random, took_s: float, calls: int
) -> dict[str, Any]:
    """All kills of a stage, and whether every killed run ended with the same results as the undisturbed one."""
    expected, spent, inside, runs, differences = files(undisturbed), 0, 0, 0, set[str]()
    while spent < kills:
        runs += 1
        place = before.with_name(f"{stage}-{runs}")
        shutil.copytree(before, place)
        is_over = False
        while spent < kills and not is_over:
            at = draw.randrange(max(1, calls)) if spent % 2 else -1
            process = start(place, stage, at)
            if at < 0:
                process[0].join(draw.uniform(0, took_s))
                process[0].kill()
            is_over = ended(process) is not None
            spent, inside = spent + (not is_over), inside + (not is_over and at >= 0)
        if not is_over and ended(start(place, stage)) is None:
            differences.add(f"run {runs} can't be resumed; see {place / 'errors.log'}")
        found = files(place)
        differences |= {name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)}
    return {
        "kills": spent, "before_a_call": inside, "runs": runs, "calls": calls, "differences": sorted(differences)
    }  # fmt: skip


def made(place: Path) -> Path:
    """A folder with a target, prompts and the run file, whose paths are relative."""
    place.mkdir(parents=True)
    make_folder(place / "tiny")
    write_run_file(
        place / "kills.yaml", "tiny",
        prepare={"conversations": "prompts.jsonl", "count": 24, "length": 96, "max_new_tokens": 24, "slots": 3},
        train={
            "steps": STEPS, "batch": 2, "lr": 5e-3, "dtype": "float32", "log_every": 1, "save_every": 2, "keep": 2,
            "held_out": 0,
        },
        evaluate={
            "tasks": ["held_out.jsonl"], "prompts": 8, "max_new_tokens": 16, "baselines": ["ngram"], "repeats": 0,
            "min_first_ngrams": 0.0, "batch": 1,
        },
        drafter=DRAFTER | {"anchors": 8, "mask_token": 3},  # exports require a mask token
    )  # fmt: skip
    file = place / "kills.yaml"
    file.write_text(file.read_text().replace("target: tiny", "target: {name: tiny, compile: false}"))
    for name, count in (("prompts", 24), ("held_out", 8)):
        rows = [{"id": f"{name}{n}", "prompt": f"{name} {n} " + "ab" * n} for n in range(count)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


# ── the process to kill ───────────────────────────────────────────────────────────────────────────────────────────────


def start(place: Path, stage: str, at: int = -1) -> tuple[Any, Any]:
    """A process that runs a stage in this folder, and the pipe on which it reports its calls."""
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=child, args=(place, stage, at, sender))
    process.start()
    sender.close()
    return process, receiver


def ended(process: tuple[Any, Any]) -> int | None:
    """The calls of a completed stage; None if it was killed or failed."""
    process[0].join()
    try:
        return int(process[1].recv())
    except EOFError:
        return None


def child(place: Path, stage: str, at: int, calls: Any) -> None:
    """Run a stage; the process is killed before call number `at`, counted from 0."""
    os.chdir(place)
    log = os.open("errors.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    count = [0]
    for owner, name in CALLS:
        setattr(owner, name, counted(getattr(owner, name), name, count, at))
    if stage == "export":
        target = outrider.load_target("tiny", compile=False)
        export_folder(RUN / "checkpoint", "speculators", EXPORT, target)
    else:
        outrider.run("kills.yaml", stages=[stage])
    calls.send(count[0])


def counted(real: Callable[..., Any], name: str, count: list[int], at: int) -> Callable[..., Any]:
    """Wraps a call to count it; call number `at` is skipped, or only half executed if it writes tensors."""

    def call(*given: Any, **more: Any) -> Any:
        if count[0] == at:
            if name == "save_file":
                real(*given, **more)
                os.truncate(given[1], Path(given[1]).stat().st_size // 2)
            os.kill(os.getpid(), 9)
        count[0] += 1
        return real(*given, **more)

    return call


# ── what must be equal ────────────────────────────────────────────────────────────────────────────────────────────────


def files(place: Path) -> dict[str, str]:
    """The results by file name: the hash of each, without clocks."""
    found = {}
    for path in sorted([*(place / RUN).rglob("*"), *(place / EXPORT).rglob("*")]):
        if path.is_dir() or path.name in LOGS or path.name.startswith("answers.sqlite"):
            continue
        found[str(path.relative_to(place))] = hashlib.sha256(without_clocks(path)).hexdigest()
    return found


def without_clocks(path: Path) -> bytes:
    content = path.read_bytes()
    if path.name == "report.json":
        rows = json.loads(content)["rows"]
        return json.dumps([{key: row[key] for key in FIGURES} for row in rows]).encode()
    if path.name in ("metrics.jsonl", checkpoint.MANIFEST):
        rows = content.splitlines() if path.suffix == ".jsonl" else [content]
        return json.dumps([_timeless(json.loads(row)) for row in rows]).encode()
    return content


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(inner) for key, inner in value.items() if key not in CLOCKS}
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
