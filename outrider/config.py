"""YAML and key=value to frozen, strict configs.  Imports no torch."""

import copy
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider.errors import ConfigError

T = TypeVar("T", bound="Config")


RENAMED = {
    "beside": "baselines", "copies": "init_from_layers", "fresh": "min_first_ngrams", "gram": "ngram", "grams": "ngram_hashes",
    "least": "min_confidence", "least_overlap": "min_overlap", "least_prompts": "min_prompts", "observed": "traced_prompts",
    "parts": "members", "runners_up": "siblings",
}  # fmt: skip
"""Former names of settings, and their names now."""


class Config(BaseModel):
    """Base of every config: frozen, strict about keys; the docstring under a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        for key in data if isinstance(data, Mapping) else ():
            if key not in cls.model_fields:
                now = RENAMED.get(key)
                hint = f"; it is called {now!r} now" if now in cls.model_fields else nearest(str(key), cls.model_fields)
                raise ValueError(f"unknown key {key!r}{hint}")
        return data


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: the nearest known one, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(known))}"


def build(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Validate `values`; a ConfigError names the key path, the given value and what is allowed."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = ".".join(str(part) for part in (where, *problem["loc"]) if part != "")
            message = problem["msg"].removeprefix("Value error, ")
            given = "" if "unknown key" in message or problem["type"] == "missing" else f" (given: {problem['input']!r})"
            lines.append(f"{path + ': ' if path else ''}{message}{given}")
        raise ConfigError("\n".join(lines)) from None


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        values = _parsed(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read run file {path}: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping such as `target: demo`, not {type(values).__name__}")
    return values


def override(values: dict[str, Any], items: Iterable[str]) -> dict[str, Any]:
    """`values` with `key.path=value` items laid over it; values are read as YAML."""
    merged = copy.deepcopy(values)
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r} must be written key.path=value, such as train.lr=3e-4")
        *parents, leaf = key.split(".")
        at = merged
        for parent in parents:
            at = at.setdefault(parent, {})
            if not isinstance(at, dict):
                raise ConfigError(f"override {item!r}: {parent!r} holds {at!r}, which has no keys of its own")
        at[leaf] = _parsed(text, f"override {item!r}: {text!r}")
    return merged


def _parsed(text: str, what: str) -> Any:
    """YAML as values.  Raises ConfigError, which begins with `what`."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {str(error).splitlines()[0]}") from None


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to key paths: {"a": {"b": 1}} is {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Raises OSError or ValueError, with the reason, where there is none.

    A key that is there twice is refused too: readers differ in which counts.
    """
    if path.exists() and not path.is_file():  # a pipe would be read for ever
        raise ValueError("it is not a file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, and a mapping is wanted")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is in it twice")
        found[name] = value
    return found
