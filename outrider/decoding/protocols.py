"""The interfaces of the loop: Target, its Cache, Drafter and Policy; the Judge is in `state`.

B live slots, in the order of `state.rows`; N drafted nodes, T taps, H hidden size, V vocabulary, P rows of a probe.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Scores, Timing


@dataclass(frozen=True, slots=True)
class Probe:
    """Extra rows of the verified pass.  No drafted row attends to them and none is cached; results are in
    `Scores.probe`."""

    embeddings: Tensor
    """[B, P, H] inputs in place of token embeddings, the family's scale applied."""
    mask: Tensor
    """[B, P, N+1+P] bool: their attention mask over the rows of anchor, nodes and probe; they attend to the whole
    cache."""
    depths: Tensor
    """[B, P] int64, positions counted from the anchor's, which is 0."""


class NoStatic(Exception):
    """A step can't be one of tensors alone; the message says why."""


class Cache(Protocol):
    """The target's keys and values of every slot."""

    slots: int
    length: int

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """The anchor and the nodes on each slot's path stay; the rest is forgotten."""

    def free(self, rows: Sequence[int]) -> None: ...


class Target(Protocol):
    """The model that verifies, as the loop needs it; `targets.protocol.Target` has more for drafters."""

    spec: Any
    """`mode` is what it can verify: tree, chain or off."""
    device: torch.device
    ends: frozenset[int]

    def allocate(self, slots: int, length: int) -> Any:
        """A `Cache` for `slots` requests of at most `length` tokens, drafted ones included."""

    def prefill(
        self, cache: Any, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...]
    ) -> Scores:
        """Read one chunk [R, S], right-padded, into these slots.  `logits` [R, 1, V] follow the last real token."""

    def verify(
        self,
        cache: Any,
        rows: Sequence[int],
        anchor: Tensor,
        draft: Draft,
        taps: tuple[int, ...],
        probe: Probe | None = None,
    ) -> Scores:
        """One pass over anchor and draft.  Nothing is cached for good until `cache.keep`."""


class Drafter:
    """Proposes tokens; this base class proposes none, which is plain decoding.  A method overrides what it needs.

    Holds weights, never a request: everything per slot lives in `memory`, which is what `allocate` returns."""

    taps: tuple[int, ...] = ()
    """Target layers whose outputs it reads; () for none."""
    limit: int = 0
    """Most nodes it can propose."""
    hidden: int | None = None
    """Size of the hidden states it reads; None for any, or none."""
    confidence_before_draw: bool = False
    """Its confidences are known before each node's token is drawn, so a policy may stop by them."""
    probe_rows: int = 0
    """Most rows of its probe; the cache has room for this many more."""
    steps: tuple[Any, ...] = ()
    """Its own passes that can be compiled, as `fast.Compiled`."""
    learns: bool = False
    """What it read of one request changes what it proposes in later ones."""
    nested: bool = True
    """Where it drafts fewer tokens, they are the first ones of a larger draft; not those that are likeliest."""
    watches: bool = False
    """As a member of an ensemble it observes every step as it was, with other members' nodes; see `nn.drafting`."""

    def refresh(self) -> None:
        """Take note of weights that were changed since the last batch, however that was done; called before each."""

    def allocate(self, cache: Cache) -> Any:
        """Its memory; slots and length are the cache's."""

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        """Called once per prefill chunk, in order.  `scores` is right-padded: the first lengths[i] columns of rows[i]
        are real and belong to the last lengths[i] of the `state.prefilled[rows[i]]` tokens read so far."""

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        """At most budget[b] nodes under each live slot's anchor.  budget [B] int64 on the CPU."""
        return Draft.empty(len(state.rows), state.device)

    def look_up(self, memory: Any, state: DecodeState, ahead: Sequence[Sequence[int]], budget: Tensor) -> Draft | None:
        """As `propose`, but after each slot's text and the drafted tokens ahead[b], all nodes deterministic.  None, the
        default, of a drafter that can't, or not without a pass of a model."""
        return None

    def static(self, memory: Any, is_greedy: bool) -> Any:
        """Its part of a step that is tensors alone, a `fast.static.step.StaticDrafter`; called at most twice a batch.

        is_greedy: every live request is.  Raises NoStatic, which says why, where the host must read something.
        """
        raise NoStatic("its drafts are made by the host")

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        """Extra rows for the pass that verifies `draft`, or None."""
        return None

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        """Called after every commit, also when nothing was drafted.  `draft` is what was verified; see
        `Draft.origin`."""

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        """The requests in these slots are over."""


class Policy(Protocol):
    """A stopping rule: how many nodes to ask for, and how many of them are verified.

    Whether node n of a slot stays may depend on the confidences of that slot's nodes 0 to n, each known before its own
    token was drawn, and on other slots.  Reading a later confidence, or the drafted tokens, makes the output
    inexact."""

    def budget(self, state: DecodeState) -> Tensor:
        """[B] int64 on the CPU, nodes wanted."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        """[B] int64 on the CPU, at most `sizes`: how many of each slot's nodes stay; all unless a policy says
        otherwise."""
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None: ...
