"""Whether a run's stages need the target's weights on this machine, or only its config and tokenizer."""

from collections.abc import Collection

from outrider.drafters import trained, trains_target
from outrider.errors import TargetError
from outrider.runs.file import RunConfig
from outrider.targets.remote.served import stores_weights
from outrider.targets.sorts import special


def why_weights(settings: RunConfig, stages: Collection[str]) -> str | None:
    """Why these stages need the target's weights; None if servers do all work that needs them."""
    config, training, kind = settings.prepare, settings.train, settings.drafter["kind"]
    if special(settings.target.name) is not None:
        return "an ensemble is bound to its members' weights"
    if "evaluate" in stages:
        return "evaluate measures the target here"
    if "prepare" in stages and config.regenerate and not config.servers:
        return "prepare.servers is empty, so the target answers here"
    if training is None or trained(kind) is None:
        return None
    if config.features == "cached":
        return "prepare.features: cached reads the texts with the target here"
    if "train" not in stages:
        return None
    if config.features == "live":
        return "prepare.features: live reads the texts with the target here"
    if trains_target(kind):
        return f"{kind} trains the target itself"
    if training.calibrate and settings.evaluate is not None:
        return "train.calibrate drafts for the target here"
    return None


def refuse_missing_weights(settings: RunConfig, stages: Collection[str]) -> None:
    """Raises TargetError for a folder without weights if these stages need them."""
    why, name = why_weights(settings, stages), settings.target.name
    if why is not None and not stores_weights(name):
        raise TargetError(f"{name} holds no weights, but {why}; copy them there, or let servers do it")
