"""Passes of a model, with what hooks record: taps, and the final hidden state before the output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.decoding.draft import Draft
from outrider.decoding.state import Scores
from outrider.kernels import prepacked
from outrider.targets.cache.attention_mask import Tree
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf import hooks
from outrider.targets.hf.family import Family
from outrider.targets.protocol import TargetSpec


class Passes:
    """What every pass of a model does."""

    model: PreTrainedModel
    device: torch.device
    spec: TargetSpec
    family: Family
    _trunk: Any
    _model_head: nn.Module
    _decoder_layers: Any

    def _scores(self, tokens: Tensor, cache: SlotCache, tree: Tree | None, taps: tuple[int, ...]) -> Scores:
        out, caught = self._passed(self.model, tokens, cache, tree, taps)
        return Scores(out.logits, caught[self._model_head].to(self.device), self._tapped(caught, taps))

    def pass_through(
        self, tokens: Tensor, cache: Any, masks: Mapping[str, Tensor], positions: Tensor, logit_indices: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """One pass, to be traced, with these masks and positions: the logits of the tokens at `logit_indices` [R, K],
        hidden states, and the output of every layer."""
        with self._catching(tuple(range(self.spec.layers))) as caught, hooks.selecting(self._model_head, logit_indices):
            logits = self.model(input_ids=tokens, **self.family.arguments(cache, masks, positions)).logits
        return logits, caught[self._model_head], [caught[layer] for layer in self._decoder_layers]

    def _hidden(
        self, tokens: Tensor, cache: SlotCache, tree: Tree | None, taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        out, caught = self._passed(self._trunk, tokens, cache, tree, taps)
        return out.last_hidden_state.to(self.device), self._tapped(caught, taps)

    def _passed(
        self, module: nn.Module, tokens: Tensor, cache: Any, tree: Tree | None, taps: tuple[int, ...]
    ) -> tuple[Any, dict[nn.Module, Any]]:
        """Output of the model or its trunk for the open pass, and what the hooks recorded."""
        context = max(self.spec.context, tokens.shape[1])
        arguments = self.family.pass_arguments(cache, tree, self.model.dtype, context)
        with prepacked.enabled(), self._catching(taps) as caught:
            out = module(input_ids=tokens, **arguments)
        if self.family.past is not None:
            cache.took(tokens, out)
        return out, caught

    def _each(
        self,
        run: Callable[..., Any],
        tokens: Tensor,
        cache: SlotCache,
        tree: Tree | None = None,
        taps: tuple[int, ...] = (),
    ) -> Any:
        """Run all rows of the open pass at once, or one by one if their lengths differ and the family does not support
        that."""
        # a recurrent state does not depend on its row's length
        is_state = self.family.is_recurrent and self.family.past is None and not cache.layers
        if self.family.takes_uneven_rows or cache.is_even or is_state:
            return run(tokens, cache, tree, taps)
        rows, parts = cache.rows, []
        for b, row in enumerate(rows):
            cache.open([row], tokens.shape[1])
            parts.append(run(tokens[b : b + 1], cache, tree and tree.of(b), taps))
        cache.open(rows, tokens.shape[1])
        joined: Any = [None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)]
        return Scores(*joined) if isinstance(parts[0], Scores) else tuple(joined)

    def _catching(self, taps: tuple[int, ...]) -> AbstractContextManager[dict[nn.Module, Tensor]]:
        """Records the outputs of these layers and the input of the output layer within this context."""
        layers = [self._decoder_layers[layer] for layer in taps]
        for layer in layers:
            hooks.watch_output(layer)
        return hooks.catching([self._model_head, *layers])

    def _tapped(self, caught: Mapping[nn.Module, Tensor], taps: tuple[int, ...]) -> Tensor | None:
        tapped = [caught[self._decoder_layers[layer]].to(self.device) for layer in taps]
        return torch.stack(tapped, 2) if taps else None


def passed(anchor: Tensor, draft: Draft, vocabulary: int) -> tuple[Tensor, Tree | None]:
    """Tokens [B, N+1] of a pass over anchor and draft, and their tree; None for a chain."""
    if not draft.tokens.shape[1]:
        return anchor[:, None], None
    # the acceptance rule rejects an id outside the vocabulary; the embedding only has to not fail on it
    tokens = torch.cat([anchor[:, None], draft.tokens.clamp(0, vocabulary - 1)], 1)
    return tokens, Tree(*draft.rows()) if draft.branches else None
