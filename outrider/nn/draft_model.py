"""What a trainable method promises: a Batch in, Predictions out, a Drafter to serve with.

It says what to predict and where, never which loss.  Every method reduces to rows of (draft logits, target logits,
weight, depth), so any loss works with any method and acceptance by depth is computed once for all.

B sequences, S tokens, T taps, H hidden size, V vocabulary, M predicted rows, m rows of one chunk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from pydantic import NonNegativeInt
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Scores
from outrider.errors import ConfigError, DrafterError
from outrider.nn.draft_vocabulary import DraftVocabulary, multiplied_in
from outrider.nn.sequence import Stripe
from outrider.nn.top_logprobs import TopLogprobs
from outrider.targets.cache.attention_mask import positions
from outrider.targets.protocol import Target, TargetSpec


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts and the target's states of them."""

    tokens: Tensor
    """[B, S] int64."""
    loss_mask: Tensor
    """[B, S] bool, True where the token is one to learn to draft."""
    documents: Tensor
    """[B, S] int64: 0 is padding, equal numbers are one text."""
    taps: Tensor
    """[B, S, T, H]."""
    hidden: Tensor
    """[B, S, H] after the target's final norm; [B, S, 0] where `top` stands in for it."""
    top: TopLogprobs | None = None
    """The target's likeliest tokens, where a cache has them in place of hidden states."""
    per_row: int = 1
    """Most texts of one row; more than 1 in a packed batch."""
    share: Share | None = None
    """Whose rows these are, where several processes have a part of the batch each."""
    stripe: Stripe | None = None
    """Which positions `taps` [B, S / N, T, H] are of, where several processes have a part of each text."""

    @property
    def final(self) -> Tensor | TopLogprobs:
        """What the target's distribution is computed from."""
        return self.hidden if self.top is None else self.top

    @property
    def positions(self) -> Tensor:
        """[B, S], each token's position within its own text, from 0."""
        return positions(self.documents)

    @property
    def whole(self) -> Batch:
        """The batch of all processes; its states are there in one process only."""
        return self if self.share is None else self.share.whole

    def own(self, values: Tensor) -> Tensor:
        """These rows of what is there for all rows of `whole`, [B, ...]."""
        return values if self.share is None else values[self.share.rows]

    def random(self, draw: Callable[[tuple[int, ...]], Tensor], *shape: int) -> Tensor:
        """Random numbers [B, *shape] for these rows, by torch.rand or the like, on the CPU.

        All processes draw for all rows: what a row gets does not depend on which of them has it.
        """
        return self.own(draw((len(self.whole.tokens), *shape)))


class Share(NamedTuple):
    """The rows of a batch that one of several processes has."""

    whole: Batch
    """Tokens, loss mask and documents of all rows, without states."""
    rows: slice
    counts: bool = True
    """False where there were too few rows for this process: it repeats another's, which must not count again."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What features were made of; a consumer refuses a source that does not match."""

    target: TargetSpec
    taps: tuple[int, ...]
    dtype: str
    template_hash: str | None
    texts: int
    tokens: int


class FeatureSource(Protocol):
    """Batches, again and again, in an order that depends on seed and step alone."""

    manifest: Manifest

    @property
    def counts(self) -> Tensor:
        """[V] int64, how often each token is one to learn."""

    @property
    def steps_per_pass(self) -> int:
        """Steps that read every text once."""

    def batch(self, step: int) -> Batch:
        """The batch of optimiser step `step`, counted from 0."""

    def packed(self, steps: range) -> Iterator[Batch]:
        """The texts of these steps, several to a row, in batches of at most as many tokens as its budget."""

    def share(self, rank: int, count: int, stripe: Stripe | None = None) -> None:
        """From now on give the rows of process `rank` of `count`, with their `Share`; taps of `stripe`, or all."""


class Predictions(Protocol):
    """Rows that a method predicts in one batch; logits come in chunks, so the full [M, V] need never exist."""

    labels: Tensor
    """[M] int64, the token that followed."""
    weight: Tensor
    """[M] float32: 0 where nothing is learnt, else what the method's paper gives this depth; a run may choose other
    weights."""
    depth: Tensor
    """[M] int64, 0 = first drafted token."""
    block: Tensor
    """[M] int64, the same for all rows of one rollout; a chunk never splits one."""
    vocabulary: int
    """V, by which the trainer chooses how many rows a chunk has."""

    def chunks(self, rows: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """(draft logits, target logits [m, V], which rows), at most about `rows` at a time."""

    def extra(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """[m] terms of the method's own, by name; they are added to the loss with the row's weight."""

    def served(self, rows: slice, draft: Tensor) -> Tensor | None:
        """What a token is drafted by after known ones, logits [m, V], where it is not `draft` itself."""

    def figures(self, rows: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """Values [n] by name, whose means are reported of held-out answers."""

    def backward(self) -> None:
        """Carry the gradients that the chunks' losses left on the rows back into the model."""


class DraftModel(nn.Module, ABC):
    """A trainable method.  Embedding and head are the target's: borrowed, frozen, never saved."""

    config: Any
    """The method's own Config, `kind` among its fields."""
    target: Target
    taps: tuple[int, ...]
    reads_target: bool = True
    """It needs the target's embedding, head or states, and not its tokens alone."""
    rows_are_independent: bool = True
    """A row's loss is its own; False where it depends on the batch's other rows, of which several processes have some
    each."""
    progress: float = 1.0
    """Share of the training that is done, set before every step; 1 where no training runs."""
    _target_head: tuple[tuple[torch.dtype, str], nn.Module] | None = None

    def begin(self, counts: Tensor) -> None:
        """Called once, before the first step, to take from the data what needs no training.  counts [V] int64."""

    def check_split(self, count: int) -> None:
        """Raises ConfigError where `count` processes can't have a part of each text."""
        raise ConfigError(
            f"train.sequence_parallel {count}: drafter {self.config.kind!r} reads whole texts; dflash and dspark can "
            "share them, set it to 1 for this one"
        )

    def facts(self) -> Mapping[str, Any]:
        """What a checkpoint says of the weights and checks when it is loaded, such as the hash of a reduced
        vocabulary."""
        return {}

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def target_states(self, source: Batch | Scores) -> Tensor:
        """States read from a target's pass, [B, n, T, H]: the taps, or the hidden state where it has none."""
        if not self.taps:
            return source.hidden.unsqueeze(-2)
        assert source.taps is not None
        return source.taps

    def logits(self, states: Tensor) -> Tensor:
        """[..., V] of states [..., H]."""
        return self.target.head(states)

    @property
    def reduced(self) -> DraftVocabulary | None:
        """The tokens that it can draft by the target's own head; None where that is all of them, or the head its
        own."""
        return None

    def over_all_tokens(self) -> DraftModel:
        """This model, drafting from all tokens: formats of others have no `reduced`."""
        return self

    def target_logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of the target, of its states [..., H] after the final norm."""
        dtype = multiplied_in(hidden)
        if dtype == hidden.dtype or self.target.spec.quantised is not None:
            return self.target.head(hidden)
        # autocast keeps the casts of weights that are trained, and makes those of frozen ones anew at every product
        key = dtype, self.target.spec.weights_hash
        if self._target_head is None or self._target_head[0] != key:
            every = torch.arange(self.target.spec.vocabulary, device=self.target.device)
            self._target_head = key, self.target.head_over(every, dtype)
        return self._target_head[1](hidden)

    def terms(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """As `Predictions.extra`; rows: what `predict` gave."""
        return {}

    def served(self, rows: Any, part: slice, draft: Tensor) -> Tensor | None:
        """As `Predictions.served`."""
        return None

    def figures(self, rows: Any, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """As `Predictions.figures`."""
        return {}

    def settled(self, held_out: Mapping[str, Any]) -> Mapping[str, Tensor]:
        """Weights, by name, whose values follow from what was measured on held-out answers after the training."""
        return {}

    @classmethod
    def build(cls, config: Any, target: Target) -> Drafter:
        """A drafter around a new model, on the target's device and of its type."""
        return cls(config, target).to(target.device, getattr(torch, target.spec.dtype)).drafter()

    def taught(self, states: Tensor, previous: Tensor) -> Tensor:
        """[..., K, V] of whole blocks of known text: states [..., K, H], and the token before each [..., K]."""
        return self.logits(states)

    @abstractmethod
    def predict(self, batch: Batch) -> Predictions: ...

    @abstractmethod
    def drafter(self) -> Drafter: ...


def picked(values: Tensor, at: Tensor) -> Tensor:
    """values [B, S] at positions [B, A, K]."""
    return values.gather(1, at.flatten(1)).view(at.shape)


def labelled(batch: Batch, at: Tensor, first: int, depths: int) -> tuple[Tensor, Tensor]:
    """Positions of the tokens that drafts from positions `at` [B, A] predict, from `at` + `first` on, and which are
    learnt.

    Both [B, A, D].  A token is learnt if it is one to learn, of the same text, and so are those of all depths before;
    where there is none, its position is the last.
    """
    length = batch.tokens.shape[1]
    wanted = at[..., None] + first + torch.arange(depths, device=at.device)
    labels_at = wanted.clamp(max=length - 1)
    is_own = picked(batch.documents, labels_at) == batch.documents.gather(1, at)[..., None]
    return labels_at, (picked(batch.loss_mask, labels_at) & is_own & (wanted < length)).cumprod(-1).bool()


def drawn(live: Tensor, most: int, batch: Batch) -> tuple[Tensor, Tensor]:
    """Up to `most` live positions a text, drawn without replacement: [B, A] ascending, and which are live.  live [B,
    n], of the batch's first n positions."""
    # on the CPU, whose random state a checkpoint stores
    chance = torch.rand(live.shape).to(live.device).masked_fill(~live, -1.0)
    if batch.per_row > 1:
        chance = chance.masked_fill(_place(chance, batch.documents[:, : live.shape[1]]) >= most, -1.0)
    # no more than there are in any row: what is not live would be drafted, and go through the head, for nothing
    best = chance.topk(max(1, min(most * batch.per_row, int(live.sum(1).max()))), dim=1)
    at, order = best.indices.sort(1)
    return at, best.values.gather(1, order) >= 0


def _place(chance: Tensor, documents: Tensor) -> Tensor:
    """How many positions of the same text have a better chance, [B, n].  chance [B, n] up to 1."""
    # float64: a text's number must not cost the chance its last digits
    order = (2.0 * documents.double() - chance).argsort(1)
    return torch.zeros_like(order).scatter(1, order, positions(documents.gather(1, order)))


class Drawn(NamedTuple):
    """Positions that a batch is drafted from."""

    at: Tensor
    """[B, A] int64, ascending."""
    live: Tensor
    """[B, A] bool, where there is something to learn."""
    labels_at: Tensor
    """[B, A, D] int64, position of the token that each depth predicts; any position where there is none."""
    learnt: Tensor
    """[B, A, D] bool: it is of the same text and one to learn, and so are those of all depths before."""


def draw(batch: Batch, most: int, first: int, depths: int) -> Drawn:
    """Up to `most` positions a text from which there is something to learn, drawn without replacement; see
    `labelled`."""
    whole = batch.whole
    every = torch.arange(whole.tokens.shape[1] - first, device=whole.tokens.device).expand(len(whole.tokens), -1)
    at, live = map(batch.own, drawn(labelled(whole, every, first, 1)[1][..., 0], most, whole))
    labels_at, learnt = labelled(batch, at, first, depths)
    return Drawn(at, live, labels_at, learnt & live[..., None])


# ── pairs of a position's feature and the next token; see `nn.memory` ─────────────────────────────────────────────────


def pair_mask(documents: Tensor) -> Tensor:
    """Attention mask of pairs, [B, S - 1, S - 1] bool: each attends to itself and to those before it of its own text.

    Where the token is another text's, or padding, there is no pair: it attends to itself, and no other attends to it.
    """
    text = documents[:, 1:]
    whole, index = (text == documents[:, :-1]) & (text > 0), torch.arange(text.shape[1], device=text.device)
    before = (text[:, :, None] == text[:, None, :]) & whole[:, None, :] & whole[:, :, None] & (index[:, None] >= index)
    return before | (index[:, None] == index)


# ── what a config asks for ────────────────────────────────────────────────────────────────────────────────────────────


def resolve_taps(taps: Sequence[int] | None, spec: TargetSpec, count: int = 5) -> tuple[int, ...]:
    """The taps asked for, checked, or `count` of them spread from layer 1 to three before the last."""
    if taps is None:
        last = max(spec.layers - 3, 0)
        first = min(1, last)
        return tuple(sorted({first + round(i * (last - first) / max(1, count - 1)) for i in range(count)}))
    wrong = [tap for tap in taps if not 0 <= tap < spec.layers]
    if wrong:
        raise DrafterError(
            f"taps {tuple(taps)} reach past layer {spec.layers - 1} of {spec.name} ({spec.layers} layers, counted from "
            "0); "
            f"choose taps from 0 to {spec.layers - 1}"
        )
    if not taps or list(taps) != sorted(set(taps)):
        raise DrafterError(f"taps must be at least one layer, in ascending order, each named once, got {tuple(taps)}")
    return tuple(taps)


C = TypeVar("C", bound=Base)
LEARNT: Literal["learnt"] = "learnt"
"""Value of `mask_token` for a vector of the draft model's own."""
MaskToken = NonNegativeInt | Literal["learnt"] | None


def with_mask(config: C, target: Target) -> C:
    """The config with the mask token filled in, so that a checkpoint names it.

    It is the token asked for, checked; else the tokenizer's mask token, or one that is not in any text; else, or where
    asked for, a learnt vector.
    """
    asked: MaskToken = config.mask_token  # type: ignore[attr-defined]
    if isinstance(asked, int) and asked >= target.spec.vocabulary:
        raise DrafterError(
            f"mask_token {asked} is not a token id of {target.spec.name}, which has {target.spec.vocabulary}; choose a "
            "lower one"
        )
    offered = (asked, target.mask_token, target.spec.unused, LEARNT)
    return config.model_copy(update={"mask_token": next(token for token in offered if token is not None)})


def trained_mask(config: Any, target: Target) -> int:
    """The token that a target trained on masks has for them.  Raises DrafterError where it has none."""
    mask: MaskToken = with_mask(config, target).mask_token
    if isinstance(mask, int):
        return mask
    raise DrafterError(
        f"{target.spec.name} has no token that can stand for masks; name the one it was trained with as "
        "drafter.mask_token"
    )


class MaskedModule(nn.Module):
    """A module that reads masks: a token of the target's, or a vector `mask` of its own."""

    config: Any
    target: Target
    mask_token: int | None

    def choose_mask(self) -> None:
        """Set the mask that the config names, as `with_mask` put it there."""
        self.mask_token = None if self.config.mask_token == LEARNT else self.config.mask_token
        if self.mask_token is None:
            self.mask = nn.Parameter(torch.randn(self.target.spec.hidden) * 0.02)

    def words(self, tokens: Tensor, masks: int, dtype: torch.dtype | None = None) -> Tensor:
        """Embeddings of tokens [..., n] and of masks after them, [..., n + masks, H]; in the target's type unless
        given."""
        if self.mask_token is not None:
            return self.target.embed(nn.functional.pad(tokens, (0, masks), value=self.mask_token)).to(dtype=dtype)
        words = self.target.embed(tokens).to(dtype=dtype)
        return torch.cat([words, self.mask.to(words.dtype).expand(*tokens.shape[:-1], masks, -1)], -2)


@torch.no_grad()
def copy_layers(layers: Sequence[nn.Module] | nn.ModuleList, indices: Sequence[int], target: Target) -> None:
    """Begin every draft layer with the weights of a target layer, for those that both have; the draft's other weights
    stay.

    Raises DrafterError where their number, or the shape of a weight, does not fit.
    """
    if len(indices) != len(layers) or max(indices) >= target.spec.layers:
        raise DrafterError(
            f"init_from_layers {tuple(indices)} must name one target layer for each of {len(layers)} draft layers, "
            f"each from 0 to {target.spec.layers - 1}"
        )
    for layer, index in zip(layers, indices, strict=True):
        mine, theirs = layer.state_dict(), target.layer(index).state_dict()
        shared = mine.keys() & theirs.keys()
        wrong = sorted(name for name in shared if mine[name].shape != theirs[name].shape)
        if wrong or not shared:
            name = wrong[0] if wrong else next(iter(mine))
            found = tuple(theirs[name].shape) if name in theirs else "missing"
            raise DrafterError(
                f"layer {index} of {target.spec.name} can't be copied: {name} is {tuple(mine[name].shape)} in the "
                "draft and "
                f"{found} in the target; give the draft the target's heads, kv_heads, head_dim and intermediate, "
                "or leave init_from_layers out"
            )
        for name in shared:
            mine[name].copy_(theirs[name])


def binding(target: Target) -> dict[str, Any]:
    """What a checkpoint is bound to: the target's shape, vocabulary and weights, not its folder."""
    spec = asdict(target.spec)
    return {key: spec[key] for key in ("layers", "hidden", "vocabulary", "tokenizer_hash", "weights_hash")}
