"""Rows of prompts from wherever they are.

Sources: `stdlib:train` and `stdlib:held_out` (the demo's prompts), FILE.jsonl, FILE.txt (a prompt a line), or a data set's
name on the Hugging Face hub.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from outrider import demo
from outrider.data.config import Config
from outrider.errors import DataError


@dataclass(slots=True)
class Skipped:
    """Rows left out, and why."""

    reasons: list[str] = field(default_factory=list)

    def add(self, error: DataError, skip_bad: bool) -> None:
        """Count a row that can't be used where `skip_bad` asks for that; else raise the error."""
        if not skip_bad:
            raise error
        self.reasons.append(str(error))

    def __len__(self) -> int:
        return len(self.reasons)


def rows(config: Config, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of every row of `config.conversations`; lines that can't be read are counted where asked for."""
    source = config.conversations
    if source.startswith("stdlib:"):
        return _library(source.removeprefix("stdlib:"), config)
    if source.endswith(".jsonl"):
        return _jsonl(Path(source), config.skip_bad, skipped)
    return _texts(Path(source)) if source.endswith(".txt") else _hub(source, config.split)


def _library(split: str, config: Config) -> Iterator[tuple[str, Any]]:
    if split not in get_args(demo.Split):
        raise DataError(f"stdlib:{split} is unknown; use stdlib:train or stdlib:held_out")
    # to train, short prompts: reading one costs as much as writing its answer, and teaches nothing
    characters = 240 if split == "train" else 600
    for name, text in demo.prompts(cast(demo.Split, split), config.count, config.seed, characters):
        yield name, {"id": name, "prompt": text}


def _texts(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        try:
            text = line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from None
        if text.strip():
            yield f"{path.name}:{number}", {"prompt": text}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines as bytes: a torn character spoils its own line alone.  A byte order mark at the start is left out."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}, line 1 begins with the mark of UTF-16; save the file as UTF-8")
                yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
    except FileNotFoundError:
        raise DataError(f"{path} does not exist; name a file of prompts, or stdlib:train for the demo's") from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _jsonl(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = " (the line is cut off)" if not line.endswith(b"\n") else ""
            problem = f"{path}, line {number} is not JSON{cut}: {error}; mend it, or leave such lines out with --skip-bad"
            skipped.add(DataError(problem), skip_bad)


def _hub(name: str, split: str) -> Iterator[tuple[str, Any]]:
    import datasets  # a second to import, and only needed here

    try:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        for number, row in enumerate(rows):
            yield f"{name}[{number}]", row
    except (OSError, ValueError, ConnectionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"can't load data set {name!r}: {first}; give a local .jsonl file where there is no network") from None
