"""An ensemble of language models as one target: p is the weighted mean of its members' distributions.

SAFE: speculation for ensembles (arXiv 2510.15346).  Prompts, texts and drafts are in the tokens of the first member,
and drafters read its states.  One pass of every member verifies a draft; each has its own cache, and all are cut back
to the accepted text.  Members with the same vocabulary read the same ids; one with another tokenizer reads the text in
its own tokens, see `alignment`.

`averaging` says where members are averaged.  Either way p depends only on the text before it, so drafts change nothing.

Differs from the paper: SAFE drafts with a member, which does not verify its own draft; here any drafter drafts, and all
members verify.

Temperature, penalties and bans apply to the logarithm of the mean, as to any target's logits.  So p at temperature T is
the mean to the power of 1 / T, normalised, not the mean of the members' distributions at T.

B live slots, R rows of a pass (anchor and drafted nodes), V vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import ConfigError, TargetError
from outrider.fast.passes.compiled import CompiledStep
from outrider.lab.alignment import AlignedCache, AlignedMember, SharedMember
from outrider.lab.averaging import Average, Shares
from outrider.lab.ensemble_folder import Description, described
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import TargetSpec
from outrider.targets.text.generation import greedy_sampling


class EnsembleCache:
    """Every member's keys and values, the first member's first."""

    def __init__(self, parts: Sequence[Any], slots: int, length: int, shares: Shares):
        self.parts, self.slots, self.length = list(parts), slots, length
        self._shares = shares
        self._codes: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each slot."""
        return self.parts[0].lengths

    @property
    def column_bytes(self) -> int:
        """Bytes of one token of a slot, over all members; 0 if one has another kind of cache."""
        sizes = [part.column_bytes for part in self.parts if isinstance(part, SlotCache | AlignedCache)]
        return sum(sizes) if len(sizes) == len(self.parts) else 0

    def count(self, codes: Tensor) -> None:
        """codes [B, R]: bits of the open pass's rows, to be counted when they are accepted."""
        self._codes = codes

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        for part in self.parts:
            part.keep(paths)
        if self._codes is not None:
            codes, self._codes = self._codes.tolist(), None
            for slot_codes, path in zip(codes, paths, strict=True):
                self._shares.add([slot_codes[0], *(slot_codes[node + 1] for node in path)])

    def free(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.free(rows)


class NoModel(TargetError, AttributeError):
    """An ensemble has no single model; as an AttributeError, `getattr` with a default works."""


class EnsembleTarget:
    """Several causal LMs as one target; drafting does not change the mean of their distributions."""

    def __init__(
        self, members: Sequence[TransformersTarget], weights: Sequence[float] | None = None,
        positions: Literal["all", "disputed"] = "all", sharpen: bool = False,
    ):  # fmt: skip
        """members: loaded targets on one device; texts are in the first one's tokens.  weights: of their distributions,
        equal by default, normalised to a sum of 1.  positions: where members are averaged.

        Members of weight 0 are not run, except the first.  Raises ConfigError for invalid weights, TargetError for
        members that can't be averaged.
        """
        self.members = tuple(members)
        if len(self.members) < 2 or not all(isinstance(member, TransformersTarget) for member in self.members):
            names = [type(member).__name__ for member in self.members]
            raise ConfigError(f"an ensemble has at least two loaded targets, got {names}; load each with load_target")
        self.weights = _shares_of(weights, len(self.members))
        first, *others = self.members
        for member in others:
            if member.device != first.device:
                raise TargetError(
                    f"{member.spec.name} is on {member.device} and {first.spec.name} on {first.device}; load all "
                    "members of an ensemble on one device"
                )
        weighed = zip(others, self.weights[1:], strict=True)
        self._others = [(_member(member, first), weight) for member, weight in weighed if weight > 0]
        self.average = Average(self.weights[0], self._others, positions == "disputed", sharpen)
        self.shares = Shares()
        """Counts over all texts so far."""
        rule = (positions, sharpen) if self.average.is_selective or sharpen else ()
        self.spec = _spec(self.members, self.weights, [other for other, _ in self._others], rule)
        self.device, self.tokenizer, self.mask_token = first.device, first.tokenizer, first.mask_token
        self._ends: frozenset[int] | None = None

    # ── the loop ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, slots: int, length: int) -> EnsembleCache:
        first_cache = self.members[0].allocate(slots, length)
        return EnsembleCache(
            [first_cache, *(other.allocate(slots, length) for other, _ in self._others)], slots, length, self.shares
        )

    @torch.inference_mode()
    def prefill(
        self, cache: EnsembleCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int],
        taps: tuple[int, ...] = (),
    ) -> Scores:  # fmt: skip
        """Every member reads one chunk [B, S], right-padded; `hidden` and `taps` are the first member's."""
        scores = self.members[0].prefill(cache.parts[0], rows, tokens, lengths, taps)
        likeliest = scores.logits.argmax(-1)
        parts = zip(self._others, cache.parts[1:], strict=True)
        opinions = [other.prefill(part, rows, tokens, lengths, likeliest) for (other, _), part in parts]
        if not opinions:
            return scores
        return scores._replace(logits=self.average.of(scores.logits, likeliest, opinions).log_p, choice=None)

    @torch.inference_mode()
    def verify(
        self, cache: EnsembleCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        """One pass of every member over anchor and draft: `logits` [B, R, V] are the logarithm of their mean.

        `hidden` and `taps` are the first member's, and so is a probe, which other members do not read.
        """
        scores = self.members[0].verify(cache.parts[0], rows, anchor, draft, taps, probe)
        if not self._others:
            cache.count(torch.zeros(scores.logits.shape[:2], dtype=torch.int64))
            return scores
        likeliest = scores.logits.argmax(-1)
        parts = zip(self._others, cache.parts[1:], strict=True)
        opinions = [other.verify(part, rows, anchor, draft, likeliest) for (other, _), part in parts]
        averaged = self.average.of(scores.logits, likeliest, opinions)
        cache.count(averaged.codes(likeliest))
        return scores._replace(logits=averaged.log_p, choice=None)

    # ── what drafters and requests ask besides ────────────────────────────────────────────────────────────────────────

    @property
    def ends(self) -> frozenset[int]:
        """Token ids that end a text: the first member's, unless others were set here."""
        return self.members[0].ends if self._ends is None else self._ends

    @ends.setter
    def ends(self, ends: frozenset[int]) -> None:
        self._ends = ends

    @property
    def detokenizer(self) -> Detokenizer | None:
        return self.members[0].detokenizer

    @property
    def step(self) -> CompiledStep:
        """The first member's compiled step; every member has its own."""
        return self.members[0].step

    @property
    def parameters(self) -> int:
        """Of all members."""
        return sum(member.parameters for member in self.members)

    @property
    def generation_config(self) -> Any:
        return self.members[0].generation_config

    @property
    def model(self) -> Never:
        """Raises TargetError: there is no one module whose weights or logits are the ensemble's."""
        raise NoModel(
            f"{self.spec.name} is an ensemble, and this needs the weights of one model; take one of its members"
        )

    def compile(self) -> float:
        """Have every member's passes compiled, as `TransformersTarget.compile`."""
        return sum(member.compile() for member in self.members)

    def embed(self, tokens: Tensor) -> Tensor:
        """The first member's, as all that drafters read."""
        return self.members[0].embed(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        """The first member's logits, not the ensemble's: those are no function of one member's state."""
        return self.members[0].head(hidden)

    def head_rows(self, tokens: Tensor) -> Tensor:
        return self.members[0].head_rows(tokens)

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        return self.members[0].head_over(tokens, dtype)

    def embedding_rows(self, tokens: Tensor) -> Tensor:
        return self.members[0].embedding_rows(tokens)

    def copy_to(self, device: torch.device) -> TransformersTarget:
        return self.members[0].copy_to(device)

    def layer(self, index: int) -> nn.Module:
        return self.members[0].layer(index)

    def read(self, tokens: Tensor, taps: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Hidden states and taps of whole texts in the first member."""
        return self.members[0].read(tokens, taps)

    def check_probe(self) -> None:
        self.members[0].check_probe()

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        return self.members[0].read_probe(tokens, documents, probe)

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """Greedy decoding with what the first member's generation_config asks for."""
        return greedy_sampling(self.members[0].model, self.ends, self.spec.vocabulary, prompt, max_new_tokens)

    def encode(self, prompt: Any, thinking: bool | None = None, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids by the first member's tokenizer."""
        return self.members[0].encode(prompt, thinking, tools)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.members[0].decode(tokens)


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _shares_of(weights: Sequence[float] | None, members: int) -> tuple[float, ...]:
    """The weights, divided by their sum."""
    shares = (1.0,) * members if weights is None else tuple(map(float, weights))
    is_sound = len(shares) == members and all(0 <= weight < math.inf for weight in shares) and sum(shares) > 0
    if not is_sound:
        raise ConfigError(
            f"an ensemble of {members} members needs as many weights, none below 0 and not all 0, got {list(shares)}"
        )
    return tuple(weight / sum(shares) for weight in shares)


def _member(target: TransformersTarget, first: TransformersTarget) -> SharedMember | AlignedMember:
    one, other = first.spec, target.spec
    if one.tokenizer_hash != other.tokenizer_hash:
        return AlignedMember(target, first)
    if one.tokenizer_hash is None and one.vocabulary != other.vocabulary:
        raise TargetError(
            f"{other.name} has a vocabulary of {other.vocabulary}, {one.name} one of {one.vocabulary}, and no "
            "tokenizer says what they share; load both with their tokenizers"
        )
    return SharedMember(target, one.vocabulary)


MODES = ("off", "chain", "tree")
"""What can be verified, weakest first."""


def _spec(
    members: Sequence[TransformersTarget], weights: Sequence[float], others: Sequence[SharedMember | AlignedMember],
    rule: tuple[Any, ...],
) -> TargetSpec:  # fmt: skip
    first = members[0].spec
    verifying = [first, *(other.target.spec for other in others)]
    same = [first, *(other.target.spec for other in others if isinstance(other, SharedMember))]
    facts = [*zip((member.spec.weights_hash for member in members), weights, strict=True), *rule]
    return replace(
        first, name=" + ".join(member.spec.name for member in members), revision=None,
        context=min(spec.context for spec in same), mode=min((spec.mode for spec in verifying), key=MODES.index),
        weights_hash=hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
        base_hash=first.base_hash or first.weights_hash,
    )  # fmt: skip


# ── a folder ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def first(description: Description) -> str:
    """The member that drafters read."""
    return description.members[0]


def load(
    name: str, description: Description, load_target: Callable[..., TransformersTarget], *, revision: str | None,
    tensor_parallel: int, **options: Any,
) -> Any:  # fmt: skip
    """The target of an ensemble's folder.  It has what serving and measuring need of a TransformersTarget, and refuses
    what needs one model."""
    if tensor_parallel > 1:
        raise ConfigError(f"tensor_parallel splits one model, but {name} is an ensemble; leave it out")
    if revision is not None:
        raise ConfigError(f"revision {revision!r} names one checkpoint, but {name} is an ensemble; leave it out")
    nested = [member for member in description.members if described(member) is not None]
    if nested:
        raise ConfigError(f"{nested[0]} is an ensemble and can't be a member of {name}; name its members there")
    members = [load_target(member, **options) for member in description.members]
    return EnsembleTarget(members, description.weights, description.positions, description.sharpen)
