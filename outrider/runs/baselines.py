"""The drafters that a run measures: its own, and its baselines."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.checkpoint import load_drafter, manifest_of, trained_on
from outrider.compiled import NotCompiled, compile_passes
from outrider.data.contamination import check, sources_of
from outrider.decoding.protocols import Drafter
from outrider.measure.row import Overlaps, training_of
from outrider.measure.tasks import PromptSet, task_name
from outrider.report.schema import Training
from outrider.runs.file import RunConfig
from outrider.runs.reporter import Reporter
from outrider.targets.transformers import TransformersTarget


class Loaded(NamedTuple):
    """Drafters by label, and what is known of them."""

    drafters: dict[str, Drafter]
    training: dict[str, Training]
    """What their training said, of those that were trained."""
    overlaps: dict[str, Overlaps]
    """Which prompts stand in their texts, of those that have some."""
    own: str
    """Label of the run's own, which is the last."""


def load_all(
    settings: RunConfig, target: TransformersTarget, drawn: Mapping[str, PromptSet], reporter: Reporter
) -> Loaded:  # fmt: skip
    """Load the run's drafter and its baselines, and see which prompts each has seen before.  drawn: prompts by task."""
    config = settings.evaluate
    assert config is not None
    found = Loaded({}, {}, {}, "")
    prompts = {task_name(task): own.prompts for task, own in drawn.items()}
    own_choice = str(settings.folder / "checkpoint") if settings.train is not None else settings.drafter
    for choice in (*config.baselines, own_choice):
        name, own = (choice, {}) if isinstance(choice, str) else parted(choice)
        if choice is own_choice and config.quantize:
            own["quantize"] = config.quantize
        drafter = load_drafter(name, target, **own)
        if settings.target.compile:
            compile_drafter(drafter, reporter)
        is_checkpoint = isinstance(choice, str) and Path(name).exists()
        label = manifest_of(name)["kind"] if is_checkpoint else name
        if label in found.drafters:  # a second one of its kind
            said = ", ".join(f"{key}={value}" for key, value in own.items())
            other = f"{label} of {settings.name}" if choice is settings.drafter else f"{label} ({said})"
            label = name if is_checkpoint else other
        found.drafters[label] = drafter
        if sources := sources_of(choice):
            seen = check(prompts, sources)
            reporter.looked(label, seen)
            found.overlaps[label] = Overlaps(seen.overlaps(prompts), seen.rule)
        if is_checkpoint:
            manifest, metrics = manifest_of(name), Path(name).parent / "metrics.jsonl"
            rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            facts = training_of(manifest, rows)
            found.training[label] = facts.model_copy(update={"precision": trained_on(manifest, target)})
    return found._replace(own=label)


def compile_drafter(drafter: Drafter, reporter: Reporter) -> None:
    """Have a drafter's own passes compiled, where it has such; it works without."""
    try:
        compile_passes(drafter)
    except NotCompiled as reason:
        reporter.not_compiled(reason)


def parted(drafter: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of a drafter in a run file, and its settings."""
    return drafter["kind"], {key: value for key, value in drafter.items() if key != "kind"}
