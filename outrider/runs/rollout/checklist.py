"""Roll-out checklist of a run's drafter: baseline, candidates, tune, parity, canary, watch.

Each item has commands, and is done once their output file is in the run's folder and belongs to the current checkpoint.
Tunings, parity and exports record the checksum of the weights, a checkpoint the report of its evaluation, and a watch
its release; a replay has only its time.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from outrider import checkpoint
from outrider.engines.verify.parity import RUN
from outrider.errors import DataError
from outrider.export.manifest import read_manifest
from outrider.report.schema import Row
from outrider.runs.rollout.files import (
    Run,
    State,
    Unfinished,
    check_time,
    check_trained,
    check_weights,
    report_of,
    written,
)
from outrider.traffic.release import release_of

PLAIN, DRAFTING = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
"""Servers of the canary: the target alone, and with the drafter."""
WATCHED_S = 600
LOOKUPS = ("ngram", "suffix")


class Item(NamedTuple):
    """One step of the roll-out."""

    name: str
    commands: tuple[str, ...]
    """Shell commands, in order."""
    state: State
    reason: str
    """The result, or why it is not done."""


def items(run: Run) -> list[Item]:
    """All items, in order."""
    steps = []
    for name, (commands, check) in ITEMS.items():
        state: State = "done"
        try:
            reason = check(run)
        except Unfinished as left:
            state, reason = left.state, left.reason
        steps.append(Item(name, tuple(commands(run)), state, reason))
    return steps


# ── the items ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _baseline_commands(run: Run) -> list[str]:
    tasks = ("--tasks", ",".join(run.tasks)) if run.tasks else ()
    out = run.folder / "baseline"
    again = ("--overwrite",) if (out / "report.json").exists() else ()
    return [run.command("evaluate", *LOOKUPS, "--target", run.target, *tasks, "--out", out, *again)]


def _baseline(run: Run) -> str:
    report = report_of(run.folder / "baseline")
    if report.target != run.target:
        raise Unfinished("out of date", f"it measured {report.target}, but the run's target is {run.target}")
    measured, expected = {row.task for row in report.rows}, _tasks(run)
    if missing := sorted(expected - measured):
        raise Unfinished("out of date", f"the candidates were measured on {', '.join(missing)} too")
    best = _best(report.rows)
    if best is None:
        raise Unfinished("out of date", "its report has no row with a speed-up")
    return f"the best without training is {_speed(best)}"


def _tasks(run: Run) -> set[str]:
    """Tasks of the candidates' report; empty without one."""
    try:
        return {row.task for row in report_of(run.folder).rows}
    except Unfinished:
        return set()


def _candidates_commands(run: Run) -> list[str]:
    return [run.command("evaluate" if run.is_trained else "run", run.folder / "config.yaml")]


def _candidates(run: Run) -> str:
    check_trained(run)
    report = report_of(run.folder)
    rows = [row for row in report.rows if row.drafter == run.kind]
    best = _best(rows)
    if best is None:
        raise Unfinished("out of date", f"its report has no row for {run.kind} with a speed-up")
    if run.trains:
        made = (checkpoint.manifest_of(run.draft).get("report") or {}).get("made")
        if made != report.made:
            since = "was not evaluated since its training" if made is None else f"was evaluated at {made}"
            raise Unfinished("out of date", f"the report is from {report.made}, but the checkpoint {since}")
    if inexact := next((row for row in rows if row.is_inexact and row.lossless is not False), None):
        raise Unfinished("failed", f"on {inexact.task} its text differs from the target's own; see `outrider parity`")
    others = _best([*(row for row in report.rows if row.drafter != run.kind), *_baseline_rows(run)])
    if (best.speedup or 0) <= max(1.0, (others.speedup or 0) if others else 0.0):
        raise Unfinished("failed", f"{_speed(best)}, {_speed(others) if others else 'which is no gain'}")
    return f"{_speed(best)}" + (f"; {_speed(others)}" if others else "")


def _baseline_rows(run: Run) -> tuple[Row, ...]:
    try:
        return report_of(run.folder / "baseline").rows
    except Unfinished:
        return ()


def _best(rows: Iterable[Row]) -> Row | None:
    return max((row for row in rows if row.speedup is not None), key=lambda row: row.speedup or 0.0, default=None)


def _speed(row: Row) -> str:
    return f"{row.drafter}, {row.speedup:.2f} times plain decoding on {row.task} at temperature {row.temperature:g}"


def _tune_commands(run: Run) -> list[str]:
    if run.engine is None:
        measured = ("plan", "--target", run.target, "--method", run.draft, "--log", run.log, "--probe", "0")
        return [run.command(*measured, "--measure", "--json", run.folder / "plan.json")]
    draft, out, commands = _served(run), run.folder / "tuned", []
    if draft != run.draft and not _is_exported(run):
        commands += [
            *_without(run.folder / "export"),
            run.command("export", run.draft, "--to", run.engine, "--out", draft),
        ]
    words = (run.log, "--draft", draft, "--target", run.target, "--engine", run.engine)
    return [*commands, *(_without(out) if _is_stale(run, out) else ()), run.command("tune", *words, "--out", out)]


def _without(folder: Path) -> list[str]:
    """A command that deletes results for other weights, which no command overwrites."""
    return [shlex.join(["rm", "-r", str(folder)])] if folder.exists() else []


def _is_stale(run: Run, out: Path) -> bool:
    """Whether a tuning is complete but for other weights; an unfinished one is resumed."""
    try:
        return written(out / "tune.json").get("weights") != run.weights
    except Unfinished as left:
        return left.state == "out of date"


def _served(run: Run) -> str:
    """The draft for an engine: the export of the trained drafter, else the kind."""
    return run.draft if run.draft == run.kind else str(run.folder / "export")


def _exported(run: Run) -> str | None:
    """Checksum of the weights from which the run's export was made."""
    checksums = read_manifest(run.folder / "export").get("checksums") or {}
    return checksums.get(checkpoint.WEIGHTS)


def _is_exported(run: Run) -> bool:
    return run.weights is not None and _exported(run) == run.weights


def _tune(run: Run) -> str:
    check_trained(run)
    if run.engine is None:
        return _planned(run)
    path = run.folder / "tuned" / "tune.json"
    tuning = written(path)
    check_weights(run, tuning.get("weights"), path)
    pays = tuning.get("pays_to")
    if pays == 0:
        raise Unfinished("failed", "speculation does not pay off at any load measured")
    return "it pays off at every load measured" if pays is None else f"it pays off up to {pays} concurrent requests"


def _planned(run: Run) -> str:
    """For kinds that no engine runs: Outrider's server drafts by step times, which a plan measures."""
    path = run.folder / "plan.json"
    plan = written(path)
    check_time(run, path.stat().st_mtime, path)
    if not plan.get("measured"):
        raise Unfinished("out of date", f"{path} is a plan on paper; measure times with --measure")
    if plan.get("decision") != "ENABLE":
        raise Unfinished("failed", f"{plan.get('decision')}: {plan.get('because')}")
    return f"depth {plan.get('depth')}"


def _parity_commands(run: Run) -> list[str]:
    path = run.folder / "parity.json"
    commands = [run.command("parity", run.folder / "config.yaml", "--temperature", "1", "--json", path)]
    if run.engine in RUN and run.draft != run.kind:
        words = ("--engine", str(run.engine), "--checkpoint", run.draft)
        commands.append(run.command("verify-export", _served(run), *words))
    return commands


def _parity(run: Run) -> str:
    check_trained(run)
    path = run.folder / "parity.json"
    comparison = written(path)
    check_weights(run, comparison.get("weights"), path)
    greedy, sampled = comparison.get("greedy") or {}, comparison.get("sampled") or {}
    for what, outcome in (("greedy", greedy.get("verdict")), ("sampled", sampled.get("verdict"))):
        if outcome in ("bug", "different"):
            raise Unfinished("failed", f"{what} texts differ from the target's own: {outcome}")
    texts = f"{greedy.get('equal')} of {greedy.get('prompts')} greedy texts equal"
    return texts + _verified(run)


def _verified(run: Run) -> str:
    """Whether the engine accepts the same tokens, if there is an export for one."""
    export = run.folder / "export"
    if run.engine not in RUN or not export.is_dir():
        return ""
    check_weights(run, _exported(run), export)
    verified: Mapping[str, Any] = read_manifest(export).get("verified") or {}
    runs = [(name, each) for name, each in verified.items() if name.split()[0] == run.engine]
    if not runs:
        raise Unfinished("to do", f"{export} was not verified in {run.engine}")
    name, last = runs[-1]
    if not last.get("is_equal"):
        raise Unfinished("failed", f"{name} drafts other tokens: {', '.join(last.get('causes') or ()) or 'no cause'}")
    return f"; {name} accepts the same"


def _canary_commands(run: Run) -> list[str]:
    plain = run.command("serve", "--target", run.target, "--port", "8000")
    drafting = run.command("serve", run.folder / "config.yaml", "--port", "8001")
    if run.engine is not None:
        words = ("deploy", _served(run), "--to", run.engine, "--port")
        plain = run.command(*words, "8000", "--tokens", "0")
        drafting = run.command(*words, "8001", "--schedule", run.folder / "tuned" / "tune.json")
    out, against = run.folder / "canary", f"{PLAIN},{DRAFTING}"
    again = ("--over",) if out.exists() else ()
    return [plain, drafting, run.command("replay", run.log, "--against", against, "--out", out, *again)]


def _canary(run: Run) -> str:
    check_trained(run)
    path = run.folder / "canary" / "replay.json"
    replay = written(path)
    try:
        at_s = datetime.fromisoformat(str(replay.get("measured"))).timestamp()
    except ValueError:
        at_s = path.stat().st_mtime
    check_time(run, at_s, path)
    servers = replay.get("endpoints") or []
    if len(servers) < 2:
        raise Unfinished("out of date", "it used one server; a canary compares two, with and without the drafter")
    if not replay.get("is_whole"):
        raise Unfinished("out of date", f"it was stopped; {replay.get('not_sent')} calls were not sent")
    for server in servers:
        if server["answered"] < server["sent"]:
            raise Unfinished("failed", f"{server['url']} answered {server['answered']} of {server['sent']} calls")
    ratio = (((replay.get("comparisons") or [{}])[0]).get("ratios") or {}).get("e2e_s") or {}
    if (ratio.get("low") or 0.0) > 1:
        raise Unfinished("failed", f"with the drafter a request takes {ratio['center']:.2f} of its time without")
    faster = f", in {ratio['center']:.2f} of the time" if ratio.get("center") else ""
    return f"{servers[1]['answered']} calls answered{faster}"


def _watch_commands(run: Run) -> list[str]:
    words = ("watch", DRAFTING, "--release", run.folder, "--for", str(WATCHED_S))
    return [run.command(*words, "--json", run.folder / "watch.json")]


def _watch(run: Run) -> str:
    check_trained(run)
    path = run.folder / "watch.json"
    reading = written(path)
    watched = reading.get("release") or {}
    try:
        release = release_of(report_of(run.folder), watched.get("drafter"), watched.get("temperature")).json()
    except DataError as error:
        raise Unfinished("out of date", str(error)) from None
    if json.loads(json.dumps(release)) != watched:
        raise Unfinished("out of date", f"{path} watched a release other than {run.folder / 'report.json'}")
    if reading.get("away"):
        raise Unfinished("failed", f"the server could not be read: {reading['away']}")
    if reading.get("alarmed") or reading.get("side") in ("below", "above"):
        raise Unfinished("failed", f"acceptance is {reading.get('side') or 'not inside'} the release's interval")
    if reading.get("side") is None:
        raise Unfinished("to do", "nothing could be compared: no traffic, or the server counts steps differently")
    return "acceptance is inside the release's interval"


ITEMS: Mapping[str, tuple[Callable[[Run], list[str]], Callable[[Run], str]]] = {
    "baseline": (_baseline_commands, _baseline),
    "candidates": (_candidates_commands, _candidates),
    "tune": (_tune_commands, _tune),
    "parity": (_parity_commands, _parity),
    "canary": (_canary_commands, _canary),
    "watch": (_watch_commands, _watch),
}
"""Name → commands and check, which raises Unfinished if the item is not done."""
