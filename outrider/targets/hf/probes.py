"""A probe's rows in a TransformersTarget's pass: after anchor and draft, or, for training, after whole texts.

B slots, S sequence, N nodes, P rows of the probe, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import TargetError
from outrider.targets.cache.attention_mask import TextCache, Tree, positions
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf import hooks
from outrider.targets.hf.passes import passed


def check(target: Any) -> None:
    """Raises TargetError if the family's passes can't include a probe."""
    family = target.family
    is_free = target.spec.mode == "tree" and family.masks != "none" and family.takes_uneven_rows
    # embeddings in every layer or of n-grams, and patches, need token ids, which a probe's rows don't have
    needs_ids = target._has_ids_in_layers or getattr(target.model, "has_ngrams", False)
    if not is_free or family.follows_one_path or family.rotary is not None or needs_ids or family.has_patches:
        raise TargetError(
            f"{target.spec.name} can't run a probe: its passes have no mask by row, follow one path, or depend on "
            "the length of the text, on token ids in every layer or on n-grams of them; draft without one"
        )


def verify(
    target: Any, cache: SlotCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...],
    probe: Probe,
) -> Scores:  # fmt: skip
    """A plain verified pass with the probe's rows after those of anchor and draft."""
    check(target)
    slots, width, more = len(anchor), draft.tokens.shape[1] + 1, probe.depths.shape[1]
    tokens, _ = passed(anchor, draft, target.spec.vocabulary)
    tokens = torch.cat([tokens, tokens.new_zeros(slots, more)], 1)
    tree_mask, depths = draft.rows()
    mask = torch.cat([torch.nn.functional.pad(tree_mask, (0, more)), probe.mask], 1)
    cache.open(rows, width + more)
    with hooks.replacing(target._embedding, _embeddings(target, probe)):
        scores: Scores = target._scores(tokens, cache, Tree(mask, torch.cat([depths, probe.depths], 1)), taps)
    return scores.first(width)._replace(probe=scores.hidden[:, width:])


def read(target: Any, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
    """Hidden states [B, P, H] after the final norm of the probe's rows after texts [B, S], as `Target.read_probe`."""
    check(target)
    cache, texts, order = TextCache(), documents[:, None], torch.arange(tokens.shape[1], device=tokens.device)
    text_positions = positions(documents)
    causal = (texts.mT == texts) & (order[:, None] >= order)
    with torch.no_grad():
        target._trunk(input_ids=tokens, **target.masked(cache, causal, text_positions, text_positions))
    ids, keys = tokens.new_zeros(probe.depths.shape), torch.cat([text_positions, probe.depths], 1)
    with hooks.replacing(target._embedding, _embeddings(target, probe)):
        arguments = target.masked(cache, probe.mask, probe.depths, keys)
        hidden: Tensor = target._trunk(input_ids=ids, **arguments).last_hidden_state
    return hidden


def _embeddings(target: Any, probe: Probe) -> Tensor:
    """[B, P, H] in the model's type, without the family's scale, which the pass applies."""
    return probe.embeddings.to(target.model.dtype) / target._scale
