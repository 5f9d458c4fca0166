"""The JSON schema of run files, generated from the Configs.  It ships as `schema.json`, which can be read without
importing torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Union

from pydantic import Field, create_model

from outrider.drafters import find
from outrider.nn.shape import SIZES
from outrider.runs.file import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FROM_TARGET = (*SIZES, "taps", "mask_token", "device")
"""Drafter settings that default to the target's, which the schema marks with `x-default`."""
STARTED = {
    "type": "object", "required": ["from"],
    "properties": {"from": {"type": "string",
    "description": "Folder or Hugging Face id of a trained drafter to start from."}},
}  # fmt: skip


def make(kinds: Iterable[str]) -> dict[str, Any]:
    """The schema of run files with these drafters.  Raises ConfigError for one that can't be imported."""
    modules = {kind: find(kind) for kind in sorted(kinds)}
    configs: Any = Union[tuple(module.Config for module in modules.values())]  # noqa: UP007
    drafter: Any = Annotated[
        configs, Field(discriminator="kind", description=RunConfig.model_fields["drafter"].description)
    ]
    run_file = create_model("RunFile", __base__=RunConfig, __doc__=RunConfig.__doc__, drafter=(drafter, ...))
    schema = _with_short_names(run_file.model_json_schema())
    for kind, module in modules.items():
        _describe(schema["$defs"][kind], module.__doc__ or "")
    for section in (schema, *schema["$defs"].values()):
        _take_one_for_a_list(section["properties"])
        for one in (section, *section["properties"].values()):
            if "description" in one:
                one["description"] = " ".join(one["description"].split())
    _take_short_forms(schema)
    return {"$schema": DIALECT, **schema}


def _with_short_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Rename definitions to their sections and kinds."""
    sections = {
        name: json.dumps(one).partition('"#/$defs/')[2].partition('"')[0] for name, one in schema["properties"].items()
    }
    kinds = schema["properties"]["drafter"]["discriminator"]["mapping"]
    names = {old: name for name, old in sections.items() if old and name != "drafter"}
    names |= {ref.rpartition("/")[2]: kind for kind, ref in kinds.items()}
    text = json.dumps(schema)
    for old, new in names.items():
        text = text.replace(f'"#/$defs/{old}"', f'"#/$defs/{new}"').replace(f'"{old}": {{', f'"{new}": {{')
    return json.loads(text)


def _describe(drafter: dict[str, Any], docstring: str) -> None:
    drafter["description"] = docstring.partition("\n\n")[0]
    drafter["required"] = ["kind", *(name for name in drafter.get("required", ()) if name != "kind")]
    for name, setting in drafter["properties"].items():
        if name in FROM_TARGET and setting.get("default", 0) is None:
            setting["x-default"] = "from the target"


def _take_one_for_a_list(settings: dict[str, Any]) -> None:
    """Accept `tasks: gsm8k` as a one-element list, as `config.Config` does."""
    for name, setting in settings.items():
        options = setting.get("anyOf", [setting])
        items = [option["items"] for option in options if option.get("type") == "array"]
        one = [option for option in items if option.get("type") != "array" and option not in options]
        if one and "anyOf" in setting:
            setting["anyOf"] = [*options, *one]
        elif one:
            settings[name] = _with_options(setting, one)


def _with_options(setting: dict[str, Any], more: list[dict[str, Any]]) -> dict[str, Any]:
    about = {key: value for key, value in setting.items() if key in ("description", "default", "title")}
    return {**about, "anyOf": [{key: value for key, value in setting.items() if key not in about}, *more]}


def _take_short_forms(schema: dict[str, Any]) -> None:
    """Accept `target: NAME`, `drafter: KIND` or a checkpoint, and `loss: kl`; default the name to the file's."""
    settings, losses = schema["properties"], schema["$defs"]["train"]["properties"]
    for where, name in ((settings, "target"), (settings, "drafter"), (losses, "loss")):
        where[name] = _with_options(where[name], [{"type": "string"}])
    settings["drafter"]["anyOf"].append(STARTED)
    schema["required"].remove("name")
    settings["name"]["x-default"] = "the file's name"
    settings["prepare"]["x-default"] = "its defaults"
