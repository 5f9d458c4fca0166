"""Where drafts are rejected: an untimed run that records every token the target judged.

The target's probabilities, ranks and entropies are taken at temperature 1, whatever the run's temperature, so that rows
can be compared.
V vocabulary, N drafted nodes.
"""

from __future__ import annotations

import math
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Policy, Probe
from outrider.decoding.scheduler import Progress
from outrider.decoding.state import Judge, Request, Scores
from outrider.generation import batch, serve
from outrider.report.parts import Pattern, Rejections, TracedToken
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.text import TextStream
from outrider.targets.hf.transformers import TransformersTarget

ENTROPIES = (0.1, 0.5, 1.0, 2.0)
"""Bin edges, in nats."""
RANKS = (2, 3, 6, 21)
"""First ranks of all bins except the first."""
ENTROPY_NAMES = ("below 0.1", "0.1 to 0.5", "0.5 to 1", "1 to 2", "2 and more")
RANK_NAMES = ("1", "2", "3-5", "6-20", ">20")
KINDS = ("word", "number", "space", "punctuation", "symbol", "hangul", "other script", "special")


class Judged(NamedTuple):
    """A text with a record of every token."""

    tokens: list[int]
    tested: list[TracedToken]
    """One per token."""
    overlap: list[float]
    """Probability that the acceptance rule accepts, for every position with a proposal, at the run's temperature."""


class TracedTarget:
    """Wraps a target to report every draft that it verifies in the batch's cache, which is the first one allocated."""

    def __init__(self, target: Any, on_verify: Callable[[Draft, Scores], None]):
        self._target = target
        self._on_verify = on_verify
        self._cache: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def allocate(self, *args: Any, **kwargs: Any) -> Any:
        cache = self._target.allocate(*args, **kwargs)
        if self._cache is None:
            self._cache = cache
        return cache

    def verify(
        self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...] = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        scores: Scores = self._target.verify(cache, rows, anchor, draft, taps, probe)
        if cache is self._cache:  # a judge uses its own cache
            self._on_verify(draft, scores)
        return scores


def judged(
    target: TransformersTarget, request: Request, drafter: Drafter, policy: Policy | str | None = None, *,
    ends: bool = True,
    judge: SamplingJudge | None = None, shared_noise: bool = True,
) -> Judged:  # fmt: skip
    """Continue one request and record every token with its proposal and the target's probabilities.

    ends: False continues past the end of the text, like timed runs above temperature 0.
    """
    judged = Judged([], [], [])
    last: list[Any] = []

    def keep_last(draft: Draft, scores: Scores) -> None:
        # cloned: a compiled step reuses its buffers
        last[:] = [draft, scores.logits[0].clone()]

    texts = _TokenTexts(target)
    state = batch(target, 1, judge or "standard", shared_noise, None if ends else frozenset())
    traced: Any = TracedTarget(target, keep_last)
    for progress in serve(traced, [request], drafter, policy=policy, state=state):
        draft, logits = last
        for token, chance in _traced_tokens(draft, logits, state.judge, progress, texts):
            judged.tested.append(token)
            if chance is not None:
                judged.overlap.append(chance)
        judged.tokens.extend(progress.tokens)
    return judged


def _traced_tokens(
    draft: Draft, logits: Tensor, judge: Judge, progress: Progress, texts: _TokenTexts
) -> list[tuple[TracedToken, float | None]]:
    """The tokens of one step, each with the probability that one of its siblings is accepted.  logits [N+1, V]."""
    size, at = draft.live[0], -1
    traced: list[tuple[TracedToken, float | None]] = []
    p = judge.distribution(logits[None])[0]
    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    for depth, token in enumerate(progress.tokens):
        children = [n for n in range(size) if draft.tree[0][n] == at]
        is_accepted = depth < progress.accepted
        # among equal siblings the first is accepted; if none is, the first represents them all
        node = next(
            (n for n in children if is_accepted and draft.ids[0][n] == token), children[0] if children else None
        )
        log_p = logs[at + 1]
        entropy = _short(-(log_p.exp() * log_p).nan_to_num(0.0).sum())
        is_last = progress.finish_reason is not None and depth + 1 == len(progress.tokens)
        text = texts.next(token, is_last)
        if node is None:
            traced.append((TracedToken(text=text, entropy=entropy), None))
            break
        proposed = draft.ids[0][node]
        is_valid = 0 <= proposed < len(log_p)
        tested = TracedToken(
            text=text, drafted=texts.of(proposed) if is_valid else None, accepted=is_accepted, depth=depth + 1,
            p=_short(log_p[proposed].exp()) if is_valid else 0.0,
            q=_short(draft.q[0, node, proposed]) if draft.q is not None and is_valid else None,
            rank=1 + int((log_p > log_p[proposed]).sum()) if is_valid else None,
            entropy=entropy, kind=texts.kind(proposed) if is_valid else None,
        )  # fmt: skip
        traced.append((tested, _chance(p[at + 1], draft, children)))
        at = node
    return traced


def _short(number: Tensor) -> float:
    """Six digits: enough for readers, and half the size of a full float in a file."""
    return float(f"{float(number):.6g}")


def _chance(p: Tensor, draft: Draft, children: Sequence[int]) -> float:
    """The probability, before they are sampled, that one of these siblings is accepted: each overlaps with the residual
    that earlier siblings leave.  p [V]."""
    residual, rejected = p, 1.0
    for node in children:
        if draft.q is not None:
            q = draft.q[0, node].to(p)
        else:
            token = draft.ids[0][node]
            q = torch.zeros_like(p)
            if 0 <= token < len(p):
                q[token] = 1.0
        rejected *= 1 - min(1.0, float(torch.minimum(residual, q).clamp(min=0).sum()))
        rest = (residual - q).clamp(min=0)
        residual = rest / rest.sum() if rest.sum() > 1e-12 else residual
    return 1 - rejected


class _TokenTexts:
    """Texts and kinds of tokens.  The texts concatenate to the run's text; special tokens are written by name."""

    def __init__(self, target: TransformersTarget):
        self.tokenizer = target.tokenizer
        self.special = {*target.ends, *getattr(self.tokenizer, "all_special_ids", ())}
        self.stream = None if target.detokenizer is None else TextStream(target.detokenizer)

    def of(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    def next(self, token: int, is_last: bool) -> str:
        """The text that this token adds; empty while a character is incomplete."""
        if self.stream is None:
            return self.of(token)
        if token in self.special:
            # if this is the last token, also the text held back for a following one
            return self.stream.push([], is_last).text + self.of(token)
        return self.stream.push([token], is_last).text

    def kind(self, token: int) -> str | None:
        return None if self.tokenizer is None else "special" if token in self.special else kind_of(self.of(token))


def kind_of(text: str) -> str:
    """The class of a token's text: by its letters if any, otherwise by digits, otherwise by punctuation.  Incomplete
    characters are allowed."""
    stripped = text.strip()
    if not stripped:
        return "space"
    names = [unicodedata.name(letter, "") for letter in stripped]
    if any(name.startswith("HANGUL") for name in names):
        return "hangul"
    classes = [unicodedata.category(letter)[0] for letter in stripped]
    letters = [name for name, kind in zip(names, classes, strict=True) if kind in "LM"]
    # partial characters decode to the replacement character: byte-level vocabularies split rare scripts
    if "\ufffd" in stripped or (letters and not any(name.startswith(("LATIN", "FULLWIDTH LATIN")) for name in letters)):
        return "other script"
    if letters:
        return "word"
    return "number" if "N" in classes else "punctuation" if "P" in classes else "symbol"


def patterns(tested: Sequence[TracedToken]) -> Rejections:
    """How often proposals of each kind, entropy and rank were tested and accepted."""
    proposals = [token for token in tested if token.depth is not None]
    return Rejections(
        by_kind=_counted(KINDS, [(token.kind, token.accepted) for token in proposals]),
        by_entropy=_counted(ENTROPY_NAMES, [(_entropy_name(token.entropy), token.accepted) for token in proposals]),
        by_rank=_counted(RANK_NAMES, [(_rank_name(token.rank), token.accepted) for token in proposals]),
    )


def _counted(names: Sequence[str], proposals: Sequence[tuple[str | None, bool]]) -> tuple[Pattern, ...]:
    """All names in order; those that never occurred have zeros."""
    return tuple(
        Pattern(
            name=name,
            tested=sum(each == name for each, _ in proposals),
            accepted=sum(each == name and accepted for each, accepted in proposals),
        )
        for name in names
    )


def _entropy_name(nats: float | None) -> str | None:
    return None if nats is None or not math.isfinite(nats) else ENTROPY_NAMES[bisect_right(ENTROPIES, nats)]


def _rank_name(rank: int | None) -> str | None:
    """The rank's bin; an id outside the target's vocabulary goes into the lowest."""
    return RANK_NAMES[-1] if rank is None else RANK_NAMES[bisect_right(RANKS, rank)]
