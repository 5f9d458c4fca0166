"""Compares trainable methods, such as one in a file of your own, at equal minutes or steps: the same answers, the same
number of seeds, one interleaved evaluation.

A stopped comparison can be resumed: its answers, trainings and evaluation belong to run files that it writes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outrider.config import build, read
from outrider.data.answers.store import answers_for
from outrider.drafters import add_file, kinds, trained, trains_target
from outrider.errors import ConfigError
from outrider.measure.config import Config as MeasureConfig
from outrider.report.bootstrap import MIN_PROMPTS, Interval, ratio_of_rates
from outrider.report.schema import Report, Row
from outrider.runs import evaluation, stages
from outrider.runs.file import RunConfig, load
from outrider.runs.forecast import budget
from outrider.runs.reporter import Reporter
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch

PYTHON, RUN_FILES = ".py", (".yaml", ".yml")
TIMED = 32
"""Number of answers on which a method's steps are timed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all methods have in common, besides the run file."""

    minutes: float | None = None
    """Minutes of each training, converted to steps by separate timings; unused if `steps` is set."""
    steps: int | None = None
    """Steps of each training."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the trainings of each method."""
    cells: Path | None = None
    """Stored results of other methods with the same run file, as in benchmarks/results/methods.jsonl."""


class Line(NamedTuple):
    """One method on one task, at one temperature."""

    task: str
    temperature: float
    method: str
    tokens_per_step: float
    seeds: tuple[float, ...]
    """Tokens per step of each seed."""
    ratio: Interval | None
    """Tokens per step of the first method over this one's, with its interval over prompts; None for the first."""


def compare(
    file: str | Path, methods: Sequence[str], options: Options, overrides: Sequence[str] = (),
    reporter: Reporter | None = None,
) -> tuple[list[Line], Report]:  # fmt: skip
    """Train and measure methods.  The first one is compared with the others.

    file: a run file with target, prompts, training and evaluation for all.  methods: kinds, FILE.py with a drafter of
    your own, or run files, whose sections `drafter` and `train` are used.
    Raises ConfigError for an unknown method, one that needs no training, and one that is given twice.
    """
    base, _ = load(file, overrides)
    if base.train is None or base.evaluate is None:
        raise ConfigError(f"{file} needs the sections `train` and `evaluate`, which are those of every method")
    if (options.minutes is None) == (options.steps is None):
        raise ConfigError("give either minutes or steps; they apply to all methods")
    sections = dict(_section(base, method) for method in methods)
    cells = [] if options.cells is None else _cells(options.cells, base.target.name, options)
    if len(sections) < len(methods) or len(methods) < (1 if cells else 2):
        raise ConfigError(f"name at least two different methods, got {', '.join(methods)}")
    folder = base.folder
    stages.run(file, [*overrides, f"prepare.folder={base.answers}"], stages=["prepare"], reporter=reporter)
    files = _run_files(base, folder, sections, options)
    for runs in files.values():
        for run in runs:
            stages.run(run, stages=["train"], reporter=reporter)
    checkpoints = [str(folder / run.stem / "checkpoint") for runs in files.values() for run in runs]
    config = base.evaluate.model_copy(update={"baselines": ()})
    report = evaluation.run(_evaluation(base, checkpoints, config), reporter)
    assert report is not None
    measured = lines(report, list(files), len(options.seeds))
    return [*measured, *_stored(cells, report, len(options.seeds))], report


def _section(base: RunConfig, method: str) -> tuple[str, dict[str, Any]]:
    """A method's name, and its sections `drafter` and, if it has settings of its own, `train`."""
    path = Path(method)
    if path.suffix in RUN_FILES:
        values = read(path)
        return path.stem, {key: values[key] for key in ("drafter", "train") if key in values}
    kind = add_file(path) if path.suffix == PYTHON else method
    if kind not in kinds() or trained(kind) is None or trains_target(kind):
        raise ConfigError(f"{method} is not a method that trains a drafter; name a kind, FILE.py or a run file")
    if kind == base.drafter["kind"]:
        return kind, {"drafter": base.drafter}
    target = sketch(base.target.name, base.target.revision, base.target.trust_remote_code)
    return kind, {"drafter": {"kind": kind} | budget.sizes(kind, target.spec.vocabulary)}


def _run_files(
    base: RunConfig, folder: Path, sections: dict[str, dict[str, Any]], options: Options
) -> dict[str, list[Path]]:
    """Write a run file per method and seed; existing ones are kept, since their steps are already timed."""
    files: dict[str, list[Path]] = {}
    target: Any = None
    folder.mkdir(parents=True, exist_ok=True)
    for name, section in sections.items():
        steps = options.steps
        for seed in options.seeds:
            path = folder / f"{name}-{seed}.yaml"
            files.setdefault(name, []).append(path)
            if path.exists():
                steps = read(path)["train"]["steps"]
                continue
            values = base.model_dump(mode="json", exclude={"serve", "usual_minutes"}) | {
                "name": f"{base.name}/{path.stem}", "drafter": section["drafter"],
            }  # fmt: skip
            values["prepare"]["folder"] = str(base.answers)
            values["train"] |= section.get("train", {}) | {
                "seed": seed,
                "calibrate": 0,
                "epochs": None,
                "steps": steps or 1,
            }
            if steps is None:
                target = target or load_target(base.target.name, **base.target.load_options())
                steps = _affordable(build(RunConfig, values), target, 60 * (options.minutes or 0))
            values["train"]["steps"] = steps
            path.write_text(yaml.safe_dump(values, sort_keys=False))
    return files


def _affordable(settings: RunConfig, target: Any, seconds: float) -> int:
    """Number of steps that fit into this time, judging by steps over a few of the answers."""
    answers = answers_for(settings.answers, target, target.tokenizer)[:TIMED]
    read_s, step_s = budget.training_rates(settings, target, answers)
    return max(1, int((seconds - read_s * len(answers)) / step_s))


def _evaluation(base: RunConfig, checkpoints: Sequence[str], config: MeasureConfig) -> evaluation.Evaluation:
    return evaluation.Evaluation(
        base.name, base.target, tuple(checkpoints), config, base.folder, base.model_dump(mode="json")
    )


def lines(report: Report, methods: Sequence[str], seeds: int) -> list[Line]:
    """The results by task and temperature.  The report has the seeds of each method one after the other."""
    labels = list(dict.fromkeys(row.drafter for row in report.rows))
    results = []
    by_condition = lambda row: (row.task, row.temperature)
    for (task, temperature), group in groupby(sorted(report.rows, key=by_condition), by_condition):
        rows = {row.drafter: row for row in group}
        first = [rows[label] for label in labels[:seeds]]
        for number, method in enumerate(methods):
            own_rows = [rows[label] for label in labels[number * seeds : (number + 1) * seeds]]
            counts = _counts(own_rows)
            tokens, steps = (sum(column) for column in zip(*counts.values(), strict=True))
            ratio = None if number == 0 else _ratio(_counts(first), counts)
            rates = tuple(row.tokens_per_step or 0.0 for row in own_rows)
            results.append(Line(task, temperature, method, tokens / steps, rates, ratio))
    return results


def _counts(rows: Sequence[Row]) -> dict[str, tuple[int, int]]:
    """Tokens and steps of each prompt, over the seeds."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        for prompt in row.per_prompt:
            if prompt.tokens and prompt.steps:
                tokens, steps = counts.get(prompt.id, (0, 0))
                counts[prompt.id] = tokens + prompt.tokens, steps + prompt.steps
    return counts


def _ratio(first: dict[str, tuple[int, int]], other: dict[str, tuple[int, int]]) -> Interval | None:
    pairs = [(*first[prompt], *other[prompt]) for prompt in first if prompt in other]
    return ratio_of_rates(pairs) if len(pairs) >= MIN_PROMPTS else None


# ── stored results ────────────────────────────────────────────────────────────────────────────────────────────────────


def _cells(path: Path, target: str, options: Options) -> list[dict[str, Any]]:
    """The stored cells of this target and budget.  Raises ConfigError if there are none."""
    budget_of = lambda cell: (cell.get("minutes"), None if cell.get("minutes") else cell.get("steps"))
    try:
        cells = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        mine = [cell for cell in cells if cell["target"] == target]
        same = [cell for cell in mine if budget_of(cell) == (options.minutes, options.steps)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a file of stored results ({error!r}); give one of benchmarks/") from None
    if not same:
        minutes = sorted({cell["minutes"] for cell in mine if cell.get("minutes")})
        raise ConfigError(f"{path} has no result for {target} with this budget; available budgets: {minutes} minutes")
    return same


def _stored(cells: Sequence[dict[str, Any]], report: Report, seeds: int) -> list[Line]:
    """The first method against stored ones, over the prompts they share."""
    first = list(dict.fromkeys(row.drafter for row in report.rows))[:seeds]
    results = []
    for task, temperature in dict.fromkeys((row.task, row.temperature) for row in report.rows):
        rows = [
            row for row in report.rows if row.drafter in first and (row.task, row.temperature) == (task, temperature)
        ]
        mine = _counts(rows)
        for method in dict.fromkeys(cell["method"] for cell in cells):
            each = [
                row for cell in cells if cell["method"] == method for row in cell["rows"]
                if (row["kind"], row["temperature"], row["draft"]) == (task, temperature, "default")
            ]  # fmt: skip
            counts: dict[str, tuple[int, int]] = {}
            for prompt, tokens, steps in (prompt for row in each for prompt in row["per_prompt"]):
                before = counts.get(prompt, (0, 0))
                counts[prompt] = before[0] + tokens, before[1] + steps
            if counts:
                rates = tuple(row["tokens_per_step"] for row in each)
                mean = sum(tokens for tokens, _ in counts.values()) / sum(steps for _, steps in counts.values())
                results.append(Line(task, temperature, f"{method} (stored)", mean, rates, _ratio(mine, counts)))
    return results
