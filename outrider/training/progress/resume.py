"""Resume a training run: what is restored from its checkpoint, and which settings must not have changed since.

The checkpoint provides weights, moments, the random state and the facts in `RESUMED`.  The learning rate and the
position in the texts, even in the middle of a pass, follow from the step number alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider import checkpoint
from outrider.errors import CheckpointError
from outrider.nn.draft_model import DraftModel
from outrider.processes import Weights
from outrider.training.config import FREE, Config
from outrider.training.optimizers import Optimizers, unpack
from outrider.training.step import Joined, rate

log = logging.getLogger(__name__)
RESUMED = ("step", "seconds", "tokens", "overlap", "ngram_hashes", "joined", "skipped", "restored", "losses", "changed")
"""Facts about a training run that are carried over on resume."""
FIXED = ("drafter.kind", "train.optimizer")
"""Settings that not even `--force` can change: weights or moments trained with one value are useless for another."""


class Change(NamedTuple):
    """A setting that differs from the one the checkpoint was trained with."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {self.before}, is {self.now}"


def resume(place: Path, model: DraftModel, settings: Mapping[str, Any], force: bool = False) -> dict[str, Any]:
    """Load the weights of the checkpoint in `place`, if there is one; returns the facts to carry over.
    `resume_moments` loads the rest once there is an optimiser.

    settings: `train`'s, resolved.  force: accept changed settings; they are recorded in the facts, as `changed`.
    Raises CheckpointError for a checkpoint with another target or other settings, naming each with both values.
    """
    if not checkpoint.is_there(place):
        return {}
    manifest = checkpoint.manifest_of(place)
    checkpoint.check_binding(manifest, model.target, place)
    changed = changes(place, model, settings, force)
    step, trained = manifest["training"]["step"], _trained(manifest)
    if settings["steps"] < step:
        more = f"train.steps {settings['steps']} is less than that; set at least {step}, or give the run another name"
        raise CheckpointError(f"{place} was trained to step {step}, and {more}")
    checkpoint.check_taps(manifest, model, place)
    _check_files(place)
    _load(place, model, changed)
    if step < settings["steps"] and not checkpoint.has_state(place):
        lacks = f"was stopped at step {step} and lacks {checkpoint.TRAINING}"
        raise CheckpointError(
            f"{place} {lacks}, without which it can't resume; put the file back, or give the run another name"
        )
    before = {"ngram_hashes": [None]} | manifest["training"]
    if settings["steps"] != trained["steps"] and step < settings["steps"]:
        before["joined"] = {"step": step, "rate": rate(step, Config(**trained), joined_of(before))}
    if changed:
        _note(before, changed, step)
    return {key: before[key] for key in RESUMED if key in before}


def resume_moments(place: Path, model: DraftModel, optimizer: Optimizers, layout: Weights) -> None:
    """Load the moments and the random state of the checkpoint in `place`, if it has them.  layout: the model's."""
    state = checkpoint.load_state(place) if checkpoint.is_there(place) else None
    if state is not None:
        unpack(state, model, optimizer, layout)


def changes(place: Path, model: DraftModel, settings: Mapping[str, Any], force: bool = False) -> list[Change]:
    """The settings that affect the weights and differ from those of the checkpoint in `place`, sorted by name.

    settings: `train`'s; those in `config.FREE` may always change.
    Raises CheckpointError if there are any; with `force`, only for those in `FIXED`.
    """
    if not checkpoint.is_there(place):
        return []
    changed = _changes(checkpoint.manifest_of(place), model, settings, place)
    if changed and (not force or any(change.key in FIXED for change in changed)):
        raise CheckpointError(_refusal(place, changed))
    return changed


def _changes(
    manifest: Mapping[str, Any], model: DraftModel, settings: Mapping[str, Any], place: Path
) -> list[Change]:  # fmt: skip
    defaults, kind = type(model.config)().model_dump(mode="json"), manifest["kind"]
    config = (
        defaults | checkpoint.config_of(manifest, place, model.target)
        if kind == defaults["kind"]
        else manifest["config"]
    )
    theirs = {"drafter": config | {"kind": kind}, "train": _trained(manifest)}
    mine = {
        "drafter": model.config.model_dump(mode="json"),
        "train": {key: settings[key] for key in settings.keys() - FREE},
    }
    if kind != defaults["kind"]:  # all settings differ between kinds, so only the kind is listed
        mine["drafter"] = {"kind": defaults["kind"]}
    both = ((f"{part}.{key}", theirs[part].get(key), now) for part in mine for key, now in mine[part].items())
    return sorted(Change(*each) for each in both if each[1] != each[2])


def _trained(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The `train` settings of a checkpoint."""
    return Config().model_dump(mode="json") | (manifest["training"].get("config") or {})


def _refusal(place: Path, changed: list[Change]) -> str:
    ways = "set them back, or give the run another name"
    if fixed := [change.key for change in changed if change.key in FIXED]:
        ways += f" ({', '.join(fixed)} can't change within a training run)"
    else:
        ways = "set them back, give the run another name, or continue with the new ones using --force"
    return f"{place} was trained with other settings: {'; '.join(map(str, changed))}; {ways}"


def _check_files(place: Path) -> None:
    """Raises CheckpointError for damaged files, with a hint about which earlier checkpoint to resume from."""
    try:
        checkpoint.check_files(place)
    except CheckpointError as error:
        there = place.parent.glob("checkpoints/step-*")
        earlier = sorted(there, key=lambda path: checkpoint.manifest_of(path)["training"]["step"])
        hint = f" (mv {place} {place}.spoilt; cp -r {earlier[-1]} {place})" if earlier else ""
        raise CheckpointError(f"{error}{hint}") from None


def _load(place: Path, model: DraftModel, changed: list[Change]) -> None:
    """Load the weights.  Raises CheckpointError, naming the changed settings, if they do not fit the model."""
    try:
        checkpoint.load_weights(place, model)
    except CheckpointError as error:
        settings = "; ".join(str(change) for change in changed if change.key.startswith("drafter."))
        if not settings:
            raise
        raise CheckpointError(
            f"the weights in {place} do not fit the new settings ({settings}): {error}; set them back, or give the run "
            "another name"
        ) from None


def _note(facts: dict[str, Any], changed: list[Change], step: int) -> None:
    """Record that training continues with other settings from this step."""
    log.warning("resumes from step %d with other settings: %s", step, "; ".join(map(str, changed)))
    values = {change.key: [change.before, change.now] for change in changed}
    facts["changed"] = [*facts.get("changed", ()), {"step": step, "settings": values}]
    facts.pop("losses", None)  # the loss may have changed


def joining(config: Config, folder: str | Path) -> str:
    """A message on how the learning rate continues if the existing training run had a different number of steps,
    otherwise empty."""
    place = Path(folder) / "checkpoint"
    facts = checkpoint.manifest_of(place)["training"] if checkpoint.is_there(place) else {}
    before, step = (facts.get("config") or {}).get("steps"), facts.get("step", 0)
    if before in (None, config.steps) or step >= config.last_step:
        return ""
    joined = Joined(step, rate(step, Config(**facts["config"]), joined_of(facts)))
    return (
        f"train.steps was {before}: from {100 * joined.rate:.0f} % of its peak the learning rate joins the curve of "
        f"{config.steps} steps (a cosine that ends at 0) within {joined.length(config)} steps"
    )


def joined_of(facts: Mapping[str, Any]) -> Joined | None:
    """Where the learning rate left its former curve; None if it did not."""
    return Joined(**facts["joined"]) if "joined" in facts else None
