"""`outrider tune`: how much an engine should speculate at each load."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.checkpoint import checksum
from outrider.cli import console
from outrider.cli.console import bar, key_of, place_of_json, quiet, say, table, write_json
from outrider.cli.deploy import ParallelOption, PythonOption, TargetOption, VersionOption
from outrider.cli.options import JsonTo, KeyFrom
from outrider.engines import commands
from outrider.engines.engine import Wish
from outrider.engines.tuning import sweep
from outrider.engines.tuning import tune as tuning
from outrider.engines.tuning.tune import Arm, Choice, Point
from outrider.errors import ConfigError
from outrider.traffic.logs import traces


def tune(
    log: Annotated[
        Path, typer.Argument(help="Recorded requests; docs/replay.md lists the formats.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for all measurements and tune.json.")],
    draft: Annotated[str | None, typer.Option(metavar="DIR", help="Exported folder; or ngram, suffix, mtp.")] = None,
    engine: Annotated[str | None, typer.Option(help="Engine to start, once for each draft length.")] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Command to start instead, with {tokens}, {width}, {cutoff}, {port}."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="TOKENS=URL", help="Running server to use instead; repeat it for each length."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Draft lengths; 0 is no speculation.")] = "0,1,2,3,5",
    loads: Annotated[str, typer.Option(help="Concurrent requests.")] = "1,2,4,8,16,32,64",
    widths: Annotated[str, typer.Option(help="Widths of trees.")] = "1",
    cutoffs: Annotated[str | None, typer.Option(help="Confidence cut-offs.")] = None,
    rounds: Annotated[int, typer.Option(help="Number of times everything is measured.")] = 2,
    calls: Annotated[int, typer.Option(help="Requests per measurement; at least eight per caller.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.")] = 128,
    margin: Annotated[float, typer.Option(help="Minimum gain for which the length changes.")] = 0.02,
    largest: Annotated[int, typer.Option(help="Highest load in the tables.")] = 1024,
    target: TargetOption = None,
    tensor_parallel: ParallelOption = 1,
    port: Annotated[int | None, typer.Option(help="Port of the servers that are started.")] = None,
    python: PythonOption = None,
    engine_version: VersionOption = None,
    health: Annotated[str, typer.Option(help="Path that returns 200 once a --start server is ready.")] = "/health",
    ready: Annotated[float, typer.Option(help="Maximum startup time in seconds.")] = 900.0,
    completions: Annotated[bool, typer.Option("--completions", help="Send messages as a prompt.")] = False,
    key_from: KeyFrom = None,
    json_to: JsonTo = None,
) -> None:
    """Measure which draft length pays off at each load, and write the tables that engines read."""
    quiet()
    place_of_json(json_to)
    servers = _servers(url)
    load_levels = _numbers("loads", loads)
    port = port or sweep.free_port()
    lengths = sorted(servers) if servers else _numbers("tokens", tokens)
    shares = [None] if cutoffs is None else _numbers("cutoffs", cutoffs, float)
    arms = sweep.arms(lengths, _numbers("widths", widths), shares)
    trace = traces.read(log)
    if servers:
        starts: sweep.Starts = lambda arm: nullcontext(servers[arm.tokens])
    elif start is not None:
        starts = sweep.of_template(start, port, health, out, ready)
    elif engine is None or draft is None:
        raise ConfigError("no server to measure; give --draft and --engine, or --start COMMAND, or --url TOKENS=URL")
    else:
        wish = Wish(port=port, tensor_parallel=tensor_parallel)
        starts = sweep.of_engine(
            engine, commands.draft_of(draft, target), wish, arms, out, ready, python, engine_version
        )
    weights = None if draft is None else checksum(draft)
    about = {
        "log": log.name, "draft": draft, "engine": engine, "target": target, "servers": sorted(servers),
        # a command or an address may hold a key, which must not be written
        "start": None if start is None else hashlib.sha256(start.encode()).hexdigest()[:16],
        "weights": weights, "calls": calls, "max_tokens": max_tokens, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    total = len(arms) * len(load_levels) * rounds
    size = f"{total} measurements of {calls} to {max(calls, 8 * max(load_levels))} requests from {log}"
    say(f"tune      {len(arms)} ways to draft at {len(load_levels)} loads, {rounds} times: {size}")
    measure = sweep.by_replay(trace, calls, max_tokens, completions, key_of(key_from))
    with bar("measurements", total) as update:
        points = sweep.sweep(arms, load_levels, rounds, starts, measure, out, about, update)
    choice = tuning.choose(points, margin, largest)
    _report(points, choice)
    choice.write(out / "tune.json", weights)
    say(f"          written to {out / 'tune.json'}; use it with `outrider deploy --schedule`")
    write_json(json_to, choice.plain(weights))


def _numbers(name: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    try:
        return sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ConfigError(f"--{name} must be numbers such as 0,1,2,4, got {text!r}") from None


def _servers(urls: list[str] | None) -> dict[int, str]:
    """Draft length → URL, from TOKENS=URL."""
    servers: dict[int, str] = {}
    for each in urls or ():
        tokens, equals, url = each.partition("=")
        if not equals or not tokens.isdecimal() or int(tokens) in servers:
            raise ConfigError(
                f"--url must be TOKENS=URL, once for each length, such as 0=http://127.0.0.1:8000, got {each!r}"
            )
        servers[int(tokens)] = url
    return servers


def _report(points: list[Point], choice: Choice) -> None:
    """Tokens per second by load and arm, and the chosen arm."""
    arms = sorted({point.arm for point in points}, key=Arm.order)
    columns = ("at once", *(_name(arm) for arm in arms), "best", "of none")
    shown = table(*columns, right=columns)
    for gain in choice.gains:
        speeds = [[p.tokens_per_s for p in points if p.arm == arm and p.load == gain.load] for arm in arms]
        around = "" if gain.low is None or gain.high is None else f" [{gain.low:.2f}, {gain.high:.2f}]"
        row = (f"{sum(speed) / len(speed):.0f}" for speed in speeds)
        shown.add_row(str(gain.load), *row, str(gain.tokens), f"{gain.ratio:.2f}{around}")
    console.show(shown)
    lengths = ", ".join(f"{one.tokens} from {one.first} on" for one in choice.ranges)
    pays = (
        "pays at every load measured" if choice.pays_to is None else f"pays for up to {choice.pays_to} requests at once"
    )
    if choice.pays_to == 0:
        pays = f"does not pay at any load measured{tuning.not_paying(choice.best_ratio)}"
    for line in (f"tokens per step: {lengths}; speculation {pays}", *choice.notes):
        say(f"          {line}")


def _name(arm: Arm) -> str:
    return f"{arm.tokens}" + (f"×{arm.width}" if arm.width > 1 else "") + (f">{arm.cutoff}" if arm.cutoff else "")
