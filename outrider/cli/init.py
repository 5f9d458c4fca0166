"""`outrider init`: create a run file."""

import itertools
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml

from outrider import config as configs
from outrider import machine
from outrider.cli.console import say
from outrider.cli.init_from import fine_tuning
from outrider.config import to_yaml
from outrider.data.answers.dialogue import Dialogue, hash_conversations
from outrider.data.config import BUILT_IN
from outrider.data.config import Config as Prepare
from outrider.data.sources.conversations import read
from outrider.drafters import trained
from outrider.errors import ConfigError, OutriderError
from outrider.hub import missing_path
from outrider.measure.tasks.names import INSTRUCTIONS
from outrider.runs.file import RunConfig, load
from outrider.runs.forecast import budget
from outrider.runs.forecast.checks import check
from outrider.targets.catalog import NAMES
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch

FILE = """\
# outrider run {file}                  all stages; or `outrider prepare`, `train`, `evaluate` one by one
# outrider run {file} --dry-run        checks everything and prints counts and sizes
# outrider show {file}                 all settings with their values and origins
target: {target}
drafter:
  kind: {kind}  # `outrider drafters` lists the others
"""
TRAINED = """\
prepare:  # the target answers the prompts
  conversations: {data}
  {count}  # number of prompts; default: all
  max_new_tokens: 512  # longest answer
  length: 4096  # longest text, prompt plus answer; longer ones are cut
  slots: 16  # concurrent answers; more need more memory
train:
  epochs: 10  # passes over the answers; or `steps: 5000`
  batch: 8  # texts per step
  lr: 6e-4
"""
MEASURED = """\
evaluate:
  tasks: {tasks}  # prompts that are not in the training data: FILE.jsonl, or names of `outrider tasks`
  prompts: 24  # of each task
  max_new_tokens: 96
  policy: auto  # drafts as much as pays, as in decode and serve; fixed: the full draft
  baselines: {baselines}  # measured in the same run
"""
BUDGETED = """\
prepare:  # the target answers the prompts
  conversations: {data}
  count: {count}
  max_new_tokens: {answer}  # longest answer
  length: {length}  # longest text, prompt plus answer; longer ones are cut
  temperature: 0.7
  top_p: 1.0
  top_k: 0
  slots: 32  # concurrent answers
train: {{steps: {steps}, batch: 8, lr: 8e-3, optimizer: muon, loss: {{kl: 1.0}}, calibrate: 0, log_every: 20,
        save_every: 100}}
evaluate:
  tasks: {tasks}
  prompts: {prompts}  # of each task
  max_new_tokens: 96
  temperatures: [0.0, 0.7]
  policy: auto  # drafts as much as pays, as in decode and serve; fixed: the full draft
  baselines: {baselines}  # measured in the same run
usual_minutes: {minutes}  # planned on this machine
"""
MOST, LENGTH = 4096, 384
"""Maximum number of prompts and maximum text length of a planned run."""


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
        str | None,
        typer.Option(help="Prompts to measure on, such as held-out.jsonl or gsm8k,mt-bench.", show_default="stdlib"),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Size the run to take this long, by measured rates."),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="DRAFTER", help="Trained drafter to fine-tune on the prompts.")
    ] = None,
    old: Annotated[
        str | None, typer.Option(help="With --from: prompts like those it was trained on, so that it forgets less.")
    ] = None,
) -> None:
    """Create a run file from options; missing ones are asked for.  Existing files are never overwritten.

    With --minutes, the target is loaded, steps are timed, and the run is sized to fit.  With --from, a trained drafter
    is fine-tuned on --data, such as a log of requests, and measured before and after.
    """
    began = time.monotonic()
    if start is not None:
        _fine_tuned(
            file or Path("tuned.yaml"), start, target, data, old, {"kind": kind, "tasks": tasks, "minutes": minutes}
        )
        return
    if old is not None:
        raise ConfigError("--old is for fine-tuning a trained drafter; name it with --from, or leave --old out")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ConfigError(f"--minutes is {minutes:g}; give the time limit of the whole run in minutes, such as 15")
    target = target or _ask("target", "Target (folder, Hugging Face id, smollm2 or demo)", "demo")
    kind = kind or ("dspark" if minutes is not None else _ask("kind", "Drafter", "dspark"))
    trains = trained(kind) is not None
    library = "stdlib:train" if target == "demo" else "instructions:train"
    if trains and data is None:
        data = library if minutes is not None else _ask("data", f"Prompts (file, data set, or {library})", library)
    place = file or Path(f"{kind}.yaml")
    if place.exists():
        raise ConfigError(f"{place} exists already; name another file, or edit that one")
    if target not in NAMES and (problem := missing_path(target)) is not None:
        raise ConfigError(f"--target: {problem}; give a folder, a Hugging Face id, or {' or '.join(NAMES)}")
    if data is not None and (data.startswith(BUILT_IN) or missing_path(data) is not None or Path(data).exists()):
        next(read(Prepare(conversations=data, count=1)))  # raises if the first row is invalid
    if tasks is None:
        tasks = "stdlib" if minutes is None or target == "demo" else ",".join(INSTRUCTIONS)
    names = [task.strip() for task in tasks.split(",")]
    values = {
        "file": str(place), "target": to_yaml(target), "kind": kind, "data": to_yaml(data or ""),
        "tasks": to_yaml(names),
    }  # fmt: skip
    if minutes is None:
        count = "count: 512" if data is not None and data.startswith(BUILT_IN) else "# count: 1000"
        values |= {"count": count, "baselines": to_yaml([] if kind == "ngram" else ["ngram"])}
        text = (FILE + (TRAINED if trains else "") + MEASURED).format(**values)
    elif trains:
        text = _budgeted(place, values, minutes, began)
    else:
        raise ConfigError(f"--minutes plans a training, and drafter {kind!r} has nothing to train; leave it out")
    _write(place, text)
    say(f"{place} is written; next: outrider run {place} --dry-run, then outrider run {place}")


def _fine_tuned(
    place: Path, drafter: str, target: str | None, data: str | None, old: str | None, others: Mapping[str, object]
) -> None:  # fmt: skip
    """Write the run file of a fine-tuning run and its prompts.  others: options that do not apply."""
    if unused := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"--{unused[0]} has no effect with --from, which sets it; leave it out")
    if place.exists():
        raise ConfigError(f"{place} exists already; name another file, or edit that one")
    text, prompts = fine_tuning(
        place, drafter, target, data or _ask("data", "Prompts (log of requests, file)", ""), old
    )
    _write(place, text)
    for path, lines in prompts.items():
        path.write_text(lines, encoding="utf-8")
        say(f"{path} is written, {lines.count(chr(10))} prompts")
    say(f"{place} is written; next: outrider run {place} --dry-run, then outrider run {place}")


def _budgeted(place: Path, values: dict[str, str], minutes: float, began: float) -> str:
    """A run file sized for these minutes, which include the time since `began`."""
    on_paper = sketch(yaml.safe_load(values["target"]))
    budget.refuse_too_large(on_paper)
    length = min(LENGTH, on_paper.spec.context or LENGTH)
    mixture = {"kind": "mix", "members": [f"runs/{place.stem}/checkpoint", "suffix"], "nodes": 6}
    values |= {
        "baselines": to_yaml(["ngram", "suffix", mixture]), "length": str(length), "answer": str(7 * length // 12)
    }  # fmt: skip
    draft = yaml.safe_load((FILE + BUDGETED).format(**values, count=MOST, steps=1, prompts=1, minutes="{}"))
    draft |= {"name": place.stem, "target": {"name": draft["target"]}}
    draft["drafter"] |= budget.sizes(draft["drafter"]["kind"], on_paper.spec.vocabulary)
    settings = configs.build(RunConfig, draft)
    inputs = check(settings, ["prepare"])
    say("loading the target; timing its steps and the drafter's")
    machine.set_up_process()
    target = load_target(settings.target.name, **settings.target.load_options())
    prompts = []
    for one in itertools.islice(hash_conversations(inputs.conversations, settings.prepare), 2 * settings.prepare.slots):
        dialogue = Dialogue(one)
        if dialogue.ask(target.tokenizer, settings.prepare, target.spec.context):
            prompts.append(dialogue.tokens)
    rates = budget.measured(settings, target, prompts)
    here, there = f"{minutes:g} minutes", len(inputs.conversations)
    planned = budget.planned(settings, rates, 60 * minutes - (time.monotonic() - began), there)
    longer = budget.planned(settings, rates, 4 * 60 * minutes, there)
    say(f"{here} on {machine.describe(target.device)}: {planned.line}\n{4 * minutes:g} minutes would be {longer.line}")
    sizes = "".join(f"\n  {key}: {to_yaml(value)}" for key, value in draft["drafter"].items() if key != "kind")
    stage_minutes = {stage: round(value, 2) for stage, value in planned.minutes.items()}
    file = (FILE.rstrip() + sizes + "\n" + BUDGETED).format(
        **values,
        count=planned.answers,
        steps=planned.steps,
        prompts=planned.prompts,
        minutes=to_yaml(stage_minutes),
    )
    return f"# {here} on {machine.describe(target.device)}: {planned.line}\n{file}"


def _ask(flag: str, question: str, default: str) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"--{flag} is missing; give it, or run `outrider init` in a terminal, which asks")
    answer: str = typer.prompt(question, default=default)
    return answer


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
