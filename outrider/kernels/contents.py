"""Detects changed weights of a model by hashing their contents.

Packed weights, compiled packages and captured graphs depend on the old values.  torch counts most writes to a tensor,
but not those through `.data`, as when PEFT merges adapters, weights are averaged or checkpoints are copied in.  So all
weights are hashed before each batch of texts, which takes about as long as one or two plain steps.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider import kernels

PART = 2**24
"""Number of words that a GPU hashes at once."""


_held: ContextVar[bool] = ContextVar("held", default=False)


@contextmanager
def held() -> Iterator[None]:
    """Promises that weights don't change within this context: each is hashed at most once in this thread."""
    token = _held.set(True)
    try:
        yield
    finally:
        _held.reset(token)


class Stamp(NamedTuple):
    """A weight at one moment."""

    place: int
    """The tensor's id, since another tensor may have taken its place."""
    pointer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int

    @classmethod
    def of(cls, tensor: Tensor, digest: int) -> Stamp:
        return cls(id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, digest)


class Contents:
    """Watches the weights of one model."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._stamps: dict[str, Stamp] | None = None

    def changes(self) -> list[str]:
        """Names of parameters and buffers that changed since the last call; none at the first one.

        Increases their version counters, so that code relying on these also sees the change.
        """
        if self._stamps is not None and _held.get():
            return []
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        digests = digests_of(list(tensors.values()))
        stamps = {
            name: Stamp.of(tensor, hashed) for (name, tensor), hashed in zip(tensors.items(), digests, strict=True)
        }
        before, self._stamps = self._stamps, stamps
        if before is None:
            return []
        changed = [name for name, stamp in stamps.items() if before.get(name) != stamp]
        for name in changed:
            if not tensors[name].is_inference():
                torch.autograd.graph.increment_version(tensors[name])
        return changed + [name for name in before if name not in stamps]


@torch.no_grad()
def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """A hash of each tensor's contents; 0 for tensors without memory in this process."""
    hashed = [_digest(tensor) for tensor in tensors]
    sums = [each for each in hashed if isinstance(each, Tensor)]
    on_device = iter(torch.stack(sums).tolist() if sums else ())  # waits for a GPU only once
    return [next(on_device) if isinstance(each, Tensor) else each for each in hashed]


def _digest(tensor: Tensor) -> int | Tensor:
    """A hash; on a GPU a tensor with one element."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
        return 0
    plain = tensor.detach().contiguous()
    if plain.device.type != "cpu":
        return _on_device(plain)
    library = kernels.library()
    if library is None:
        data = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    hashed: int = library.outrider_digest(ctypes.c_void_p(plain.data_ptr()), ctypes.c_int64(plain.nbytes))
    return hashed


def _on_device(plain: Tensor) -> Tensor:
    """A sum of its words, each multiplied by a number for its position: one pass over the GPU's memory."""
    size = 4 if plain.nbytes % 4 == 0 else 1
    words = plain.view(-1).view(torch.int32 if size == 4 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(PART)):
        places = torch.arange(len(part), dtype=torch.int32, device=words.device) * 2 + (2 * number + 1)
        total = total * 31 + (part.to(torch.int32) * places).sum(dtype=torch.int64)
    return total
