"""Training one model in several processes: losses compared with a single process, kills in between, throughput, memory.

    python benchmarks/distributed.py [--parts losses,kills,speed,memory] [--steps 12] [--rounds 5] [--out FILE]

The demo target and a small dflash on texts of random tokens; every start is torchrun's, gloo, one thread per process.
losses: 1, 2 and 4 processes, ddp and fsdp, compared with one process in float32 and one in float64, in which
`Tensor.float` returns float64.  kills: one process, two, one, each killed after a save.  speed: seconds of the same
steps in one process and in two, interleaved; only meaningful on an idle machine.  memory: a dflash of six wide layers
on short texts: bytes of weights and moments that a process holds, and its peak resident memory in training, above the
level before the model.  Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.replay import provenance, publish
from outrider import load_target
from outrider.config import build
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.drafters import dflash
from outrider.measure import peak_memory
from outrider.training import step, trainer
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.parallel import distributed, shards

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"layers": 2, "kv_heads": 2, "block": 4, "anchors": 8}
WIDE = {"layers": 6, "intermediate": 4096, "block": 4, "anchors": 2}
WANTED = {"speed": 1.7, "memory": 0.6, "noise": 1e-5}
"""Throughput of two processes over one's, memory of one of two over a single one's, relative error of a loss."""


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--parts", default="losses,kills,speed,memory")
    asked.add_argument("--steps", type=int, default=12)
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--out", type=Path)
    asked.add_argument("--job", help=argparse.SUPPRESS)
    options = asked.parse_args()
    if options.job:
        work(json.loads(options.job))
        return
    began, found = time.perf_counter(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts.split(","):
            found[part] = PARTS[part](Path(folder), options.steps, options.rounds)
            print(json.dumps({part: found[part]}), file=sys.stderr, flush=True)
    found["promises"] = promises(found)
    publish({"provenance": provenance(time.perf_counter() - began)} | found, options.out)


def promises(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows: list[tuple[str, float, float, bool]] = []
    if "losses" in found:
        off = max(value for row in found["losses"].values() if isinstance(row, dict) for value in row.values())
        rows.append(
            ("losses of 1, 2 and 4 processes: largest difference", WANTED["noise"], off, off <= WANTED["noise"])
        )
    if "kills" in found:
        off = found["kills"]["from_one"]
        rows.append(
            ("one process, two, one across kills: largest difference", WANTED["noise"], off, off <= WANTED["noise"])
        )
    if "speed" in found:
        ratio = found["speed"]["ratio"]
        rows.append(("throughput of two processes over one's", WANTED["speed"], ratio, ratio >= WANTED["speed"]))
    if "memory" in found:
        share = found["memory"]["held_bytes_share"]
        rows.append(
            ("weights and moments in one of two FSDP2 processes", WANTED["memory"], share, share <= WANTED["memory"])
        )
    return [dict(zip(("promise", "wanted", "found", "holds"), row, strict=True)) for row in rows]


# ── one process ───────────────────────────────────────────────────────────────────────────────────────────────────────


def work(job: Mapping[str, Any]) -> None:
    """Train as `job` says, in as many processes as were started; each writes its results."""
    torch.set_num_threads(1)
    assert shards  # loaded before memory is measured
    if job.get("float64"):
        single, overlap = torch.Tensor.float, step.overlap
        step.overlap = lambda p, q: single(overlap(p, q))  # acceptance is counted in float32
        torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment, method-assign]
    with distributed.joined() as processes:
        target = load_target("demo", dtype="float64" if job.get("float64") else "float32", compile=False)
        noise = torch.Generator().manual_seed(0)
        texts = [
            Answer(str(i), torch.randint(target.spec.vocabulary, (n,), generator=noise).tolist(), [(4, n)])
            for i, n in enumerate(job["lengths"])
        ]
        config = Config(**{"lr": 1e-3, "dtype": "float32", "log_every": 1, "held_out": 0} | job["train"])
        torch.manual_seed(0)
        before = peak_memory.peak_bytes(target.device) if peak_memory.reset(target.device) else None
        model = dflash.Model(build(dflash.Config, {"kind": "dflash", **job["drafter"]}), target)
        source = LiveFeatures(target, texts, model.taps, batch=config.batch, length=256)
        held, losses, times, peaks = list[Optimizers](), list[float](), list[float](), list[int]()

        def optimizers(*given: Any) -> Optimizers:
            held.append(Optimizers(*given))
            return held[0]

        def on_step(number: int, row: Mapping[str, Any]) -> None:
            losses.append(row["loss"])
            times.append(time.perf_counter())
            peaks.append((peak_memory.peak_bytes(target.device) or 0) - (before or 0))
            if number == job.get("kill_at") and processes.rank == processes.count - 1:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.Optimizers = optimizers  # type: ignore[assignment, misc]
        trainer.train(model, source, config, job["folder"], on_step=on_step, processes=processes)
        local, parts = processes.weights.local, [*model.parameters()]
        moments = [v for w in parts for v in held[0].state_of(w).values()]
        size = sum(local(v.detach()).numel() * v.element_size() for v in (*parts, *moments))
        facts = {"losses": losses, "times": times, "held_bytes": size, "peak_bytes": peaks[-1]}
        Path(f"{job['folder']}.{processes.rank}.json").write_text(json.dumps(facts))


def run(count: int, folder: Path, job: Mapping[str, Any], fails: bool = False) -> list[dict[str, Any]]:
    """Start a job in `count` processes; returns the result of each.  fails: it is expected to be killed."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    if count == 1:
        words = [sys.executable]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, "-m", "benchmarks.distributed", "--job", json.dumps(dict(job) | {"folder": str(folder)})],
        env=environment, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if bool(done.returncode) != fails:
        raise SystemExit(f"{count} processes ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [] if fails else [json.loads(Path(f"{folder}.{rank}.json").read_text()) for rank in range(count)]


def small(steps: int, **train: Any) -> dict[str, Any]:
    return {
        "lengths": [40 + 3 * i for i in range(16)], "drafter": SMALL,
        "train": {"steps": steps, "batch": 8, "save_every": 4} | train,
    }  # fmt: skip


# ── measurements ──────────────────────────────────────────────────────────────────────────────────────────────────────


def losses(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Largest relative difference of a step's loss from that of one process."""
    whole = run(1, folder / "one", small(steps))[0]["losses"]
    exact = run(1, folder / "exact", small(steps) | {"float64": True})[0]["losses"]
    found: dict[str, Any] = {"steps": steps, "one": {"from_float64": off(whole, exact)}}
    for count, way in ((2, "ddp"), (2, "fsdp"), (4, "ddp"), (4, "fsdp")):
        mine = run(count, folder / f"{way}{count}", small(steps, distributed=way))[-1]["losses"]
        found[f"{way}, {count}"] = {"from_one": off(mine, whole), "from_float64": off(mine, exact)}
    return found


def off(mine: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(mine, theirs, strict=True))


def kills(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """One process, two, one: each but the last is killed two steps after a save, and the next one resumes."""
    whole = run(1, folder / "whole", small(steps))[0]["losses"]
    place = folder / "killed"
    run(1, place, small(steps) | {"kill_at": 6}, fails=True)  # 4 of these steps are saved
    run(2, place, small(steps) | {"kill_at": 10}, fails=True)
    rest = run(1, place, small(steps))[0]["losses"]
    return {"steps": steps, "last_steps": len(rest), "from_one": off(rest, whole[-len(rest) :])}


def speed(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Steps per second of two processes over one's, by rounds; without the first steps, which read the target."""
    job = small(steps + 4, save_every=10**6)
    job["lengths"], job["drafter"] = [150 + i for i in range(16)], SMALL | {"anchors": 32}
    ratios, seconds = [], list[list[float]]()
    for number in range(rounds):
        both = [run(count, folder / f"speed{number}-{count}", job)[0]["times"] for count in (1, 2)]
        seconds.append([(times[-1] - times[3]) / steps for times in both])
        ratios.append(seconds[-1][0] / seconds[-1][1])
    return {"ratio": statistics.median(ratios), "ratios": ratios, "seconds_a_step": seconds, "load": os.getloadavg()[0]}


def sizes(folder: Path, steps: int, rounds: int) -> dict[str, Any]:
    """Memory of each of two processes with FSDP2 over that of a single one."""
    job = {"lengths": [24] * 4, "drafter": WIDE, "train": {"steps": 3, "batch": 2, "save_every": 10**6}}
    one = run(1, folder / "memory1", job)[0]
    two = run(2, folder / "memory2", job | {"train": job["train"] | {"distributed": "fsdp"}})  # type: ignore[operator]
    found = {key: [one[key], *(each[key] for each in two)] for key in ("held_bytes", "peak_bytes")}
    files = [(folder / name / "checkpoint" / "training.safetensors").stat().st_size for name in ("memory1", "memory2")]
    shares = {f"{key}_share": max(values[1:]) / values[0] for key, values in found.items() if values[0]}
    return found | shares | {"checkpoint_bytes": files}


PARTS = {"losses": losses, "kills": kills, "speed": speed, "memory": sizes}


if __name__ == "__main__":
    main()
