"""The answers in a Batch's output file, looked up by `custom_id` without loading the file."""

import hashlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.data.sources.messages import SKIP
from outrider.errors import DataError
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.trusted import regular
from outrider.targets.files import unreadable


class BatchAnswers:
    """An output file and the offset of each answer in it; takes 16 bytes of memory per answer."""

    def __init__(self, path: str):
        self._path = Path(path).expanduser()
        keys, offsets = array("Q"), array("Q")
        offset = 0
        if (problem := unreadable(self._path)) is not None:
            raise DataError(f"a source's answers: {problem}, or give another output file of the Batch")
        try:
            self._file = regular(self._path).open("rb")
            for number, line in numbered_lines(self._file):
                if line.strip():
                    keys.append(_key(self._row(line, number)["custom_id"]))
                    offsets.append(offset)
                offset += len(line)
        except OSError as error:
            problem = f"a source's answers {path} can't be read: {error.strerror or error}"
            raise DataError(f"{problem}; give the output file of the Batch") from None
        order = np.argsort(np.asarray(keys, np.uint64), kind="stable")
        self._keys = np.asarray(keys, np.uint64)[order]
        self._offsets = np.asarray(offsets, np.uint64)[order]

    def joined(self, row: Any, name: str) -> Any:
        """A row of the Batch's input joined with its answer.  Raises DataError for a row without one."""
        if not isinstance(row, Mapping) or "custom_id" not in row:
            raise DataError(f"{name}: a row of a Batch needs a custom_id, to look up its answer; {SKIP}")
        at = int(np.searchsorted(self._keys, np.uint64(_key(row["custom_id"]))))
        if at < len(self._keys):
            self._file.seek(int(self._offsets[at]))
            answer = self._row(self._file.readline(), at)
            if answer["custom_id"] == row["custom_id"]:
                return {**row, "response": answer.get("response"), "error": answer.get("error")}
        raise DataError(f"{name}: {self._path} has no answer to custom_id {row['custom_id']!r}; {SKIP}")

    def _row(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = parse_json(line)
            if isinstance(row, Mapping) and isinstance(row["custom_id"], str):
                return row
            problem = "it needs a custom_id that is a string"
        except (ValueError, KeyError) as error:
            problem = str(error)
        raise DataError(f"{self._path}, line {number} is not the output of a Batch ({problem}); correct the file")


def _key(custom_id: Any) -> int:
    return int.from_bytes(hashlib.blake2b(str(custom_id).encode("utf-8", "replace"), digest_size=8).digest(), "little")
