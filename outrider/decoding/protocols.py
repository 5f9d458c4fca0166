"""What the loop speaks to: a Target whose distribution is kept, its Cache, a Drafter, a Policy; the Judge is in `state`.

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
    """Extra rows of the verified pass, which no drafted row sees and which are never kept; read in `Scores.probe`."""

    embeddings: Tensor
    """[B, P, H] what the rows hold in place of token embeddings, the family's scale applied."""
    mask: Tensor
    """[B, P, N+1+P] bool: what they see of the rows of anchor, nodes and probe; of the cache they see all."""
    depths: Tensor
    """[B, P] int64, positions counted from the anchor's, which is 0."""


class Cache(Protocol):
    """The target's keys and values of every slot."""

    slots: int
    length: int

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """The anchor and the nodes on each slot's path stay, the rest never happened."""

    def free(self, rows: Sequence[int]) -> None: ...


class Target(Protocol):
    """The model that verifies, as the loop sees it; `targets.protocol.Target` has more for drafters."""

    spec: Any
    """`mode` says what it can verify: tree, chain or off."""
    device: torch.device
    ends: frozenset[int]

    def allocate(self, slots: int, length: int) -> Any:
        """A `Cache` for `slots` requests of at most `length` tokens, drafted ones included."""

    def prefill(self, cache: Any, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...]) -> Scores:
        """Read one chunk [R, S], right-padded, into these slots.  `logits` [R, 1, V] follow the last real token."""

    def verify(
        self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...], probe: Probe | None = None
    ) -> Scores:
        """One pass over anchor and draft.  Nothing is committed until `cache.keep`."""


class Drafter:
    """Proposes; this one nothing, which is plain decoding.  A method overrides what it needs.

    Holds weights, never a request: everything per slot lives in `memory`, which is what `allocate` returns."""

    taps: tuple[int, ...] = ()
    """Target layers it wants to see; () for none."""
    limit: int = 0
    """Most nodes it can propose."""
    hidden: int | None = None
    """Size of the hidden states it reads; None for any, or none."""
    confidence_before_draw: bool = False
    """Its confidences are chances known before each node's token is drawn, so a policy may stop by them."""
    probe_rows: int = 0
    """Most rows of its probe; the cache has room for so many more."""
    steps: tuple[Any, ...] = ()
    """Its own passes that can be compiled, as `compiled.Compiled`."""
    watches: bool = False
    """As a part of several drafters it reads any draft, and so sees every step as it was; see `nn.ensemble`."""

    def allocate(self, cache: Cache) -> Any:
        """Its memory; slots and length are the cache's."""

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        """Once per prefill chunk, in order.  `scores` is right-padded: of rows[i] the first lengths[i] columns are real, and
        they are of the last lengths[i] of the `state.prefilled[rows[i]]` tokens that were read."""

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        """At most budget[b] nodes under each live slot's anchor.  budget [B] int64 on the CPU."""
        return Draft.empty(len(state.rows), state.device)

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        """Extra rows for the pass that verifies `draft`."""
        return None

    def observe(self, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        """Every step, also when nothing was drafted, after the commit.  `draft` is what was verified; see `Draft.origin`."""

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        """The requests in these slots are over."""


class Policy(Protocol):
    """A stopping rule: how many nodes to ask for, and how many of them are verified.

    Whether node n of a slot stays may depend on the confidences of that slot's nodes 0 to n, each known before its own token
    was drawn, and on other slots.  Looking at a later confidence, or at the drafted tokens, makes the output inexact."""

    def budget(self, state: DecodeState) -> Tensor:
        """[B] int64 on the CPU, nodes wanted."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        """[B] int64 on the CPU, at most `sizes`: how many of each slot's nodes stay; all unless a policy says otherwise."""
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None: ...
