"""A run that starts from a trained drafter: `drafter: {from: FOLDER}` takes its kind, settings and weights."""

from collections.abc import Mapping
from typing import Any

from outrider import checkpoint, loading
from outrider.config import build
from outrider.drafters import find
from outrider.errors import ConfigError
from outrider.export import reading
from outrider.nn.draft_model import DraftModel
from outrider.targets.remote.served import RunTarget
from outrider.targets.sketch import sketch

FREE = (
    "length", "width", "nodes", "siblings", "tree", "drawn", "replacement", "refine", "device", "quantize", "ttt",
    "decay",
    "anchors", "noise", "ratio", "floor", "alpha", "curriculum",
)  # fmt: skip
"""Settings for serving and training that do not change the meaning of the weights."""


def settings_from(
    section: Mapping[str, Any], target: str, revision: str | None, trust_remote_code: bool
) -> dict[str, Any]:
    """A drafter's section, completed with the kind and settings of the trained drafter it starts from.

    target: the run's.  Raises ConfigError for a setting that contradicts these, and the errors of `loading.describe`.
    """
    changes = {key: value for key, value in section.items() if key != "from"}
    if not isinstance(name := section["from"], str):
        raise ConfigError(f"drafter.from must be the folder of a trained drafter, or its Hugging Face id, got {name!r}")
    source = loading.describe(name)
    verifier: Any = sketch(target, revision, trust_remote_code)  # enough for a drafter's settings
    if source.format is None:
        trained_settings = {"kind": source.kind, **checkpoint.config_of(source.manifest, source.folder, verifier)}
    else:
        trained_settings = reading.settings_of(source.folder, verifier, source.format, source.kind)
    if changes.get("kind", source.kind) != source.kind:
        raise ConfigError(
            f"drafter.kind is {changes['kind']}, but {name} is of kind {source.kind}; leave out drafter.kind"
        )
    schema = find(source.kind).Config
    before = build(schema, trained_settings, name).model_dump(mode="json")
    after = build(schema, {**trained_settings, **changes}, "drafter").model_dump(mode="json")
    for key in changes:
        if key in trained_settings and key not in FREE and before[key] != after[key]:
            raise ConfigError(
                f"drafter.{key} is {after[key]!r}, but {name} was trained with {before[key]!r}; leave out drafter.{key}"
            )
    return {"from": name, **trained_settings, **changes}


def take_weights(model: DraftModel, name: str, target: RunTarget) -> None:
    """Load the weights of the trained drafter that a run starts from."""
    source = loading.describe(name)
    if source.format is None:  # in training precision; `draft_model` would round to the target's
        checkpoint.check_binding(source.manifest, target, source.folder, quantised=True)
        checkpoint.check_taps(source.manifest, model, source.folder)
        checkpoint.load_weights(source.folder, model)
        return
    loaded = loading.draft_model(source, target)
    model.load_state_dict(
        {key: weight.to(model.state_dict()[key].dtype) for key, weight in loaded.state_dict().items()}
    )
