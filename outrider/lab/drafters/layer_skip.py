"""Layer skip: the target drafts for itself with some of its sublayers left out.  (SWIFT 2410.06916; LayerSkip
2404.16710.)

Drafts read the target's keys and values and write theirs after them, where the verifying pass then writes.  The skipped
sublayers are a setting, the result of `outrider lab layers` on the user's prompts (`training.fitting`), or of a search
while decoding (`search`, `lab.sublayer_search`).   Needs no training.

Differs from LayerSkip: the verifying pass runs all layers and does not continue from the draft's states.

Use it if nothing can be trained and the target has many layers and slow passes.  It does not pay on the demo target,
which has 16.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator
from torch import Tensor

from outrider.config import Config as Base
from outrider.config import read_object
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.errors import CheckpointError, DrafterError
from outrider.lab.sublayer_search import Search
from outrider.method import Method
from outrider.nn.drafting.serving import Sampler
from outrider.targets.protocol import Skip, SkipsLayers, Target
from outrider.targets.skip import every_second, listed, probability, refuse_failing, require_skipping, runs

METHOD = Method(
    instead={
        "vllm": "transformers has early exit (assistant_early_exit)",
        "transformers": "assistant_early_exit=N drafts with the first N layers, which is not the same",
    },
)  # fmt: skip

LENGTH, MIN_CONFIDENCE = 6, 0.4
"""Defaults without a saved set: tokens of a draft, and the probability below which it ends."""


class Config(Base):
    REMOVED: ClassVar[Mapping[str, str]] = {
        "exit_layer": "name that layer and all after it in 'skip_attention' and 'skip_mlp'"
    }
    kind: Literal["layer_skip"] = "layer_skip"
    file: str | None = None
    """A file that `outrider lab layers` saved; it names what is left out, and length and min_confidence unless these
    are given."""
    skip_attention: tuple[NonNegativeInt, ...] | None = None
    """Layers whose attention is left out, counted from 0; every second layer is left out whole where nothing is
    given."""
    skip_mlp: tuple[NonNegativeInt, ...] | None = None
    """Layers whose MLP is skipped, counted from 0."""
    length: PositiveInt | None = None
    """Most tokens drafted per step; defaults to the saved set's, or 6."""
    min_confidence: Annotated[float, Field(ge=0, le=1)] | None = None
    """A draft ends before the first token whose likeliest choice has a lower probability; the saved set's unless given,
    or 0.4."""

    search: NonNegativeInt = 0
    """Sets of sublayers tried while decoding, each in up to 12 drafted steps beside as many of the best set so far,
    which is the one given here at first; 0 tries none."""

    @model_validator(mode="after")
    def _is_one_set(self) -> Config:
        settings = [name for name in ("skip_attention", "skip_mlp") if getattr(self, name) is not None]
        if self.file is not None and settings:
            raise ValueError(f"file and {' and '.join(settings)} both name what is left out; give one of them")
        return self


@dataclass
class Memory:
    """The target's own cache, and the set that drafted in the current step."""

    cache: Cache
    skip: Skip | None = None
    """None if there is no draft."""
    passes: int = 0


class LayerSkip(Drafter):
    """Drafts a chain with the target's remaining sublayers."""

    confidence_before_draw = True

    def __init__(
        self, target: SkipsLayers, skip: Skip, length: int, min_confidence: float, search: Search | None = None
    ):
        self.target, self.skip, self.min_confidence, self.search = target, skip, min_confidence, search
        self.limit, self.learns = length, search is not None

    def allocate(self, cache: Cache) -> Memory:
        return Memory(cache)

    @torch.inference_mode()
    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        sampler, sureness = Sampler(state), list[Tensor]()
        sizes = torch.zeros_like(budget)
        goes_on, token = torch.ones_like(budget, dtype=torch.bool), state.anchor
        memory.skip, memory.passes = self.skip if self.search is None else self.search.next(), 0
        with self.target.skipping(memory.skip, memory.cache, state.rows) as read:
            for depth in range(int(budget.max())):
                memory.passes += 1
                logits = state.judge.masked(read(token[:, None])[:, -1], sampler.tokens)
                sure = probability(logits)
                # before this position's token is drawn, so that the end of a draft does not depend on it
                goes_on &= (sure >= self.min_confidence).cpu() & (depth < budget)
                if not goes_on.any():
                    break
                sizes += goes_on
                token = sampler.draw(logits)
                sureness.append(sure)
        return sampler.draft(sizes, torch.stack(sureness, 1) if sureness else None)

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        # for a slot that ended within its draft, the acceptance of later nodes is unknown
        ended = zip(accepted.paths, accepted.next_tokens, strict=True)
        tokens = [1 + len(path) for path, following in ended if following >= 0]
        if self.search is not None and memory.skip is not None and tokens:
            self.search.learn(memory.skip, sum(tokens) / len(tokens), memory.passes)
        memory.skip = None


def build(config: Config, target: Target) -> LayerSkip:
    skips = require_skipping(target)
    if config.file is None:
        skip, length, min_confidence = _chosen(config, target, skips.skippable()), LENGTH, MIN_CONFIDENCE
    else:
        skip, length, min_confidence = _saved(config.file, target)
    if not skip.attention and not skip.mlp:
        logging.getLogger(__name__).warning(
            "layer_skip leaves nothing out, so a draft saves no time; set skip_attention or skip_mlp"
        )
    refuse_failing(target, skip)
    possible, threshold = skips.skippable(), min_confidence if config.min_confidence is None else config.min_confidence
    search = Search(target.spec, skip, possible, config.search, partial(runs, target)) if config.search else None
    return LayerSkip(skips, skip, config.length or length, threshold, search)


def _saved(path: str, target: Target) -> tuple[Skip, int, float]:
    """Sublayers, length and min_confidence of a saved set.  Raises CheckpointError for a file that is missing, damaged
    or another target's."""
    try:
        fields = read_object(Path(path))
        skip = Skip(*(frozenset(map(int, fields[name])) for name in ("skip_attention", "skip_mlp")))
        saved = skip, int(fields["length"]), float(fields["min_confidence"])
        name, weights_hash = fields["target"], fields["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"can't read a set of sublayers from {path} ({type(error).__name__}: {error}); "
            "search for one with `outrider lab layers`"
        ) from error
    if weights_hash != target.spec.weights_hash:
        raise CheckpointError(
            f"{path} was found on {name} with weights {weights_hash}; this target, {target.spec.name}, has "
            f"{target.spec.weights_hash}; search again with `outrider lab layers`"
        )
    return saved


def _chosen(config: Config, target: Target, possible: Skip) -> Skip:
    """The sublayers that the config skips.  Raises DrafterError for those that the target needs."""
    named = {"skip_attention": config.skip_attention, "skip_mlp": config.skip_mlp}
    if set(named.values()) == {None}:
        return every_second(target.spec.layers, possible)
    sets = []
    for (name, indices), allowed in zip(named.items(), (possible.attention, possible.mlp), strict=True):
        wrong = sorted(set(indices or ()) - allowed)
        if wrong:
            raise DrafterError(
                f"{name} names layer {wrong[0]}, which {target.spec.name} needs; choose from {listed(allowed)}"
            )
        sets.append(frozenset(indices or ()))
    return Skip(*sets)
