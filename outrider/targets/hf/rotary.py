"""Rotary factors that depend on the length of the text: every token gets the same factors as in `generate`, whatever
else is in its pass.

transformers derives the factors of `longrope` (Phi-3, Phi-4-mini) and `dynamic` (InternLM) from the longest position of
a pass, for all of its rows.  Here each token has its own text length: within a prompt, the prompt's length; after it,
the length up to the token.  Cached keys do not change.  If `generate` rereads a text when it grows longer than the
pretraining context, it is reread here too.

R rows of a pass, n tokens a row.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.decoding.state import Scores
from outrider.errors import TargetError
from outrider.targets.cache.attention_mask import Tree
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf import hooks
from outrider.targets.hf.anatomy import cache_argument

_LOCK = threading.Lock()
_deciding: ContextVar[Tensor | None] = ContextVar("deciding", default=None)


@dataclass(frozen=True)
class Rotary:
    """How the factors of a family depend on the length of a text."""

    original: int
    """The longest text that uses the pretraining factors."""
    rereads: bool
    """Whether `generate` rereads the whole text when it grows longer than that."""


def deciding(lengths: Tensor) -> AbstractContextManager[object]:
    """Within this context, rotary factors depend on these text lengths [R, n], one for each token of a pass."""
    return hooks.during(_deciding, lengths)


def learn_rotary(model: PreTrainedModel) -> Rotary | None:
    """Make modules whose factors depend on the batch depend on each token.  None if there are no such modules."""
    modules = [module for module in model.modules() if _kinds(module)]
    originals = {_original(module, kind) for module in modules for kind in _kinds(module)}
    if not modules:
        return None
    if len(originals) > 1:
        raise TargetError(
            f"{type(model).__name__} has rotary factors that change at several lengths, {sorted(originals)}; use "
            "transformers' own generate for it"
        )
    for module in modules:
        hooks.wrap(module, _by_tokens)
    [original] = originals
    return Rotary(original, _rereads(model, original))


def _kinds(module: nn.Module) -> list[str | None]:
    """Kinds of layers whose factors depend on a length; [None] if there is one kind."""
    rope: Any = getattr(module, "rope_type", None)
    kinds = rope if isinstance(rope, dict) else {None: rope}
    return [kind for kind, name in kinds.items() if isinstance(name, str) and (name == "longrope" or "dynamic" in name)]


def _original(module: Any, kind: str | None) -> int:
    rope = module.config.rope_parameters if kind is None else module.config.rope_parameters[kind]
    if rope["rope_type"] == "longrope":
        return int(rope["original_max_position_embeddings"])
    return int(module.original_max_seq_len)


def _by_tokens(
    module: Any, forward: Callable[..., Any], x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The module's `forward`, with the factors of each token's own text length."""
    lengths = _deciding.get()
    if lengths is None:
        return forward(x, position_ids, *args, **kwargs)
    positions = position_ids.expand_as(lengths)
    original = _original(module, _kinds(module)[0])
    factors: list[Tensor] = []
    with _LOCK:  # the module stores the factors it used last
        for length in lengths.clamp(min=original).unique().tolist():
            # transformers drops the factors of a longer text only when a pass stays below the original length
            forward(x, position_ids.new_zeros(1, 1), *args, **kwargs)
            # an extra token, removed afterwards, has the longest position of the pass
            longest = torch.full_like(positions[:, :1], length - 1)
            cos_sin = forward(x, torch.cat([positions.clamp(max=length - 1), longest], 1), *args, **kwargs)
            has_length = (lengths.clamp(min=original) == length)[..., None]
            parts = [part[:, :-1] for part in cos_sin]
            factors = [torch.where(has_length, *pair) for pair in zip(parts, factors or parts, strict=True)]
    return tuple(factors)


def _rereads(model: Any, original: int) -> bool:
    text, cache = torch.zeros(1, original + 1, dtype=torch.int64, device=model.device), SlotCache(1, original + 1)
    cache.lengths = [original]
    cache.open([0], 1)
    name = cache_argument(inspect.signature(model.prepare_inputs_for_generation).parameters)
    return model.prepare_inputs_for_generation(text, **{name: cache}, next_sequence_length=1).get(name) is None


# ── passes of such families ───────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def reading_prompt(target: Any, cache: SlotCache, tokens: Tensor, lengths: Sequence[int]) -> Iterator[None]:
    """A pass of a TransformersTarget over part of a prompt, whose length counts one token extra."""
    if target.family.rotary is None:
        yield
        return
    cache.reads(tokens)
    ends = [cache.lengths[row] + length + 1 for row, length in zip(cache.rows, lengths, strict=True)]
    for row, end in zip(cache.rows, ends, strict=True):
        cache.prompts[row] = -1 if cache.lengths[row] else end
        cache.long[row] = end > target.family.rotary.original
    with deciding(torch.tensor(ends, device=target.device)[:, None].expand(-1, tokens.shape[1])):
        yield


def verify_by_length(
    target: Any, cache: SlotCache, rows: Sequence[int], tokens: Tensor, tree: Tree | None, taps: tuple[int, ...]
) -> Scores:
    """Like the target's `verify`, with the factors of `generate` for each token."""
    rotary = target.family.rotary
    for row in rows:
        length = cache.lengths[row] + 1
        is_prompt_in_parts = cache.prompts[row] not in (0, length) and length > rotary.original
        if is_prompt_in_parts or (rotary.rereads and length > rotary.original and not cache.long[row]):
            _reread(target, cache, row, length if is_prompt_in_parts else rotary.original + 1)
        cache.prompts[row] = 0
    cache.open(rows, tokens.shape[1])
    cache.reads(tokens)
    ends = _ends(cache, tokens, tree)
    with deciding(ends):
        scores: Scores = target._each(target._scores, tokens, cache, tree, taps)
    if rotary.rereads:
        for b, row in enumerate(rows):
            if not cache.long[row] and int(ends[b].max()) > rotary.original:
                row_tree = tree and tree.of(b)
                reread = _as_long(target, cache.texts[row][: cache.lengths[row]], tokens[b : b + 1], row_tree, taps)
                for values, others in zip(scores, reread, strict=True):
                    if values is not None and others is not None:
                        values[b, ends[b] > rotary.original] = others[0, ends[b] > rotary.original]
    return scores


def _reread(target: Any, cache: SlotCache, row: int, length: int) -> None:
    """Reread a slot's text as part of a text of this length."""
    text = torch.tensor([cache.texts[row][: cache.lengths[row]]], device=target.device)
    cache.lengths[row], cache.long[row] = 0, True
    cache.open([row], text.shape[1])
    cache.reads(text)
    with deciding(torch.full_like(text, length)):
        target._each(target._hidden, text, cache)
    cache.append([text.shape[1]])


def _as_long(target: Any, text: list[int], tokens: Tensor, tree: Tree | None, taps: tuple[int, ...]) -> Scores:
    """Scores of tokens [1, n] after a text that is reread as part of a longer one."""
    again = target.allocate(1, len(text) + tokens.shape[1] + 1)
    again.lengths, again.texts = [len(text)], [text]
    if text:
        _reread(target, again, 0, len(text) + 1 + tokens.shape[1])
    again.open([0], tokens.shape[1])
    with deciding(_ends(again, tokens, tree)):
        scores: Scores = target._scores(tokens, again, tree, taps)
    return scores


def _ends(cache: SlotCache, tokens: Tensor, tree: Tree | None) -> Tensor:
    """[R, n] length of the text that ends with each token of the open pass."""
    return cache.positions(tree and tree.depths).expand_as(tokens) + 1
