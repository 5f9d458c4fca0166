"""Descriptions of run file settings, from the shipped schema, so that no drafter is imported."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import nearest
from outrider.drafters import kinds
from outrider.errors import ConfigError

SCHEMA = Path(__file__).with_name("schema.json")
SECTIONS = ("run", "target", "prepare", "train", "evaluate", "serve")
"""Names for `section` besides the kinds of drafters; `run` is the file itself."""

IN_WORDS = ("required", "not set", "from the target", "its defaults", "the file's name")
"""Defaults that are not literal values."""


class Setting(NamedTuple):
    """Description of a setting."""

    name: str
    type: str
    default: str
    meaning: str


class Section(NamedTuple):
    """A section of a run file, or a kind of drafter."""

    name: str
    summary: str
    settings: list[Setting]


@functools.cache
def schema() -> dict[str, Any]:
    """The JSON schema of run files, including installed drafters of other distributions."""
    shipped: dict[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    if all(kind in shipped["$defs"] for kind in kinds()):
        return shipped
    from outrider.runs.schema import make  # loads torch, which the shipped schema does not need

    return make(kinds())


def section(name: str) -> Section:
    """The settings of a section or a kind of drafter.  Raises ConfigError for an unknown name."""
    if name not in SECTIONS and name not in kinds():
        raise ConfigError(f"unknown section or drafter {name!r}{nearest(name, [*SECTIONS, *kinds()])}")
    section = schema() if name == "run" else schema()["$defs"][name]
    return Section(name, section.get("description", ""), list(_settings(section, is_run=name == "run")))


def sections(drafters: Iterable[str] | None = None) -> list[Section]:
    """The run file, its sections, and these drafters (default: all)."""
    return [section(name) for name in (*SECTIONS, *sorted(kinds() if drafters is None else drafters))]


def _settings(section: dict[str, Any], is_run: bool = False, prefix: str = "") -> Iterator[Setting]:
    ordered = sorted(
        section["properties"].items(), key=lambda setting: setting[1].get("x-default") == "from the target"
    )
    for name, one in ordered:
        if name == "kind":
            continue
        is_required = name in section.get("required", ())
        default = "required" if is_required else one.get("x-default") or _default(one.get("default"))
        yield Setting(prefix + name, _words(one), default, one.get("description", ""))
        for part in () if is_run else _options(one):
            if "$ref" in part:
                yield from _settings(schema()["$defs"][part["$ref"].rpartition("/")[2]], prefix=f"{prefix}{name}.")


def _options(one: dict[str, Any]) -> list[dict[str, Any]]:
    """The types of a setting, except null."""
    return [option for option in one.get("anyOf", [one]) if option.get("type") != "null"]


def _words(one: dict[str, Any], many: bool = False) -> str:
    """The type of a setting: `whole number, at least 1`."""
    options = _options(one)
    if len(options) > 1:
        lists = [option["items"] for option in options if option.get("type") == "array"]
        words = [_words(option, many) for option in options if option not in lists]
        return (", or " if any("," in word for word in words) else " or ").join(dict.fromkeys(words))
    [only] = options
    plural = "s" if many else ""
    match only:
        case {"$ref": _} | {"oneOf": _} | {"type": "object", "properties": _}:
            return "section"
        case {"enum": choices}:
            return _either([_default(choice) for choice in choices])
        case {"const": choice}:
            return _default(choice)
        case {"type": "array", "items": items}:
            return f"list{plural} of {_words(items, many=True)}"
        case {"type": "object", "additionalProperties": {"type": "number" | "string"} as values}:
            return f"mapping{plural} of names to {_words(values, many=True)}"
        case {"type": "object"}:
            return f"mapping{plural}"
        case {"type": "boolean"}:
            return "yes or no"
        case {"type": "integer"}:
            return f"whole number{plural}" + _range(only, whole=True)
        case {"type": "number"}:
            return f"number{plural}" + _range(only, whole=False)
    return f"text{plural}"


def _range(one: dict[str, Any], whole: bool) -> str:
    low, high = one.get("minimum"), one.get("maximum")
    if "exclusiveMinimum" in one and whole:
        low = one["exclusiveMinimum"] + 1
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    words = [] if low is None else [f"at least {low:,}"]
    words += [] if "exclusiveMinimum" not in one or whole else [f"above {one['exclusiveMinimum']:,}"]
    words += [] if high is None else [f"at most {high:,}"]
    words += [] if "exclusiveMaximum" not in one else [f"below {one['exclusiveMaximum']:,}"]
    return ", " + " and ".join(words) if words else ""


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _default(value: Any) -> str:
    """A value as in a run file; lists and mappings without quotes."""
    match value:
        case None | "":
            return "not set"
        case bool():
            return "yes" if value else "no"
        case list():
            return f"[{', '.join(map(_default, value))}]"
        case dict():
            return "{" + ", ".join(f"{key}: {_default(each)}" for key, each in value.items()) + "}"
        case float() if value.is_integer():
            return str(int(value))
    return str(value)
