"""`outrider deploy` and `outrider tune`: a draft in an engine, and how much it should speculate there."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, bar, key_of, place_of_json, quiet, write_json
from outrider.engines import commands, flags, manifests, sweep
from outrider.engines import tune as tuning
from outrider.engines.commands import Command, Draft, Wish
from outrider.engines.tune import Arm, Choice, Point
from outrider.errors import ConfigError
from outrider.traffic import traces

TargetOption = Annotated[str | None, typer.Option("--target", help="Hub id, folder or GGUF file, if not as in training.")]
KindOption = Annotated[str | None, typer.Option("--kind", help="Kind of drafter, of a folder that comes from elsewhere.")]
FormatOption = Annotated[str | None, typer.Option("--format", help="Format of a folder that comes from elsewhere.")]
PythonOption = Annotated[
    str | None, typer.Option("--python", metavar="PATH", help="Python of the engine's environment, to ask for its version.")
]
VersionOption = Annotated[str | None, typer.Option("--engine-version", help="Instead of asking.")]
ParallelOption = Annotated[int, typer.Option("--tensor-parallel", help="GPUs that share the target.")]


def deploy(
    draft: Annotated[str | None, typer.Argument(help="Exported folder; or ngram, suffix, mtp.", show_default=False)] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="ENGINE", help="vllm, sglang, trtllm, llamacpp, transformers or triton.")
    ] = None,
    target: TargetOption = None,
    tokens: Annotated[int | None, typer.Option(help="Drafted a step; as the draft was made for.  0: none.")] = None,
    width: Annotated[int, typer.Option(help="Tokens in each place of a tree; 1 is a chain.")] = 1,
    cutoff: Annotated[float | None, typer.Option(help="Stop before a token that the draft gives less.")] = None,
    schedule: Annotated[Path | None, typer.Option(metavar="FILE", help="Tokens by load: tune.json.")] = None,
    tensor_parallel: ParallelOption = 1,
    port: Annotated[int | None, typer.Option(help="The engine's usual one.")] = None,
    kind: KindOption = None,
    format: FormatOption = None,
    python: PythonOption = None,
    engine_version: VersionOption = None,
    only_print: Annotated[bool, typer.Option("--print", help="The command and nothing else on standard output.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Gets the command, Kubernetes, compose and a dashboard.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of what is made for --out.")] = "outrider",
    image: Annotated[str | None, typer.Option(help="Container image, for --out.")] = None,
    translate: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="A command of an older article, in today's words.")
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Say the command with which an engine serves a draft, and write what a deployment needs."""
    quiet()
    place_of_json(json_to)
    if translate is not None:
        _translate(translate, only_print, json_to)
        return
    if draft is None or to is None:
        raise ConfigError("nothing to do; name a draft and an engine: outrider deploy FOLDER --to vllm")
    found = commands.draft_of(draft, target, kind, format)
    version = engine_version or (None if python is None else commands.installed(to, python))
    wish = Wish(tokens, width, cutoff, () if schedule is None else tuning.read(schedule), "127.0.0.1", port, tensor_parallel)
    if out is not None:
        wish = replace(wish, files=f"{out}/settings")
    command = commands.command(to, found, wish, version)
    if command.files and out is None and to != "transformers":
        _note(f"it reads {', '.join(command.files)}, which --out FOLDER writes")
    _say(found, command, only_print)
    if out is not None:
        place = manifests.Place(name, image, gpus=wish.tensor_parallel)
        _note(f"written to {out}: {', '.join(manifests.write(out, to, found, wish, place, version))}")
    write_json(json_to, command.plain(found))


def _translate(text: str, only_print: bool, json_to: str | None) -> None:
    found = flags.translate(text)
    if not only_print:
        console.out.print("deploy    an older command in today's words", highlight=False)
        for note in found.notes or ("nothing in it is old",):
            console.out.print(f"          {note}", highlight=False, markup=False, soft_wrap=True)
    print(found.shell, file=console.out.file)
    for name, content in found.files.items():
        print(f"# {name}\n{content}", file=console.out.file)
    write_json(
        json_to, {"engine": found.engine, "command": found.shell, "words": list(found.words), "notes": list(found.notes)}
    )


def _note(text: str) -> None:
    console.note.print(f"          {text}", highlight=False, markup=False, soft_wrap=True)


def _say(draft: Draft, command: Command, only_print: bool) -> None:
    if not only_print:
        what = draft.kind if draft.folder is None else f"{draft.kind} in {draft.folder} ({draft.format})"
        asked = ", not asked for: the flags are of this version" if command.is_assumed else ""
        title = f"{commands.engine_of(command.engine).title} {command.version.removeprefix('vLLM ')}{asked}"
        console.out.print(f"deploy    {what} for {draft.target}, with {title}", highlight=False, markup=False, soft_wrap=True)
        for note in command.notes:
            console.out.print(f"          {note}", highlight=False, markup=False, soft_wrap=True)
        if command.before is not None:
            console.out.print("          first:", highlight=False)
            print(command.before, file=console.out.file)
    # as it is, so that it can be pasted
    print(command.shell, file=console.out.file)
    if command.engine == "transformers" and not only_print:
        print("\n".join(f"# {name}\n{text}" for name, text in command.files.items()), file=console.out.file)


# ── tune ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def tune(
    log: Annotated[Path, typer.Argument(help="Recorded requests; docs/replay.md lists the formats.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Gets every measurement, and tune.json.")],
    draft: Annotated[str | None, typer.Option(metavar="DIR", help="Exported folder; or ngram, suffix, mtp.")] = None,
    engine: Annotated[str | None, typer.Option(help="Starts this engine once for each draft length.")] = None,
    start: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Instead: it, with {tokens}, {width}, {cutoff}, {port} filled in.")
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option("--url", metavar="TOKENS=URL", help="Instead: a server that runs; once for each length.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Draft lengths; 0 is no speculation.")] = "0,1,2,3,5",
    loads: Annotated[str, typer.Option(help="Requests at once.")] = "1,2,4,8,16,32,64",
    widths: Annotated[str, typer.Option(help="Widths of trees.")] = "1",
    cutoffs: Annotated[str | None, typer.Option(help="Cut-offs by confidence.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that everything is measured.")] = 2,
    calls: Annotated[int, typer.Option(help="Requests in each measurement; at least eight a caller.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of an answer.")] = 128,
    tries: Annotated[int, typer.Option(min=1, help="Sets of layers tried, with --draft layer_skip.")] = 60,
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
    key_from: Annotated[str | None, typer.Option("--key-from", metavar="VARIABLE", help="Variable that holds the key.")] = None,
    json_to: JsonTo = None,
) -> None:
    """Measure which draft length pays at which load, and write the tables that engines read.

    With --draft layer_skip: search on the prompts of LOG which layers of --target can be spared, and write skip.json.
    """
    quiet()
    place_of_json(json_to)
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
        starts = sweep.of_engine(engine, commands.draft_of(draft, target), wish, arms, out, ready, python, engine_version)
    about = {
        "log": log.name, "draft": draft, "engine": engine, "target": target, "servers": sorted(named),
        # a command or an address may hold a key, which is nothing to write down
        "start": None if start is None else hashlib.sha256(start.encode()).hexdigest()[:16],
        "calls": calls, "max_tokens": max_tokens, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    total = len(arms) * len(at) * rounds
    console.out.print(
        f"tune      {len(arms)} ways to draft at {len(at)} loads, {rounds} times: "
        f"{total} measurements of {calls} to {max(calls, 8 * max(at))} requests from {log}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    measure = sweep.by_replay(trace, calls, max_tokens, completions, key_of(key_from))
    with bar("measurements", total) if console.note.is_terminal else nullcontext(None) as update:
        points = sweep.sweep(arms, at, rounds, starts, measure, out, about, update)
    choice = tuning.choose(points, margin, largest)
    _report(points, choice)
    choice.write(out / "tune.json")
    console.out.print(f"          written to {out / 'tune.json'}; use it with `outrider deploy --schedule`", highlight=False)
    write_json(json_to, choice.plain())


def _sublayers(prompts: Path, out: Path, target: str, tries: int, json_to: str | None) -> None:
    """The best sets of sublayers on a file's prompts; the best becomes skip.json."""
    from outrider.engines import sublayers  # loads torch, which the other verbs of this file do without

    say = lambda text: console.out.print(f"tune      {text}", highlight=False, soft_wrap=True)
    found = sublayers.search_prompts(str(prompts), target, tries, say)
    out.mkdir(parents=True, exist_ok=True)
    found[0].save(out / "skip.json")
    for one in found[:3]:
        skipped = f"attention {sorted(one.skip_attention)}, MLP {sorted(one.skip_mlp)}"
        console.out.print(f"          {one.speedup:.2f}x without {skipped}", highlight=False, markup=False, soft_wrap=True)
    console.out.print(f"          written to {out / 'skip.json'}; use it with {{kind: layer_skip, file: ...}}", highlight=False)
    write_json(json_to, [dataclasses.asdict(one) | {"speedup": one.speedup} for one in found])


def _numbers(name: str, text: str, kind: Callable[[str], Any] = int) -> list[Any]:
    try:
        return sorted({kind(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ConfigError(f"--{name} {text!r}; wanted numbers such as 0,1,2,4") from None


def _named(urls: list[str] | None) -> dict[int, str]:
    """TOKENS=URL, by tokens."""
    found: dict[int, str] = {}
    for one in urls or ():
        tokens, equals, url = one.partition("=")
        if not equals or not tokens.isdecimal() or int(tokens) in found:
            raise ConfigError(f"--url {one!r}; wanted TOKENS=URL once for each length, such as 0=http://127.0.0.1:8000")
        found[int(tokens)] = url
    return found


def _report(points: list[Point], choice: Choice) -> None:
    """Tokens per second by load and way to draft, and what is chosen."""
    arms = sorted({point.arm for point in points}, key=Arm.order)
    table = Table(box=None, pad_edge=False)
    for name in ("at once", *(_name(arm) for arm in arms), "best", "of none"):
        table.add_column(name, justify="right")
    for gain in choice.gains:
        speeds = [[p.tokens_per_s for p in points if p.arm == arm and p.load == gain.load] for arm in arms]
        around = "" if gain.low is None or gain.high is None else f" [{gain.low:.2f}, {gain.high:.2f}]"
        row = (f"{sum(speed) / len(speed):.0f}" for speed in speeds)
        table.add_row(str(gain.load), *row, str(gain.tokens), f"{gain.ratio:.2f}{around}")
    console.out.print(table, highlight=False)
    said = ", ".join(f"{one.tokens} from {one.first} on" for one in choice.ranges)
    pays = "pays at every load measured" if choice.pays_to is None else f"pays up to {choice.pays_to} requests at once"
    if choice.pays_to == 0:
        pays = "does not pay at any load measured"
    console.out.print(f"          tokens a step: {said}; speculation {pays}", highlight=False, soft_wrap=True)
    for note in choice.notes:
        console.out.print(f"          {note}", highlight=False, markup=False, soft_wrap=True)


def _name(arm: Arm) -> str:
    return f"{arm.tokens}" + (f"×{arm.width}" if arm.width > 1 else "") + (f">{arm.cutoff}" if arm.cutoff else "")
