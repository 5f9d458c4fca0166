"""Rows of files and data sets, streamed: a file is never loaded as a whole.

FILE.jsonl (a row per line), FILE.json (a list of rows, or a row per line), FILE.parquet, FILE.arrow, FILE.txt (a prompt
per line), a folder of these or of `datasets`' save_to_disk, `stdlib:train`, `stdlib:held_out` and `packages:NAME,…`
(installed Python source), and data sets of the Hugging Face hub.
"""

import codecs
import functools
import itertools
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from outrider import demo
from outrider.data.config import Source
from outrider.data.sources import tables
from outrider.data.sources.questions import questions
from outrider.errors import DataError
from outrider.hub import missing_path
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular
from outrider.targets.files import unreadable

log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
Row = tuple[str, Any]
"""File and line, and the row's content."""
LIBRARY_COUNT = 1000
"""Default number of pieces of installed source."""
SHORT, LONG = 240, 600
"""Characters of a training prompt (short, since prompts cost time and are not trained on), and of other prompts."""
ENDINGS = (".jsonl", ".json", ".parquet", ".arrow", ".txt")
TABLES = (".parquet", ".arrow")
ABOUT = ("", ".md", ".py", ".yaml", ".yml")
"""Names of files that describe a data set."""
SPLIT = re.compile("train|test|valid|dev|eval")
NAMED = 3
"""Number of files that a warning names."""
MIB = 2**20
ROW_BYTES = 64 * MIB
"""Maximum bytes of a row; a longer one means that the file is damaged."""
PIECE = 1 << 16


@dataclass(slots=True)
class Skipped:
    """Rows left out, and why."""

    reasons: list[str] = field(default_factory=list)
    unread: Counter[str] = field(default_factory=Counter)
    """Fields unknown to all layouts, with the number of rows in which they are set."""
    unstable: int = 0
    """Answers from a source that are not trained on, since their boundaries in the rendered text are uncertain."""

    def usable(self, items: Iterable[T], parse: Callable[[T], U], skip_bad: bool) -> Iterator[U]:
        """`parse(item)` of every item; with `skip_bad`, an item that raises DataError is noted and skipped."""
        for item in items:
            try:
                parsed = parse(item)
            except DataError as error:
                if not skip_bad:
                    raise
                self.reasons.append(str(error))
            else:
                yield parsed


def rows(source: Source, skip_bad: bool, skipped: Skipped, seed: int = 0) -> Iterator[Row]:
    """Every row of a source; with `skip_bad`, lines that can't be read are noted in `skipped`.

    seed: of the library's prompts, and of a data set's order if only some of its rows are read.
    Raises DataError with file and line for a row that can't be read.
    """
    if source.name is not None:
        return _hub(source, seed)
    assert source.path is not None
    if source.is_built_in:
        return _built_in(source.path, source.count or LIBRARY_COUNT, seed)
    return (row for path in files_of(source) for row in _of_file(path, skip_bad, skipped))


def files_of(source: Source) -> list[Path]:
    """The files of a source, sorted by name; empty for installed source and data sets on the hub."""
    if source.path is None or source.is_built_in:
        return []
    path = Path(source.path).expanduser()
    if (problem := missing_path(source.path)) is not None:
        raise DataError(f"{problem}; give a file of prompts, a data set, or stdlib:train for the demo's prompts")
    if not path.is_dir():
        return [path]
    if (saved := tables.saved_files(path, source.split)) is not None:
        return saved
    inside = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    files = [file for file in inside if file.suffix.lower() in ENDINGS]
    if not files:
        raise DataError(f"{path} has no file of prompts; give files that end in {', '.join(ENDINGS)}")
    _warn_of_others(path, files, [file for file in inside if file.suffix.lower() not in (*ENDINGS, *ABOUT)])
    return files


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@functools.lru_cache(64)
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def _warn_of_others(folder: Path, files: list[Path], others: list[Path]) -> None:
    """Log once which files of a folder are not read, and whether those of several splits are."""
    if others:
        names = ", ".join(str(file.relative_to(folder)) for file in others[:NAMED])
        _warn_once(
            f"{len(others)} files of {folder} are not read, such as {names}; those that are end in {', '.join(ENDINGS)}"
        )
    splits = {match[0] for file in files if (match := SPLIT.match(file.name.lower()))}
    if len(splits) > 1:
        _warn_once(
            f"{folder} has files of several splits, {', '.join(sorted(splits))}, and all are read; name one file"
        )


def _of_file(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    kind = path.suffix.lower()
    if kind not in ENDINGS:
        raise DataError(f"{path} has an unknown type; give a file that ends in {', '.join(ENDINGS)}")
    if (problem := unreadable(path)) is not None:
        raise DataError(problem)
    if kind in TABLES:
        return tables.rows_of(path)
    if kind == ".txt":
        return _rows_by_line(path, skip_bad, skipped, _prompt_line)
    if kind == ".jsonl":
        return _rows_by_line(path, skip_bad, skipped, _json_line)
    return _json(path, skip_bad, skipped)


def _built_in(path: str, count: int, seed: int) -> Iterator[Row]:
    kind, name = path.split(":", 1)
    if kind == "instructions":
        if name not in get_args(demo.Split):
            raise DataError(f"instructions:{name} is unknown; use instructions:train or instructions:held_out")
        prompts = many_instructions(seed) if name == "train" else instructions(name, seed)
        return ((row["id"], row) for row in itertools.islice(prompts, count))
    if kind == "packages":
        drawn = demo.pieces(demo.package_modules(name.split(",")), count, f"{path} {seed}", SHORT)
    elif name in get_args(demo.Split):
        is_train = name == "train"
        # another seed for held-out pieces, since an evaluation with the same seed would draw the same ones
        drawn = demo.prompts(cast(demo.Split, name), count, seed + (not is_train), SHORT if is_train else LONG)
    else:
        raise DataError(f"stdlib:{name} is unknown; use stdlib:train or stdlib:held_out")
    return ((name, {"id": name, "prompt": text}) for name, text in drawn)


def instructions(split: str, seed: int, kinds: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """The instructions for chat models that ship with Outrider, shuffled by the seed: {id, kind, split, turns}.

    kinds: only these, if not empty.
    """
    lines = (resources.files("outrider.data") / "instructions.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(parse_json, lines) if row["split"] == split]
    random.Random(f"{split} {seed}").shuffle(rows)
    named = ({"id": f"instructions:{split}:{number}", **row} for number, row in enumerate(rows))
    return (row for row in named if not kinds or row["kind"] in kinds)


def many_instructions(seed: int) -> Iterator[dict[str, Any]]:
    """The instructions for training, followed by alternating questions about functions of the standard library and
    repetitions of the instructions under new ids, until there are no more questions."""
    first = list(instructions("train", seed))
    yield from first
    again = itertools.cycle(first)
    for number, (place, text) in enumerate(questions(demo.modules("train"), f"instructions {seed}")):
        yield {"id": f"instructions:train:{place}", "kind": "code-python", "split": "train", "turns": [text]}
        row = next(again)
        yield row | {"id": f"{row['id']}:{2 + number // len(first)}"}


# ── lines ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    """Lines as bytes, so that an invalid character affects only its line; None for a line that is too long.

    A byte order mark at the start is removed.
    """
    try:
        with regular(path).open("rb") as file:
            number = 0
            while line := file.readline(ROW_BYTES + 1):
                number += 1
                if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise DataError(f"{path}, line 1 begins with a UTF-16 byte order mark; save the file as UTF-8")
                is_long = len(line) > ROW_BYTES
                while is_long and line and not line.endswith(b"\n"):
                    line = file.readline(ROW_BYTES)
                content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield number, None if is_long else content
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _nonempty_lines(path: Path) -> Iterator[tuple[int, bytes | None]]:
    return ((number, line) for number, line in _lines(path) if line is None or line.strip())


def _rows_by_line(
    path: Path, skip_bad: bool, skipped: Skipped, parse: Callable[[Path, int, bytes], Any]
) -> Iterator[Row]:
    """A row for every line that is not empty.  parse: gets file, line number and line."""

    def row(numbered: tuple[int, bytes | None]) -> Row:
        number, line = numbered
        if line is None:
            raise DataError(
                f"{path}, line {number} is longer than {ROW_BYTES // MIB} MiB; write one row per line, or skip such "
                "lines with --skip-bad"
            )
        return f"{path.name}:{number}", parse(path, number, line)

    return skipped.usable(_nonempty_lines(path), row, skip_bad)


def _prompt_line(path: Path, number: int, line: bytes) -> dict[str, str]:
    try:
        return {"prompt": line.decode("utf-8").rstrip("\r\n")}
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number} is not UTF-8 text: {error}") from None


def _json_line(path: Path, number: int, line: bytes) -> Any:
    try:
        return parse_json(line)
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else " (the line is cut off)"
        raise DataError(
            f"{path}, line {number} is not JSON{cut}: {error}; correct it, or skip such lines with --skip-bad"
        ) from None


# ── one list of rows ──────────────────────────────────────────────────────────────────────────────────────────────────


def _json(path: Path, skip_bad: bool, skipped: Skipped) -> Iterator[Row]:
    """Rows of a list, as in ShareGPT's file, streamed; a file of this name with a JSON row per line is read too."""
    text = _Text(path)
    if text.next_letter() == "[":
        return _listed(path, text)
    text.close()
    lines = [line for _, line in itertools.islice(_nonempty_lines(path), 2)]
    if len(lines) == 2 and (lines[0] is None or _is_json(lines[0])):
        return _rows_by_line(path, skip_bad, skipped, _json_line)
    if len(lines) == 1 and lines[0] is not None and _is_json(lines[0]):
        problem = f"{path} must have a list of rows, got {type(parse_json(lines[0])).__name__}"
    else:
        problem = f"{path} is not JSON: neither a list of rows nor a row per line"
    raise DataError(f"{problem}; give a list, or FILE.jsonl with one row per line")


def _is_json(text: bytes) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _listed(path: Path, text: "_Text") -> Iterator[Row]:
    """The entries of the list at the current position of `text`."""
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
            raise text.error("there is text after the end of the list")


class _Text:
    """A file's text, decoded in pieces, with a current position."""

    def __init__(self, path: Path):
        self.path, self._text, self._at = path, "", 0
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decoder = json.JSONDecoder()
        try:
            self._file = regular(path).open("rb")
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
        """The next non-space character, without consuming it; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def value(self, name: str) -> Any:
        """Consume the next value.  Raises DataError if it is not JSON or longer than a row may be."""
        self.next_letter()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                if len(self._text) - self._at > ROW_BYTES:
                    raise DataError(f"{self.path}: {name} is longer than {ROW_BYTES // MIB} MiB, or damaged") from None
                if isinstance(error, RecursionError) or not self._more():
                    raise self.error(f"{name}: {error}") from None
                continue
            is_number = isinstance(value, int | float) and self._text[end : end + 1] in ("", *"+-.eE0123456789")
            if is_number and self._more():  # it may continue in the next piece
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Double the buffer, so that the total time for a long row stays linear."""
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
    loaded = data_set(source, seed)
    try:
        for number, row in enumerate(loaded):
            yield f"{source.name}[{number}]", tables.plain_row(row)
    except (OSError, ValueError, ConnectionError) as error:
        raise _unreachable(source, error) from None


@functools.lru_cache(8)
def data_set(source: Source, seed: int = 0) -> Any:
    """A data set on the hub: downloaded, or streamed if only some of its rows are used."""
    assert source.name is not None
    if (problem := missing_path(source.name)) is not None:
        raise DataError(f"{problem}; name a file of prompts, a data set on the hub, or stdlib:train")
    import datasets  # takes a second

    is_streamed = source.count is not None
    try:
        loaded = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision, streaming=is_streamed
        )
        return loaded.shuffle(seed=seed, buffer_size=10_000) if is_streamed else loaded
    except (OSError, ValueError, ConnectionError) as error:
        raise _unreachable(source, error) from None


def _unreachable(source: Source, error: Exception) -> DataError:
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(f"can't load data set {source.name!r}: {first}; without a network, give a local .jsonl file")
