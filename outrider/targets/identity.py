"""Sizes of a target, and hashes of its tokenizer and weights, to which drafters are bound."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from outrider.errors import first_line
from outrider.targets import quantised
from outrider.targets.anatomy import output_layer, sizes
from outrider.targets.protocol import TargetSpec
from outrider.targets.sizes import layer_sizes, unused_row


def spec_of(model: PreTrainedModel, tokenizer: Any, name: str | None, revision: str | None) -> TargetSpec:
    (layers, hidden, context), words = sizes(model), output_layer(model).weight.shape[0]
    return TargetSpec(
        name or type(model).__name__, revision or getattr(model.config, "_commit_hash", None), layers, hidden, words,
        context,
        str(model.dtype).removeprefix("torch."), None if tokenizer is None else hash_tokenizer(tokenizer),
        hash_weights(model),
        quantised=quantised.precision(model), sizes=layer_sizes(model.config), unused=unused_row(tokenizer, words),
    )  # fmt: skip


def load_tokenizer(path: str, **options: Any) -> tuple[Any, str]:
    """The tokenizer of a folder or Hugging Face id; where there is none, None and why."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, KeyError) as error:
        return None, first_line(error)
    # without files transformers makes up a tokenizer of special tokens alone
    is_real = len(tokenizer.get_vocab()) > len(tokenizer.all_special_tokens)
    return (tokenizer, "") if is_real else (None, "its vocabulary is empty")


def hash_tokenizer(tokenizer: Any) -> str:
    """SHA-256 over the sorted vocabulary, 16 hex digits."""
    entries = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256("\n".join(f"{token}\t{number}" for token, number in entries).encode()).hexdigest()[:16]


def hash_weights(model: nn.Module) -> str:
    """SHA-256 over names, shapes and the first values of every weight, read as bfloat16 so that the dtype does not
    matter."""
    digest = hashlib.sha256()
    for name, whole in sorted(model.state_dict().items()):
        for part, weight in quantised.parts(name, whole):
            sample = weight.flatten()[:64].to("cpu", torch.bfloat16).view(torch.int16)
            digest.update(f"{part} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
