"""`outrider tune`: how much an engine should speculate at which load, which layers the target can draft without, or
after which words a small model can write alone."""

from __future__ import annotations

import dataclasses
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
from outrider.cli.options import JsonTo
from outrider.engines import commands
from outrider.engines.engine import Wish
from outrider.engines.tuning import sweep
from outrider.engines.tuning import tune as tuning
from outrider.engines.tuning.tune import Arm, Choice, Point
from outrider.errors import ConfigError
from outrider.loading import load_drafter
from outrider.measure.config import Config
from outrider.measure.tasks.prompts import as_tokens, draw
from outrider.targets.load import load_target
from outrider.traffic.logs import traces
from outrider.training.fitting import cues, sublayers


def tune(
    log: Annotated[
        Path, typer.Argument(help="Recorded requests; docs/traffic-logs.md lists the formats.", show_default=False)
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Gets every measurement, and tune.json.")],
    draft: Annotated[str | None, typer.Option(metavar="DIR", help="Exported folder; or ngram, suffix, mtp.")] = None,
    engine: Annotated[str | None, typer.Option(help="Starts this engine once for each draft length.")] = None,
    start: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Instead: it, with {tokens}, {width}, {cutoff}, {port} filled in."),
    ] = None,
    url: Annotated[
        list[str] | None,
        typer.Option("--url", metavar="TOKENS=URL", help="Instead: a server that runs; once for each length."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Draft lengths; 0 is no speculation.")] = "0,1,2,3,5",
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16,32,64",
    widths: Annotated[str, typer.Option(help="Widths of trees.")] = "1",
    cutoffs: Annotated[str | None, typer.Option(help="Cut-offs by confidence.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that everything is measured.")] = 2,
    calls: Annotated[int, typer.Option(help="Requests in each measurement; at least eight a caller.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    tries: Annotated[int, typer.Option(min=1, help="Sets of layers tried, with --draft layer_skip.")] = 60,
    relay: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Instead: rank the cue words after which this small model can write alone."),
    ] = None,
    words: Annotated[str | None, typer.Option(help="Cue words to rank, with --relay: So,Then,Therefore.")] = None,
    margin: Annotated[float, typer.Option(help="What a change of length must win.")] = 0.02,
    largest: Annotated[int, typer.Option(help="The highest load of the tables.")] = 1024,
    target: TargetOption = None,
    tensor_parallel: ParallelOption = 1,
    port: Annotated[int | None, typer.Option(help="Of servers that are started.")] = None,
    python: PythonOption = None,
    engine_version: VersionOption = None,
    health: Annotated[str, typer.Option(help="Answers 200 once a server of --start is ready.")] = "/health",
    ready: Annotated[float, typer.Option(help="The longest start, in seconds.")] = 900.0,
    completions: Annotated[bool, typer.Option("--completions", help="Send messages as a prompt.")] = False,
    key_from: Annotated[
        str | None, typer.Option("--key-from", metavar="VARIABLE", help="Variable that holds the key.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Measure which draft length pays at which load, and write the tables that engines read.

    With --draft layer_skip: search on the prompts of LOG which layers of --target can be spared, and write skip.json.
    With --relay MODEL: rank cue words on --target's answers to them, for the lossy verification `relay`, in cues.json.
    """
    quiet()
    place_of_json(json_to)
    if relay is not None:
        _cues(log, out, target or "demo", relay, words, calls, max_tokens, json_to)
        return
    if draft == "layer_skip":
        _sublayers(log, out, target or "demo", tries, json_to)
        return
    named, at, port = _named(url), _numbers("loads", loads), port or sweep.free_port()
    lengths, shares = sorted(named) if named else _numbers("tokens", tokens), _numbers("cutoffs", cutoffs or "", float)
    arms = sweep.arms(lengths, _numbers("widths", widths), shares if cutoffs is not None else [None])
    trace = traces.read(log)
    if named:
        starts: sweep.Starts = lambda arm: nullcontext(named[arm.tokens])
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
        "log": log.name, "draft": draft, "engine": engine, "target": target, "servers": sorted(named),
        # a command or an address may hold a key, which must not be written
        "start": None if start is None else hashlib.sha256(start.encode()).hexdigest()[:16],
        "weights": weights, "calls": calls, "max_tokens": max_tokens, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    total = len(arms) * len(at) * rounds
    size = f"{total} measurements of {calls} to {max(calls, 8 * max(at))} requests from {log}"
    say(f"tune      {len(arms)} ways to draft at {len(at)} loads, {rounds} times: {size}")
    measure = sweep.by_replay(trace, calls, max_tokens, completions, key_of(key_from))
    with bar("measurements", total) as update:
        points = sweep.sweep(arms, at, rounds, starts, measure, out, about, update)
    choice = tuning.choose(points, margin, largest)
    _report(points, choice)
    choice.write(out / "tune.json", weights)
    say(f"          written to {out / 'tune.json'}; use it with `outrider deploy --schedule`")
    write_json(json_to, choice.plain(weights))


def _sublayers(prompts: Path, out: Path, target: str, tries: int, json_to: str | None) -> None:
    """The best sets of sublayers on a file's prompts; the best becomes skip.json."""
    loaded, file = load_target(target), str(prompts)
    drawn = draw(file, Config(tasks=(file,), prompts=8))
    texts = [as_tokens(loaded, prompt) for prompt in drawn.prompts[:8]]
    say(f"tune      {tries} sets of layers on {len(texts)} prompts of {prompts}")
    found = sublayers.search(loaded, texts, tries=tries)
    out.mkdir(parents=True, exist_ok=True)
    found[0].save(out / "skip.json")
    for one in found[:3]:
        skipped = f"attention {sorted(one.skip_attention)}, MLP {sorted(one.skip_mlp)}"
        say(f"          {one.speedup:.2f}x without {skipped}")
    say(f"          written to {out / 'skip.json'}; use it with {{kind: layer_skip, file: ...}}")
    write_json(json_to, [dataclasses.asdict(one) | {"speedup": one.speedup} for one in found])


def _cues(
    prompts: Path, out: Path, target: str, model: str, words: str | None, most: int, max_tokens: int, json_to: Any
) -> None:  # fmt: skip
    """The cue words of a file's prompts, ranked; the selected ones are used by `relay(cues=cues.json)`."""
    loaded, file = load_target(target), str(prompts)
    small_model: Any = load_drafter("small_model", loaded, model=model)
    texts = [as_tokens(loaded, prompt) for prompt in draw(file, Config(tasks=(file,), prompts=most)).prompts[:most]]
    say(f"tune      cue words on {len(texts)} answers of at most {max_tokens} tokens, read by {model}")
    given = None if words is None else [word.strip() for word in words.split(",") if word.strip()]
    with bar("answers", len(texts)) as update:
        found = cues.calibrate(
            loaded, small_model.model, texts, max_new_tokens=max_tokens, words=given, say=lambda done: update(done)
        )
    out.mkdir(parents=True, exist_ok=True)
    found.save(out / "cues.json", target=target, small_model=model, answers=len(texts))
    columns = ("after", "times", "tokens", "margin", "error", "above others")
    shown = table(*columns, right=columns[1:])
    for cue in found.cues[:20]:
        numbers = (f"{cue.mean:.3f}", f"{cue.standard_error:.3f}", f"{cue.difference:+.3f}")
        shown.add_row(cue.word, str(cue.count), str(cue.tokens), *numbers)
    console.show(shown)
    chosen = f"{len(found.selected)} of {len(found.cues)} words are selected"
    say(f"          {chosen}; the margin of all {found.tokens} tokens is {found.mean:.3f}")
    say(f"          written to {out / 'cues.json'}; use it with --verification 'relay(cues=...)' --allow-lossy")
    write_json(json_to, dataclasses.asdict(found))


def _numbers(name: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    try:
        return sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ConfigError(f"--{name} must be numbers such as 0,1,2,4, got {text!r}") from None


def _named(urls: list[str] | None) -> dict[int, str]:
    """TOKENS=URL, by tokens."""
    found: dict[int, str] = {}
    for one in urls or ():
        tokens, equals, url = one.partition("=")
        if not equals or not tokens.isdecimal() or int(tokens) in found:
            raise ConfigError(
                f"--url must be TOKENS=URL, once for each length, such as 0=http://127.0.0.1:8000, got {one!r}"
            )
        found[int(tokens)] = url
    return found


def _report(points: list[Point], choice: Choice) -> None:
    """Tokens per second by load and way to draft, and what is chosen."""
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
    pays = "pays at every load measured" if choice.pays_to is None else f"pays up to {choice.pays_to} requests at once"
    if choice.pays_to == 0:
        pays = f"does not pay at any load measured{tuning.not_paying(choice.best_ratio)}"
    for line in (f"tokens a step: {lengths}; speculation {pays}", *choice.notes):
        say(f"          {line}")


def _name(arm: Arm) -> str:
    return f"{arm.tokens}" + (f"×{arm.width}" if arm.width > 1 else "") + (f">{arm.cutoff}" if arm.cutoff else "")
