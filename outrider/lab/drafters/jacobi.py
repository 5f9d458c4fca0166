"""Jacobi decoding: the target's own passes refine a window of guesses.  (arXiv 2305.10427; sampled: 2410.01699.)

After the first rejection, a verified pass still predicts what would follow each guess.  Shifted by the accepted tokens,
those rows give the next window: their likeliest tokens at temperature 0, else draws.  New guesses at the window's end,
and further branches, come from a pool of n-grams of the text and of earlier windows (lookahead decoding, arXiv
2402.02057).  Rows after a wrong guess are likely wrong too, so if the pool has the text's end, the whole window comes
from the pool.  Needs no model and no training.

Differs from the papers: the window is one chain, without lookahead's second dimension.  Guesses are drawn anew in every
step, also those that were not verified, since q depended on them and a policy may have seen their outcome.

Use it if nothing can be trained and there are no texts to look up in: on the demo target it had the highest acceptance
of the kinds that need neither.

B live slots, N drafted nodes, V vocabulary, m rows of the last pass that can still be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted, repaired_q
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Scores
from outrider.nn.drafting import serving, trees
from outrider.nn.memory import RequestDrafter
from outrider.retrieval.pool import Pool
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import Prefix
from outrider.targets.protocol import Target


class Config(Base):
    kind: Literal["jacobi"] = "jacobi"
    window: PositiveInt = 8
    """Guesses per step."""
    init: Literal["ngram", "repeat"] = "ngram"
    """New guesses: `ngram` takes what followed the last tokens in the pool, else repeats the last token; `repeat`
    always repeats it.  If the pool has the text's last `ngram` - 1 tokens, all guesses come from it."""
    ngram: Annotated[int, Field(ge=2)] = 4
    """Longest n-gram in the pool, in tokens, including the one that follows."""
    pool: PositiveInt = 8192
    """Most beginnings of n-grams in a slot's pool; the oldest are removed."""
    branches: NonNegativeInt = 0
    """N-grams of the pool that are also verified, as branches of a tree."""


class Slot:
    """The last pass's predictions of the next tokens, and the pool."""

    def __init__(self, config: Config):
        self.pool = Pool(config.ngram - 1, config.pool, config.branches + 1)
        self.logits: Tensor | None = None
        """[m, V]; row i predicts the token i positions after the anchor."""
        self.best: list[int] = []
        """The likeliest ids of these rows."""

    def forget(self) -> None:
        """Begin a new window."""
        self.logits, self.best = None, []


class Jacobi(RequestDrafter[Slot]):
    """Proposes what the target predicted for the positions after the rejected one."""

    def __init__(self, config: Config, vocabulary: int):
        self.config, self.vocabulary = config, vocabulary
        self.uses_pool = config.init == "ngram" or config.branches > 0
        self.limit = config.window + config.branches * (config.ngram - 1)

    def new_request(self, tenant: str) -> Slot:
        return Slot(self.config)

    @torch.inference_mode()
    def propose(self, memory: list[Slot | None], state: DecodeState, budget: Tensor) -> Draft:
        slots, texts = [self.of(memory, state, row) for row in state.rows], [state.tokens[row] for row in state.rows]
        sizes = [min(most, self.config.window) for most in budget.tolist()]
        if self.uses_pool:
            for slot, text in zip(slots, texts, strict=True):
                slot.pool.learn(text)
                if self.config.init == "ngram" and slot.pool.knows(text):
                    slot.forget()
        guesses, q = self._carried(slots, state, sizes)
        banning = dict(state.judge.banning) if isinstance(state.judge, SamplingJudge) else {}
        nodes, parents = [], []
        for b, (slot, text) in enumerate(zip(slots, texts, strict=True)):
            trunk = self._filled(slot, text, guesses[b], sizes[b], banning.get(b))
            branches = self._branches(slot, text, trunk, int(budget[b]) - len(trunk))
            nodes.append([*trunk, *(token for token, _ in branches)])
            parents.append([*range(-1, len(trunk) - 1), *(parent for _, parent in branches)])
        draft = trees.of_lists(nodes, parents, state.device)
        return draft if q is None else replace(draft, q=_full_q(draft, q, list(map(len, guesses))))

    def observe(
        self, memory: list[Slot | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        best = []
        if draft.tokens.shape[1]:
            best = (scores.logits.argmax(-1) if scores.choice is None else scores.choice).tolist()
        for b, row in enumerate(state.rows):
            slot, count = self.of(memory, state, row), len(accepted.paths[b])
            trunk = _trunk(draft.tree[b][: draft.live[b]])
            slot.forget()
            if accepted.next_tokens[b] < 0 or trunk <= count:
                continue
            if self.uses_pool:
                # what the target would emit after guesses; after accepted ones the text has it
                text, end = state.tokens[row], len(state.tokens[row]) - count - 1
                before = text[max(0, end - self.config.ngram) : end]
                for n in range(count, trunk):
                    slot.pool.add([*before, *draft.ids[b][: n + 1]], best[b][n + 1])
            # the next token replaced the first of these nodes; the row after it predicts the next position
            slot.logits, slot.best = scores.logits[b, count + 1 : trunk + 1], best[b][count + 1 : trunk + 1]

    def _carried(
        self, slots: list[Slot], state: DecodeState, sizes: list[int]
    ) -> tuple[list[list[int]], Tensor | None]:
        """Each slot's guesses from the rows of its last pass, and their q [B, m, V]; None if they are deterministic."""
        counts = [min(len(slot.best), size) for slot, size in zip(slots, sizes, strict=True)]
        deepest = max(counts)
        if not deepest or (state.judge.temperature is None and not state.judge.bans):
            return [slot.best[:count] for slot, count in zip(slots, counts, strict=True)], None
        some = next(slot.logits for slot in slots if slot.logits is not None)
        rows = [
            (some if slot.logits is None else slot.logits)[:count] for slot, count in zip(slots, counts, strict=True)
        ]
        drawn = serving.side_by_side(pad_sequence(rows, batch_first=True), torch.tensor(counts), state)
        return [tokens[:count] for tokens, count in zip(drawn.ids, counts, strict=True)], drawn.q

    def _filled(self, slot: Slot, text: list[int], guesses: list[int], size: int, prefix: Prefix | None) -> list[int]:
        """The guesses, followed by new ones.  prefix: of a slot with banned tokens, else None."""
        before = text[-self.config.ngram :]
        tokens = list(guesses)
        while len(tokens) < size:
            tail = [*before, *tokens]
            likely = slot.pool.after(tail) if self.config.init == "ngram" else []
            tokens.append(self._possible([*likely, tail[-1]], tuple(tokens), prefix))
        return tokens

    def _possible(self, tokens: list[int], path: tuple[int, ...], prefix: Prefix | None) -> int:
        """The first of these tokens that may follow the path, else the first token that may."""
        if prefix is None:
            return tokens[0]
        may_follow = prefix.possible(path, self.vocabulary)
        return next((token for token in tokens if bool(may_follow[token])), int(may_follow.int().argmax()))

    def _branches(self, slot: Slot, text: list[int], trunk: list[int], room: int) -> list[tuple[int, int]]:
        """Tokens and parents of n-grams after the anchor that begin unlike the trunk; most likely first."""
        nodes: list[tuple[int, int]] = []
        if not self.config.branches or room < 1:
            return nodes
        before = text[-self.config.ngram :]
        others = [token for token in slot.pool.after(before) if token != trunk[0]]
        for first in others[: self.config.branches]:
            path = [first]
            while len(path) < self.config.ngram - 1 and (likely := slot.pool.after([*before, *path])):
                path.append(likely[0])
            at = len(trunk) + len(nodes)
            nodes += zip(path, [-1, *range(at, at + len(path) - 1)], strict=True)
        return nodes[:room]


def _full_q(draft: Draft, q: Tensor, drawn: list[int]) -> Tensor:
    """q [B, m, V] over all nodes of the draft: the first drawn[b] of slot b came from it, the others are
    deterministic."""
    width, device = draft.tokens.shape[1], q.device
    is_drawn = torch.arange(width, device=device) < torch.tensor(drawn, device=device)[:, None]
    padded_q = torch.nn.functional.pad(q, (0, 0, 0, width - q.shape[1]))
    return repaired_q(padded_q, draft.tokens, torch.ones_like(is_drawn), is_drawn)


def _trunk(parents: Sequence[int]) -> int:
    """Nodes of the window in a verified draft; its branches come after them."""
    return next((n for n, parent in enumerate(parents) if parent != n - 1), len(parents))


def build(config: Config, target: Target) -> Jacobi:
    if config.branches and not serving.verifies_trees(target, "jacobi", "its window alone"):
        config = config.model_copy(update={"branches": 0})
    has_pool = config.init != "repeat" or bool(config.branches)
    because = "without a pool; set init to ngram, or branches"
    serving.warn_idle("jacobi", config, {"ngram": has_pool, "pool": has_pool}, because)
    return Jacobi(config, target.spec.vocabulary)
