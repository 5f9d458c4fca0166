"""Rows of tables: Parquet and Arrow files, folders written by `datasets`' save_to_disk, data sets on the hub.

A table has one type per column, so each struct has the fields of all rows, with null for those a row lacks.  Such
fields were never in the row and are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from outrider.errors import DataError
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular
from outrider.targets.text.parts import without_nulls

STATE, SPLITS = "state.json", "dataset_dict.json"
"""Files of save_to_disk: one in each data set, and one in a folder of several splits."""
BATCH = 64
"""Number of rows in memory."""
MOST = 1 << 24
"""Bytes of a text, and entries of a list, in a Parquet file's metadata."""


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a .parquet or .arrow file, each with its place.  Raises DataError for a damaged file."""
    import pyarrow  # takes a third of a second

    number = 0
    try:
        regular(path)
        for batch in _parquet(path) if path.suffix.lower() == ".parquet" else _arrow(path):
            batch.validate(full=True)  # an invalid offset would end the process
            for start in range(0, batch.num_rows, BATCH):
                for row in batch.slice(start, BATCH).to_pylist(maps_as_pydicts="strict"):
                    yield f"{path.name}[{number}]", plain_row(row)
                    number += 1
    except (OSError, KeyError, ValueError, MemoryError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path} can't be read after row {number}: {error}; copy the file again, or leave it out"
        ) from None


def plain_row(row: Any) -> Any:
    """A row of a table as it was originally: without null fields, and with JSON types."""
    return _plain(without_nulls(row))


def _plain(value: Any) -> Any:
    """A table's value in JSON: times in ISO 8601, decimals as numbers, bytes as text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode()
        return value.hex()
    if isinstance(value, Decimal):
        return float(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _parquet(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path, thrift_string_size_limit=MOST, thrift_container_size_limit=MOST) as file:
        _refuse_repeated(file.schema_arrow.names)
        yield from file.iter_batches(
            batch_size=BATCH, use_threads=False
        )  # a thread could not report it if memory ran out


def _refuse_repeated(columns: list[str]) -> None:
    """Raises ValueError for two columns of the same name, since a row would keep only the last."""
    if repeated := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise ValueError(f"it has more than one column {repeated[0]!r}")


def _arrow(path: Path) -> Iterator[Any]:
    """Record batches of Arrow's stream format, which `datasets` writes, or of its file format."""
    import pyarrow

    with pyarrow.OSFile(str(path)) as file:  # not memory-mapped: a truncated file would end the process
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            file.seek(0)
            batches = pyarrow.ipc.open_file(file)
            _refuse_repeated(batches.schema.names)
            reader = (batches.get_batch(number) for number in range(batches.num_record_batches))
        else:
            _refuse_repeated(reader.schema.names)
        yield from reader


def saved_files(folder: Path, split: str) -> list[Path] | None:
    """The files of a folder written by save_to_disk, in the order of their rows; None for any other folder.

    Raises DataError if it has several splits but not this one, or if one of its files is missing.
    """
    if (folder / SPLITS).exists():
        splits = _json(folder / SPLITS).get("splits")
        if not isinstance(splits, list) or split not in splits:
            raise DataError(
                f"{folder} has the splits {splits}, but not {split!r}; name one with `split`, or its folder"
            )
        folder = folder / split
    if not (folder / STATE).exists():
        return None
    entries = _json(folder / STATE).get("_data_files")
    entries = entries if isinstance(entries, list) else []
    names = [entry.get("filename") for entry in entries if isinstance(entry, Mapping)]
    files = [folder / name for name in names if isinstance(name, str)]
    if not files or (missing := [file for file in files if not file.is_file()]):
        problem = f"lacks {missing[0].name}" if files else f"has a {STATE} that lists no files"
        raise DataError(f"{folder}, a data set of save_to_disk, {problem}; copy the folder again, or save it again")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(regular(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}; copy the folder again") from None
    return content if isinstance(content, dict) else {}
