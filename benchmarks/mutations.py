"""Damages files and bodies: bytes are cut, flipped or repeated, and values, keys and nesting of JSON change."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

CHUNKS = (
    b"\x00", b"\xff" * 8, b"\xff\xff\xff\x7f", b"\x1b]0;x\x07", b"\xed\xa0\x80", b"9" * 5000, b"1e999", b"-1", b"NaN",
    b"null", b"[" * 3000, b'{"a":' * 3000, b'"', b"\\ud800", b"\n", b",", b"\r\n\r\n", b"\x00" * 4096,
    (2**63).to_bytes(8, "little"), (2**31).to_bytes(4, "big"), b"&a [*a]", b"0x", b"\xef\xbb\xbf",
)  # fmt: skip
"""Inserted into files."""
DEEP = "DEEP"
"""Stands for a value that is nested too deeply for `json.dumps`."""
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**63, -(2**63) - 1, 10**30, 1.5, -0.0, 1e-320, 1e308, float("inf"),
    float("nan"), "", " ", "a", "\ud800", "\x1b[2J\x07", "\x00", "../../etc/passwd", "/dev/zero", "9" * 400, "a" * 5000,
    "<|im_start|>", [], {}, [[]], [None], [0] * 2000, [[1, 2]] * 50, {"": None}, {"a": {"b": [1]}}, {"type": "text"},
    ["a", 1, None], DEEP,
)  # fmt: skip
"""Replacements for values."""


def damaged(content: bytes, draw: random.Random) -> bytes:
    """The content with one to three changes to its structure if it is JSON, otherwise to its bytes."""
    for _ in range(draw.choice((1, 1, 2, 3))):
        changed = restructured(content, draw) if draw.random() < 0.7 else None
        content = changed if changed is not None else rebytes(content, draw)
    return content


def rebytes(content: bytes, draw: random.Random) -> bytes:
    """One change of bytes, half of them near the beginning, where the sizes are."""
    data = bytearray(content)
    near = min(len(data), 4096) if draw.random() < 0.5 else len(data)
    at, size = draw.randrange(near + 1), draw.choice((1, 1, 2, 8, 64, 1024))
    match draw.randrange(6):
        case 0:
            data[at : at + 1] = bytes([draw.randrange(256)])
        case 1:
            del data[at : at + size]
        case 2:
            data[at:at] = data[at : at + size]
        case 3:
            data[at:at] = draw.choice(CHUNKS)
        case 4:
            chunk = draw.choice(CHUNKS)
            data[at : at + len(chunk)] = chunk
        case _:
            del data[at:]
    return bytes(data)


def restructured(content: bytes, draw: random.Random) -> bytes | None:
    """One change to the JSON, or to one line of JSONL; None if it is neither."""
    try:
        return dumped(changed(json.loads(content), draw))
    except (ValueError, RecursionError):
        pass
    lines = content.splitlines(keepends=True)
    if len(lines) < 2 or len(lines) > 10_000:
        return None
    at = draw.randrange(len(lines))
    try:
        lines[at] = dumped(changed(json.loads(lines[at]), draw)) + b"\n"
    except (ValueError, RecursionError):
        return None
    return b"".join(lines)


def changed(value: Any, draw: random.Random) -> Any:
    """JSON with one value replaced, removed, repeated or renamed."""
    value = copy.deepcopy(value)
    places = list(places_in(value))
    if not places:
        return draw.choice(VALUES)
    owner, key = draw.choice(places)
    match draw.randrange(6):
        case 0 if isinstance(owner, dict):
            owner[draw.choice(("", "x", "\x1b[2J", key + "_", key.upper(), "a" * 300))] = owner.pop(key)
        case 1:
            del owner[key]
        case 2:
            owner[key] = [owner[key]] * draw.choice((1, 2, 300))
        case 3:
            others = [other for holder, name in places for other in [holder[name]]]
            owner[key] = copy.deepcopy(draw.choice(others))
        case _:
            owner[key] = draw.choice(VALUES)
    return value


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places_in(inner)


def dumped(value: Any) -> bytes:
    return json.dumps(value).replace(f'"{DEEP}"', "[" * 5000 + "]" * 5000).encode()
