"""`outrider evaluate`: measure the drafters of a run file, or drafters by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from outrider import config as configs
from outrider.cli.console import place_of_json, write_json
from outrider.cli.options import DRAFTERS_OWN, Fields, JsonTo, with_options
from outrider.cli.run import DryRun, show
from outrider.cli.stages import Printer
from outrider.errors import ConfigError
from outrider.measure.config import Config
from outrider.report.schema import Report
from outrider.runs import evaluation, stages
from outrider.runs.file import TargetConfig

RUN_FILES = (".yaml", ".yml")
OPTIONS = "tasks temperatures prompts max_new_tokens batch processes overwrite data"


@with_options
def evaluate(
    what: Annotated[
        list[str],
        typer.Argument(
            metavar="RUNFILE | DRAFTER... [KEY=VALUE...]", show_default=False,
            help="A run file; or checkpoints, kinds, published folders, Hugging Face ids.  Then settings: "
            "evaluate.seed=1",
        ),
    ],
    target_overrides: Annotated[list[str], Fields(TargetConfig, "name=target tensor_parallel", "target", DRAFTERS_OWN)],
    evaluate_overrides: Annotated[list[str], Fields(Config, OPTIONS, "evaluate")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the results.")] = None,
    dry_run: DryRun = False,
    json_to: JsonTo = None,
) -> None:  # fmt: skip
    """Measure drafters against the target alone.  Rerun the same command to resume."""
    place_of_json(json_to)
    names = [word for word in what if not _is_setting(word)]
    settings = [*(word for word in what if _is_setting(word)), *evaluate_overrides, *target_overrides]
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
        show(stages.plan(names[0], settings, stages=["evaluate"]), json_to)
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
    target = None
    if section := values.get("target"):
        default = {} if "name" in section else {"name": evaluation.of_drafters(names, config, out).target.name}
        target = configs.build(TargetConfig, default | section, "target")
    evaluated = evaluation.of_drafters(names, config, out, target)
    if dry_run:
        show(evaluation.plan(evaluated), json_to)
        return None
    return evaluation.run(evaluated, Printer())


def _is_setting(word: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*=", word) is not None and not Path(word).exists()
