"""Tiny targets of bytes and patches in float64."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from conftest import scaled
from contracts.chances import TOKENS

from outrider.lab.targets.byte_model import ByteConfig, ByteModel, entropies
from outrider.sampling.distribution import Settings, distribution

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "window_size": 24,
    "local_encoder_layers": 1, "local_decoder_layers": 1, "global_layers": 2,
    "global_hidden_size": 48, "global_intermediate_size": 64, "global_attention_heads": 3,
    "patcher_hidden_size": 16, "patcher_intermediate_size": 32, "patcher_attention_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip


def byte_model(seed: int = 0, by: float = 2.0, patch: float = 3.0, **overrides: object) -> ByteModel:
    """A random one whose greedy text does not collapse at once.  Equal seed and sizes, equal weights.

    patch: bytes of a patch, on average over random text."""
    torch.manual_seed(seed)
    model = scaled(ByteModel(ByteConfig(**(SIZES | overrides))).double().eval(), by)
    ids = torch.randint(model.config.vocab_size, (1, 200), generator=torch.Generator().manual_seed(seed))
    causal = torch.ones(1, 200, 200, dtype=torch.bool).tril()
    patcher = model.model.patcher
    found = entropies(patcher(ids, causal, torch.arange(200)[None])).quantile(1 - 1 / patch)
    patcher.threshold = model.config.entropy_threshold = float(found.detach())
    return model


def ends_of(model: ByteModel, text: list[int]) -> list[bool]:
    """Which bytes of a text end a patch, told byte by byte."""
    patcher, found = model.model.patcher, []
    for count in range(1, len(text) + 1):
        at = torch.arange(count)
        mask = (at <= at[:, None]) & (at > at[:, None] - model.config.window_size)
        found.append(float(entropies(patcher(torch.tensor([text[:count]]), mask[None], at[None]))[0, -1]))
    return [entropy > model.config.entropy_threshold for entropy in found]


@contextmanager
def passes(model: ByteModel) -> Iterator[Counter[str]]:
    """Counts passes of the local layers and of the global model."""
    counts: Counter[str] = Counter(local=0, wide=0)
    parts = {"local": model.model.layers[0], "wide": model.model.global_model.layers[0]}
    hooks = [part.register_forward_hook(lambda *_, name=name: counts.update([name])) for name, part in parts.items()]
    yield counts
    for hook in hooks:
        hook.remove()


def exactly(target: Any, prompt: Sequence[int], settings: Settings) -> torch.Tensor:
    """Joint distribution of the next `TOKENS` bytes of a vocabulary of 5, [5, 5, 5]."""
    joint = torch.ones(())
    for count in range(TOKENS):
        heads = torch.tensor(list(itertools.product(range(5), repeat=count)), dtype=torch.int64).view(5**count, count)
        given = torch.cat([torch.tensor(prompt).expand(len(heads), -1), heads], 1)
        p = distribution(target.model(given).logits[None, :, -1].detach(), settings)[0]
        joint = joint[..., None] * p.view(*[5] * count, 5)
    return joint
