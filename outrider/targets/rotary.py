"""Rotary factors that depend on how long a text is: every token gets those that `generate` gives it, whoever shares its pass.

transformers takes the factors of `longrope` (Phi-3, Phi-4-mini) and `dynamic` (InternLM) from the longest position of a pass,
for all of its rows.  Here each token names the length of text that decides: in a prompt that of the prompt, behind it the
token's own.  Keys that are cached keep the factors they were made with; where `generate` reads a text again, once it is longer
than the context of the first training, it is read again here too.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import TargetError
from outrider.targets import hooks
from outrider.targets.anatomy import cache_argument

_LOCK = threading.Lock()
_deciding: ContextVar[Tensor | None] = ContextVar("deciding", default=None)


@dataclass(frozen=True)
class Rotary:
    """How the factors of a family depend on the length of a text."""

    original: int
    """The longest text that has the first factors."""
    rereads: bool
    """Whether `generate` reads the whole text again when it grows longer than that."""


@contextmanager
def deciding(lengths: Tensor) -> Iterator[None]:
    """While this is open, rotary factors go by these lengths of text [R, n], one for each token of a pass."""
    token = _deciding.set(lengths)
    try:
        yield
    finally:
        _deciding.reset(token)


def learn_rotary(model: PreTrainedModel) -> Rotary | None:
    """Teach modules whose factors look at the batch to look at each token.  None where there are no such modules."""
    modules = [module for module in model.modules() if _kinds(module)]
    originals = {_original(module, kind) for module in modules for kind in _kinds(module)}
    if not modules:
        return None
    if len(originals) > 1:
        raise TargetError(f"{type(model).__name__} has rotary factors that change at several lengths: {sorted(originals)}")
    for module in modules:
        hooks.wrap(module, _by_tokens)
    [original] = originals
    return Rotary(original, _rereads(model, original))


def _kinds(module: nn.Module) -> list[str | None]:
    """Kinds of layers whose factors depend on a length; [None] where there is one kind."""
    rope: Any = getattr(module, "rope_type", None)
    kinds = rope if isinstance(rope, dict) else {None: rope}
    return [kind for kind, name in kinds.items() if isinstance(name, str) and (name == "longrope" or "dynamic" in name)]


def _original(module: Any, kind: str | None) -> int:
    rope = module.config.rope_parameters if kind is None else module.config.rope_parameters[kind]
    if rope["rope_type"] == "longrope":
        return int(rope["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


def _by_tokens(module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The module's `forward`, with the factors that each token's own length of text decides."""
    lengths = _deciding.get()
    if lengths is None:
        return forward(x, position_ids, *args, **kwargs)
    positions = position_ids.expand_as(lengths)
    original = _original(module, _kinds(module)[0])
    turned: list[Tensor] = []
    with _LOCK:  # the module holds the factors that it used last, for whoever asks next
        for length in lengths.clamp(min=original).unique().tolist():
            # transformers forgets the factors of a longer text only when a pass stays below the original length
            forward(x, position_ids.new_zeros(1, 1), *args, **kwargs)
            # one more token, cut off again, is the longest of the pass
            longest = torch.full_like(positions[:, :1], length - 1)
            found = forward(x, torch.cat([positions.clamp(max=length - 1), longest], 1), *args, **kwargs)
            own = (lengths.clamp(min=original) == length)[..., None]
            parts = [part[:, :-1] for part in found]
            turned = [torch.where(own, *pair) for pair in zip(parts, turned or parts, strict=True)]
    return tuple(turned)


class _Read:
    """A cache that holds so many tokens, for a question to `prepare_inputs_for_generation`."""

    is_compileable = False

    def __init__(self, length: int):
        self.length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length


def _rereads(model: Any, original: int) -> bool:
    text = torch.zeros(1, original + 1, dtype=torch.int64, device=model.device)
    name = cache_argument(inspect.signature(model.prepare_inputs_for_generation).parameters)
    return model.prepare_inputs_for_generation(text, **{name: _Read(original)}, next_sequence_length=1).get(name) is None
