"""Selects the kernels that accept and sample on a device: ours, if they choose the same tokens as the plain rule.

They need CUDA and Triton, or a C++ compiler on a CPU, and are tested once per device and process.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import likeliest
from outrider.errors import first_line
from outrider.kernels import cpu_acceptance, library
from outrider.sampling.distribution import tempered
from outrider.sampling.judge import AcceptanceKernels

log = logging.getLogger(__name__)

SLOTS, VOCABULARY = 16, 5003
"""Sizes of the test; the vocabulary is prime, so not a multiple of any block."""
CHAIN, TREE = (-1, 0, 1, 2), (-1, -1, -1, 0, 0)
"""Parents of the test's drafts."""


@functools.cache
def acceptance_kernels(device: torch.device) -> AcceptanceKernels | None:
    """The kernels that accept and sample on this device; None for the plain rule."""
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and library() is None):
        return None
    kernels: AcceptanceKernels = cpu_acceptance
    try:
        if device.type == "cuda":
            from outrider.kernels import gpu_acceptance  # Triton is only part of torch for GPUs

            kernels = gpu_acceptance
        wrong = difference(kernels, device)
    except Exception as error:  # no Triton, no C compiler for it, or an unsupported GPU
        wrong = first_line(error)
    if wrong:
        log.info("drafts on %s are accepted and sampled by torch, without kernels: %s", device, wrong)
        return None
    return kernels


@torch.inference_mode()
def difference(kernels: AcceptanceKernels, device: torch.device) -> str:
    """How the kernels' results differ from those of the plain rule; "" if they don't."""
    noise = torch.Generator().manual_seed(11)
    index = torch.arange(SLOTS)
    for parents in (CHAIN, TREE):
        logits = 3 * torch.randn(SLOTS, len(parents) + 1, VOCABULARY, generator=noise)
        q = (
            logits[:, [1 + parent for parent in parents]]
            + torch.randn(SLOTS, len(parents), VOCABULARY, generator=noise)
        ).softmax(-1)
        tokens = q.flatten(0, 1).multinomial(1, generator=noise).view(SLOTS, -1)
        on_device = [each.to(device) for each in (logits, tokens, q, torch.linspace(0.4, 1.5, SLOTS))]
        for seeded in (None, (index % 2 == 0).to(device)):
            streams = Streams((7 + index).to(device), (3 * index).to(device), seeded)
            for has_q in (True, False):
                if wrong := _difference(kernels, on_device, parents, streams, has_q):
                    return wrong
    return ""


def _difference(
    kernels: AcceptanceKernels, inputs: Sequence[Tensor], parents: Sequence[int], streams: Streams, has_q: bool
) -> str:  # fmt: skip
    """`difference` for one draft.  inputs: logits, tokens, q and temperatures."""
    logits, tokens, q, temperature = inputs
    sizes = torch.full((SLOTS,), len(parents))
    draft = Draft.fixed(tokens, parents, sizes, q if has_q else None)
    if accepted(kernels.accept(draft, logits, temperature, streams)) != accept(
        draft, tempered(logits, temperature), streams
    ):
        return "our kernels accept different tokens from the plain rule"
    choice = likeliest(logits)
    one_hot = torch.zeros_like(logits).scatter_(-1, choice[..., None], 1.0)
    expected = accept(Draft.fixed(tokens, parents, sizes), one_hot, streams)
    if any(accepted(kernels.accept_greedy(draft, logits, known_choice)) != expected for known_choice in (None, choice)):
        return "our kernels accept different greedy tokens from the plain rule"
    plain = tempered(logits[:, 0], temperature)
    sampled_q, drawn = kernels.sample(logits[:, 0], temperature, streams, 2)
    if not torch.equal(drawn, streams.draw(plain, 2, Purpose.DRAFT)) or float((sampled_q - plain).abs().max()) > 1e-5:
        return "our kernels sample different tokens from the plain rule"
    return ""


def accepted(rows: Tensor) -> Accepted:
    """The kernels' output as `Accepted`."""
    return Accepted.read([row[:-1] for row in rows.tolist()])
