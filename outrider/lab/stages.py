"""Ranges of a target's layers as stages of a pipeline, each with its own cache, whose lengths may differ.

While a range runs, the layers outside it pass their input through, except the one before it, which returns its recorded
output.  So embeddings, masks, positions and norms are the family's own.

S tokens of a pass, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from outrider.errors import TargetError
from outrider.lab.pipeline import Stage, StageOutput
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.anatomy import BROKEN
from outrider.targets.hf.transformers import TransformersTarget


def ranges(layers: int, stages: int) -> list[range]:
    """The layers of each stage, as evenly as possible.  Raises TargetError for more stages than layers."""
    if not 1 <= stages <= layers:
        raise TargetError(f"{layers} layers can't be cut into {stages} stages; choose from 1 to {layers}")
    cuts = [round(number * layers / stages) for number in range(stages + 1)]
    return [range(*pair) for pair in pairwise(cuts)]


class LayerRange(Stage):
    """These layers of a target over one text, with the embedding before the first and the head after the last."""

    def __init__(self, target: TransformersTarget, layers: range, length: int, taps: Sequence[int] = ()):
        """length: most tokens of a text, including those in flight.  taps: of the whole target; it returns its own."""
        self.target, self.layers = target, layers
        self.taps = tuple(tap for tap in taps if tap in layers)
        self.kv_cache = SlotCache(1, length, target.device, len(layers))
        self._given: tuple[Tensor, Tensor | None] | None = None

    def begin(self, tokens: Tensor, states: Tensor | None, start: int) -> None:
        assert start <= self.kv_cache.lengths[0], f"a pass from {start} on where {self.kv_cache.lengths[0]} are read"
        self.kv_cache.lengths[0] = start  # drop tokens that are no longer in flight
        self._given = tokens, states

    @torch.inference_mode()
    def end(self) -> StageOutput:
        assert self._given is not None
        (tokens, states), self._given = self._given, None
        target, last = self.target, self.layers[-1]
        self.kv_cache.open([0], tokens.shape[1])
        with target._sublayers.only(self.layers, states):
            out, caught = target._passed(target._trunk, tokens, self.kv_cache, None, (*self.taps, last))
        self.kv_cache.append([tokens.shape[1]])
        taps = target._tapped(caught, self.taps)
        if last < target.spec.layers - 1:
            return StageOutput(caught[target._decoder_layers[last]], taps)
        hidden: Tensor = out.last_hidden_state
        return StageOutput(hidden, taps, target.head(hidden[:, -1:]))


def stages_of(target: TransformersTarget, stages: int, length: int, taps: Sequence[int] = ()) -> list[LayerRange]:
    """The target as stages in this process.  Raises TargetError if it can't be split."""
    check(target, stages)
    return [LayerRange(target, layers, length, taps) for layers in ranges(target.spec.layers, stages)]


@torch.inference_mode()
def check(target: TransformersTarget, stages: int) -> None:
    """Raises TargetError unless the stages compute the same as the model, on a few tokens."""
    family, name, cuts = target.family, target.spec.name, ranges(target.spec.layers, stages)
    if family.follows_one_path or family.rotary is not None or target._has_ids_in_layers:
        raise TargetError(
            f"{name} can't be cut into stages: it carries a state, or its layers depend on the length of the text or "
            "on token ids; decode it in one pass"
        )
    tokens = torch.arange(6, device=target.device)[None] % target.spec.vocabulary
    try:
        target.skippable()
        whole, _ = target.read(tokens)
        states: Tensor | None = None
        for stage in [LayerRange(target, layers, 6) for layers in cuts]:
            stage.begin(tokens, states, 0)
            states = stage.end().states
    except BROKEN as error:
        raise TargetError(f"{name} can't be cut into {stages} stages ({type(error).__name__}: {error})") from error
    if states is None or not torch.allclose(states, whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max())):
        raise TargetError(f"{name} can't be cut into {stages} stages: one after another they are not the model")
