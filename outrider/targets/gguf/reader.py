"""Reads GGUF files; every length in a file is checked against its size before memory is allocated.

Files are not memory-mapped: if a file is truncated while it is read, that is an error, not a signal that kills the
process.  Independent of architectures and of llama.cpp's library.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from outrider.kernels.blocks import TYPES
from outrider.storage import trusted

MAGIC, VERSIONS, ALIGNMENT = b"GGUF", (2, 3), 32
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
"""Type numbers of values → codes of `struct`."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
MOST_KEYS, MOST_TENSORS = 2**16, 2**17
MOST_VALUES = 2**23
"""Maximum number of values of all keys together, enough for several vocabularies.  In memory, a list takes many times
as many bytes as in the file."""
MOST_TEXT = 2**24
"""Maximum bytes of one text, such as a chat template."""
SHOWN = 80
"""Maximum number of characters of a name from a file in an error message."""


class Damaged(ValueError):
    """A file is not GGUF, or is truncated or invalid; the message follows `it can't be read: `."""


class Info(NamedTuple):
    """Where a tensor is in its file."""

    shape: tuple[int, ...]
    """As in torch, rows first."""
    type: int
    """ggml's number, see `kernels.blocks`."""
    offset: int
    """Bytes from the beginning of the file."""
    size: int
    """Bytes; 0 for an unknown type."""

    @property
    def kind(self) -> str:
        """The name of its type."""
        ggml_type = TYPES.get(self.type)
        return f"type {self.type}" if ggml_type is None else ggml_type.name


class Header(NamedTuple):
    """The keys and tensors of a file."""

    keys: dict[str, Any]
    tensors: dict[str, Info]


def shown(name: str) -> str:
    """A name from a file for an error message: without control characters, and shortened."""
    text = ascii(name)[1:-1]
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def read_header(path: Path) -> Header:
    """Keys, and where the tensors are.  Raises Damaged for a file that is not GGUF, truncated or invalid; OSError."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise Damaged("it is not a regular file")
    return _header(path, about.st_mtime_ns, about.st_size)


@functools.lru_cache(maxsize=2)  # a vocabulary of 150,000 tokens takes half a second, and is read several times
def _header(path: Path, _changed: int, size: int) -> Header:
    with opened(path) as file:
        return _Cursor(file, size).header()


def opened(path: Path) -> BinaryIO:
    """Opens a regular file, without blocking if it is now a pipe."""
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise Damaged("it is not a regular file")
    return file


def read_bytes(file: BinaryIO, info: Info) -> Tensor:
    """A tensor's bytes, uint8 [n].  Raises Damaged if the file has become shorter."""
    data = torch.empty(info.size, dtype=torch.uint8)
    view, at = memoryview(data.numpy()), 0  # type: ignore[arg-type]
    file.seek(info.offset)
    while at < info.size:
        count = file.readinto(view[at:])  # type: ignore[attr-defined]
        if not count:
            raise Damaged("it became shorter while it was read")
        at += count
    return data


class _Cursor:
    """Reads a file from the start; Damaged for anything beyond its end."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.left, self.values = file, size, size, MOST_VALUES

    # ── numbers, texts, values ────────────────────────────────────────────────────────────────────────────────────────

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise Damaged(f"it ends after {self.size} bytes, within a value")
        self.left -= size
        data = self.file.read(size)
        if len(data) != size:
            raise Damaged("it became shorter while it was read")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        size = int.from_bytes(self.take(8), "little")
        if size > MOST_TEXT:
            raise Damaged(f"a text declares {size} bytes, more than {MOST_TEXT}")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise Damaged(f"a text is not UTF-8 ({error.reason})") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == STRING:
            return self.text()
        return self.array() if kind == ARRAY else self.number(_code(kind))

    def array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind == ARRAY:
            raise Damaged("a list holds lists")
        code = "" if kind == STRING else _code(kind)
        self.check(count, 8 if kind == STRING else struct.calcsize(f"<{code}"))
        self.values -= count
        if self.values < 0:
            raise Damaged(f"its keys have more than {MOST_VALUES} values")
        if kind == STRING:
            return [self.text() for _ in range(count)]
        return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(f"<{code}"))))

    def check(self, count: int, size: int) -> None:
        """Raises Damaged if this many values of at least this size don't fit in the rest of the file."""
        if count * size > self.left:
            raise Damaged(f"it declares {count} values, more than it has bytes")

    # ── the whole header ──────────────────────────────────────────────────────────────────────────────────────────────

    def header(self) -> Header:
        if not self.size:
            raise Damaged("it is empty")
        if (magic := self.take(min(self.size, len(MAGIC)))) != MAGIC:
            raise Damaged(trusted.FETCH if magic == trusted.POINTER[: len(MAGIC)] else "it is not a GGUF file")
        version, num_tensors, num_keys = self.number("I"), self.number("Q"), self.number("Q")
        if version not in VERSIONS:
            big_endian = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise Damaged("it is big-endian" if big_endian else f"its version is {version}; supported are {VERSIONS}")
        for count, most in ((num_keys, MOST_KEYS), (num_tensors, MOST_TENSORS)):
            self.check(count, 12)  # the minimum that a key or a tensor takes
            if count > most:
                raise Damaged(f"it declares {count} keys or tensors, more than {most}")
        keys: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self.fresh(keys)
            keys[name] = self.named(name, self.value)
        tensors: dict[str, Info] = {}
        for _ in range(num_tensors):
            name = self.fresh(tensors)
            tensors[name] = self.named(name, self.info)
        return Header(keys, self.placed(tensors, _alignment(keys)))

    def fresh(self, names: Mapping[str, Any]) -> str:
        """The next name, which must be new."""
        name = self.text()
        if name in names:
            raise Damaged(f"{shown(name)} occurs twice")
        return name

    def named(self, name: str, read: Any) -> Any:
        """The next value; errors name its key or tensor."""
        try:
            return read()
        except Damaged as error:
            raise Damaged(f"{error}, in {shown(name)}") from None

    def info(self) -> Info:
        """A tensor, with an offset relative to the first one."""
        dimensions = self.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise Damaged(f"a tensor has {dimensions} dimensions")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        type, offset = self.number("I"), self.number("Q")
        if not all(shape):
            raise Damaged(f"a tensor has shape {shape}")
        ggml_type = TYPES.get(type)
        if ggml_type is None:
            return Info(shape, type, offset, 0)
        if shape[-1] % ggml_type.values:
            raise Damaged(f"a tensor {shape} in {ggml_type.name} has rows that are not a whole number of blocks")
        return Info(shape, type, offset, math.prod(shape) // ggml_type.values * ggml_type.bytes)

    def placed(self, tensors: Mapping[str, Info], alignment: int) -> dict[str, Info]:
        """The tensors with offsets from the start of the file.  Raises Damaged if one is outside the file or overlaps
        another."""
        begin = -(-(self.size - self.left) // alignment) * alignment
        for name, info in tensors.items():
            if info.offset % alignment:
                raise Damaged(f"{shown(name)} begins at {info.offset}, which is not a multiple of {alignment}")
            if info.offset + info.size > self.size - begin:
                raise Damaged(f"it ends within {shown(name)}")
        order = sorted(tensors, key=lambda name: tensors[name].offset)
        for name, after in itertools.pairwise(order):
            if tensors[name].offset + tensors[name].size > tensors[after].offset:
                raise Damaged(f"{shown(name)} and {shown(after)} overlap")
        return {name: info._replace(offset=begin + info.offset) for name, info in tensors.items()}


def _code(kind: int) -> str:
    if kind not in SCALARS:
        raise Damaged(f"a value has type {kind}, which is unknown")
    return SCALARS[kind]


def _alignment(keys: Mapping[str, Any]) -> int:
    alignment = keys.get("general.alignment", ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
        raise Damaged(f"general.alignment is {shown(str(alignment))}, not a power of two up to {2**20}")
    return alignment
