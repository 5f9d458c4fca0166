"""Sampling a draft's tokens in serving: chains, trees, and which tokens are possible.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState
from outrider.nn.drafting import trees
from outrider.targets.protocol import Target
from outrider.targets.skip import probability


class Sampler:
    """Samples a draft's tokens, depth by depth: the likeliest at temperature 0, otherwise from the request's
    distribution q.

    Banned tokens have probability 0; the ban depends on the tokens sampled before.
    """

    def __init__(self, state: DecodeState):
        self.state, self.streams = state, state.streams
        self.tokens: list[Tensor] = []
        self.q: list[Tensor] = []

    def next(self, logits: Tensor) -> Tensor:
        """One token per slot, [B].  logits [B, V] after the last ones."""
        return self.draw(self.state.judge.masked(logits, self.tokens))

    def draw(self, logits: Tensor) -> Tensor:
        """Like `next`, for logits that are already masked."""
        if self.state.judge.temperature is None:
            self.tokens.append(logits.argmax(-1))
        else:
            q, tokens = self.state.judge.drawn(logits, self.streams, len(self.tokens))
            self.q.append(q)
            self.tokens.append(tokens)
        return self.tokens[-1]

    def draft(self, sizes: Tensor, confidence: Tensor | None = None) -> Draft:
        """The chain of the sampled tokens. sizes [B] int64 on the CPU."""
        if not self.tokens:
            return Draft.empty(len(self.state.rows), self.state.device)
        return Draft.chain(torch.stack(self.tokens, 1), sizes, torch.stack(self.q, 1) if self.q else None, confidence)


def chain(first: Tensor, read_one: Callable[[Tensor], Tensor], budget: Tensor, state: DecodeState) -> Draft:
    """Sample a chain token by token. first [B, V], logits after the anchor.

    read_one reads one drafted token per slot, [B], and returns the logits [B, V] after it; the last token is not read.
    """
    sampler, stop, logits = Sampler(state), state.stop, first
    for depth in range(int(budget.max())):
        if depth:
            if stop is not None and not stop.reads():
                break
            logits = read_one(sampler.tokens[-1])
        logits = state.judge.masked(logits, sampler.tokens)
        # before the token is sampled, so that the end of a draft does not depend on it
        if stop is not None and not stop.draws(probability(logits)):
            break
        sampler.draw(logits)
    return sampler.draft(budget if stop is None else torch.minimum(budget, stop.sizes))


def side_by_side(logits: Tensor, budget: Tensor, state: DecodeState) -> Draft:
    """A chain whose tokens are sampled independently. logits [B, at least budget, V] of every depth.

    `state.stop` is ignored, since the one pass is already done.
    """
    later = iter(logits.unbind(1)[1:])
    if state.stop is not None:
        state = state.replaced(stop=None)
    return chain(logits[:, 0], lambda _drafted: next(later), budget, state)


def tree(
    first: Tensor, expand: trees.Expand, budget: Tensor, state: DecodeState, *, width: int, depth: int,
    parents: Sequence[int], replacement: bool = False,
) -> Draft:  # fmt: skip
    """The likeliest paths at temperature 0, otherwise the shape `parents` with sampled nodes.  first [B, V], logits
    after the anchor."""

    def possible(tree: Draft, new: int) -> Tensor:
        return masked(expand(tree, new), tree, state)

    first = state.judge.masked(first)
    if state.judge.temperature is None:
        return trees.beam(first, possible, budget, width=width, depth=depth)
    return trees.sampled(first, possible, budget, state, parents=parents, replacement=replacement)


class Branching:
    """Drafts of a drafter that reads its own tokens: a chain, or a tree if the config's width is above 1."""

    def __init__(self, config: Any):
        """config: its `length`, `width`, `nodes` and `replacement` are used."""
        self.config, self.width = config, config.width
        self.parents = trees.shape(self.width, config.length, config.nodes) if self.width > 1 else ()
        self.limit = len(self.parents) or config.length

    def draft(
        self,
        first: Tensor,
        read_one: Callable[[Tensor], Tensor],
        expand: trees.Expand,
        budget: Tensor,
        state: DecodeState,
    ) -> Draft:
        """read_one as in `chain`, expand as in `tree`."""
        if self.width == 1:
            return chain(first, read_one, budget, state)
        shape: Any = {"width": self.width, "depth": self.config.length, "parents": self.parents}
        return tree(first, expand, budget, state, **shape, replacement=self.config.replacement)


def allowed(config: Any, target: Target) -> Any:
    """The config, with width 1 if the target can't verify trees.  Warns about settings without effect."""
    if config.width == 1:
        idle = {"nodes": False, "replacement": False}
        warn_idle(config.kind, config, idle, "on a chain; set width above 1 for a tree")
    elif not verifies_trees(target, config.kind, f"a chain of {config.length}, as with width 1"):
        return config.model_copy(update={"width": 1})
    return config


def masked(logits: Tensor, tree: Draft, state: DecodeState) -> Tensor:
    """logits [B, new, V] after the last nodes of the tree, -inf for banned tokens; see `Judge.masked`."""
    if not state.judge.bans:
        return logits
    new, path = logits.shape[1], trees.path(tree, logits.shape[1])
    return torch.stack([state.judge.masked(logits[:, w], [step[:, w] for step in path]) for w in range(new)], 1)


def possible(draft: Draft, state: DecodeState) -> Draft:
    """The draft up to the first node where every token is banned.

    The ban does not depend on the node's own token, so a slot may end there.
    """
    if draft.q is None or not state.judge.bans:
        return draft
    is_valid = draft.q.isfinite().all(-1).long().cumprod(-1).sum(-1)
    return draft.first(torch.minimum(draft.sizes, is_valid.cpu()))


def verifies_trees(target: Target, kind: str, instead: str) -> bool:
    """Whether the target can verify trees; if not, warns that `kind` drafts `instead`."""
    if target.spec.mode != "tree":
        message = "%s can't verify trees (its mode is %s): %s drafts %s"
        logging.getLogger(__name__).warning(message, target.spec.name, target.spec.mode, kind, instead)
    return target.spec.mode == "tree"


def warn_idle(kind: str, config: object, needs: Mapping[str, object], because: str) -> None:
    """Warn about settings that differ from their default but have no effect.  needs: setting → whether it is used."""
    fields = type(config).model_fields  # type: ignore[attr-defined]
    idle = [name for name, is_used in needs.items() if not is_used and getattr(config, name) != fields[name].default]
    if idle:
        logging.getLogger(__name__).warning("%s.%s has no effect %s", kind, " and ".join(idle), because)
