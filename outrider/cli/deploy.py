"""`outrider deploy` and `outrider tune`: a draft in an engine, and how much it should speculate there."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, bar, key_of, place_of_json, quiet, write_json
from outrider.errors import ConfigError, DataError, ExportError

if TYPE_CHECKING:
    from outrider.engines.commands import Command, Draft, Wish
    from outrider.engines.tune import Arm, Choice, Point
    from outrider.traffic.traces import Trace

    Starts = Callable[[Arm], AbstractContextManager[str]]
    """A way to draft to a server that drafts so, at an address."""

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
    from outrider.engines import commands, tune
    from outrider.engines.commands import Wish

    found = _draft(draft, target, kind, format)
    version = engine_version or (None if python is None else commands.installed(to, python))
    wish = Wish(tokens, width, cutoff, () if schedule is None else tune.read(schedule), "127.0.0.1", port, tensor_parallel)
    if out is not None:
        wish = replace(wish, files=f"{out}/settings")
    command = commands.command(to, found, wish, version)
    if command.files and out is None and to != "transformers":
        _note(f"it reads {', '.join(command.files)}, which --out FOLDER writes")
    _say(found, command, only_print)
    if out is not None:
        _write(out, to, found, wish, command, version, name, image)
    write_json(json_to, _plain(found, command))


def _draft(place: str, target: str | None, kind: str | None, format: str | None) -> Draft:
    """A folder from elsewhere is recognised as `outrider import` does."""
    from outrider.engines import commands
    from outrider.engines import folder as folders

    folder = Path(place)
    if folder.is_dir() and (kind is None or format is None) and not folders.manifest(folder):
        from outrider.export.folder import read_json, read_names
        from outrider.export.formats import candidates

        config, names = read_json(folder / folders.CONFIG), frozenset[str]()
        with suppress(ExportError):  # pickles, which an engine may open
            names = read_names(folder)
        with suppress(ExportError, ValueError):  # of several or none, or such as we can't read, an engine may know more
            [(format, kind)] = candidates(config, format, kind, names)
    return commands.draft_of(place, target, kind, format)


def _translate(text: str, only_print: bool, json_to: str | None) -> None:
    from outrider.engines.flags import translate

    found = translate(text)
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
        from outrider.engines.commands import engine_of

        what = draft.kind if draft.folder is None else f"{draft.kind} in {draft.folder} ({draft.format})"
        asked = ", not asked for: the flags are of this version" if command.is_assumed else ""
        title = f"{engine_of(command.engine).title} {command.version.removeprefix('vLLM ')}{asked}"
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


def _plain(draft: Draft, command: Command) -> dict[str, Any]:
    return {
        "engine": command.engine, "version": command.version, "version_is_assumed": command.is_assumed, "kind": draft.kind,
        "format": draft.format, "target": draft.target, "command": command.shell, "words": list(command.words),
        "speculative": command.settings, "files": dict(command.files), "before": command.before, "notes": list(command.notes),
    }  # fmt: skip


def _write(
    out: Path, engine: str, draft: Draft, wish: Wish, command: Command, version: str | None, name: str, image: str | None
) -> None:
    """Everything of a deployment in a new folder, whole or not at all."""
    from outrider.engines import manifests

    if out.exists():
        raise DataError(f"{out} is there already; name a new folder, or delete it first")
    place = manifests.Place(name, image, gpus=wish.tensor_parallel)
    own = dict(command.files)
    if engine == "triton":
        own = manifests.triton(name, draft.target, wish, command.settings)
    files = {f"settings/{path}": text for path, text in own.items()}
    files |= manifests.files_of(engine, draft, wish, place, version)
    lines = ["#!/bin/sh", "set -e", *([command.before] if command.before else []), f"exec {command.shell}", ""]
    files["serve.sh"] = "\n".join(lines)
    part = out.with_name(out.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        for path, text in files.items():
            (part / path).parent.mkdir(parents=True, exist_ok=True)
            (part / path).write_text(text, encoding="utf-8")
        (part / "serve.sh").chmod(0o755)
        part.rename(out)
    except OSError as error:
        raise DataError(f"can't write {out}: {error.strerror}; name a folder that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    _note(f"written to {out}: {', '.join(sorted({path.split('/')[0] for path in files}))}")


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
    from outrider.traffic import traces

    named, at, port = _named(url), _numbers("loads", loads), port or _free_port()
    arms = _arms(sorted(named) if named else _numbers("tokens", tokens), widths, cutoffs)
    trace = traces.read(log)
    if named:
        starts: Starts = lambda arm: nullcontext(named[arm.tokens])
    elif start is not None:
        starts = _templates(start, port, health, ready, out)
    else:
        starts = _engines(engine, draft, target, arms, tensor_parallel, port, ready, out, python, engine_version)
    about = {
        "log": log.name, "draft": draft, "engine": engine, "target": target, "servers": sorted(named),
        # a command or an address may hold a key, which is nothing to write down
        "start": None if start is None else hashlib.sha256(start.encode()).hexdigest()[:16],
        "calls": calls, "max_tokens": max_tokens, "tensor_parallel": tensor_parallel,
    }  # fmt: skip
    console.out.print(
        f"tune      {len(arms)} ways to draft at {len(at)} loads, {rounds} times: "
        f"{len(arms) * len(at) * rounds} measurements of {calls} to {max(calls, 8 * max(at))} requests from {log}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    measure = _measures(trace, calls, max_tokens, completions, key_of(key_from))
    points = _measured(arms, at, rounds, starts, measure, out, about)
    _choose(points, margin, largest, out, json_to)


def _sublayers(prompts: Path, out: Path, target: str, tries: int, json_to: str | None) -> None:
    """The best sets of sublayers on a file's prompts; the best becomes skip.json."""
    from outrider.engines import sublayers
    from outrider.measure import run as measure
    from outrider.targets.transformers import load_target

    loaded = load_target(target)
    drawn = measure.draw(str(prompts), measure.Config(tasks=(str(prompts),), prompts=8))
    texts = [measure.as_tokens(loaded, prompt) for prompt in drawn.prompts[:8]]
    console.out.print(f"tune      {tries} sets of layers on {len(texts)} prompts of {prompts}", highlight=False, soft_wrap=True)
    found = sublayers.search(loaded, texts, tries=tries)
    out.mkdir(parents=True, exist_ok=True)
    found[0].save(out / "skip.json")
    for one in found[:3]:
        skipped = f"attention {sorted(one.skip_attention)}, MLP {sorted(one.skip_mlp)}"
        console.out.print(f"          {one.speedup:.2f}x without {skipped}", highlight=False, markup=False, soft_wrap=True)
    console.out.print(f"          written to {out / 'skip.json'}; use it with {{kind: layer_skip, file: ...}}", highlight=False)
    write_json(json_to, [dataclasses.asdict(one) | {"speedup": one.speedup} for one in found])


def _arms(lengths: list[int], widths: str, cutoffs: str | None) -> list[Arm]:
    """Every way to draft that is tried."""
    from outrider.engines import tune as tuning

    shares = [None] if cutoffs is None else [float(share) for share in _numbers("cutoffs", cutoffs, float)]
    return tuning.arms(lengths, _numbers("widths", widths), shares)


def _measured(
    arms: list[Arm], loads: list[int], rounds: int, starts: Starts, measure: Callable[[str, int], float], out: Path,
    about: dict[str, Any],
) -> list[Point]:  # fmt: skip
    """Every measurement, with a bar on a terminal."""
    from outrider.engines import tune as tuning

    total = len(arms) * len(loads) * rounds
    with bar("measurements", total) if console.note.is_terminal else nullcontext(None) as update:
        return tuning.sweep(arms, loads, rounds, starts, measure, out, about, update)


def _choose(points: list[Point], margin: float, largest: int, out: Path, json_to: str | None) -> None:
    """Say and write the length for each load."""
    from outrider.engines import tune as tuning
    from outrider.report.bootstrap import student

    choice = tuning.choose(points, student, margin, largest)
    _report(points, choice)
    _tables(out, choice)
    write_json(json_to, choice.plain())


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


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _templates(start: str, port: int, health: str, ready_s: float, out: Path) -> Starts:
    """Servers of a command with places to fill in."""
    from outrider.engines.tune import served

    if "{tokens}" not in start or "{port}" not in start:
        raise ConfigError("--start has no {tokens} or no {port}; the draft length and the port are filled in there")

    def starts(arm: Arm) -> AbstractContextManager[str]:
        filled = start
        for name, value in {"tokens": arm.tokens, "width": arm.width, "cutoff": arm.cutoff or 0, "port": port}.items():
            filled = filled.replace(f"{{{name}}}", str(value))
        return served(shlex.split(filled), f"http://127.0.0.1:{port}", health, out / "server.log", ready_s)

    return starts


def _engines(
    engine: str | None, draft: str | None, target: str | None, arms: list[Arm], tensor_parallel: int, port: int,
    ready_s: float, out: Path, python: str | None, version: str | None,
) -> Starts:  # fmt: skip
    """Servers of an engine; every arm's command is made once before the first runs, so that none is refused in the middle."""
    from outrider.engines import commands
    from outrider.engines.tune import served

    if engine is None or draft is None:
        raise ConfigError("no server to measure; give --draft and --engine, or --start COMMAND, or --url TOKENS=URL")
    found, asked = _draft(draft, target, None, None), commands.engine_of(engine)
    if asked.metrics is None:
        raise ConfigError(f"{asked.title} can't be started and measured here; name one of vllm, sglang, trtllm, llamacpp")
    version = version or (None if python is None else commands.installed(engine, python))
    wish = lambda arm: commands.Wish(
        arm.tokens, arm.width, arm.cutoff, port=port, tensor_parallel=tensor_parallel, files=str(out)
    )
    every = {arm: commands.command(engine, found, wish(arm), version) for arm in arms}

    @contextmanager
    def starts(arm: Arm) -> Iterator[str]:
        for name, text in every[arm].files.items():
            (out / name).write_text(text, encoding="utf-8")
        words = _in_environment(every[arm].words, python)
        with served(words, f"http://127.0.0.1:{port}", asked.health, out / "server.log", ready_s) as url:
            yield url

    return starts


def _in_environment(words: tuple[str, ...], python: str | None) -> list[str]:
    """The same words with programs of that Python's environment."""
    if python is None:
        return list(words)
    beside = Path(python).parent / words[0]
    first = python if words[0] == "python" else str(beside) if beside.exists() else words[0]
    return [first, *words[1:]]


def _measures(
    trace: Trace, calls: int, max_tokens: int, completions: bool, key: str | None
) -> Callable[[str, int], float]:  # fmt: skip
    """(address, load) to tokens per second, by a replay in a closed loop."""
    from outrider.traffic.replay import Plan, replay

    def measure(url: str, load: int) -> float:
        count = max(calls, 8 * load)
        plan = Plan(concurrency=load, limit=count, max_tokens=max_tokens, ignore_eos=True, completions=completions)
        result = replay(_repeated(trace, count), [url], plan, key=key)
        if not result.is_whole:
            raise KeyboardInterrupt
        [one] = result.endpoints
        if one.answered < one.sent:
            said = ", ".join(f"{reason}: {number}" for reason, number in {**one.failed, **one.cut_off}.items())
            raise DataError(
                f"{one.sent - one.answered} of {one.sent} requests were not answered ({said}); see the server's log"
            )
        if not one.tokens:
            raise DataError(f"{url} does not count its tokens (usage); measure an engine that does")
        return one.tokens_per_s

    return measure


def _repeated(trace: Trace, count: int) -> Trace:
    """The log as often as it takes to have `count` calls."""
    times = -(-count // trace.size)
    return replace(
        trace, size=trace.size * times, places=[*trace.places] * times, lines=[*trace.lines] * times, has_times=False
    )  # fmt: skip


def _report(points: list[Point], choice: Choice) -> None:
    """Tokens per second by load and way to draft, and what is chosen."""
    arms = sorted({point.arm for point in points}, key=lambda arm: (arm.tokens, arm.width, arm.cutoff or 0.0))
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


def _tables(out: Path, choice: Choice) -> None:
    """tune.json, with the tables as engines read them."""
    import json

    part = out / "tune.json.part"
    part.write_text(json.dumps(choice.plain(), indent=2) + "\n", encoding="utf-8")
    part.replace(out / "tune.json")
    console.out.print(f"          written to {out / 'tune.json'}; use it with `outrider deploy --schedule`", highlight=False)
