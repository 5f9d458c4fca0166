"""Layer skip: the target drafts for itself with some of its sublayers left out.  (SWIFT 2410.06916; LayerSkip
2404.16710.)

Drafts read the target's own keys and values, and write theirs after them, where the verifying pass writes next.  Which
sublayers are left out is a setting, or the result of `outrider tune --draft layer_skip` on the user's own prompts
(`training.sublayers`); the simplest choice is to exit early, after some layers, with the target's norm and head.  Needs
no training.

Differs from LayerSkip: the verifying pass runs whole, and does not continue from the draft's states.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState
from outrider.errors import CheckpointError, DrafterError
from outrider.nn.serving import Sampler
from outrider.targets.protocol import Skip, SkipsLayers, Target
from outrider.targets.skip import able, every_second, listed, probability, refuse_failing

LENGTH, MIN_CONFIDENCE = 6, 0.4
"""Tokens of a draft, and the probability below which it ends, where neither the config nor a saved set has them."""


class Config(Base):
    kind: Literal["layer_skip"] = "layer_skip"
    file: str | None = None
    """A file that `outrider tune` saved; it names what is left out, and length and min_confidence unless these are
    given."""
    skip_attention: tuple[NonNegativeInt, ...] | None = None
    """Layers whose attention is left out, counted from 0; every second layer is left out whole where nothing is
    given."""
    skip_mlp: tuple[NonNegativeInt, ...] | None = None
    """Layers whose MLP is left out, counted from 0."""
    exit_layer: PositiveInt | None = None
    """This layer and all after it are left out whole: the draft exits early."""
    length: PositiveInt | None = None
    """Most tokens drafted per step; the saved set's unless given, or 6."""
    min_confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    """A draft ends before the first token whose likeliest choice has a lower probability; the saved set's unless given,
    or 0.4."""

    @model_validator(mode="after")
    def _is_one_set(self) -> Config:
        given = [name for name in ("skip_attention", "skip_mlp", "exit_layer") if getattr(self, name) is not None]
        if self.file is not None and given:
            raise ValueError(f"file and {' and '.join(given)} both name what is left out; give one of them")
        return self


class LayerSkip(Drafter):
    """Drafts a chain with what is left of the target."""

    confidence_before_draw = True

    def __init__(self, target: SkipsLayers, skip: Skip, length: int, min_confidence: float):
        self.target, self.skip, self.min_confidence = target, skip, min_confidence
        self.limit = length

    def allocate(self, cache: Cache) -> Cache:
        """Memory of the slots: the target's own cache."""
        return cache

    @torch.inference_mode()
    def propose(self, memory: Cache, state: DecodeState, budget: Tensor) -> Draft:
        sampler, sureness = Sampler(state), list[Tensor]()
        sizes = torch.zeros_like(budget)
        goes_on, own = torch.ones_like(budget, dtype=torch.bool), state.anchor
        with self.target.skipping(self.skip, memory, state.rows) as read:
            for depth in range(int(budget.max())):
                logits = state.judge.masked(read(own[:, None])[:, -1], sampler.tokens)
                sure = probability(logits)
                # known before this position's token is drawn, so that a draft's end does not depend on it
                goes_on &= (sure >= self.min_confidence).cpu() & (depth < budget)
                if not goes_on.any():
                    break
                sizes += goes_on
                own = sampler.draw(logits)
                sureness.append(sure)
        return sampler.draft(sizes, torch.stack(sureness, 1) if sureness else None)


def build(config: Config, target: Target) -> LayerSkip:
    skips = able(target)
    if config.file is None:
        skip, length, min_confidence = _chosen(config, target, skips.skippable()), LENGTH, MIN_CONFIDENCE
    else:
        skip, length, min_confidence = _saved(config.file, target)
    if not skip.attention and not skip.mlp:
        logging.getLogger(__name__).warning(
            "layer_skip leaves nothing out, so a draft saves no time; set skip_attention, skip_mlp or exit_layer"
        )
    refuse_failing(target, skip)
    return LayerSkip(
        skips, skip, config.length or length, min_confidence if config.min_confidence is None else config.min_confidence
    )


def _saved(path: str, target: Target) -> tuple[Skip, int, float]:
    """Sublayers, length and min_confidence of a saved set.  Raises CheckpointError for a file that is missing, damaged
    or another target's."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        skip = Skip(*(frozenset(map(int, found[name])) for name in ("skip_attention", "skip_mlp")))
        saved = skip, int(found["length"]), float(found["min_confidence"])
        name, weights_hash = found["target"], found["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"can't read a set of sublayers from {path} ({type(error).__name__}: {error}); "
            "search for one with `outrider tune`"
        ) from error
    if weights_hash != target.spec.weights_hash:
        raise CheckpointError(
            f"{path} was found on {name} with weights {weights_hash}; this target, {target.spec.name}, has "
            f"{target.spec.weights_hash}; search again with `outrider tune`"
        )
    return saved


def _chosen(config: Config, target: Target, possible: Skip) -> Skip:
    """The sublayers that the config leaves out.  Raises DrafterError for what can't be."""
    layers = target.spec.layers
    if config.exit_layer is not None and config.exit_layer >= layers:
        raise DrafterError(f"exit_layer must be below the target's {layers} layers, got {config.exit_layer}; lower it")
    skipped = range(layers if config.exit_layer is None else config.exit_layer, layers)
    named = {"skip_attention": config.skip_attention, "skip_mlp": config.skip_mlp}
    if config.exit_layer is None and set(named.values()) == {None}:
        return every_second(layers, possible)
    sets = []
    for (name, given), allowed in zip(named.items(), (possible.attention, possible.mlp), strict=True):
        wrong = sorted(set(given or ()) - allowed)
        if wrong:
            raise DrafterError(
                f"{name} names layer {wrong[0]}, which {target.spec.name} needs; choose from {listed(allowed)}"
            )
        missing = sorted(set(skipped) - allowed)
        if missing:
            raise DrafterError(
                f"exit_layer {config.exit_layer} would leave out layer {missing[0]}, which this target needs; choose "
                "a higher "
                f"one"
            )
        sets.append(frozenset(given or ()) | frozenset(skipped))
    return Skip(*sets)
