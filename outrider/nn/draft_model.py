"""The interface of a trainable method: a Batch in, Predictions out, and a Drafter to serve.

A method defines what to predict and where, never the loss.  Every method reduces to rows of (draft logits, target
logits, weight, depth), so any loss works with any method, and acceptance by depth is computed in one place.

B sequences, S tokens, T taps, H hidden size, V vocabulary, M predicted rows, m rows of one chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Scores
from outrider.errors import ConfigError
from outrider.nn.draft_vocabulary import DraftVocabulary, multiplied_in
from outrider.nn.sequence import Stripe
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.cache.attention_mask import positions
from outrider.targets.protocol import Target, TargetSpec


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts and the target's states."""

    tokens: Tensor
    """[B, S] int64."""
    loss_mask: Tensor
    """[B, S] bool, True where the token is a training label."""
    documents: Tensor
    """[B, S] int64, the number of each token's text; 0 is padding."""
    taps: Tensor
    """[B, S, T, H]."""
    hidden: Tensor
    """[B, S, H] after the target's final norm; [B, S, 0] if `top` replaces it."""
    top: TopLogprobs | None = None
    """The target's likeliest tokens, if the feature cache stores them in place of hidden states."""
    per_row: int = 1
    """Maximum number of texts in one row; above 1 in a packed batch."""
    share: Share | None = None
    """The rows of this process, if several processes split the batch."""
    stripe: Stripe | None = None
    """The positions of `taps` [B, S / N, T, H], if several processes split each text."""

    @property
    def final(self) -> Tensor | TopLogprobs:
        """What the target's distribution is computed from: hidden states or likeliest tokens."""
        return self.hidden if self.top is None else self.top

    @property
    def positions(self) -> Tensor:
        """[B, S], each token's position within its text, from 0."""
        return positions(self.documents)

    @property
    def whole(self) -> Batch:
        """The batch of all processes; without states if there are several."""
        return self if self.share is None else self.share.whole

    def own(self, values: Tensor) -> Tensor:
        """This process's rows of `values`, which has all rows of `whole`."""
        return values if self.share is None else values[self.share.rows]

    def random(self, draw: Callable[[tuple[int, ...]], Tensor], *shape: int) -> Tensor:
        """Random numbers [B, *shape] for these rows, from torch.rand or the like, on the CPU.

        Every process draws for all rows, so a row's numbers do not depend on the process that has it.
        """
        return self.own(draw((len(self.whole.tokens), *shape)))


class Share(NamedTuple):
    """The rows of a batch that belong to one of several processes."""

    whole: Batch
    """Tokens, loss mask and documents of all rows, without states."""
    rows: slice
    counts: bool = True
    """False if there were too few rows for all processes: this process then repeats another's row, which must not be
    counted twice."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the features were computed from; a consumer refuses a source that does not match."""

    target: TargetSpec
    taps: tuple[int, ...]
    dtype: str
    template_hash: str | None
    texts: int
    tokens: int


class FeatureSource(Protocol):
    """An endless source of batches, in an order that depends only on seed and step."""

    manifest: Manifest

    @property
    def counts(self) -> Tensor:
        """[V] int64, how often each token is a training label."""

    @property
    def steps_per_pass(self) -> int:
        """Steps per epoch."""

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`, counted from 0."""

    def packed(self, steps: range) -> Iterator[Batch]:
        """The texts of these steps, several per row, in batches within the source's token budget."""

    def share(self, rank: int, count: int, stripe: Stripe | None = None) -> None:
        """From now on, yield the rows of process `rank` of `count`, with their `Share`; taps of `stripe`, or all."""


class Predictions(Protocol):
    """Rows that a method predicts in one batch; logits come in chunks, so the full [M, V] never exists."""

    labels: Tensor
    """[M] int64, the actual next token."""
    weight: Tensor
    """[M] float32: 0 where nothing is trained, otherwise the paper's weight for this depth; a run may override it."""
    depth: Tensor
    """[M] int64, 0 = first drafted token."""
    block: Tensor
    """[M] int64, the same for all rows of a rollout; a chunk never splits one."""
    vocabulary: int
    """V; the trainer derives the number of rows per chunk from it."""

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """(draft logits [m, V], target logits [m, V], rows), about `rows` rows at most at a time."""

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """The method's additional loss terms [m], by name; they are added with the row's weight."""

    def served(self, rows: slice, draft: Tensor) -> Tensor | None:
        """The logits [m, V] that serving drafts from after the text's tokens, if they are not `draft` itself."""

    def figures(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Values [n] by name; their means over held-out answers are reported."""

    def backward(self) -> None:
        """Backpropagate the gradients of all chunks into the model."""


class DraftModel(nn.Module, ABC):
    """A trainable method.  It borrows the target's embedding and head, which stay frozen and are never saved."""

    config: Any
    """The method's Config, with the field `kind`."""
    target: Target
    taps: tuple[int, ...]
    reads_target: bool = True
    """Whether it needs the target's embedding, head or states, not only its tokens."""
    reads_states: bool = True
    """Whether it reads hidden states of the target."""
    rows_are_independent: bool = True
    """Whether a row's loss depends on that row alone; False if it depends on other rows of the batch, which may be in
    other processes."""
    progress: float = 1.0
    """Share of training completed, set before every step; 1 outside of training."""
    _target_head: tuple[tuple[torch.dtype, str], nn.Module] | None = None

    def begin(self, counts: Tensor) -> None:
        """Called once before the first step, to initialise whatever depends on the data.  counts [V] int64."""

    def check_split(self, count: int) -> None:
        """Raises ConfigError if texts can't be split over `count` processes."""
        raise ConfigError(
            f"train.sequence_parallel {count}: drafter {self.config.kind!r} needs whole texts; only dflash, dflash2 "
            "and dspark can split them, so set it to 1"
        )

    def facts(self) -> Mapping[str, Any]:
        """Facts that a checkpoint stores and checks at load, such as the hash of a reduced vocabulary."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def target_states(self, source: Batch | Scores) -> Tensor:
        """The states that the model reads, [B, n, T, H]: the taps of a target's pass, or its hidden state if there are
        none."""
        if not self.taps:
            return source.hidden.unsqueeze(-2)
        assert source.taps is not None
        return source.taps

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., V] of states [..., H]."""
        return self.target.head(states)

    @property
    def reduced(self) -> DraftVocabulary | None:
        """The reduced vocabulary, if it drafts fewer tokens with the target's head; otherwise None."""
        return None

    def over_all_tokens(self) -> DraftModel:
        """This model with the full vocabulary, for formats without `reduced`."""
        return self

    def target_logits(self, hidden: Tensor) -> Tensor:
        """The target's logits [..., V] of its states [..., H] after the final norm."""
        dtype = multiplied_in(hidden)
        if dtype == hidden.dtype or self.target.spec.quantised is not None:
            return self.target.head(hidden)
        # autocast caches only casts of trained weights, and would cast the frozen head again for every product
        key = dtype, self.target.spec.weights_hash
        if self._target_head is None or self._target_head[0] != key:
            every = torch.arange(self.target.spec.vocabulary, device=self.target.device)
            self._target_head = key, self.target.head_over(every, dtype)
        return self._target_head[1](hidden)

    def terms(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Like `Predictions.extra`; rows: what `predict` returned."""
        return {}

    def served(self, rows: Any, part: slice, draft: Tensor) -> Tensor | None:
        """As `Predictions.served`."""
        return None

    def figures(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """As `Predictions.figures`."""
        return {}

    def settled(self, held_out: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Weights, by name, to set after training based on the measurements on held-out answers."""
        return {}

    @classmethod
    def build(cls, config: Any, target: Target) -> Drafter:
        """A drafter with a new model, on the target's device and in its dtype."""
        return cls(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()

    def taught(self, states: Tensor, previous: Tensor) -> Tensor:
        """Teacher-forced logits [..., K, V] of whole blocks: states [..., K, H], and the token before each [..., K]."""
        return self.logits(states)

    @abstractmethod
    def predict(self, batch: Batch) -> Predictions: ...

    @abstractmethod
    def drafter(self) -> Drafter: ...


def binding(target: Target) -> dict[str, Any]:
    """What a checkpoint requires of its target: shape, vocabulary and weights, not the folder."""
    spec = asdict(target.spec)
    return {key: spec[key] for key in ("layers", "hidden", "vocabulary", "tokenizer_hash", "weights_hash")}
