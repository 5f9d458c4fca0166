"""Jacobi decoding: the target's own passes refine a window of guesses.  (Santilli et al. 2305.10427; sampled: 2410.01699.)

Behind the first rejection a verified pass still says what would follow each guess.  Moved on by what was kept, those rows are
the next window: its likeliest tokens at temperature 0, above it draws from them.  Fresh guesses at the window's end, and
further branches, come from a pool of n-grams of the text and of earlier windows (lookahead decoding, Fu et al. 2402.02057).
Rows behind a wrong guess are wrong themselves: where the pool knows the text's end, the whole window is its own.  Needs no
model and no training.

Differs from both: the window is one chain, without lookahead's second dimension.  Guesses are drawn anew in every step, also
those that nobody judged: they decided what q is, and a policy may have seen what became of them.

B live slots, N drafted nodes, V vocabulary, m rows of the last pass that are still of use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores
from outrider.nn import trees
from outrider.nn.serving import Sampler, verifies_trees, warn_idle
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import Prefix
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["jacobi"] = "jacobi"
    window: PositiveInt = 8
    """Guesses per step, one behind the other."""
    init: Literal["ngram", "repeat"] = "ngram"
    """Fresh guesses: what the pool says followed the last tokens, or the last token again, which is also the way out.  Where
    the pool knows the text's last `gram` - 1 tokens, all of its guesses are taken before the rows'."""
    gram: Annotated[int, Field(ge=2)] = 4
    """Tokens of the longest n-gram in the pool, the one that follows included."""
    pool: PositiveInt = 8192
    """Beginnings of n-grams that a slot's pool holds; the oldest goes first."""
    branches: NonNegativeInt = 0
    """N-grams of the pool that are verified beside the window, so that the draft is a tree."""


class Pool:
    """What followed short sequences of tokens, the most recent first.  One slot's."""

    def __init__(self, config: Config):
        self.longest, self.most, self.siblings = config.gram - 1, config.pool, config.branches + 1
        self.read = 0
        """Tokens of the text that were learnt from."""
        self.follows: dict[tuple[int, ...], list[int]] = {}

    def learn(self, text: list[int]) -> None:
        """Take in what is new of the text."""
        for at in range(max(self.read, 1), len(text)):
            self.add(text[max(0, at - self.longest) : at], text[at])
        self.read = len(text)

    def add(self, before: Sequence[int], token: int) -> None:
        """Remember that this token followed these."""
        for n in range(1, min(self.longest, len(before)) + 1):
            key = tuple(before[-n:])
            known = self.follows.pop(key, [])
            self.follows[key] = [token, *(other for other in known if other != token)][: self.siblings]
        while len(self.follows) > self.most:
            del self.follows[next(iter(self.follows))]

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether something followed as many of these last tokens as an n-gram can begin with."""
        return tuple(tokens[-self.longest :]) in self.follows and len(tokens) >= self.longest

    def after(self, tokens: Sequence[int]) -> list[int]:
        """What followed these tokens, each once: by the longest match first, then the most recent."""
        found: dict[int, None] = {}
        for n in range(min(self.longest, len(tokens)), 0, -1):
            found |= dict.fromkeys(self.follows.get(tuple(tokens[-n:]), ()))
        return list(found)


class Slot:
    """What the last pass says of the tokens to come, and the pool."""

    def __init__(self, config: Config):
        self.pool = Pool(config)
        self.logits: Tensor | None = None
        """[m, V]; row i speaks of the token i places behind the anchor."""
        self.best: list[int] = []
        """The likeliest ids of these rows."""

    def forget(self) -> None:
        """Begin a fresh window."""
        self.logits, self.best = None, []


class Jacobi(Drafter):
    """Proposes what the target said of the places behind the one it refused."""

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.vocabulary = config, vocabulary
        self.uses_pool = config.init == "ngram" or config.branches > 0
        self.limit = config.window + config.branches * (config.gram - 1)

    def allocate(self, cache: Cache) -> list[Slot]:
        return [Slot(self.config) for _ in range(cache.slots)]

    @torch.inference_mode()
    def propose(self, memory: list[Slot], state: DecodeState, budget: Tensor) -> Draft:
        slots, texts = [memory[row] for row in state.rows], [state.tokens[row] for row in state.rows]
        sizes = [min(most, self.config.window) for most in budget.tolist()]
        if self.uses_pool:
            for slot, text in zip(slots, texts, strict=True):
                slot.pool.learn(text)
                if self.config.init == "ngram" and slot.pool.knows(text):
                    slot.forget()
        guesses, q = self._carried(slots, state, sizes)
        prefixes = state.judge.prefixes if isinstance(state.judge, SamplingJudge) else []
        banning = {b: prefix for b, prefix in prefixes if prefix.sampling.bans}
        nodes, parents = [], []
        for b, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            trunk = self._filled(slot, text, guesses[b], sizes[b], banning.get(b))
            branches = self._branches(slot, text, trunk, int(budget[b]) - len(trunk))
            nodes.append([*trunk, *(token for token, _ in branches)])
            parents.append([*range(-1, len(trunk) - 1), *(parent for _, parent in branches)])
        return self._draft(nodes, parents, list(map(len, guesses)), q, state.device)

    def observe(self, memory: list[Slot], state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        best = []
        if draft.tokens.shape[1]:
            best = (scores.logits.argmax(-1) if scores.choice is None else scores.choice).tolist()
        for b, row in enumerate(state.rows):
            slot, accepted = memory[row], len(kept.paths[b])
            slot.forget()
            trunk = _trunk(draft.tree[b][: draft.live[b]])
            if kept.next_tokens[b] < 0 or len(trunk) <= accepted:
                continue
            if self.uses_pool:
                text = state.tokens[row]
                before = text[max(0, len(text) - accepted - 1 - self.config.gram) : len(text) - accepted - 1]
                self._learn(slot.pool, before, [draft.ids[b][n] for n in trunk], [best[b][n + 1] for n in trunk], accepted)
            # the next token took the place of the first of these nodes; the row behind it speaks of the place after
            rows = [n + 1 for n in trunk[accepted:]]
            is_straight = rows == list(range(rows[0], rows[0] + len(rows)))
            slot.logits = scores.logits[b, slice(rows[0], rows[-1] + 1) if is_straight else rows]
            slot.best = [best[b][at] for at in rows]

    def free(self, memory: list[Slot], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = Slot(self.config)

    def _carried(self, slots: list[Slot], state: DecodeState, sizes: list[int]) -> tuple[list[list[int]], Tensor | None]:
        """Each slot's guesses from the rows of its last pass, and what they were drawn from, [B, m, V]; None where certain."""
        counts = [min(len(slot.best), size) for slot, size in zip(slots, sizes, strict=True)]
        deepest = max(counts)
        if not deepest or (state.judge.temperature is None and not state.judge.bans):
            return [slot.best[:count] for slot, count in zip(slots, counts, strict=True)], None
        some = next(slot.logits for slot in slots if slot.logits is not None)
        logits = some.new_zeros(len(slots), deepest, self.vocabulary)
        for b, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            if slot.logits is not None:
                logits[b, :count] = slot.logits[:count]
        sampler = Sampler(state)
        for depth in range(deepest):
            sampler.next(logits[:, depth])
        drawn = sampler.draft(torch.tensor(counts))
        return [own[:count] for own, count in zip(drawn.ids, counts, strict=True)], drawn.q

    def _filled(self, slot: Slot, text: list[int], guesses: list[int], size: int, prefix: Prefix | None) -> list[int]:
        """The guesses with fresh ones behind them.  prefix: of a slot that makes tokens impossible."""
        before = text[-self.config.gram :]
        found = list(guesses)
        while len(found) < size:
            tail = [*before, *found]
            likely = slot.pool.after(tail) if self.config.init == "ngram" else []
            found.append(self._possible([*likely, tail[-1]], tuple(found), prefix))
        return found

    def _possible(self, tokens: list[int], path: tuple[int, ...], prefix: Prefix | None) -> int:
        """The first of these that may follow the path, or the first that may at all."""
        if prefix is None:
            return tokens[0]
        may_follow = prefix.possible(path, self.vocabulary)
        return next((token for token in tokens if bool(may_follow[token])), int(may_follow.int().argmax()))

    def _branches(self, slot: Slot, text: list[int], trunk: list[int], room: int) -> list[tuple[int, int]]:
        """Tokens and parents of n-grams that begin at the anchor as the trunk does not; most likely first."""
        found: list[tuple[int, int]] = []
        if not self.config.branches or room < 1:
            return found
        before = text[-self.config.gram :]
        others = [token for token in slot.pool.after(before) if token != trunk[0]]
        for first in others[: self.config.branches]:
            path = [first]
            while len(path) < self.config.gram - 1 and (likely := slot.pool.after([*before, *path])):
                path.append(likely[0])
            at = len(trunk) + len(found)
            found += zip(path, [-1, *range(at, at + len(path) - 1)], strict=True)
        return found[:room]

    def _draft(
        self, nodes: list[list[int]], parents: list[list[int]], drawn: list[int], q: Tensor | None, device: torch.device
    ) -> Draft:
        """Lists to tensors; the first drawn[b] nodes of slot b came from q, the others are certain."""
        draft = trees.of_lists(nodes, parents, device)
        if q is None:
            return draft
        width = draft.tokens.shape[1]
        is_drawn = torch.arange(width, device=device) < torch.tensor(drawn, device=device)[:, None]
        certain = q.new_zeros(*draft.tokens.shape, q.shape[-1]).scatter_(-1, draft.tokens[..., None], 1.0)
        known = torch.nn.functional.pad(q, (0, 0, 0, width - q.shape[1]))
        return replace(draft, q=torch.where(is_drawn[..., None], known, certain))

    def _learn(self, pool: Pool, before: list[int], guesses: list[int], best: list[int], accepted: int) -> None:
        """Put what the target would say behind guesses into the pool; of those that were kept the text says it."""
        for n in range(accepted, len(guesses)):
            pool.add([*before, *guesses[: n + 1]], best[n])


def _trunk(parents: Sequence[int]) -> list[int]:
    """The window in a verified draft: the anchor's eldest child, its eldest, and so on."""
    path = [-1]
    for n, parent in enumerate(parents):
        if parent == path[-1]:
            path.append(n)
    return path[1:]


def build(config: Config, target: Target) -> Jacobi:
    if config.branches and not verifies_trees(target, "jacobi", "its window alone"):
        config = config.model_copy(update={"branches": 0})
    has_pool = config.init != "repeat" or bool(config.branches)
    warn_idle("jacobi", config, {"gram": has_pool, "pool": has_pool}, "without a pool; set init to ngram, or branches")
    return Jacobi(config, target.spec.vocabulary)
