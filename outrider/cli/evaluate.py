"""`outrider evaluate`: the drafters of a run file, or drafters by name, measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer
import yaml

from outrider import config as configs
from outrider.cli.console import JsonTo, Parts, place_of_json, write_json
from outrider.cli.run import DryRun, preview, show
from outrider.cli.stages import Printer
from outrider.errors import ConfigError
from outrider.measure.config import Config
from outrider.report.schema import Report
from outrider.runs import evaluation, stages
from outrider.runs.file import TargetConfig

RUN_FILES = (".yaml", ".yml")


def evaluate(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNFILE | DRAFTER... [KEY=VALUE...]", show_default=False,
            help="A run file; or checkpoints, kinds, published folders, Hugging Face ids.  Then settings: "
            "evaluate.seed=1",
        ),
    ],
    target: Annotated[
        str | None, typer.Option("--target", "--model",
        help="The target, if not the one the checkpoint was trained for.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Tasks, such as gsm8k,mt-bench or mine.jsonl.")] = None,
    temperatures: Annotated[str | None, typer.Option(help="Such as 0,1.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts of each task.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts that are served together.")] = None,
    processes: Annotated[int | None, typer.Option(help="Processes that share the prompts.")] = None,
    tensor_parallel: Parts = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the results.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite",
    help="Measure again, and replace the report in DIR.")] = False,
    data: Annotated[Path | None, typer.Option("--data", help="Folder of prompt sets, in place of the hub.")] = None,
    allow_code_execution: Annotated[
        bool, typer.Option("--allow-code-execution", help="Run written code, in a sandbox, where tests score a task.")
    ] = False,
    dry_run: DryRun = False,
    json_to: JsonTo = None,
) -> None:  # fmt: skip
    """Measure drafters against the target alone.  Goes on where it was stopped."""
    place_of_json(json_to)
    values = {
        "tasks": _listed(tasks), "temperatures": _listed(temperatures), "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "batch": batch, "processes": processes, "overwrite": overwrite or None,
        "data": None if data is None else str(data),
        "allow_code_execution": allow_code_execution or None, "score": allow_code_execution or None,
    }  # fmt: skip
    # as YAML text: a folder may be called null, or 2024
    options = [f"evaluate.{key}={_yaml(value)}" for key, value in values.items() if value is not None]
    names = [word for word in what if not _is_setting(word)]
    settings = [*(word for word in what if _is_setting(word)), *options]
    if target is not None:
        settings.append(f"target.name={_yaml(target)}")
    if tensor_parallel is not None:
        settings.append(f"target.tensor_parallel={tensor_parallel}")
    if any(name.endswith(RUN_FILES) for name in names):
        report = _of_file(names, settings, out, dry_run, json_to)
    else:
        report = _of_drafters(names, settings, out, dry_run, json_to)
    if report is not None:
        write_json(json_to, json.loads(report.json_text()))


def _of_file(
    names: list[str], settings: list[str], out: Path | None, dry_run: bool, json_to: str | None
) -> Report | None:
    if len(names) > 1:
        raise ConfigError(
            f"{' and '.join(names)}: give one run file, or drafters; a run file names its own in baselines"
        )
    if out is not None:
        raise ConfigError(
            "--out has no effect on a run file, whose results go to runs/NAME; leave it out, or set name=OTHER"
        )
    if dry_run:
        preview(Path(names[0]), settings, ["evaluate"], json_to)
        return None
    return stages.run(names[0], settings, stages=["evaluate"], reporter=Printer())


def _of_drafters(
    names: list[str], settings: list[str], out: Path | None, dry_run: bool, json_to: str | None
) -> Report | None:
    if not names:
        raise ConfigError("nothing to evaluate; name a run file, a checkpoint folder, or a drafter such as ngram")
    values = configs.override({}, settings)
    if others := sorted(values.keys() - {"evaluate", "target"}):
        raise ConfigError(
            f"{others[0]}: settings of drafters by name begin with evaluate. or target., such as evaluate.seed=1"
        )
    config = configs.build(Config, values.get("evaluate", {}), "evaluate")
    target, given = None, values.get("target", {})
    if given:
        theirs = {} if "name" in given else {"name": evaluation.of_drafters(names, config, out).target.name}
        target = configs.build(TargetConfig, theirs | given, "target")
    chosen = evaluation.of_drafters(names, config, out, target)
    if dry_run:
        show(evaluation.plan(chosen), json_to)
        return None
    return evaluation.run(chosen, Printer())


def _is_setting(word: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*=", word) is not None and not Path(word).exists()


def _listed(text: str | None) -> list[str | float] | None:
    """a,b as a list; numbers are read as numbers."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    return [float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else word for word in words if word]


def _yaml(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()
