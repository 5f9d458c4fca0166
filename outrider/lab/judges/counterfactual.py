"""The counterfactual rule: accept the drafter's candidate whose probability changes least if words of the text are
swapped.  LOSSY.

In AMBEDKAR (arXiv 2509.02133) a large model chooses among a small model's candidates, given a text and its
counterfactual, in which words that name a group are swapped.  With p and p' a candidate's probabilities there,

    score(c) = log p - beta JS,   JS = (p log(p / m) + p' log(p' / m)) / 2,   m = (p + p') / 2

in nats, at temperature 1: JS is the candidate's part of the divergence of the two distributions.  The paper's code
takes the least JS of five candidates, which is beta = inf, the default; of equal ones the likeliest.  The candidates
are a node's drafted children, so a `small_model` of width k gives its k likeliest tokens.  The first child is accepted
if its score is at least the best one minus delta; else the best is accepted, and the walk continues there.  With beta 0
and without a preamble this is the target's greedy choice among the candidates.  The user gives the words to swap in a
file, and optionally a preamble before both texts, such as rules of conduct.

Differs from the paper: the large model is not trained on a constitution, but can be given one as the preamble.  Beta
below inf, delta and drafts of several tokens are ours.

The target reads the swapped text in the rule's own cache: one more row in every pass, two with a preamble.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.errors import ConfigError
from outrider.lab.second_text import SecondTexts
from outrider.lab.swap import Swap, beginning, swap_of
from outrider.lab.take_over import distances_of, ending_in_draft, node_distances, own_rows, possible
from outrider.policies.lossy import LossyRule, Verified
from outrider.sampling.distribution import log_probs
from outrider.sampling.fast import outside

SETTINGS = {"swap": str, "beta": float, "delta": float, "preamble": str}
REQUIRED = "swap"

TINY = 1e-15
"""Weight of a log probability that only decides between equal divergences."""

Words = Mapping[str, str] | Mapping[tuple[int, ...], Sequence[int]]


class Counterfactual(LossyRule):
    """Chooses among the children of each node by their scores; draws only if there are none."""

    def __init__(
        self, swap: Words, beta: float = math.inf, delta: float = 0.0, preamble: str | Sequence[int] = "",
        name: str | None = None,
    ):  # fmt: skip
        """swap: words, or sequences of token ids, to their replacements.  Raises ConfigError for numbers out of
        range."""
        if not (beta >= 0 and delta >= 0):
            raise ConfigError(f"counterfactual: beta and delta must be at least 0, got {beta} and {delta}")
        self.words, self.beta, self.delta, self.preamble = swap, beta, delta, preamble
        shown = f", preamble of {len(preamble)}" if preamble else ""
        self.name = name or f"counterfactual({len(swap)} words, beta={beta:g}, delta={delta:g}{shown})"
        self.tokens = self.chosen = self.changed = self.passes = 0
        """Tokens emitted; those that were candidates; those of them that are not the drafted one; passes of its own."""
        self.divergence = 0.0
        """Sum of the divergences JS of the chosen candidates, in nats."""
        self._taken: list[list[int]] = []
        self._emitted: list[list[int]] = []
        self._swapped: SecondTexts | None = None
        self._plain: SecondTexts | None = None

    def allocate(self, target: Any, cache: Any) -> None:
        preamble = list(target.encode(self.preamble)) if self.preamble else []
        before = preamble, beginning(target) if preamble else ()
        self._swapped = SecondTexts(target, cache, Swap.of(self.words, target), *before) if self.beta else None
        self._plain = SecondTexts(target, cache, Swap({}), *before) if preamble else None

    def free(self, row: int) -> None:
        for texts in (self._swapped, self._plain):
            if texts is not None:
                texts.free(row)

    def begin(self, verified: Verified) -> None:
        self._verified = verified

    def __call__(self, draft: Draft, p: Tensor, streams: Streams) -> Accepted:
        scores, divergences = self._scores(draft)
        walks = [self._walk(draft, b, slot_scores) for b, slot_scores in enumerate(scores)]
        paths, is_whole = [path for path, _ in walks], [whole for _, whole in walks]
        every = torch.arange(len(paths), device=p.device)
        ends = torch.tensor([path[-1] + 1 if path else 0 for path in paths], device=p.device)
        counts = torch.tensor([len(path) for path in paths], device=p.device)
        following = streams.draw(p[every, ends], counts, Purpose.TARGET).tolist()
        self._taken = paths
        self._emitted = [[*path, *([] if whole else [-1])] for path, whole in walks]
        self._count(draft, divergences)
        return ending_in_draft(draft, Accepted(paths, following, outside(draft, p.shape[-1])), is_whole)

    def _scores(self, draft: Draft) -> tuple[list[list[float]], list[list[float]]]:
        """The score of every node, -inf where it is impossible, and its divergence; each [B][N]."""
        rows, texts, logits = self._verified
        if not draft.tokens.shape[1]:
            return [[] for _ in rows], [[] for _ in rows]
        plain_logits = logits if self._plain is None else self._plain.read(rows, texts, draft)
        allowed = torch.tensor(possible(draft, logits), device=plain_logits.device)
        candidates = own_rows(draft, plain_logits.shape[-1])[1]
        log_p = log_probs(plain_logits)[candidates].double()
        divergences = torch.zeros_like(log_p)
        if self._swapped is not None:
            divergences = jensen_shannon(log_p, log_probs(self._swapped.read(rows, texts, draft))[candidates].double())
        self.passes += len(rows) * ((self._plain is not None) + (self._swapped is not None))
        # beta = inf: the divergence alone, and what is left of log p decides between equal ones
        scores = log_p - self.beta * divergences if self.beta < math.inf else TINY * log_p - divergences
        return scores.where(allowed, -torch.inf).tolist(), divergences.tolist()

    def _walk(self, draft: Draft, b: int, scores: Sequence[float]) -> tuple[list[int], bool]:
        """The chosen nodes of slot b, and whether they go down to a leaf."""
        tree, path, at = draft.tree[b][: draft.live[b]], list[int](), -1
        while children := [n for n in range(at + 1, len(tree)) if tree[n] == at]:
            drafted, best = children[0], max(children, key=lambda n: scores[n])  # of equal scores the elder
            if not scores[best] > -math.inf:
                return path, False
            at = drafted if -math.inf < scores[drafted] >= scores[best] - self.delta else best
            path.append(at)
        return path, bool(path)

    def _count(self, draft: Draft, divergences: Sequence[Sequence[float]]) -> None:
        for b, path in enumerate(self._taken):
            tree = draft.tree[b]
            self.chosen += len(path)
            self.changed += sum(node != tree.index(tree[node]) for node in path)
            self.divergence += sum(divergences[b][node] for node in path)

    def distances(self, draft: Draft, p: Tensor, accepted: Accepted) -> Tensor:
        return distances_of(node_distances(draft, p, is_by_q=False), self._emitted, self._taken)

    def observe(self, accepted: Accepted, texts: Sequence[list[int]]) -> None:
        self.tokens += sum(accepted.counts) + sum(token >= 0 for token in accepted.next_tokens)

    def figures(self) -> dict[str, float]:
        chosen = max(1, self.chosen)
        figures = {"changed_share": self.changed / chosen, "divergence": self.divergence / chosen}
        return {**figures, "passes_of_its_own": self.passes}


def jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Each outcome's part of the divergence of two distributions, in nats; they sum to the divergence."""
    p, q = log_p.exp(), log_q.exp()
    mean = (p + q) / 2
    return ((torch.xlogy(p, p) + torch.xlogy(q, q)) / 2 - torch.xlogy(mean, mean)).clamp(min=0)


def counterfactual(
    swap: str | Path | Words, beta: float = math.inf, delta: float = 0.0, preamble: str | Sequence[int] = ""
) -> Counterfactual:
    """The rule with these words, or with those of a JSON file {word: word}.

    Raises ConfigError for a file that is not one.
    """
    if not isinstance(swap, str | Path):
        return Counterfactual(swap, beta, delta, preamble)
    settings = f"swap={swap}, beta={beta:g}, delta={delta:g}" + (f", preamble={preamble}" if preamble else "")
    return Counterfactual(swap_of(swap), beta, delta, preamble, f"counterfactual({settings})")
