"""`outrider watch`: compare a server's acceptance with that of the drafter's release."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from outrider.cli import console
from outrider.cli.console import lasting, place_of_json, write_json
from outrider.cli.options import JsonTo
from outrider.errors import ConfigError, DataError
from outrider.report.schema import Report
from outrider.traffic.address import address_of
from outrider.traffic.release import Release, release_of
from outrider.traffic.watch import SIDES, View, Window, glance, side_of, watch_server

MISSING = "–"
INCOMPARABLE = (
    "can't be compared: the server counts only steps with a draft, and the report does not show that its drafter "
    "drafts at every step; watch a server that counts all steps, or release a report with accepted_histogram"
)


def watch(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.", show_default=False)],
    release: Annotated[Path | None, typer.Option(help="report.json of the drafter's release, or its folder.")] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Rows of the report to compare with; the lead rows unless given.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of the traffic; rows at it are compared. Defaults to that of the lead rows."),
    ] = None,
    every: Annotated[float, typer.Option(help="Seconds between readings.")] = 5.0,
    for_s: Annotated[float | None, typer.Option("--for", help="Stop after this many seconds.")] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Take one reading: since the server started, or over --for seconds.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="Append a JSON line per reading to this file.")] = None,
    json_to: JsonTo = None,
) -> None:
    """Monitor a server's acceptance; warn and exit with 1 if it leaves the release interval."""
    if every < 0.1 or (for_s is not None and for_s <= 0):
        raise ConfigError(
            "--every must be at least 0.1 s and --for above 0 s, got "
            f"{every:g}{'' if for_s is None else f' and {for_s:g}'}"
        )
    if once and log is not None:
        raise ConfigError("--log has no effect with --once; write the reading with --json FILE")
    place_of_json(json_to)
    promised = None
    if release is not None:
        promised = release_of(Report.load(release), drafter, temperature)
    elif drafter is not None:
        raise ConfigError(
            f"--drafter {drafter} has no effect without --release; add --release with the report that has this drafter"
        )
    elif temperature is not None:
        raise ConfigError(
            f"--temperature {temperature:g} has no effect without --release; add --release with the report that has it"
        )
    reading, is_outside = _once(url, promised, for_s) if once else _live(url, promised, every, for_s, log)
    write_json(json_to, reading)
    if is_outside:
        raise typer.Exit(1)


def _once(url: str, promised: Release | None, for_s: float | None) -> tuple[dict[str, Any], bool]:
    """Print one reading; returns it as JSON, and whether it is outside the release's interval."""
    counters, window = glance(url, for_s)
    over = f"the last {for_s:g} s" if for_s is not None else "since it started"
    _say_head(f"{counters.server} at {address_of(url).shown}, {over}", promised)
    console.show(_table([(over, window)], promised))
    side = None if promised is None else side_of(window, promised)
    console.out.print(_standing_text(side, window, promised))
    reading = {"server": counters.server, "running": counters.running, "waiting": counters.waiting, "side": SIDES[side]}
    return reading | {"window": window.json(), "release": promised and promised.json()}, side in (-1, 1)


def _say_head(what: str, promised: Release | None) -> None:
    console.say(f"watch     {what}")
    if promised is not None:
        console.say(f"release   {promised.description}")


def _standing_text(side: int | None, window: Window, promised: Release | None) -> Text:
    if promised is not None and (window.stats.tokens_per_step is None or window.steps <= 0):
        return Text("nothing was decoded, so there is nothing to compare")
    return _side_text(side, promised, f"inside the release's interval, as far as {window.steps:,} steps can tell")


def _side_text(side: int | None, promised: Release | None, inside: str, since: str = "") -> Text:
    """Which side of the release interval the server is on.  inside: the text if it is within."""
    if promised is None:
        return Text("no release to compare with; name one with --release report.json", overflow="fold")
    if side is None:
        return Text(INCOMPARABLE, overflow="fold")
    if side == 0:
        return Text(inside, overflow="fold")
    where, style = ("below", "bold white on red") if side < 0 else ("above", "bold")
    return Text(f"OUTSIDE   {where} the release's interval{since}", style, overflow="fold")


def _live(
    url: str, promised: Release | None, every: float, for_s: float | None, log: Path | None
) -> tuple[dict[str, Any], bool]:
    """Take readings until --for expires or Ctrl-C; returns the last one as JSON, and whether there was an alarm."""
    alarmed, view, views = False, None, watch_server(url, promised, every, for_s)
    with _opened(log) as lines:
        _say_head(
            f"{next(views).counters.server} at {address_of(url).shown}, every {every:g} s; Ctrl-C stops it", promised
        )
        with Live(console=console.out, auto_refresh=False, transient=False) as screen, suppress(KeyboardInterrupt):
            for view in views:
                alarmed |= view.alarmed
                screen.update(_screen(view, promised), refresh=True)
                if lines is not None:  # after the screen, so that every logged reading was shown
                    lines.write(json.dumps(view.json()) + "\n")
    if not console.out.is_terminal:
        console.out.print()
    reading = view.json() if view is not None else {}
    return reading | {"release": promised and promised.json(), "alarmed": alarmed}, alarmed


def _opened(log: Path | None) -> AbstractContextManager[IO[str] | None]:
    """The line-buffered log file."""
    try:
        return nullcontext() if log is None else log.open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise DataError(
            f"can't write {log}: {error.strerror}; name a file in a folder that exists and can be written to"
        ) from None


def _screen(view: View, promised: Release | None) -> Group:
    """The whole dashboard."""
    counters = view.counters
    since_start = Window(counters.age_s(view.at_s), counters.since())
    columns = [("1 min", view.minute), ("10 min", view.ten_minutes), ("since start", since_start)]
    busy = ""
    if counters.running is not None:
        busy = f"requests  {counters.running} running, {counters.waiting or 0} waiting"
        busy += f"; the server restarted {view.restarts} times" if view.restarts else ""
    return Group(_table(columns, promised), Text(busy), _status_text(view, promised))


def _status_text(view: View, promised: Release | None) -> Text:
    """The state of the server in one line."""
    if view.away is not None:
        return Text(f"AWAY      {view.away}", "bold white on red", overflow="fold")
    inside = f"inside    {100 * view.evidence:.0f} % of the evidence for an alarm"
    if view.steps_to_notice is None:
        inside += "; a drop of 10 % lies inside the release's interval: release with more prompts to detect it"
    elif view.ten_minutes.steps:
        wait_s = view.steps_to_notice * view.ten_minutes.seconds / view.ten_minutes.steps
        inside += f"; at this traffic a drop of 10 % is detected in about {lasting(wait_s)}"
    since = time.strftime("%H:%M:%S", time.localtime(view.side_since_s))
    return _side_text(view.side, promised, inside, f", found at {since}")


def _table(columns: list[tuple[str, Window]], promised: Release | None) -> console.PlainTable:
    """Metrics in rows, periods in columns, the release's interval last."""
    heads = [f"{name:>8}" for name, _ in columns] + (["release"] if promised else [])
    table = console.table("", *heads, right=heads)
    stats = [window.stats for _, window in columns]

    def row(name: str, cells: list[str], limits: str = "") -> None:
        table.add_row(name, *cells, *([] if promised is None else [limits]))

    interval = promised.tokens_per_step if promised else None
    source = " (the server's own mean)" if any(each.is_interval for each in stats) else ""
    limits = f"{interval.low:.2f} … {interval.high:.2f}" if interval else ""
    row(f"tokens per step{source}", [_figure(each.tokens_per_step, ".2f") for each in stats], limits)
    row("tokens per step with a draft", [_figure(each.tokens_per_draft, ".2f") for each in stats])
    row("drafted tokens accepted", [_figure(each.draft_acceptance, ".1%") for each in stats])
    depths = () if promised is None else promised.by_depth
    for k in range(max([len(each.rates) for each in stats], default=0)):
        limits = f"{100 * depths[k].low:.0f} … {100 * depths[k].high:.0f} %" if k < len(depths) else ""
        rates = [each.rates[k] if k < len(each.rates) else None for each in stats]
        row(f"  accepted at depth {k + 1}", [_figure(rate, ".1%") for rate in rates], limits)
    row("steps", [f"{window.steps:,}" for _, window in columns])
    row("tokens/s", [_figure(window.tokens_per_s, ".1f") for _, window in columns])
    return table


def _figure(value: float | None, spec: str) -> str:
    return MISSING if value is None else f"{value:{spec}}".replace("%", " %")
