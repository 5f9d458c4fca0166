"""Scored blocks: a block of drafted tokens is accepted whole if its score is high enough, else the target generates it.
LOSSY.

The mechanism of SDVG (arXiv 2604.17397) on text.  There a block of video frames is scored by its worst frame, and the
first block is always rejected, so that the large model sets the scene.  Here a block is a sentence or a number of
tokens, its score is the mean or the minimum over its tokens, and a token's score is its log probability under the
target or a function of the user.  tau, the lowest score that is accepted, is the only parameter: at -infinity all text
after the first block is the drafter's, at infinity all is the target's.

A block never spans two drafts.  One that would is left to the next draft, which begins with it; if a draft is shorter
than a block, its end ends the block, so use long drafts.  After a rejection, the first token of the block is drawn from
p and the acceptance rule judges drafts of the others, so the target's blocks are exact.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.lab.take_over import distances_of, eldest_child, ending_in_draft, node_distances, own_rows, possible
from outrider.policies.lossy import LossyRule, Verified
from outrider.policies.sentences import Piece, decode_of, piece, pieces
from outrider.sampling.distribution import log_probs

SETTINGS = {
    "tau": float, "aggregate": str, "block": lambda text: int(text) if text.isdecimal() else text,
    "force_reject_first": int,
}  # fmt: skip
REQUIRED = "tau"

Aggregate = Literal["min", "mean"]
SENTENCE: Literal["sentence"] = "sentence"


class Block(NamedTuple):
    """A drafted block to score."""

    tokens: list[int]
    text: str
    """The text of these tokens, following the text before them."""
    before: list[int]
    """Prompt and all tokens before the block."""
    log_probs: list[float]
    """The target's, of each token, in nats, at temperature 1."""


Score = Callable[[Block], float | Sequence[float]]
"""Scores of a block's tokens, or one of the whole block."""


def by_target(block: Block) -> list[float]:
    """The target's log probability of each token."""
    return block.log_probs


@dataclass(frozen=True, slots=True)
class Gate:
    """What the target still has to write itself of one text."""

    rejections: int
    """Blocks to reject whatever their score, the first ones."""
    tokens: int = 0
    """Tokens left of a rejected block."""
    is_in_sentence: bool = False
    """The rejected block goes on to the end of the sentence."""

    @property
    def is_open(self) -> bool:
        """The next drafted token begins a block that is scored."""
        return not (self.tokens or self.is_in_sentence)

    def rejecting(self, block: int | Literal["sentence"], tokens: int) -> Gate:
        """After a drafted block of so many tokens was rejected."""
        left = max(0, self.rejections - 1)
        return Gate(left, is_in_sentence=True) if block == SENTENCE else Gate(left, tokens)

    def after(self, token: Piece) -> Gate:
        """After one token that the target wrote."""
        is_in_sentence = self.is_in_sentence and not token.ends_sentence
        return replace(self, tokens=max(0, self.tokens - 1), is_in_sentence=is_in_sentence)


class Walk(NamedTuple):
    """What becomes of one slot's draft."""

    path: list[int]
    """Nodes that stay: by the acceptance rule, then blocks."""
    taken: list[int]
    """Those of accepted blocks."""
    accepted: int
    """How many blocks these are."""
    rejected: int | None
    """Tokens of the block that was rejected after them; None where none was."""
    is_whole: bool = False
    """The step ends with the last of these nodes: blocks were accepted up to the end of the draft, or up to a block
    that it does not hold whole."""


class ScoredBlocks(LossyRule):
    """Accepts a drafted block whole where its score is at least tau."""

    def __init__(
        self, tau: float, aggregate: Aggregate = "mean", block: int | Literal["sentence"] = SENTENCE,
        force_reject_first: int = 1, score: Score = by_target, name: str | None = None,
    ):  # fmt: skip
        """Raises ConfigError for settings without a meaning."""
        _check(tau, aggregate, block, force_reject_first)
        self.tau, self.aggregate, self.block, self.score = tau, aggregate, block, score
        self.force_reject_first = force_reject_first
        score_setting = "" if score is by_target else f", score={score!r}"
        settings = f"tau={tau:g}, aggregate={aggregate}, block={block}, force_reject_first={force_reject_first}"
        self.name = name or f"scorer({settings}{score_setting})"
        self.texts: dict[int, Gate] = {}
        """By slot."""
        self.tokens = self.drafted_tokens = self.blocks = self.accepted_blocks = 0
        """Tokens emitted; those of accepted blocks; blocks that were scored or rejected unscored; accepted ones."""
        self._walks: list[Walk] = []
        self._emitted: list[list[int]] = []

    def allocate(self, target: Any, cache: Any) -> None:
        self._decode = decode_of(target, "scorer")

    def admit(self, row: int, request: Request) -> None:
        self.texts[row] = Gate(self.force_reject_first)

    def free(self, row: int) -> None:
        self.texts.pop(row, None)

    def begin(self, verified: Verified) -> None:
        self._verified = verified

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        logits = self._verified.logits
        is_valid, index = own_rows(draft, logits.shape[-1])
        logs = torch.where(is_valid, log_probs(logits)[index], -torch.inf).tolist()
        allowed, exact = possible(draft, logits), accept(draft, p, streams)
        walks = [self._walk(draft, b, exact.paths[b], logs[b], allowed[b]) for b in range(len(logs))]
        paths = [walk.path for walk in walks]
        # where no block was looked at, the next token is the acceptance rule's; after blocks it is drawn from p
        ends = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=p.device)
        counts = torch.tensor([len(path) for path in paths], device=p.device)
        drawn = streams.draw(p[torch.arange(len(paths), device=p.device), ends], counts, Purpose.TARGET).tolist()
        following = [
            drawn_token if walk.taken or walk.rejected is not None else token
            for walk, token, drawn_token in zip(walks, exact.next_tokens, drawn, strict=True)
        ]
        self._walks = walks
        self._emitted = [[*walk.path, *([] if walk.is_whole else [-1])] for walk in walks]
        return ending_in_draft(draft, Accepted(paths, following, exact.invalid), [walk.is_whole for walk in walks])

    def _walk(self, draft: Draft, b: int, by_rule: Sequence[int], logs: list[float], allowed: Sequence[bool]) -> Walk:
        """Follow the acceptance rule while the target owes tokens, then accept blocks until one fails."""
        text, gate = list(self._verified.texts[b]), self.texts[self._verified.rows[b]]
        path, at = list[int](), -1
        for node in by_rule:
            if gate.is_open:
                break
            text.append(draft.ids[b][node])
            gate, at = gate.after(piece(self._decode, text, len(text) - 1)), node
            path.append(node)
        taken, accepted = list[int](), 0
        while gate.is_open:
            block, is_complete = self._next_block(draft, b, at, text, allowed)
            if not block:
                break
            if at >= 0 and not is_complete:
                return Walk([*path, *taken], taken, accepted, None, is_whole=True)
            tokens = [draft.ids[b][node] for node in block]
            is_possible = not gate.rejections and all(allowed[node] for node in block)
            if not (is_possible and self._passes(tokens, text, [logs[node] for node in block])):
                return Walk([*path, *taken], taken, accepted, len(block))
            taken, at, accepted = [*taken, *block], block[-1], accepted + 1
            text += tokens
        return Walk([*path, *taken], taken, accepted, None, is_whole=bool(taken))

    def _next_block(
        self, draft: Draft, b: int, at: int, text: Sequence[int], allowed: Sequence[bool]
    ) -> tuple[list[int], bool]:
        """The nodes of the block after a node, along the eldest path, at most up to one that is impossible, and whether
        the draft holds it whole; no nodes at the end of the draft."""
        nodes, whole = list[int](), list(text)
        while (node := eldest_child(draft, b, at)) is not None:
            nodes.append(node)
            at = node
            whole.append(draft.ids[b][node])
            if not allowed[node] or len(nodes) == self.block:
                return nodes, True
            if self.block == SENTENCE and piece(self._decode, whole, len(whole) - 1).ends_sentence:
                return nodes, True
        return nodes, False

    def _passes(self, tokens: list[int], before: list[int], logs: list[float]) -> bool:
        block_text = "".join(token.added for token in pieces(self._decode, [*before, *tokens], len(before)))
        scores = self.score(Block(tokens, block_text, [*before], logs))
        if isinstance(scores, int | float):
            return scores >= self.tau
        values = list(scores)
        if not values:
            raise ConfigError(f"the scorer {self.score!r} returned no score for a block of {len(tokens)} tokens")
        return (min(values) if self.aggregate == "min" else sum(values) / len(values)) >= self.tau

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        # a token stays if those after it pass too, so it is not emitted with q
        nodes = node_distances(draft, p, is_by_q=False)
        return distances_of(nodes, self._emitted, [walk.taken for walk in self._walks])

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        for b, (row, tokens) in enumerate(zip(self._verified.rows, texts, strict=True)):
            count, walk = len(accepted.paths[b]) + (accepted.next_tokens[b] >= 0), self._walks[b]
            emitted, gate = self._emitted[b][:count], self.texts[row]
            for at, node in enumerate(emitted, len(tokens) - count):
                if node == -1 and walk.rejected is not None:
                    gate = gate.rejecting(self.block, walk.rejected)
                if node not in walk.taken:
                    gate = gate.after(piece(self._decode, tokens, at))
            self.texts[row] = gate
            self.tokens += count
            self.drafted_tokens += sum(node in walk.taken for node in emitted)
            self.accepted_blocks += walk.accepted
            self.blocks += walk.accepted + (walk.rejected is not None)

    def figures(self) -> dict[str, float]:
        share = self.drafted_tokens / self.tokens if self.tokens else 0.0
        passed = self.accepted_blocks / self.blocks if self.blocks else 0.0
        return {"drafted_share": share, "blocks": self.blocks, "blocks_accepted": passed}


def _check(tau: float, aggregate: str, block: object, force_reject_first: int) -> None:
    if math.isnan(tau):
        raise ConfigError("scorer: tau must be a number, -inf or inf, got nan")
    if aggregate not in ("min", "mean"):
        raise ConfigError(f"scorer: aggregate must be min or mean, got {aggregate!r}")
    if block != SENTENCE and not (isinstance(block, int) and block >= 1):
        raise ConfigError(f"scorer: block must be 'sentence' or a number of tokens from 1 on, got {block!r}")
    if force_reject_first < 0:
        raise ConfigError(f"scorer: force_reject_first must be at least 0, got {force_reject_first}")


def scorer(
    tau: float, aggregate: Aggregate = "mean", block: int | Literal["sentence"] = SENTENCE, force_reject_first: int = 1,
    score: Score = by_target,
) -> ScoredBlocks:  # fmt: skip
    """The rule with these settings.  score: a function of a `Block` in place of the target's log probabilities, which
    is code and can be given in Python alone."""
    return ScoredBlocks(tau, aggregate, block, force_reject_first, score)
