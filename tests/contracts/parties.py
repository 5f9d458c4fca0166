"""Parties made for the tests: a target whose distribution is a table, drafters of every shape, policies good and bad.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from conftest import SHAPE
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.protocols import Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.policies.fixed import Fixed
from outrider.sampling.distribution import distribution
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets.protocol import TargetSpec

HIDDEN = 8


# ── a target ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TableCache:
    """All that a table must know of a slot's text: its last token but the anchor."""

    def __init__(self, slots: int, length: int):
        self.slots, self.length = slots, length
        self.before = torch.zeros(slots, dtype=torch.int64)
        self.now: tuple[Sequence[int], Tensor, Tensor] = ([], torch.empty(0), torch.empty(0))

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        rows, anchor, tokens = self.now
        if tokens.shape[1]:
            last = torch.tensor([path[-1] if path else -1 for path in paths])
            anchor = torch.where(last >= 0, tokens.gather(1, last.clamp(min=0)[:, None])[:, 0], anchor)
        self.before[list(rows)] = anchor

    def free(self, rows: Sequence[int]) -> None:
        self.before[list(rows)] = 0


class TableTarget:
    """A target whose next token depends on the last two, so that thousands of slots cost nothing.  table [V, V, V],
    logits."""

    def __init__(self, table: Tensor):
        self.table = table
        vocabulary = len(table)
        generator = torch.Generator().manual_seed(5)
        self.features = torch.randn(vocabulary, vocabulary, HIDDEN, dtype=torch.float64, generator=generator)
        self.embedding = torch.randn(vocabulary, HIDDEN, dtype=torch.float64, generator=generator)
        self.weight = torch.randn(vocabulary, HIDDEN, dtype=torch.float64, generator=generator)
        self.spec = TargetSpec("table", None, 4, HIDDEN, vocabulary, 1000, "float64", None, "", sizes=SHAPE)
        self.device = torch.device("cpu")
        self.ends: frozenset[int] = frozenset()
        self.mask_token = None
        self.detokenizer = Detokenizer(self.decode, is_local=True)

    @classmethod
    def random(cls, vocabulary: int, seed: int = 0) -> TableTarget:
        generator = torch.Generator().manual_seed(seed)
        return cls(1.2 * torch.randn(vocabulary, vocabulary, vocabulary, dtype=torch.float64, generator=generator))

    @classmethod
    def of(cls, p: Sequence[float]) -> TableTarget:
        """Every token drawn alike, whatever stands before it."""
        return cls(torch.tensor(p, dtype=torch.float64).log().expand(len(p), len(p), -1))

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.weight.dtype) @ self.weight.T

    def allocate(self, slots: int, length: int) -> TableCache:
        return TableCache(slots, length)

    def prefill(
        self, cache: TableCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple = ()
    ) -> Scores:
        before = torch.cat([cache.before[list(rows)][:, None], tokens[:, :-1]], 1)
        last = torch.tensor(lengths)[:, None] - 1
        cache.before[list(rows)] = tokens.gather(1, last)[:, 0]
        return self._scores(before, tokens, taps)

    def verify(
        self, cache: TableCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple = (),
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        tokens = draft.tokens.clamp(0, self.spec.vocabulary - 1)
        own = torch.cat([anchor[:, None], tokens], 1)
        parents = torch.minimum(draft.parents, torch.arange(tokens.shape[1]) - 1).clamp(min=-1)
        before = torch.cat([cache.before[list(rows)][:, None], own.gather(1, parents + 1)], 1)
        cache.now = rows, anchor, tokens
        scores = self._scores(before, own, taps)
        return scores if probe is None else scores._replace(probe=self._probed(scores.hidden, probe))

    def read(self, tokens: Tensor, taps: tuple = ()) -> tuple[Tensor, Tensor | None]:
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], 1)
        scores = self._scores(before, tokens, taps)
        return scores.hidden, scores.taps

    def check_probe(self) -> None: ...

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        return self._probed(self.read(tokens)[0], probe)

    @staticmethod
    def _probed(hidden: Tensor, probe: Probe) -> Tensor:
        """A row of a probe knows its embedding and the last row that it sees."""
        last = probe.mask[:, :, : hidden.shape[1]].int().cumsum(-1).argmax(-1)
        return hidden.gather(1, last[..., None].expand(-1, -1, HIDDEN)) + probe.embeddings

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        return Sampling()

    def encode(self, prompt: Any) -> list[int]:
        return list(prompt)

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def _scores(self, before: Tensor, own: Tensor, taps: tuple) -> Scores:
        hidden = self.features[before, own]
        tapped = torch.stack([hidden + layer for layer in taps], 2) if taps else None
        return Scores(self.table[before, own], hidden, tapped)

    def distribution(self, prompt: Sequence[int], tokens: int, settings: Any) -> Tensor:
        """Exact distribution of the next `tokens` tokens, [V] * tokens."""
        p = distribution(self.table[None], settings)[0]
        before, anchor = ([0, *prompt])[-2:]
        joint = p[before, anchor]
        vocabulary = self.spec.vocabulary
        for n in range(1, tokens):
            shape = joint.shape
            rows = torch.arange(vocabulary)
            if n == 1:
                following = p[anchor, rows]
            else:
                following = p.view(*(1,) * (n - 2), vocabulary, vocabulary, vocabulary).expand(*shape, vocabulary)
            joint = joint.unsqueeze(-1) * following
        return joint


# ── drafters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Proposer(Drafter):
    """A drafter without weights and without memory but its own noise."""

    limit = 4

    def allocate(self, cache: Any) -> torch.Generator:
        return torch.Generator().manual_seed(11)


def last_two(state: DecodeState) -> tuple[Tensor, Tensor]:
    pairs = torch.tensor([([0, *state.tokens[row]])[-2:] for row in state.rows])
    return pairs[:, 0], pairs[:, 1]


class Tree(Proposer):
    """A tree under every anchor, from a distribution that is near the table's but not it.

    `how` says how siblings come about: "replacement", "without", "top" (deterministic) or "mixed" (the eldest
    deterministic, the younger drawn).  Confidences depend on the tokens before a node, as an honest drafter's do.
    """

    confidence_before_draw = True

    def __init__(self, target: TableTarget, parents: Sequence[int], how: str):
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(target.table.shape, dtype=torch.float64, generator=generator)
        self.table = 0.6 * target.table + 0.7 * noise
        self.trust = torch.rand(target.table.shape[:2], generator=generator)
        self.parents, self.how, self.limit = list(parents), how, len(parents)

    def propose(self, memory: torch.Generator, state: DecodeState, budget: Tensor) -> Draft:
        before, anchor = last_two(state)
        tokens: list[Tensor] = []
        rows, confidences = [], []
        for n, parent in enumerate(self.parents):
            own = anchor if parent < 0 else tokens[parent]
            above = before if parent < 0 else (anchor if self.parents[parent] < 0 else tokens[self.parents[parent]])
            q = state.judge.distribution(self.table[above, own])
            q_plain = self.table[above, own].softmax(-1)
            elders = [tokens[m] for m in range(n) if self.parents[m] == parent]
            if self.how in ("without", "mixed", "top") and elders:
                q = q_plain.scatter(1, torch.stack(elders, 1), 0.0)
                q = q / q.sum(-1, keepdim=True)
            if self.how == "top" or (self.how == "mixed" and not elders) or state.judge.temperature is None:
                q = torch.zeros_like(q).scatter_(1, q.argmax(-1, keepdim=True), 1.0)
            tokens.append(torch.multinomial(q, 1, generator=memory)[:, 0])
            rows.append(q)
            confidences.append(self.trust[above, own])
        is_certain = self.how == "top" or state.judge.temperature is None
        q = None if is_certain else torch.stack(rows, 1).float() if self.how == "mixed" else torch.stack(rows, 1)
        parents = torch.tensor(self.parents).expand(len(anchor), -1)
        return Draft(torch.stack(tokens, 1), parents, budget, q, torch.stack(confidences, 1))


class Drawn(Proposer):
    """A chain drawn token by token; `distribution` gives q [B, V] from (before, own), `confidence` [B] from the same.

    `bend` may spoil the finished draft, as a faulty drafter would.
    """

    confidence_before_draw = True

    def __init__(
        self, distribution: Callable[[Tensor, Tensor], Tensor], limit: int = 3,
        confidence: Callable[[Tensor, Tensor], Tensor] | None = None, bend: Callable[[Draft], Draft] | None = None,
    ):  # fmt: skip
        self.distribution, self.limit, self.confidence, self.bend = distribution, limit, confidence, bend

    def propose(self, memory: torch.Generator, state: DecodeState, budget: Tensor) -> Draft:
        before, own = last_two(state)
        tokens, rows, confidences = [], [], []
        for depth in range(int(budget.max())):
            rows.append(self.distribution(before, own))
            if self.confidence is not None:
                confidences.append(self.confidence(before, own))
            before, own = own, state.streams.draw(rows[-1], depth, Purpose.DRAFT)
            tokens.append(own)
        confidence = torch.stack(confidences, 1) if confidences else None
        draft = Draft.chain(torch.stack(tokens, 1), budget, torch.stack(rows, 1), confidence)
        return draft if self.bend is None else self.bend(draft)


class Oracle(Proposer):
    """Knows the text to come and hides it in a tree: at every depth a wrong elder sibling, then the true token.

    No argmax has a chance to fall on a wrong sibling, so every true node up to the draft's depth is kept.  A target
    that verifies chains alone sees eldest children: for it the true one is the elder.
    """

    def __init__(self, texts: Sequence[list[int]], vocabulary: int, depth: int = 3, true_is_eldest: bool = False):
        self.texts, self.vocabulary, self.depth, self.limit = texts, vocabulary, depth, 2 * depth
        self.true = 0 if true_is_eldest else 1

    def propose(self, memory: torch.Generator, state: DecodeState, budget: Tensor) -> Draft:
        tokens, sizes = torch.zeros(len(state.rows), self.limit, dtype=torch.int64), budget.clone()
        for b, row in enumerate(state.rows):
            text = state.tokens[row]
            whole = next(known for known in self.texts if known[: len(text)] == text)
            coming = whole[len(text) : len(text) + self.depth]
            sizes[b] = min(int(budget[b]), 2 * len(coming))
            for d, token in enumerate(coming):
                tokens[b, 2 * d + self.true], tokens[b, 2 * d + 1 - self.true] = token, (token + 1) % self.vocabulary
        parents = torch.tensor([max(-1, 2 * (n // 2 - 1) + self.true) for n in range(self.limit)]).expand_as(tokens)
        return Draft(tokens.to(state.device), parents.to(state.device), sizes)


# ── policies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class OnAndOff(Fixed):
    """Speculates, rests, speculates on some slots only."""

    def __init__(self, nodes: int):
        super().__init__(nodes)
        self.turn = 0

    def budget(self, state: DecodeState) -> Tensor:
        self.turn += 1
        rows = torch.tensor(state.rows)
        every = torch.full_like(rows, self.nodes)
        wanted = [every, 0 * rows, 0 * rows, (rows % 2) * self.nodes, 1 + 0 * rows, rows % 3]
        return wanted[self.turn % len(wanted)]


class Cutting(Fixed):
    """Verifies a slot's nodes while the product of their confidences is at least `least`; of drafts without confidences
    half in every other step."""

    def __init__(self, nodes: int, least: float):
        super().__init__(nodes)
        self.least, self.turn = least, 0

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is None:
            self.turn += 1
            return sizes if self.turn % 2 else sizes // 2
        return torch.minimum(sizes, (confidence.cumprod(-1) >= self.least).cumprod(-1).sum(-1).cpu())


class LookAhead(Fixed):
    """Keeps two nodes or none by the second's confidence: never sees a token, and yet breaks the distribution."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is None or confidence.shape[1] < 2:
            return sizes
        return torch.where(confidence[:, 1] >= 0.5, sizes, 0)
