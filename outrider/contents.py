"""Whether a model's weights are still what they were, by what they hold.

Packed weights, compiled packages and captured graphs hold or were made from values as they were.  torch counts most
writes to a tensor, but not those through `.data`, by which PEFT merges adapters, averages are taken and checkpoints
copied in.  So all weights are hashed before a batch of texts, which takes about as long as one or two plain steps.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from outrider import kernels

PART = 2**24
"""Words of a weight that a GPU hashes at once."""


class Stamp(NamedTuple):
    """A weight at one moment."""

    place: int
    """Its id: another tensor may have taken its place."""
    pointer: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int


class Contents:
    """The weights of one model, watched."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._stamps: dict[str, Stamp] | None = None

    def changes(self) -> list[str]:
        """Names of parameters and buffers that are not what they were at the last call; none at the first one.

        Their version counters are raised, so that whoever stamps by these sees the change too.
        """
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        stamps = {name: _stamp(tensor) for name, tensor in tensors.items()}
        before, self._stamps = self._stamps, stamps
        if before is None:
            return []
        changed = [name for name, stamp in stamps.items() if before.get(name) != stamp]
        for name in changed:
            if not tensors[name].is_inference():
                torch.autograd.graph.increment_version(tensors[name])
        return changed + [name for name in before if name not in stamps]


def _stamp(tensor: Tensor) -> Stamp:
    return Stamp(id(tensor), tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, digest(tensor))


@torch.no_grad()
def digest(tensor: Tensor) -> int:
    """A hash of what a tensor holds; of tensors that have no memory of their own here, 0."""
    if tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter) or not tensor.numel():
        return 0
    plain = tensor.detach()
    if plain.device.type != "cpu":
        return _on_device(plain)
    if not plain.is_contiguous():  # a transposed weight is dense all the same
        plain = plain.contiguous()
    library = kernels.library()
    if library is None:
        data = (ctypes.c_ubyte * plain.nbytes).from_address(plain.data_ptr())
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    library.outrider_digest.restype = ctypes.c_uint64
    hashed: int = library.outrider_digest(ctypes.c_void_p(plain.data_ptr()), ctypes.c_int64(plain.nbytes))
    return hashed


def _on_device(plain: Tensor) -> int:
    """By sums of its words, each times a number of its place: one pass over the memory of a GPU."""
    size = 4 if plain.nbytes % 4 == 0 else 1
    words = plain.contiguous().view(-1).view(torch.int32 if size == 4 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, part in enumerate(words.split(PART)):
        places = torch.arange(len(part), dtype=torch.int32, device=words.device) * 2 + (2 * number + 1)
        total = total * 31 + (part.to(torch.int32) * places).sum(dtype=torch.int64)
    return int(total)
