"""The drafters of an evaluation, with labels and facts about their training."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.checkpoint import trained_on
from outrider.data.overlap.contamination import check, sources_of
from outrider.decoding.protocols import Drafter
from outrider.drafters import find, kinds
from outrider.fast import NotCompiled, compile_passes
from outrider.loading import Source, describe, load_drafter
from outrider.measure.record import Overlaps
from outrider.measure.row import training_of
from outrider.measure.tasks.names import PromptSet, task_name
from outrider.report.parts import Training
from outrider.runs.reporter import Reporter
from outrider.storage.json_text import parse_json
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.progress import checkpoints

Choice = str | Mapping[str, Any]
"""A kind, a kind with its settings, a folder of a trained drafter, or its Hugging Face id."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


class Loaded(NamedTuple):
    """Drafters and facts about them, by label."""

    drafters: dict[str, Drafter]
    training: dict[str, Training]
    """Facts about their training; zeros for drafters without training."""
    overlaps: dict[str, Overlaps]
    """Prompts that occur in a drafter's texts, if it has texts."""
    identities: dict[str, str]
    """Settings, or a hash of the weights, to distinguish drafters with the same label."""

    @property
    def own(self) -> str:
        """Label of the run's own drafter, which is the last."""
        return list(self.drafters)[-1]


def load_all(
    choices: Sequence[Choice], target: TransformersTarget, drawn: Mapping[str, PromptSet], reporter: Reporter,
    name: str = "", quantize: str | None = None, compile: bool | None = None,
) -> Loaded:  # fmt: skip
    """Load drafters, and check which prompts occur in their training data.  drawn: prompts by task.

    name: the run's, used to label its own drafter, which is the last choice and the one that `quantize` applies to.
    """
    loaded = Loaded({}, {}, {}, {})
    prompts = {task_name(task): prompt_set.prompts for task, prompt_set in drawn.items()}
    for number, choice in enumerate(choices, 1):
        is_own = number == len(choices)
        kind, settings = (choice, {}) if isinstance(choice, str) else parted(choice)
        if is_own and quantize:
            settings["quantize"] = quantize
        source = None if kind in kinds() else describe(kind)
        drafter = load_drafter(kind, target, **settings)
        if compile or (compile is None and target.step.graph is not None):
            compile_drafter(drafter, reporter, unasked=not compile)
        label = kind if source is None else source.kind
        if label in loaded.drafters:  # a second drafter of the same kind
            listing = ", ".join(f"{key}={value}" for key, value in settings.items())
            of_kind = f"{label} of {name}" if is_own and name else f"{label} ({listing})"
            label = of_kind if source is None else kind
        loaded.drafters[label] = drafter
        loaded.identities[label] = (
            json.dumps([kind, settings], default=str) if source is None else _weights_hash(source, settings)
        )
        if sources := sources_of(choice):
            contamination = check(prompts, sources)
            reporter.looked(label, contamination)
            loaded.overlaps[label] = Overlaps(contamination.overlaps(prompts), contamination.rule)
        if (training := _training(kind, source, target)) is not None:
            loaded.training[label] = training
    return loaded


def _training(kind: str, source: Source | None, target: TransformersTarget) -> Training | None:
    """Facts about a drafter's training; None if unknown."""
    if source is None:
        module = find(kind)
        is_free = not hasattr(module, "Model") and "model" not in module.Config.model_fields
        return Training(steps=0, seconds=0.0, tokens=0) if is_free else None
    if source.format is not None:
        return None
    training = training_of(source.manifest, metrics_of(source.folder))
    return training.model_copy(update={"precision": trained_on(source.manifest, target)})


def metrics_of(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl next to a checkpoint; empty without one."""
    above = checkpoint.parent.parent if checkpoint.parent.name == checkpoints.FOLDER else checkpoint.parent
    path = above / "metrics.jsonl"
    return [parse_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _weights_hash(source: Source, settings: Mapping[str, Any]) -> str:
    """A hash of a trained drafter's weights, its config and these settings."""
    total = hashlib.sha256(json.dumps([source.manifest.get("config"), settings], default=str, sort_keys=True).encode())
    total.update(json.dumps(source.manifest.get("calibration"), default=str).encode())
    for path in sorted(path for path in source.folder.rglob("*") if path.suffix in WEIGHTS and path.stem != "training"):
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16]


def compile_drafter(drafter: Drafter, reporter: Reporter, unasked: bool = False) -> None:
    """Like `compile_passes`, but a failure is reported and the drafter runs uncompiled."""
    try:
        compile_passes(drafter, unasked)
    except NotCompiled as reason:
        reporter.not_compiled(reason)


def parted(drafter: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The kind of a drafter in a run file, and its settings."""
    return drafter["kind"], {key: value for key, value in drafter.items() if key != "kind"}
