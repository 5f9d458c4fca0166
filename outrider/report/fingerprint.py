"""What tells two fingerprints of machines apart.  `measure.fingerprint` takes them; nothing here knows torch."""

from __future__ import annotations

from collections.abc import Mapping

Value = str | int | float | bool | None


def differences(a: Mapping[str, Value], b: Mapping[str, Value]) -> list[str]:
    """What differs between two fingerprints, such as `torch 2.9.0 against 2.13.0`; empty where nothing does.

    A fingerprint without any value agrees with nothing, since nothing is known of it.
    """
    missing = [name for name, own in (("first", a), ("second", b)) if not own]
    if missing:
        return [f"the {name} report has no fingerprint" for name in missing]
    return [
        f"{name.replace('_', ' ')} {_text(a, name)} against {_text(b, name)}"
        for name in sorted(
            a.keys() | b.keys(), key=lambda name: (name not in a, list(a).index(name) if name in a else 0, name)
        )
        if a.get(name) != b.get(name)
    ]


def _text(values: Mapping[str, Value], name: str) -> str:
    value = values.get(name)
    return "unknown" if value is None else ("yes" if value else "no") if isinstance(value, bool) else str(value)
