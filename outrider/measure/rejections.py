"""Where drafts are rejected: one more, untimed run, with a record of every token that the target judged.

The target's probabilities, ranks and entropies are read at temperature 1, whatever the run's temperature is, so that
rows can be compared.
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
"""Nats, where one bin ends and the next begins."""
RANKS = (2, 3, 6, 21)
"""Ranks where a bin begins, after the first."""
ENTROPY_NAMES = ("below 0.1", "0.1 to 0.5", "0.5 to 1", "1 to 2", "2 and more")
RANK_NAMES = ("1", "2", "3-5", "6-20", ">20")
KINDS = ("word", "number", "space", "punctuation", "symbol", "hangul", "other script", "special")


class Judged(NamedTuple):
    """One text, with a record of every token."""

    tokens: list[int]
    tested: list[TracedToken]
    """One for each token."""
    overlap: list[float]
    """For every position with a proposal: the chance that the acceptance rule accepts it, at the run's temperature."""


class TracedTarget:
    """A target that reports every draft it verifies in the batch's cache, the first that is allocated, and is unchanged
    otherwise."""

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
        if cache is self._cache:  # a judge reads in a cache of its own
            self._on_verify(draft, scores)
        return scores


def judged(
    target: TransformersTarget, request: Request, drafter: Drafter, policy: Policy | str | None = None, *,
    ends: bool = True,
    judge: SamplingJudge | None = None, shared_noise: bool = True,
) -> Judged:  # fmt: skip
    """Continue one request and record every token: what was proposed, and the target's probabilities.

    ends: False goes on after the end of the text, as timed runs above temperature 0 do.
    """
    found = Judged([], [], [])
    last: list[Any] = []

    def keep_last(draft: Draft, scores: Scores) -> None:
        # a copy: a compiled step gives its buffers out again
        last[:] = [draft, scores.logits[0].clone()]

    words = _Words(target)
    state = batch(target, 1, judge or "standard", shared_noise, None if ends else frozenset())
    traced: Any = TracedTarget(target, keep_last)
    for progress in serve(traced, [request], drafter, policy=policy, state=state):
        draft, logits = last
        for tested, chance in _traced_tokens(draft, logits, state.judge, progress, words):
            found.tested.append(tested)
            if chance is not None:
                found.overlap.append(chance)
        found.tokens.extend(progress.tokens)
    return found


def _traced_tokens(
    draft: Draft, logits: Tensor, judge: Judge, progress: Progress, words: _Words
) -> list[tuple[TracedToken, float | None]]:
    """The tokens of one step, each with its proposal and the chance that one of the siblings is accepted.  logits [N+1,
    V]."""
    size, at = draft.live[0], -1
    found: list[tuple[TracedToken, float | None]] = []
    p = judge.distribution(logits[None])[0]
    logs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    for depth, token in enumerate(progress.tokens):
        children = [n for n in range(size) if draft.tree[0][n] == at]
        is_accepted = depth < progress.accepted
        # of equal siblings the first is accepted; where none is, the first stands for all
        node = next(
            (n for n in children if is_accepted and draft.ids[0][n] == token), children[0] if children else None
        )
        own = logs[at + 1]
        entropy = _short(-(own.exp() * own).nan_to_num(0.0).sum())
        is_last = progress.finish_reason is not None and depth + 1 == len(progress.tokens)
        text = words.next(token, is_last)
        if node is None:
            found.append((TracedToken(text=text, entropy=entropy), None))
            break
        proposed = draft.ids[0][node]
        known = 0 <= proposed < len(own)
        tested = TracedToken(
            text=text, drafted=words.of(proposed) if known else None, accepted=is_accepted, depth=depth + 1,
            p=_short(own[proposed].exp()) if known else 0.0,
            q=_short(draft.q[0, node, proposed]) if draft.q is not None and known else None,
            rank=1 + int((own > own[proposed]).sum()) if known else None,
            entropy=entropy, kind=words.kind(proposed) if known else None,
        )  # fmt: skip
        found.append((tested, _chance(p[at + 1], draft, children)))
        at = node
    return found


def _short(number: Tensor) -> float:
    """Six digits: enough for a reader, and half the size of a float in a file."""
    return float(f"{float(number):.6g}")


def _chance(p: Tensor, draft: Draft, children: Sequence[int]) -> float:
    """The chance that one of these siblings is accepted, before they are drawn: its overlap with the residual of the
    earlier ones. p [V]."""
    left, missed = p, 1.0
    for node in children:
        if draft.q is not None:
            q = draft.q[0, node].to(p)
        else:
            token = draft.ids[0][node]
            q = torch.zeros_like(p)
            if 0 <= token < len(p):
                q[token] = 1.0
        missed *= 1 - min(1.0, float(torch.minimum(left, q).clamp(min=0).sum()))
        rest = (left - q).clamp(min=0)
        left = rest / rest.sum() if rest.sum() > 1e-12 else left
    return 1 - missed


class _Words:
    """Texts and kinds of tokens.  The texts of a run, joined, are the run's text; special tokens are written by
    name."""

    def __init__(self, target: TransformersTarget):
        self.tokenizer = target.tokenizer
        self.special = {*target.ends, *getattr(self.tokenizer, "all_special_ids", ())}
        self.stream = None if target.detokenizer is None else TextStream(target.detokenizer)

    def of(self, token: int) -> str:
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token], skip_special_tokens=False)

    def next(self, token: int, is_last: bool) -> str:
        """What this token adds to the text; empty while a character is incomplete."""
        if self.stream is None:
            return self.of(token)
        if token in self.special:
            # also text that waited for a following token, where this is the last one
            return self.stream.push([], is_last).text + self.of(token)
        return self.stream.push([token], is_last).text

    def kind(self, token: int) -> str | None:
        return None if self.tokenizer is None else "special" if token in self.special else kind_of(self.of(token))


def kind_of(text: str) -> str:
    """The class of a token's text, by its letters, else its digits, else its marks.  Incomplete characters are
    allowed."""
    stripped = text.strip()
    if not stripped:
        return "space"
    names = [unicodedata.name(letter, "") for letter in stripped]
    if any(name.startswith("HANGUL") for name in names):
        return "hangul"
    classes = [unicodedata.category(letter)[0] for letter in stripped]
    letters = [name for name, kind in zip(names, classes, strict=True) if kind in "LM"]
    # part of a character decodes to the replacement sign: byte-level vocabularies split rare scripts
    if "\ufffd" in stripped or (letters and not any(name.startswith(("LATIN", "FULLWIDTH LATIN")) for name in letters)):
        return "other script"
    if letters:
        return "word"
    return "number" if "N" in classes else "punctuation" if "P" in classes else "symbol"


def patterns(tested: Sequence[TracedToken]) -> Rejections:
    """How often proposals of each kind, entropy and rank were tested and accepted."""
    proposals = [place for place in tested if place.depth is not None]
    return Rejections(
        by_kind=_counted(KINDS, [(place.kind, place.accepted) for place in proposals]),
        by_entropy=_counted(ENTROPY_NAMES, [(_entropy_name(place.entropy), place.accepted) for place in proposals]),
        by_rank=_counted(RANK_NAMES, [(_rank_name(place.rank), place.accepted) for place in proposals]),
    )


def _counted(names: Sequence[str], found: Sequence[tuple[str | None, bool]]) -> tuple[Pattern, ...]:
    """All names in their order; a name that never came up has zeros."""
    return tuple(
        Pattern(
            name=name,
            tested=sum(own == name for own, _ in found),
            accepted=sum(own == name and accepted for own, accepted in found),
        )
        for name in names
    )


def _entropy_name(nats: float | None) -> str | None:
    return None if nats is None or not math.isfinite(nats) else ENTROPY_NAMES[bisect_right(ENTROPIES, nats)]


def _rank_name(rank: int | None) -> str | None:
    """An id outside the target's vocabulary counts as the lowest rank."""
    return RANK_NAMES[-1] if rank is None else RANK_NAMES[bisect_right(RANKS, rank)]
