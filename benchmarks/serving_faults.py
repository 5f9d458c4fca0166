"""The parts of `serving.py` that provoke failures: requests generated from the server's own document, and failing
drafters."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

from benchmarks.batch_time import CHECKPOINT, promise
from benchmarks.engines.server_process import Server, running
from benchmarks.faulty_drafter import Fault
from benchmarks.serving_turns import Clients, at_most, audited, known, outrider_serve, started, tell
from outrider import load_target

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
PHASES = "examples,coverage,fuzzing"
TIMEOUT_S = 2
"""Seconds after which a drafter counts as hung."""
STEP = 12
"""The step at which drafters fail."""
ALARMS: Mapping[str, str] = dict.fromkeys(("ids", "q", "parents", "sizes"), "invalid_draft") | dict.fromkeys(
    ("hangs", "hangs in observe"), "drafter_hung"
)
"""The alarm raised by a fault; drafter_raised for all others."""
NEW = (24, 48, 96)


# ── fuzz ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def fuzz(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Callable[[], None]) -> None:
    """schemathesis sends what the server's document allows and forbids; short slots keep its texts short."""
    drafter = str(CHECKPOINT) if wanted.drafter == "dspark" else wanted.drafter
    start = partial(started, {"slots": 8, "length": 96, "drafter": drafter, "more": ["serve.n=4", "serve.texts=8"]})
    with start("outrider") as server, tempfile.TemporaryDirectory() as place:
        paths = json.loads(server.get("/openapi.json")[1])["paths"]
        operations = sum(method in METHODS for methods in paths.values() for method in methods)
        rounds, statuses = 0, Counter[str]()
        own |= {"operations": operations, "cases": 0, "failures": [], "told": [], "schemathesis": ""}
        # the coverage phase ignores the number of cases, and few cases exhaust a route without a body: rounds with
        # other seeds
        while own["cases"] < wanted.cases and rounds < 50:
            left = wanted.cases - own["cases"]
            report = run_schemathesis(server, max(20, left // 5), wanted.seed + rounds, Path(place) / str(rounds))
            rounds += 1
            own["schemathesis"] = report["schemathesis_version"]
            own["cases"] += report["test_cases"]["generated"]
            own["failures"] += report["failures"] + report["errors"]
            own["told"] += report["told"]
            statuses += report["statuses"]
            tell(f"fuzz: {own['cases']:,} cases, {len(own['failures'])} failures")
        own |= {"statuses": dict(statuses), "rounds": rounds, "health": server.get("/health")[0]}
    worst = sum(count for status, count in statuses.items() if status.startswith("5"))
    own["promises"] = [
        promise("fuzz: cases", wanted.cases, own["cases"]),
        at_most("fuzz: answers with 5xx", 0, worst),
        at_most("fuzz: failures that schemathesis tells", 0, len(own["failures"])),
    ]


def run_schemathesis(server: Server, examples: int, seed: int, place: Path) -> dict[str, Any]:
    """The report of schemathesis, with `statuses`: the count of each status."""
    command = [
        Path(sys.executable).with_name("schemathesis"), "run", f"http://127.0.0.1:{server.port}/openapi.json",
        "--checks", "not_a_server_error", "--phases", PHASES, "--max-examples", examples, "--seed", seed,
        "--workers", 4, "--continue-on-failure", "--generation-database", "none", "--suppress-health-check", "all",
        "--request-timeout", 120, "--no-color", "--report", "json,ndjson", "--report-dir", place,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    reports = sorted(place.glob("*.json"))
    if not reports:
        raise SystemExit(f"schemathesis ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}")
    report: dict[str, Any] = json.loads(reports[0].read_text())
    statuses = Counter[str]()
    for path in place.glob("*.ndjson"):
        for line in path.read_text().splitlines():
            statuses.update(str(status) for status in statuses_in(json.loads(line)))
    told = done.stdout.partition(" ERRORS ")[2] or done.stdout.partition(" FAILURES ")[2]
    told = told.partition(" SUMMARY ")[0].strip("=\n ")
    return report | {"statuses": statuses, "told": [told[:3000]] if told else []}


def statuses_in(event: Any) -> Iterator[int]:
    """Response statuses in an event of schemathesis' report."""
    if isinstance(event, dict):
        if isinstance(event.get("status_code"), int):
            yield event["status_code"]
        for value in event.values():
            yield from statuses_in(value)
    elif isinstance(event, list):
        for value in event:
            yield from statuses_in(value)


# ── chaos ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def chaos(wanted: argparse.Namespace, own: dict[str, Any], clients: Clients, save: Callable[[], None]) -> None:
    """A server per fault: answers during and after it equal plain decoding's, and an alarm is counted."""
    target = load_target("demo", dtype=wanted.dtype, compile=False)
    pool = known(target, 24, NEW, has_all=True)  # q is only needed for sampled answers
    rows = own["rows"] = []
    with offered() as path:
        for fault in get_args(Fault):
            more = [
                "--set",
                f"fault={json.dumps(fault)}",
                "--set",
                f"step={STEP}",
                f"serve.drafter_timeout_s={TIMEOUT_S}",
            ]
            start = partial(outrider_serve, slots=8, length=512, drafter="faulty", dtype=wanted.dtype, more=more)
            with running(f"faulty: {fault}", start, {"PYTHONPATH": path}) as server:
                turns = [clients.turn(server, pool, range(len(pool)), 8) for _ in range(2)]
                health = json.loads(server.get("/health")[1])["status"]
                alarms = alarms_of(server)
            partings = [
                {"due": number, "kind": "other", "text": row["text"], "turn": n}
                for n, turn in enumerate(turns)
                for number, row in enumerate(turn.rows) if not row["is_equal"]
            ]  # fmt: skip
            rows.append({
                "fault": fault, "answers": sum(len(turn.rows) for turn in turns), "alarms": alarms, "health": health,
                "alarm": ALARMS.get(fault, "drafter_raised"), "partings": audited(target, pool, partings),
            })  # fmt: skip
            tell(f"chaos: {fault}: {len(partings)} texts differ, {health}, {alarms}")
    own["promises"] = [one for row in rows for one in chaos_promises(row)]


def chaos_promises(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    wrong = sum(not one["is_tie"] for one in row["partings"])
    return [
        at_most(f"chaos: {row['fault']}: answers that are not plain decoding's", 0, wrong),
        promise(f"chaos: {row['fault']}: alarms of the kind {row['alarm']}", 1, row["alarms"].get(row["alarm"], 0)),
    ]


def alarms_of(server: Server) -> dict[str, int]:
    """Alarms by their kind."""
    mark = 'outrider:alarms_total{kind="'
    found = {name: value for name, value in server.metrics().items() if name.startswith(mark)}
    return {name.removeprefix(mark).rstrip('"}'): int(value) for name, value in found.items()}


@contextmanager
def offered() -> Iterator[str]:
    """A PYTHONPATH with a distribution that offers `faulty_drafter` as a drafter."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "faulty_drafter-0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-drafter\nVersion: 0\n")
        (folder / "entry_points.txt").write_text("[outrider.drafters]\nfaulty = benchmarks.faulty_drafter\n")
        root = Path(__file__).resolve().parents[1]
        yield os.pathsep.join([place, str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
