"""The parties the loop speaks to: a Target whose law is kept, its Cache, and a Drafter that proposes.

B live slots, S sequence, N drafted nodes, T taps, H hidden size, V vocabulary.  Tensors of a step index the live slots in
the order of `state.rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.sampling import Sampling
from outrider.decoding.state import DecodeState
from outrider.decoding.text import Detokenizer


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What a decoder layer measures, and how its heads turn by position."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    """How rotary angles are stretched, as in the rope_parameters of a config.json; None where they are not."""
    partial_rotary_factor: float = 1.0
    """Share of a head that turns."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a drafter or a checkpoint must know of its target, and what tells two targets apart."""

    name: str
    revision: str | None
    layers: int
    hidden: int
    vocabulary: int
    context: int
    dtype: str
    tokenizer_hash: str | None
    """SHA-256 over the sorted vocabulary, 16 hex digits; None without a tokenizer."""
    weights_hash: str
    """SHA-256 over shapes and a sample of the weights' values, 16 hex digits."""
    mode: Literal["tree", "chain", "off"] = "tree"
    quantised: str | None = None
    """What its weights are quantised to, such as int8; None where they are not."""
    base_hash: str | None = None
    """`weights_hash` of the weights that were quantised; None where nothing was, or where it came quantised."""
    sizes: LayerSizes | None = None
    """Of its own decoder layers, which a drafter's are like unless it is told otherwise; None where they are not known."""
    unused: int | None = None
    """First row of the embedding that is no token of the tokenizer; None where there is none."""

    @property
    def precision(self) -> str:
        """int8 or the like, else the type of its weights."""
        return self.quantised or self.dtype


class Scores(NamedTuple):
    """What the target says of the rows it was given."""

    logits: Tensor
    """[B, N+1, V]."""
    hidden: Tensor
    """[B, N+1, H] after the final norm."""
    taps: Tensor | None
    """[B, N+1, T, H]; tap i is the residual stream after decoder layer i, 0-based."""
    choice: Tensor | None = None
    """[B, N+1], the likeliest ids, where the pass found them on its way."""

    def first(self, rows: int) -> Scores:
        """Without the padding behind so many rows."""
        return self if rows == self.logits.shape[1] else Scores(*(None if x is None else x[:, :rows] for x in self))  # type: ignore[arg-type]


class Cache(Protocol):
    """The target's keys and values of every slot."""

    slots: int
    length: int

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """The anchor and the nodes on each slot's path stay, the rest never happened."""

    def fork(self, row: int, rows: Sequence[int], length: int) -> None:
        """Give `rows` the first `length` tokens of `row`."""

    def free(self, rows: Sequence[int]) -> None:
        """The requests in these slots are over."""


class Target(Protocol):
    """The model whose law is kept."""

    spec: TargetSpec
    device: torch.device
    ends: frozenset[int]
    """Token ids that end a text."""
    mask_token: int | None
    """Id that stands for a token yet to be drafted; None where the tokenizer has none."""

    @property
    def detokenizer(self) -> Detokenizer | None:
        """How its ids become text, as `decode` does it, for texts that grow; None without a tokenizer."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H], the family's scale applied."""

    def head(self, hidden: Tensor) -> Tensor:
        """[..., V], the family's soft-cap and scale applied."""

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]; for reading."""

    def lent(self, device: torch.device) -> Target:
        """This target for a drafter on another device: embedding and head are copied there."""

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are for reading."""

    def allocate(self, slots: int, length: int) -> Cache:
        """A cache for `slots` requests of at most `length` tokens, drafted ones included."""

    def prefill(self, cache: Any, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...]) -> Scores:
        """Read one chunk [R, S], right-padded, into these slots.  `logits` [R, 1, V] follow the last real token."""

    def verify(self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...]) -> Scores:
        """One pass over anchor and draft.  Nothing is committed until `cache.keep`."""

    def read(self, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a cache."""

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """How a prompt is continued where no `Sampling` is given: greedily, with what the model itself asks for."""

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a text, of chat messages, or of ids given as they are."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids; special tokens are left out."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Sublayers that a pass leaves out, by layer, counted from 0."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


@runtime_checkable
class SkipsLayers(Protocol):
    """A target that can read on with some of its sublayers left out, and so draft for itself."""

    def skippable(self) -> Skip:
        """All that may be left out.  Raises TargetError where nothing may."""

    def skipping(self, skip: Skip, cache: Any, rows: Sequence[int]) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Gives a function from tokens [R, n] to logits [R, n, V]: it reads them behind what these slots hold, without `skip`.

        One call goes on where the last ended.  On every way out model and slots are what they were before.
        """


class Drafter(Protocol):
    """Proposes.  Holds weights, never a request: everything per slot lives in `memory`.

    One whose confidences a policy may stop by as they are says so by an attribute `is_confident`, True; see `confidence`.
    One that reads hidden states may say of which size by an attribute `hidden`.
    """

    taps: tuple[int, ...]
    """Target layers it wants to see; () for none."""
    limit: int
    """Most nodes it can propose."""

    def allocate(self, cache: Cache) -> Any:
        """Its memory; slots and length are the cache's."""

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores) -> None:
        """Once per prefill chunk, in order.  `state.prefilled[row]` counts the prompt tokens read, this chunk included."""

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        """At most budget[b] nodes under each live slot's anchor.  budget [B] int64 on the CPU."""

    def observe(self, memory: Any, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None:
        """Every step, also when nothing was drafted, after the commit."""

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        """The requests in these slots are over."""


class Plain:
    """The drafter that proposes nothing: plain decoding, by the same loop."""

    taps: tuple[int, ...] = ()
    limit = 0

    def allocate(self, cache: Cache) -> None: ...
    def admit(self, memory: None, rows: Sequence[int], state: DecodeState, scores: Scores) -> None: ...

    def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
        return Draft.empty(len(state.rows), state.device)

    def observe(self, memory: None, state: DecodeState, draft: Draft, kept: Kept, scores: Scores) -> None: ...
    def free(self, memory: None, rows: Sequence[int]) -> None: ...
