"""`outrider replay`: replay recorded traffic to one or several servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import bar, counted, key_of, place_of_json, write_json
from outrider.cli.options import Fields, JsonTo, KeyFrom, SkipBad, with_options
from outrider.errors import ConfigError, DataError
from outrider.report.bootstrap import Interval
from outrider.traffic.address import address_of
from outrider.traffic.logs import traces
from outrider.traffic.logs.traces import Trace
from outrider.traffic.replay.comparison import TextComparison
from outrider.traffic.replay.folder import check_paths
from outrider.traffic.replay.plan import Plan, limits
from outrider.traffic.replay.report import ReplayResult
from outrider.traffic.replay.run import replay as send
from outrider.traffic.replay.servers import check_servers

OPTIONS = (
    "speed rate concurrency limit=calls warmup split model max_tokens greedy completions ignore_eos retries "
    "timeout_s=timeout seed redact"
)


@with_options
def replay(
    context: typer.Context,
    log: Annotated[
        Path, typer.Argument(help="Recorded requests; docs/replay.md lists the formats.", show_default=False)
    ],
    plan: Annotated[Plan, Fields(Plan, OPTIONS)],
    against: Annotated[
        str | None, typer.Option(metavar="URL[,URL…]", help="One server, or several to compare on the same requests.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(help="Format of the log; detected from its first row by default.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="ttft=500,tpot=50", help="Limits in ms; answers within all of them count.")
    ] = None,
    key_from: KeyFrom = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Where calls.jsonl and replay.json go.")] = None,
    over: Annotated[bool, typer.Option("--over", help="Overwrite existing files.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the log in Outrider's format.")] = None,
    skip_bad: SkipBad = False,
    json_to: JsonTo = None,
) -> None:
    """Replay recorded traffic to one or several servers, and time the answers."""
    place_of_json(json_to)
    urls = [url.strip() for url in (against or "").split(",") if url.strip()]
    plan = dataclasses.replace(plan, slo=limits(slo))
    plan.check()
    if urls:
        check_servers(urls)
    elif save is None:
        raise ConfigError("nothing to do; name a server with --against URL, or a file with --save FILE")
    else:
        _refuse_idle(context)
    result = None if json_to in (None, "-") else Path(json_to)
    check_paths(log, save=save, out=out, result=result, over=over)
    key = key_of(key_from)
    trace = traces.read(log, format, skip_bad)
    _describe(trace)
    if urls:
        plan.check(trace)
    if save is not None:
        count = traces.write(save, islice(trace.calls(), plan.limit), plan.redact)
        _say(f"{count} calls written to {save}" + (", redacted" if plan.redact else ""))
    if urls:
        _send(trace, urls, plan, out, over, key, json_to)


def _send(
    trace: Trace, urls: list[str], plan: Plan, out: Path | None, over: bool, key: str | None, json_to: str | None
) -> None:  # fmt: skip
    """Send the calls, then print and store the results."""
    total, seconds = plan.count(trace), plan.seconds(trace)
    about = "" if seconds is None else f", about {seconds:.0f} s"
    _say(f"{total} calls by {plan.mode}, to {' and '.join(address_of(url).shown for url in urls)}{about}")
    with bar("calls", total) as update:
        result = send(trace, urls, plan, folder=out, over=over, key=key, progress=update)
    report(result)
    if out is not None:
        _say(f"written to {out}")
    write_json(json_to, result.plain())
    if not result.is_whole:
        _say(f"stopped; {result.not_sent} calls were not sent")
        raise SystemExit(130)
    if not any(endpoint.answered for endpoint in result.endpoints):
        raise DataError("no call was answered; the table shows why, and --out FOLDER stores each server's message")


SAVING = {"log", "format", "calls", "over", "save", "redact", "skip_bad"}
"""Options that still apply when nothing is sent."""


def _refuse_idle(context: typer.Context) -> None:
    """Raise ConfigError for options that have no effect with --save alone."""
    is_given = lambda name: getattr(context.get_parameter_source(name or ""), "name", None) == "COMMANDLINE"
    idle = [option.opts[0] for option in context.command.params if option.name not in SAVING and is_given(option.name)]
    if idle:
        has = "has" if len(idle) == 1 else "have"
        named = ", ".join(idle)
        raise ConfigError(
            f"{named} {has} no effect with --save alone; leave {'it' if len(idle) == 1 else 'them'} out, or name a "
            "server with --against URL"
        )


def _say(text: str) -> None:
    console.say(f"          {text}")


def _describe(trace: Trace) -> None:
    times = f" over {trace.span_s:.0f} s" if trace.has_times else ", without times"
    console.say(f"replay    {trace.path}: {trace.size} calls{times} ({trace.format})")
    for reason, count in trace.left_out.items():
        _say(f"{count} rows left out: {reason}")
    if trace.num_synthetic:
        _say(f"{trace.num_synthetic} calls have synthetic text of the lengths in the log, so acceptance is meaningless")


# ── the report ────────────────────────────────────────────────────────────────────────────────────────────────────────


def report(result: ReplayResult) -> None:
    """Print one table: a column per server, and ratios to the first."""
    names = ["first", "second", "third", *(f"{place}th" for place in range(4, len(result.endpoints) + 1))]
    names = names[: len(result.endpoints)] if result.comparisons else ["server"]
    for name, endpoint in zip(names, result.endpoints, strict=True):
        model = "" if endpoint.model is None else f", {endpoint.model}"
        console.say(f"{name:<10}{endpoint.url}{model}")
    columns = [*names, *(f"{name} / first" for name in names[1:])]
    table = console.table("", *columns, right=columns)
    for row in rows(result):
        table.add_row(*row)
    console.show(table)
    if result.schedule_error_s is not None:
        late = result.schedule_error_s._asdict()
        message = ", ".join(f"{late[name] * 1e3:.1f} ms {name}" for name in ("p50", "p95", "p99", "most"))
        _say(f"sent late: {message}")
    for name, one in zip(names[1:], result.comparisons, strict=True):
        if one.answers is not None:
            _say(_compared(f"answers of the {name} compared with the first", one.answers))
    for url, compared in result.log_answers.items():
        _say(_compared(f"answers of {url} compared with the log", compared))
    for endpoint in result.endpoints:
        for reason, message in endpoint.first_messages.items():
            if message != reason:
                _say(f"{endpoint.url}, first: {message}")
    for note in result.notes:
        _say(note)


def rows(result: ReplayResult) -> list[list[str]]:
    """A title and a cell per server; rows of means also have ratios to the first server."""
    endpoints = result.endpoints
    rows = [
        ["calls sent", *(str(one.sent) for one in endpoints)],
        ["answered", *(str(one.answered) for one in endpoints)],
    ]
    for kind, counts in (
        ("failed", [one.failed for one in endpoints]),
        ("cut off", [one.cut_off for one in endpoints]),
    ):
        for reason in sorted({reason for failures in counts for reason in failures}):
            rows.append([f"{kind}, {reason}", *(str(failures[reason]) for failures in counts)])
    if any(one.retried for one in endpoints):
        rows.append(["sent more than once", *(str(one.retried) for one in endpoints)])
    rows.append(["answers/s", *(f"{one.answers_per_s:.2f}" for one in endpoints)])
    rows.append(["tokens/s", *(counted(one.tokens_per_s) if one.tokens else "unknown" for one in endpoints)])
    for name, title in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("gap_s", "gap"), ("e2e_s", "E2E")):
        spreads = [spread._asdict() if (spread := getattr(one, name)) else {} for one in endpoints]
        for share in ("mean", "p50", "p95", "p99"):
            cells = [f"{spread[share] * 1e3:.1f}" if spread else "-" for spread in spreads]
            ratios = [_ratio(one.ratios.get(name)) for one in result.comparisons] if share == "mean" else []
            rows.append([f"{title if share == 'mean' else ' ' * len(title)} ms, {share}", *cells, *ratios])
    if result.slo:
        within = ", ".join(f"{name} {limit * 1e3:g} ms" for name, limit in result.slo.items())
        rows.append([f"answers/s within {within}", *(f"{one.goodput_per_s or 0:.2f}" for one in endpoints)])
    reported: dict[str, list[Mapping[str, Any] | None]] = {
        "counters": [one.acceptance for one in endpoints],
        "answers": [one.reported_acceptance for one in endpoints],
    }
    for name, title in (("tokens_per_step", "tokens per step"), ("drafted", "drafted"), ("accepted", "accepted")):
        for source, acceptances in reported.items():
            values = [None if acceptance is None else acceptance.get(name) for acceptance in acceptances]
            if any(value is not None for value in values):
                rows.append([f"{title}, {source}", *map(_count, values)])
    return rows


def _ratio(interval: Interval | None) -> str:
    return "" if interval is None else f"{interval.center:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _compared(what: str, compared: TextComparison) -> str:
    text = f"{what}: {compared.equal} of {compared.compared} equal"
    if compared.first_differences:
        name, at = compared.first_differences[0]
        text += f"; call {name} is the first to differ, at character {at}"
    return text
