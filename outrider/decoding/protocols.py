"""The interfaces of the loop: Target, Cache, Drafter and Policy; the Judge is in `state`.

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
    """Extra rows of the verified pass.  No drafted row attends to them and they are not cached; their hidden states are
    in `Scores.probe`."""

    embeddings: Tensor
    """[B, P, H] inputs in place of token embeddings, with the model's embedding scale applied."""
    mask: Tensor
    """[B, P, N+1+P] bool: attention mask over the rows of anchor, nodes and probe; they attend to the whole cache."""
    depths: Tensor
    """[B, P] int64, positions relative to the anchor."""


class NoStatic(Exception):
    """A step can't run entirely on the device; the message gives the reason."""


class Cache(Protocol):
    """The target's keys and values of every slot."""

    slots: int
    length: int

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the anchor and the nodes on each slot's path; drop the rest."""

    def free(self, rows: Sequence[int]) -> None: ...


class Target(Protocol):
    """The model that verifies, as the loop uses it; `targets.protocol.Target` adds what drafters use."""

    spec: Any
    """`spec.mode` is what it can verify: tree, chain or off."""
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
        """One pass over anchor and draft.  `cache.keep` decides which of them stay cached."""


class Drafter:
    """Proposes tokens.  This base class proposes none, which is plain decoding; override what your method needs.

    A drafter holds weights but no request state: all state per slot is in `memory`, which `allocate` returns."""

    taps: tuple[int, ...] = ()
    """Target layers whose outputs it reads; () for none."""
    limit: int = 0
    """Maximum number of nodes it can propose."""
    hidden: int | None = None
    """Size of the hidden states it reads; None for any size, or if it does not read them."""
    confidence_before_draw: bool = False
    """Whether each node's confidence is known before its token is drawn, so that a policy may stop by it."""
    probe_rows: int = 0
    """Maximum number of rows of its probe; the cache is allocated with room for them."""
    steps: tuple[Any, ...] = ()
    """The drafter's passes that can be compiled, as `fast.Compiled`."""
    learns: bool = False
    """Whether one request affects what it proposes in later ones."""
    nested: bool = True
    """Whether a smaller draft is a prefix of a larger one.  False if it has the most likely nodes instead."""
    watches: bool = False
    """Whether, in an ensemble, it observes the other members' nodes too; see `nn.drafting`."""

    def refresh(self) -> None:
        """Called before each batch, in case weights have changed."""

    def allocate(self, cache: Cache) -> Any:
        """Its memory, for the cache's number of slots and length."""

    def admit(
        self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        """Called once per prefill chunk, in order.  `scores` is right-padded: the first lengths[i] columns of rows[i]
        are real and belong to the last lengths[i] of the `state.prefilled[rows[i]]` tokens read so far."""

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        """At most budget[b] nodes under each live slot's anchor.  budget [B] int64 on the CPU."""
        return Draft.empty(len(state.rows), state.device)

    def look_up(
        self, memory: Any, state: DecodeState, drafted: Sequence[Sequence[int]], budget: Tensor
    ) -> Draft | None:
        """Like `propose`, but after each slot's text followed by drafted[b], with deterministic nodes only.  The
        default returns None: the drafter can't do this, or only with a model pass."""
        return None

    def static(self, memory: Any, is_greedy: bool) -> Any:
        """A `fast.static.step.StaticDrafter`: its part of a step that does not involve the host; called at most twice
        per batch.

        is_greedy: whether every live request is.  Raises NoStatic with the reason if the host must read something.
        """
        raise NoStatic("its drafts are made on the host")

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        """Extra rows for the pass that verifies `draft`, or None."""
        return None

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        """Called after every commit, even when nothing was drafted.  `draft` is the verified one; see
        `Draft.origin`."""

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        """Forget the requests in these slots: they have ended."""


class Policy(Protocol):
    """A stopping rule: how many nodes to draft, and how many of them to verify.

    Whether node n of a slot is verified may depend on the confidences of that slot's nodes 0 to n, each known before
    its token was drawn, and on other slots.  Using a later confidence or the drafted tokens makes the output inexact.
    """

    def budget(self, state: DecodeState) -> Tensor:
        """[B] int64 on the CPU, most nodes to draft."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        """[B] int64 on the CPU: how many of each slot's `sizes` nodes to verify; all by default."""
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None: ...
