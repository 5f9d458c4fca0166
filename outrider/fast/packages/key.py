"""Hashes of what a compiled package depends on."""

from __future__ import annotations

import hashlib
import itertools

import torch
from torch import nn

from outrider import kernels, machine
from outrider.kernels import prepacked

INLINED = 8
"""Maximum number of values of a vector that inductor writes into the code, so that packages don't read it from the
model."""


def fingerprint(model: nn.Module, *more: object) -> str:
    """Hash of what a package depends on, 16 hex digits: every weight's name and shape, which are tied, and how each is
    multiplied; the values of short vectors; settings and code in `more`; torch, threads and the processor.
    """
    linear = prepacked.way_of(model), prepacked.layout(model), kernels.source()
    digest, first = hashlib.sha256(repr((machine.identity(), linear, more)).encode()), dict[int, str]()
    for name, weight in sorted(model.state_dict().items()):
        shared = first.setdefault(weight.data_ptr(), name)
        digest.update(f"{name} {shared} {tuple(weight.shape)} {weight.dtype}".encode())
    for name, values in itertools.chain(model.named_parameters(), model.named_buffers()):
        if values.ndim <= 1 and values.numel() <= INLINED:
            digest.update(f"{name} {values.tolist()}".encode())
    return digest.hexdigest()[:16]


def values_of(model: nn.Module) -> str:
    """Hash of the weights' values, 16 hex digits; a package with a copy of the weights also depends on it."""
    digest = hashlib.sha256()
    for _, weight in sorted(model.state_dict().items()):
        digest.update(weight.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
