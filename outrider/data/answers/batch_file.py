"""The answers in a Batch's output file, found by their `custom_id` without holding the file."""

import hashlib
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from outrider.data.sources.messages import SKIP
from outrider.errors import DataError


class BatchAnswers:
    """An output file, and where each answer stands in it: 16 bytes of memory an answer."""

    def __init__(self, path: str):
        self._path = Path(path).expanduser()
        keys, offsets, offset = array("Q"), array("Q"), 0
        try:
            self._file = self._path.open("rb")
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    keys.append(_key(self._row(line, number)["custom_id"]))
                    offsets.append(offset)
                offset += len(line)
        except OSError as error:
            problem = f"a source's answers {path} can't be read: {error.strerror}"
            raise DataError(f"{problem}; give the output file of the Batch") from None
        order = np.argsort(np.asarray(keys, np.uint64), kind="stable")
        self._keys = np.asarray(keys, np.uint64)[order]
        self._offsets = np.asarray(offsets, np.uint64)[order]

    def joined(self, row: Any, name: str) -> Any:
        """A row of the Batch's input with the answer to it.  Raises DataError for a row that has none."""
        if not isinstance(row, Mapping) or "custom_id" not in row:
            raise DataError(f"{name}: a row of a Batch has a custom_id, and its answer is found by it; {SKIP}")
        at = int(np.searchsorted(self._keys, np.uint64(_key(row["custom_id"]))))
        if at < len(self._keys):
            self._file.seek(int(self._offsets[at]))
            answer = self._row(self._file.readline(), at)
            if answer["custom_id"] == row["custom_id"]:
                return {**row, "response": answer.get("response"), "error": answer.get("error")}
        raise DataError(f"{name}: {self._path} has no answer to custom_id {row['custom_id']!r}; {SKIP}")

    def _row(self, line: bytes, number: int) -> Mapping[str, Any]:
        try:
            row = json.loads(line)
            if isinstance(row, Mapping) and isinstance(row["custom_id"], str):
                return row
            problem = "a custom_id is wanted"
        except (ValueError, KeyError, RecursionError) as error:
            problem = str(error)
        raise DataError(f"{self._path}, line {number} is not the output of a Batch ({problem}); correct the file")


def _key(custom_id: Any) -> int:
    return int.from_bytes(hashlib.blake2b(str(custom_id).encode("utf-8", "replace"), digest_size=8).digest(), "little")
