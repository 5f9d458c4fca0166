"""JSON from files and servers, which may be nested too deeply for Python's parser; and lines, which may have no end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

MOST_LINE = 2**26
"""Bytes of a line; a file may claim any size without taking it up on the disk."""


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, counted from 1.  Raises OSError for one that is longer than `MOST_LINE`."""
    number = 0
    while line := file.readline(MOST_LINE + 1):
        number += 1
        if len(line) > MOST_LINE:
            raise OSError(f"line {number} is longer than {MOST_LINE >> 20} MiB")
        yield number, line


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.  Raises ValueError for any other text, also for one that is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
