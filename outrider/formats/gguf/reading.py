"""Read a GGUF file without llama.cpp's library: every length in it is checked against the file before it is used.

Readable are tensors in f32, f16, bf16 and q8_0, and whole numbers; a tensor that is quantised otherwise is refused by
its name.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.errors import ExportError

SUFFIX = ".gguf"
MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Number of a type of value to its code in `struct`."""
STRING, ARRAY = 8, 9
BLOCK, BLOCK_BYTES = 32, 34
"""Numbers that share a scale in q8_0, and the bytes of them and it."""
TYPES = {0: "f32", 1: "f16", 8: "q8_0", 26: "i32", 27: "i64", 30: "bf16"}
OTHERS = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 9: "q8_1", 10: "q2_K", 11: "q3_K", 12: "q4_K", 13: "q5_K", 14: "q6_K",
    15: "q8_K", 20: "iq4_nl", 23: "iq4_xs", 28: "f64", 39: "mxfp4",
}  # fmt: skip
"""Types of tensors that are known by name only."""
DTYPES = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
MOST_DIMENSIONS = 4
HEADS = {"token_embd.weight": "embed_tokens.weight", "output.weight": "lm_head.weight"}
"""llama.cpp's names of embedding and head, and those that every format here knows them by."""
SHAPES = "outrider.shapes"
"""A key that `read_config` adds: the shape of every tensor, by its name, rows first."""


class Info(NamedTuple):
    """Where a tensor is in its file."""

    shape: tuple[int, ...]
    """As torch has it, rows first."""
    type: int
    offset: int
    """Bytes from the beginning of the file."""


class Header(NamedTuple):
    """What a file says before its tensors' numbers."""

    keys: dict[str, Any]
    tensors: dict[str, Info]


def find(folder: Path) -> Path | None:
    """The GGUF file that a folder, or the path of a file, stands for; None for none.

    Raises ExportError for a folder with several of which none is `model.gguf`.
    """
    if folder.is_file():
        return folder if folder.suffix == SUFFIX else None
    if (folder / f"model{SUFFIX}").exists():
        return folder / f"model{SUFFIX}"
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        names = ", ".join(ascii(path.name)[1:-1] for path in found[:4])
        raise ExportError(f"{folder} has {len(found)} GGUF files: {names}; name one of them")
    return found[0] if found else None


def read_header(path: Path) -> Header:
    """Keys, and where the tensors are.  Raises ExportError for a file that is none, or is torn."""
    try:
        about = path.stat()
        return _header(path, about.st_mtime_ns, about.st_size)
    except (OSError, ValueError, struct.error) as error:
        raise ExportError(f"{path} can't be read: {error}; copy it again") from None


@functools.lru_cache(maxsize=2)  # a vocabulary of 150,000 tokens takes half a second, and is asked for several times
def _header(path: Path, _changed: int, size: int) -> Header:
    if not size:
        raise ValueError("it is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Cursor(data).header()


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a file, and the shapes of its tensors under `SHAPES`."""
    header = read_header(path)
    return header.keys | {SHAPES: {name: info.shape for name, info in header.tensors.items()}}


def read_tensors(path: Path, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors by their names in the file; those of `names` where given.

    Raises ExportError for one that is quantised in a way that is not readable, or not whole.
    """
    header = read_header(path)
    wanted = {name: info for name, info in header.tensors.items() if names is None or name in names}
    return {name: _tensor(path, name, info) for name, info in wanted.items()}


def rounded_heads(path: Path) -> set[str]:
    """Which of embedding and head a file has in q8_0, which is only close to the matrix that was rounded."""
    found = read_header(path).tensors
    return {name for theirs, name in HEADS.items() if theirs in found and TYPES.get(found[theirs].type) == "q8_0"}


def _tensor(path: Path, name: str, info: Info) -> Tensor:
    shown = ascii(name)[1:-1]
    kind = TYPES.get(info.type)
    if kind is None:
        theirs = OTHERS.get(info.type, f"type {info.type}")
        raise ExportError(f"{path} has {shown} in {theirs}; use a file in q8_0, f16, bf16 or f32")
    count = math.prod(info.shape)
    if kind == "q8_0" and (not info.shape or info.shape[-1] % BLOCK):
        raise ExportError(f"{path} has {shown} {info.shape} in q8_0, whose rows go in {BLOCK}s; copy it again")
    length = count // BLOCK * BLOCK_BYTES if kind == "q8_0" else count * DTYPES[kind].itemsize
    if info.offset + length > path.stat().st_size:
        raise ExportError(f"{path} ends within {shown}; copy it again")
    with path.open("rb") as file:
        file.seek(info.offset)
        raw = bytearray(file.read(length))
    if not raw:
        return torch.empty(info.shape)
    return widened(torch.frombuffer(raw, dtype=torch.uint8), kind, info.shape)


def widened(raw: Tensor, kind: str, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a tensor's bytes [n], uint8; q8_0 becomes float32."""
    if kind != "q8_0":
        return raw.view(DTYPES[kind]).view(shape)
    blocks = raw.view(-1, BLOCK_BYTES)
    scales = blocks[:, :2].contiguous().view(torch.float16).float()
    return (blocks[:, 2:].view(torch.int8).float() * scales).view(shape)


class _Cursor:
    """Reads a file's bytes from the front; ValueError for what lies beyond its end."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        if size > len(self.data) - self.at:
            raise ValueError(f"it ends after {len(self.data)} bytes, within a value")
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode("utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        return self.array() if kind == ARRAY else self.number(_code(kind))

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == STRING:
            self.check(count, 8)
            return [self.text() for _ in range(count)]
        code = _code(kind)
        self.check(count, struct.calcsize(code))
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))

    def check(self, count: int, size: int) -> None:
        """ValueError where so many of at least this size are more than what is left of the file."""
        if count * size > len(self.data) - self.at:
            raise ValueError(f"it announces {count} values, more than it has bytes")

    def header(self) -> Header:
        if self.take(4) != MAGIC:
            raise ValueError("it is not a GGUF file")
        version, num_tensors, num_keys = self.number("I"), self.number("Q"), self.number("Q")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}; readable are {VERSIONS}")
        keys = _unique((self.text(), self.value()) for _ in range(self.checked(num_keys)))
        infos = _unique((self.text(), self.info()) for _ in range(self.checked(num_tensors)))
        alignment = keys.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self.at // alignment) * alignment
        return Header(keys, {name: info._replace(offset=begin + info.offset) for name, info in infos.items()})

    def checked(self, count: int) -> int:
        self.check(count, 12)  # the least that a key or a tensor takes
        return count

    def info(self) -> Info:
        dimensions = self.number("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        return Info(shape, self.number("I"), self.number("Q"))


def _code(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"a value has type {kind}, which is unknown")
    return SCALARS[kind]


def _unique(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in items:
        if name in found:
            raise ValueError(f"{ascii(name)[1:-1]} is there twice")
        found[name] = value
    return found
