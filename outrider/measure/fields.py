"""What stands under a key of a row, of the type it must have: every reader of rows asks here, and none of them guesses.

A key that is null counts as one that is missing: so Parquet writes it.  Errors are KeyError for a missing key and TypeError,
which says what was given and what was wanted; who knows file and line makes a DataError of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def has(row: Row, key: str) -> bool:
    return row.get(key) is not None


def text(row: Row, key: str) -> str:
    """The text under a key."""
    value = _there(row, key)
    if not isinstance(value, str):
        raise TypeError(f"{key} must be a text, not {value!r:.80}")
    return value


def texts(row: Row, key: str) -> tuple[str, ...]:
    """The list of texts under a key, which may be empty.  One text is no list of its letters."""
    value = _there(row, key)
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise TypeError(f"{key} must be a list of texts, not {value!r:.80}")
    return tuple(value)


def word(row: Row, *keys: str) -> str:
    """The text or the number, written as text, under the first of these keys that is there."""
    key = next((key for key in keys if has(row, key)), keys[0])
    value = _there(row, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (isinstance(value, str) or is_number):
        raise TypeError(f"{key} must be a text or a number, not {value!r:.80}")
    return str(value)


def _there(row: Row, key: str) -> Any:
    if not has(row, key):
        raise KeyError(key)
    return row[key]
