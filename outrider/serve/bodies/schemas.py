"""JSON schemas for answers, tightened so that a small model terminates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAP = r"( |\n[ \t]{0,24})?"
"""White space allowed between two parts of JSON: a small model may otherwise write line feeds until it is cut off."""
COMBINED = (
    "anyOf", "oneOf", "$ref", "if", "not", "unevaluatedProperties", "patternProperties", "propertyNames",
    "minProperties", "dependentRequired", "dependentSchemas",
)  # fmt: skip
"""Besides `properties`, these keywords may require further properties."""
NAMED = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
"""Keywords whose keys are names."""
VALUES = ("enum", "const", "default", "examples")


def bounded(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with little white space, and without properties that it does not name, unless it mentions them: a
    small model may otherwise add properties until it is cut off."""
    return {"x-guidance": {"whitespace_pattern": GAP}} | (dict(schema) if _is_combined(schema) else _closed(schema))


def _is_combined(schema: Any) -> bool:
    """Whether an object's properties are spread over several schemas, none of which lists them all."""
    if isinstance(schema, list):
        return any(map(_is_combined, schema))
    if not isinstance(schema, Mapping):
        return False
    if "allOf" in schema or ("properties" in schema and _asks_for_others(schema)):
        return True
    return any(_is_combined(value) for key, value in schema.items() if key not in VALUES)


def _asks_for_others(schema: Mapping[str, Any]) -> bool:
    """Whether an object may need properties besides those in `properties`."""
    properties, required = schema["properties"], schema.get("required", ())
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return True
    return any(keyword in schema for keyword in COMBINED) or any(name not in properties for name in required)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            closed[key] = {name: _closed(one) for name, one in value.items()}
        else:
            closed[key] = value if key in VALUES else _closed(value)
    return {"additionalProperties": False} | closed if "properties" in schema else closed
