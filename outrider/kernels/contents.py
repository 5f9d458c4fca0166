"""Whether a model's weights are still what they were, by what they hold.

Packed weights, compiled packages and captured graphs hold or were made from values as they were.  torch counts most
writes to a tensor, but not those through `.data`, by which PEFT merges adapters, averages are taken and checkpoints
copied in.  So all weights are hashed before a batch of texts, which takes about as long as one or two plain steps.
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
"""Words of a weight that a GPU hashes at once."""


_held: ContextVar[bool] = ContextVar("held", default=False)


@contextmanager
def held() -> Iterator[None]:
    """While this is open nobody changes weights, its opener says: those that were hashed once are not hashed again in
    this thread."""
    token = _held.set(True)
    try:
        yield
    finally:
        _held.reset(token)


class Stamp(NamedTuple):
    """A weight at one moment."""

    place: int
    """Its id: another tensor may have taken its place."""
    pointer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int

    @classmethod
    def of(cls, tensor: Tensor, digest: int) -> Stamp:
        return cls(id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, digest)


class Contents:
    """The weights of one model, watched."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._stamps: dict[str, Stamp] | None = None

    def changes(self) -> list[str]:
        """Names of parameters and buffers that are not what they were at the last call; none at the first one.

        Their version counters are raised, so that whoever stamps by these sees the change too.
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
    """A hash of what each holds; of tensors that have no memory of their own here, 0."""
    hashed = [_digest(tensor) for tensor in tensors]
    sums = [each for each in hashed if isinstance(each, Tensor)]
    on_device = iter(torch.stack(sums).tolist() if sums else ())  # waits for a GPU once
    return [next(on_device) if isinstance(each, Tensor) else each for each in hashed]


def _digest(tensor: Tensor) -> int | Tensor:
    """A hash, on a GPU as a tensor of one number."""
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
    """By sums of its words, each times a number of its place: one pass over the memory of a GPU."""
    size = 4 if plain.nbytes % 4 == 0 else 1
    words = plain.view(-1).view(torch.int32 if size == 4 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(PART)):
        places = torch.arange(len(part), dtype=torch.int32, device=words.device) * 2 + (2 * number + 1)
        total = total * 31 + (part.to(torch.int32) * places).sum(dtype=torch.int64)
    return total
