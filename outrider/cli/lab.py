"""`outrider lab layers` and `lab cues`: settings of experimental methods, fitted to your prompts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import console
from outrider.cli.console import bar, place_of_json, quiet, say, write_json
from outrider.cli.options import JsonTo, TargetName
from outrider.loading import load_drafter
from outrider.measure.config import Config
from outrider.measure.tasks.prompts import as_tokens, draw
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.training.fitting import cues, sublayers

Prompts = Annotated[str, typer.Argument(help="File of prompts (JSONL).", show_default=False)]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where the result goes.")]


def lab_layers(
    prompts: Prompts,
    out: Out,
    target: TargetName = "demo",
    tries: Annotated[int, typer.Option(min=1, help="Sets of layers to try.")] = 60,
    json_to: JsonTo = None,
) -> None:
    """Search for layers that the target can skip while it drafts for itself; writes skip.json for `layer_skip`."""
    quiet()
    place_of_json(json_to)
    loaded = load_target(target)
    texts = _texts(loaded, prompts, 8)
    say(f"layers    {tries} sets of layers on {len(texts)} prompts of {prompts}")
    candidates = sublayers.search(loaded, texts, tries=tries)
    out.mkdir(parents=True, exist_ok=True)
    candidates[0].save(out / "skip.json")
    for candidate in candidates[:3]:
        skipped = f"attention {sorted(candidate.skip_attention)}, MLP {sorted(candidate.skip_mlp)}"
        say(f"          {candidate.speedup:.2f}x without {skipped}")
    say(f"          written to {out / 'skip.json'}; use it with {{kind: layer_skip, file: ...}}")
    write_json(json_to, [dataclasses.asdict(each) | {"speedup": each.speedup} for each in candidates])


def lab_cues(
    prompts: Prompts,
    out: Out,
    small_model: Annotated[str, typer.Option(metavar="MODEL", help="Language model that generates after a cue word.")],
    target: TargetName = "demo",
    words: Annotated[
        str | None, typer.Option(help="Words to rank, such as So,Then; default: those that begin sentences.")
    ] = None,
    calls: Annotated[int, typer.Option(help="Prompts to answer.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of tokens of an answer.")] = 128,
    json_to: JsonTo = None,
) -> None:
    """Rank the words after which a small model can generate alone; writes cues.json for the lossy verification
    `relay`."""
    quiet()
    place_of_json(json_to)
    loaded = load_target(target)
    drafter: Any = load_drafter("small_model", loaded, model=small_model)
    texts = _texts(loaded, prompts, calls)
    say(f"cues      {len(texts)} answers of at most {max_tokens} tokens, read by {small_model}")
    candidates = None if words is None else [word.strip() for word in words.split(",") if word.strip()]
    with bar("answers", len(texts)) as update:
        ranking = cues.calibrate(
            loaded, drafter.model, texts, max_new_tokens=max_tokens, words=candidates, say=lambda done: update(done)
        )
    out.mkdir(parents=True, exist_ok=True)
    ranking.save(out / "cues.json", target=target, small_model=small_model, answers=len(texts))
    columns = ("after", "times", "tokens", "margin", "error", "above others")
    table = console.table(*columns, right=columns[1:])
    for cue in ranking.cues[:20]:
        numbers = (f"{cue.mean:.3f}", f"{cue.standard_error:.3f}", f"{cue.difference:+.3f}")
        table.add_row(cue.word, str(cue.count), str(cue.tokens), *numbers)
    console.show(table)
    say(
        f"          {len(ranking.selected)} of {len(ranking.cues)} words are selected; "
        f"the margin of all {ranking.tokens} tokens is {ranking.mean:.3f}"
    )
    say(f"          written to {out / 'cues.json'}; use it with --verification 'relay(cues=...)' --allow-lossy")
    write_json(json_to, dataclasses.asdict(ranking))


def _texts(target: TransformersTarget, file: str, count: int) -> list[list[int]]:
    """The first prompts of a file, as tokens."""
    return [as_tokens(target, prompt) for prompt in draw(file, Config(tasks=(file,), prompts=count)).prompts[:count]]
