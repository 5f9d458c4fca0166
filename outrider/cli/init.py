"""`outrider init`: a run file to begin with."""

import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from outrider.cli.console import say
from outrider.data.config import BUILT_IN
from outrider.data.config import Config as Prepare
from outrider.data.conversations import read
from outrider.drafters import trained
from outrider.errors import ConfigError, OutriderError
from outrider.hub import missing_path
from outrider.runs.file import load

FILE = """\
# outrider run {file}                  all stages; or `outrider prepare`, `train`, `evaluate` one by one
# outrider run {file} --dry-run        checks everything and prints counts and sizes
# outrider show {file}                 every setting there is, with its value and origin
target: {target}
drafter:
  kind: {kind}  # `outrider drafters` lists the others
"""
TRAINED = """\
prepare:  # the target answers the prompts
  conversations: {data}
  {count}  # fewer prompts take less time; all are used unless this is given
  max_new_tokens: 512  # longest answer
  length: 4096  # longest text, prompt and answer; what is beyond is cut off
  slots: 16  # answers written at the same time; more need more memory
train:
  epochs: 10  # passes over the answers; or `steps: 5000`
  batch: 8  # texts per step
  lr: 6e-4
"""
MEASURED = """\
evaluate:
  tasks: {tasks}  # prompts that are not in the data above: FILE.jsonl, or names of `outrider tasks`
  prompts: 24  # of each task
  max_new_tokens: 96
  baselines: {baselines}  # measured in the same run
"""


def init(
    file: Annotated[
        Path | None, typer.Argument(help="Run file to write; KIND.yaml unless given.", show_default=False)
    ] = None,
    target: Annotated[str | None, typer.Option(help="Folder, Hugging Face id, `smollm2` or `demo`.")] = None,
    kind: Annotated[str | None, typer.Option(help="Drafter to train, such as dspark; see `outrider drafters`.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Prompts: FILE.jsonl, FILE.json, FILE.txt, a data set, or instructions:train.")
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Prompts to measure on, such as held-out.jsonl or gsm8k,mt-bench.")
    ] = "stdlib",
) -> None:
    """Write a run file, by flags, or by asking for those that are missing; an existing file is never overwritten."""
    target = target or _ask("target", "Target (folder, Hugging Face id, smollm2 or demo)", "demo")
    kind = kind or _ask("kind", "Drafter", "dspark")
    trains = trained(kind) is not None
    library = "stdlib:train" if target == "demo" else "instructions:train"
    data = data or (_ask("data", f"Prompts (file, data set, or {library})", library) if trains else None)
    place = file or Path(f"{kind}.yaml")
    if place.exists():
        raise ConfigError(f"{place} exists already; name another file, or edit that one")
    if target != "demo" and (problem := missing_path(target)) is not None:
        raise ConfigError(f"--target: {problem}; give a folder, a Hugging Face id, or demo")
    text = FILE + (TRAINED if trains else "") + MEASURED
    if data is not None and (data.startswith(BUILT_IN) or missing_path(data) is not None or Path(data).exists()):
        next(read(Prepare(conversations=data, count=1)))  # says what is wrong with its first row
    count = "count: 512" if data is not None and data.startswith(BUILT_IN) else "# count: 1000"
    names = [task.strip() for task in tasks.split(",")]
    values = {
        "file": str(place), "target": _plain(target), "kind": kind, "data": _plain(data or ""), "count": count,
        "tasks": _plain(names), "baselines": _plain([] if kind == "ngram" else ["ngram"]),
    }  # fmt: skip
    _write(place, text.format(**values))
    say(f"{place} is written; next: outrider run {place} --dry-run, then outrider run {place}")


def _ask(flag: str, question: str, default: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"--{flag} is missing; give it, or run `outrider init` in a terminal, which asks")
    answer: str = typer.prompt(question, default=default)
    return answer


def _plain(value: str | list[str]) -> str:
    """A value as YAML on one line."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()


def _write(place: Path, text: str) -> None:
    try:
        with place.open("x", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(
            f"can't write {place}: {error.strerror}; name a file in a folder that exists and can be written to"
        ) from None
    try:
        load(place)
    except OutriderError:
        place.unlink()
        raise
