"""Rows of files and of data sets, one after the other: a file of any size is never held whole.

FILE.jsonl (a row a line), FILE.json (one list of rows, or a row a line), FILE.parquet, FILE.arrow, FILE.txt (a prompt a
line), a folder of these or of `datasets`' save_to_disk, `stdlib:train`, `stdlib:held_out` and `packages:NAME,…`
(Python source that is installed), and data sets of the Hugging Face hub.
"""

import codecs
import functools
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from outrider import demo
from outrider.data.config import Source
from outrider.data.sources import tables
from outrider.data.sources.questions import questions
from outrider.errors import DataError
from outrider.hub import missing_path

T = TypeVar("T")
U = TypeVar("U")
Row = tuple[str, Any]
"""File and line, and what stands there."""
LIBRARY_COUNT = 1000
"""Pieces of installed source, where no count is given."""
SHORT, LONG = 240, 600
"""Characters of a piece to train on, where reading costs as much as writing and trains nothing, and of others."""
ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".txt")
TABLES = (".parquet", ".arrow")
MIB = 2**20
ROW_BYTES = 64 * MIB
"""Longest row of a file: a longer one is a damaged file."""
PIECE = 1 << 16


@dataclass(slots=True)
class Skipped:
    """Rows left out, and why."""

    reasons: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    """Fields of rows that no layout knows, and in how many rows they are filled in."""
    unstable: int = 0
    """Answers given that do not train: where they begin or end in the rendering is not sure."""

    def usable(self, items: Iterable[T], make: Callable[[T], U], skip_bad: bool) -> Iterator[U]:
        """`make(item)` of every item; with `skip_bad`, an item that raises DataError is counted instead."""
        for item in items:
            try:
                made = make(item)
            except DataError as error:
                if not skip_bad:
                    raise
                self.reasons.append(str(error))
            else:
                yield made


def rows(source: Source, skip_bad: bool, skipped: Skipped, seed: int = 0) -> Iterator[Row]:
    """Every row of a source; with `skip_bad`, lines that can't be read are counted in `skipped`.

    seed: of the library's prompts, and of a data set's order where only some rows are read.
    Raises DataError with file and line for what can't be read.
    """
    if source.name is not None:
        return _hub(source, seed)
    assert source.path is not None
    if source.is_built_in:
        return _built_in(source.path, source.count or LIBRARY_COUNT, seed)
    return (row for path in files_of(source) for row in _of_file(path, skip_bad, skipped))


def files_of(source: Source) -> list[Path]:
    """The files of a source, in the order of their names; none of the library and of the hub."""
    if source.path is None or source.is_built_in:
        return []
    path = Path(source.path).expanduser()
    if (problem := missing_path(source.path)) is not None:
        raise DataError(f"{problem}; give a file of prompts, a data set, or stdlib:train for the demo's prompts")
    if not path.is_dir():
        return [path]
    if (saved := tables.saved_files(path, source.split)) is not None:
        return saved
    found = sorted(one for one in path.rglob("*") if one.suffix in ENDINGS and one.is_file())
    if not found:
        raise DataError(f"{path} has no file of prompts; wanted files that end in {', '.join(ENDINGS)}")
    return found


def _of_file(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    if path.suffix not in ENDINGS:
        raise DataError(f"{path} is of an unknown kind; give a file that ends in {', '.join(ENDINGS)}")
    if path.suffix in TABLES:
        return tables.rows_of(path)
    if path.suffix == ".txt":
        return _text_file(path, skip_bad, skipped)
    return _jsonl(path, skip_bad, skipped) if path.suffix == ".jsonl" else _json(path, skip_bad, skipped)


def _built_in(path: str, count: int, seed: int) -> Iterator[Row]:
    kind, name = path.split(":", 1)
    if kind == "instructions":
        if name not in get_args(demo.Split):
            raise DataError(f"instructions:{name} is unknown; use instructions:train or instructions:held_out")
        found = many_instructions(seed) if name == "train" else instructions(name, seed)
        return ((row["id"], row) for row in itertools.islice(found, count))
    if kind == "packages":
        drawn = demo.pieces(demo.package_modules(name.split(",")), count, f"{path} {seed}", SHORT)
    elif name in get_args(demo.Split):
        is_train = name == "train"
        # of the held-out ones, other pieces than an evaluation with the same seed draws
        drawn = demo.prompts(cast(demo.Split, name), count, seed + (not is_train), SHORT if is_train else LONG)
    else:
        raise DataError(f"stdlib:{name} is unknown; use stdlib:train or stdlib:held_out")
    return ((one, {"id": one, "prompt": text}) for one, text in drawn)


def instructions(split: str, seed: int, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The package's own instructions for chat models, in an order by the seed: {id, kind, split, turns}.  kinds: these
    alone."""
    lines = (resources.files("outrider.data") / "instructions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["split"] == split]
    random.Random(f"{split} {seed}").shuffle(rows)
    named = ({"id": f"instructions:{split}:{number}", **row} for number, row in enumerate(rows))
    return (row for row in named if not kinds or row["kind"] in kinds)


def many_instructions(seed: int) -> Iterator[dict[str, Any]]:
    """The instructions for training, and then for as long as there are some, in turn: a question about a function of
    the standard library, and an instruction again, under another id."""
    first = list(instructions("train", seed))
    yield from first
    again = itertools.cycle(first)
    for number, (place, text) in enumerate(questions(demo.modules("train"), f"instructions {seed}")):
        yield {"id": f"instructions:train:{place}", "kind": "code-python", "split": "train", "turns": [text]}
        row = next(again)
        yield row | {"id": f"{row['id']}:{2 + number // len(first)}"}


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Lines as bytes, so that a torn character affects its own line only; None for a line that is too long.  A byte
    order mark at the start is left out."""
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(ROW_BYTES + 1):
                number += 1
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}, line 1 begins with a UTF-16 byte order mark; save the file as UTF-8")
                is_long = len(line) > ROW_BYTES
                while is_long and line and not line.endswith(b"\n"):
                    line = file.readline(ROW_BYTES)
                whole = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield number, None if is_long else whole
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _held(path: Path, number: int, line: bytes | None) -> bytes:
    """The line, unless it is too long."""
    if line is None:
        problem = f"{path}, line {number} is longer than {ROW_BYTES // MIB} MiB"
        raise DataError(f"{problem}; write one row a line, or skip such lines with --skip-bad")
    return line


def _text_file(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    def row(numbered: tuple[int, bytes | None]) -> Row:
        number, line = numbered
        try:
            return f"{path.name}:{number}", {"prompt": _held(path, number, line).decode("utf-8").rstrip("\r\n")}
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from None

    filled = ((number, line) for number, line in _lines(path) if line is None or line.strip())
    return skipped.usable(filled, row, skip_bad)


def _jsonl(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    def row(numbered: tuple[int, bytes | None]) -> Row:
        number, line = numbered
        held = _held(path, number, line)
        try:
            return f"{path.name}:{number}", json.loads(held)
        except (ValueError, RecursionError) as error:
            cut = "" if held.endswith(b"\n") else " (the line is cut off)"
            problem = f"{path}, line {number} is not JSON{cut}: {error}"
            raise DataError(f"{problem}; correct it, or skip such lines with --skip-bad") from None

    filled = ((number, line) for number, line in _lines(path) if line is None or line.strip())
    return skipped.usable(filled, row, skip_bad)


# ── one list of rows ──────────────────────────────────────────────────────────────────────────────────────────────────


def _json(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    """Rows of a list, as ShareGPT's file has them, read piece by piece; lines of JSON under this name are read too."""
    head = _Text(path)
    if head.next_letter() == "[":
        return _listed(path, head)
    head.close()
    filled = list(islice((line for _, line in _lines(path) if line is None or line.strip()), 2))
    if len(filled) == 2 and (filled[0] is None or _is_json(filled[0])):
        return _jsonl(path, skip_bad, skipped)
    if len(filled) == 1 and filled[0] is not None and _is_json(filled[0]):
        problem = f"{path} must hold a list of rows, got {type(json.loads(filled[0])).__name__}"
    else:
        problem = f"{path} is not JSON: neither a list of rows nor a row a line"
    raise DataError(f"{problem}; give a list, or FILE.jsonl with one row per line")


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _listed(path: Path, text: "_Text") -> Iterator[Row]:
    """The entries of the list that `text` stands before."""
    with text:
        text.take(1)
        number = 0
        is_open = text.next_letter() != "]"
        while is_open:
            name = f"{path.name}[{number}]"
            yield name, text.value(name)
            number, letter = number + 1, text.next_letter()
            is_open = letter == ","
            if letter not in (",", "]"):
                raise text.error(f"a comma or the end of the list must follow {name}")
            if is_open:
                text.take(1)
        text.take(1)
        if text.next_letter():
            raise text.error("something follows the list's end")


class _Text:
    """A file's text, decoded in pieces, and a place in it."""

    def __init__(self, path: Path):
        self.path, self._text, self._at = path, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decoder = json.JSONDecoder()
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise DataError(f"{path} can't be read: {error}") from None

    def __enter__(self) -> "_Text":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def error(self, why: str) -> DataError:
        return DataError(f"{self.path} is not JSON: {why}; correct it, or give FILE.jsonl with one row per line")

    def take(self, count: int) -> None:
        self._at += count

    def next_letter(self) -> str:
        """The next letter that is not white space, not taken; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def value(self, name: str) -> Any:
        """The next value, taken.  Raises DataError for what is not JSON, and for what is longer than a row may be."""
        self.next_letter()
        while True:
            try:
                found, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > ROW_BYTES:
                    raise DataError(f"{self.path}: {name} is longer than {ROW_BYTES // MIB} MiB, or damaged") from None
                if isinstance(error, RecursionError) or not self._more():
                    raise self.error(f"{name}: {error}") from None
                continue
            is_number = isinstance(found, int | float) and self._text[end : end + 1] in ("", *"+-.eE0123456789")
            if is_number and self._more():  # it may go on in the next piece
                continue
            self._at = end
            return found

    def _more(self) -> bool:
        """Read on, by as much as is held already, so that a long row is not scanned again and again."""
        self._text, self._at = self._text[self._at :], 0
        try:
            data = self._file.read(max(PIECE, len(self._text)))
            self._text += self._decode(data, not data)
        except OSError as error:
            raise DataError(f"{self.path} can't be read: {error}") from None
        except UnicodeDecodeError as error:
            raise self.error(str(error)) from None
        return bool(data)


# ── the hub ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _hub(source: Source, seed: int) -> Iterator[Row]:
    found = data_set(source, seed)
    try:
        for number, row in enumerate(found):
            yield f"{source.name}[{number}]", tables.without_nulls(row)
    except (OSError, ValueError, ConnectionError) as error:
        raise _unreachable(source, error) from None


@functools.lru_cache(8)
def data_set(source: Source, seed: int = 0) -> Any:
    """A data set of the hub: on disk, or, where only some rows are wanted, read from the network as they come."""
    assert source.name is not None
    if (problem := missing_path(source.name)) is not None:
        raise DataError(f"{problem}; name a file of prompts, a data set of the hub, or stdlib:train")
    import datasets  # a second to import, and only needed here

    only_some = source.count is not None
    try:
        found = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision, streaming=only_some
        )
        return found.shuffle(seed=seed, buffer_size=10_000) if only_some else found
    except (OSError, ValueError, ConnectionError) as error:
        raise _unreachable(source, error) from None


def _unreachable(source: Source, error: Exception) -> DataError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(
        f"can't load data set {source.name!r}: {first}; give a local .jsonl file where there is no network"
    )
