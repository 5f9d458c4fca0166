"""Served texts on disk, bounded in size; a fixed share of them is never trained on.

    texts/train/00000007.jsonl      {"prompt", "answer": token ids, "drafts": [[depth, accepted], …], "temperature", …}
    texts/held_out/00000002.jsonl   the same

The hash of a prompt decides its part, so a repeated prompt always lands in the same part.  When a file is full, the
next one is started; when the total size exceeds the limit, the oldest is deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from outrider.errors import DataError
from outrider.storage.json_text import parse_json

Part = Literal["train", "held_out"]
FILES = 16
"""Number of files in a full part; one of them is deleted at a time."""


class Text(NamedTuple):
    """An answered request."""

    prompt: list[int]
    answer: list[int]
    drafts: list[tuple[int, int]]
    """Per step: depth of the draft, and number of accepted tokens; one more token follows them."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def rejected(self) -> list[int]:
        """Positions in the answer at which the drafted token was rejected."""
        places, at = [], 0
        for depth, accepted in self.drafts:
            if accepted < depth and at + accepted < len(self.answer):
                places.append(at + accepted)
            at += accepted + 1
        return places

    @property
    def is_drafted(self) -> bool:
        return any(depth for depth, _ in self.drafts)


class Buffer:
    """The texts in a folder.  One process writes; others may read at the same time.

    max_bytes: of all files together.  one_in: one prompt in `one_in` is held out; held-out texts may use that share of
    the bytes.
    """

    def __init__(self, folder: Path, max_bytes: int, one_in: int):
        self.folder, self.one_in = folder, one_in
        held_out = max_bytes // one_in
        self.most: dict[Part, int] = {"held_out": held_out, "train": max_bytes - held_out}

    def part_of(self, prompt: Sequence[int]) -> Part:
        digest = hashlib.sha256(array("q", prompt).tobytes()).digest()
        return "train" if int.from_bytes(digest[:8], "big") % self.one_in else "held_out"

    def add(self, texts: Sequence[Text]) -> dict[Part, int]:
        """Store texts; returns how many were added to each part.  Raises OSError, for example on a full disk."""
        lines: dict[Part, list[bytes]] = {"train": [], "held_out": []}
        for text in texts:
            lines[self.part_of(text.prompt)].append(json.dumps(text._asdict()).encode() + b"\n")
        for part, part_lines in lines.items():
            if part_lines:
                self._append(part, b"".join(part_lines))
        return {part: len(part_lines) for part, part_lines in lines.items()}

    def newest(self, part: Part, most: int, is_distinct: bool = False) -> list[Text]:
        """Up to `most` texts of a part, the newest first.  is_distinct: only the newest text of each prompt."""
        seen: set[tuple[int, ...]] = set()

        def chosen() -> Iterator[Text]:
            for path in reversed(self.files(part)):
                for text in reversed(read(path)):
                    prompt = tuple(text.prompt)
                    if not (is_distinct and prompt in seen):
                        seen.add(prompt)
                        yield text

        return list(islice(chosen(), most))

    def files(self, part: Part) -> list[Path]:
        """The files of a part, the oldest first."""
        return sorted((self.folder / part).glob("[0-9]*.jsonl"))

    def _append(self, part: Part, data: bytes) -> None:
        files = self.files(part)
        if not files or files[-1].stat().st_size + len(data) > self.most[part] // FILES:
            number = int(files[-1].stem) + 1 if files else 1
            files.append(self.folder / part / f"{number:08d}.jsonl")
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            files[-1].parent.mkdir(exist_ok=True, mode=0o700)
        handle = os.open(files[-1], os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(handle).st_size
            is_torn = size and os.pread(handle, 1, size - 1) != b"\n"  # after a crash or on a full disk
            os.write(handle, b"\n" + data if is_torn else data)
        finally:
            os.close(handle)
        sizes = [path.stat().st_size for path in files]
        while sum(sizes) > self.most[part] and len(sizes) > 1:
            files.pop(0).unlink()
            sizes.pop(0)


def read(path: Path) -> list[Text]:
    """The texts of a file, the oldest first; lines cut off by a crash are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:  # deleted after it was listed
        return []
    return [text for line in lines if (text := _text(line)) is not None]


def _text(line: bytes) -> Text | None:
    try:
        row: dict[str, Any] = parse_json(line)
        return Text(**row | {"drafts": [(depth, accepted) for depth, accepted in row["drafts"]]})
    except (ValueError, TypeError, KeyError):
        return None


def check(texts: Sequence[Text], vocabulary: int, where: Path) -> None:
    """Raises DataError for token ids outside the vocabulary: texts of another target."""
    for text in texts:
        if wrong := [token for token in (*text.prompt, *text.answer) if not 0 <= token < vocabulary]:
            raise DataError(
                f"{where} has token id {wrong[0]}, but this target's ids end at {vocabulary - 1}, so its texts are of "
                "another target; name another folder"
            )
