"""Estimates how likely each node of a draft is to be accepted, from past acceptance or from the drafter's
confidences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice, repeat, zip_longest
from operator import mul
from typing import NamedTuple

from outrider.decoding.accept import Accepted
from outrider.decoding.state import DecodeState, Request

Survival = Sequence[Sequence[float]]
"""a of every slot: the probability that a node and all before it are accepted, non-increasing.  Slots may have
different numbers of nodes."""
Rate = Callable[[int], float]
"""Steps per second by tokens in the pass, including anchors."""
GUESS, DOUBT = 0.7, 4.0
"""Prior of the first node, and how many tests it counts as; every other node's prior is the value of the previous node.
"""


class NodeAcceptance:
    """How often each node of a draft was accepted recently, over all slots."""

    WINDOW, NEW_TEXT = 256.0, 16.0
    """Tests after which a count has faded to 1/e; maximum weight, in tests, of counts from earlier requests."""

    def __init__(self, limit: int):
        self.limit = limit
        self.accepted, self.tests = [0.0] * limit, [0.0] * limit
        """How often each node was accepted and tested, with exponential decay."""
        self.is_tree = False
        self.serving: dict[int, Request] = {}
        self.gap = self.variance = 0.0
        """Accepted minus expected nodes in the last dozen steps, and its variance."""

    def shares(self) -> list[float]:
        """Acceptance probability of every node.  In a chain a node is tested if the one before it was accepted, so
        these are cumulative products; in a tree, whose parents a policy can't see, every node is tested."""
        node_shares = shares(self.accepted, self.tests)
        return node_shares if self.is_tree else list(accumulate(node_shares, mul))

    def switch_to_tree(self) -> None:
        """Called once a draft was a tree: from then on every node is counted, not only those whose predecessor was
        accepted."""
        if not self.is_tree:
            self.is_tree, self.accepted, self.tests = True, [0.0] * self.limit, [0.0] * self.limit

    def admit(self, state: DecodeState) -> list[Request]:
        """Reduce the weight of old counts if slots serve new requests; returns these slots."""
        new = [state.requests[row] for row in state.rows if self.serving.get(row) is not state.requests[row]]
        if new:
            self.serving = dict(state.requests)
            self.discount(self.NEW_TEXT, 1 - len(new) / len(state.rows))
        return new

    def discount(self, most: float, share: float = 0.0) -> None:
        """Reduce every count to `share` of its weight or to `most` tests, whichever is more."""
        for n, tests in enumerate(self.tests):
            left = min(tests, max(most, share * tests))
            self.accepted[n], self.tests[n] = self.accepted[n] * left / max(tests, 1e-9), left

    def count(self, steps: Sequence[tuple[Sequence[int], int]]) -> None:
        """Count accepted nodes of steps (path, requested nodes).  A node that was requested but not offered counts as
        rejected."""
        for n in range(self.limit):
            tests = sum(requested > n and (self.is_tree or len(path) >= n) for path, requested in steps)
            self.add(n, sum(n in path for path, requested in steps if requested > n), tests)

    def add(self, n: int, accepted: float, tests: int) -> None:
        """Node n was tested `tests` times, and accepted in `accepted` of them."""
        fade = (1 - 1 / self.WINDOW) ** tests
        self.tests[n] = self.tests[n] * fade + tests
        self.accepted[n] = self.accepted[n] * fade + accepted

    def detect_change(self, steps: Sequence[tuple[Sequence[int], int]], num_steps: int) -> None:
        """If the accepted nodes of a dozen steps are 3 standard deviations off, the text is assumed to have changed:
        reduce the weight of old counts."""
        fade = (11 / 12) ** num_steps
        shares = self.shares()
        means = list(accumulate(shares, initial=0.0))
        squares = list(
            accumulate(((2 * n + 1) * share for n, share in enumerate(shares)), initial=0.0)
        )  # of a chain's length
        self.gap = self.gap * fade + sum(len(path) - means[requested] for path, requested in steps)
        self.variance = self.variance * fade + sum(squares[requested] - means[requested] ** 2 for _, requested in steps)
        if self.gap**2 > 9 * (self.variance + 1):
            self.discount(4.0)
            self.gap = self.variance = 0.0


def shares(accepted: list[float], tests: list[float]) -> list[float]:
    """Share of its tests in which each node was accepted.  With few tests it is close to the previous node's, so that
    untried nodes get tried."""
    guess, estimates = GUESS, []
    for count, tested in zip(accepted, tests, strict=True):
        guess = (count + DOUBT * guess) / (tested + DOUBT)
        estimates.append(guess)
    return estimates


class StepOutcome(NamedTuple):
    """One step, as the policy observed it."""

    requested: list[int]
    sizes: list[int]
    """Verified nodes of each slot."""
    survival: list[list[float]] | None
    accepted: Accepted
    draft_s: float
    pass_s: float
    """Seconds of everything but the draft."""
    is_odd: bool
    """Whether its times are atypical."""
    is_first: bool
    """Whether it follows plain steps."""

    @property
    def has_confidences(self) -> bool:
        """Whether it has confidences, and they are valid probabilities."""
        survival = self.survival
        return survival is not None and all(0.0 <= each[-1] <= each[0] <= 1.0 for each in survival if each)

    def paths(self) -> list[tuple[list[int], int]]:
        """(accepted nodes, number requested) of each slot that did not end inside its block."""
        slots = zip(self.accepted.paths, self.requested, self.accepted.next_tokens, strict=True)
        return [(path, requested) for path, requested, token in slots if token >= 0]

    def ends(self) -> list[tuple[int, int]]:
        """(verified, accepted) numbers of nodes of every slot; accepted is -1 if it ended inside its block."""
        slots = zip(self.sizes, self.accepted.paths, self.accepted.next_tokens, strict=True)
        return [(size, len(path) if token >= 0 else -1) for size, path, token in slots]


class Promises:
    """What confidences predicted recently: the mean of a by node, and how much of it was accepted."""

    WINDOW, NEW_TEXT = 64.0, 16.0
    """Steps of a slot after which a mean has faded to 1/e; maximum weight of a mean after `discount`."""
    COMPARED, PRIOR = 256.0, 16.0
    """Predicted nodes after which the ratio has faded to 1/e; weight of its prior (1), in predicted nodes."""

    def __init__(self, limit: int):
        self.sums, self.weights = [0.0] * limit, [0.0] * limit
        self.accepted = self.promised = self.PRIOR

    @property
    def scale(self) -> float:
        """Accepted / promised nodes."""
        return self.accepted / self.promised

    def means(self) -> list[float]:
        """Mean of a by node, over slots for which it was requested; 0 if there were none."""
        return [total / max(weight, 1e-9) for total, weight in zip(self.sums, self.weights, strict=True)]

    def discount(self) -> None:
        """Reduce the weight of old means."""
        for n, weight in enumerate(self.weights):
            share = min(1.0, self.NEW_TEXT / max(weight, 1e-9))
            self.sums[n], self.weights[n] = share * self.sums[n], share * weight

    def read(self, steps: Sequence[StepOutcome]) -> None:
        """Learn from steps with confidences: what they predicted, and how many of the verified nodes were accepted."""
        survival = [slot for each in steps for slot in each.survival or ()]
        nodes = sorted(slot for each in steps for slot in each.requested)
        for n, total in enumerate(islice(chain(columns(survival), repeat(0.0)), nodes[-1])):
            slots = len(nodes) - bisect_right(nodes, n)
            fade = (1 - 1 / self.WINDOW) ** slots
            self.sums[n] = self.sums[n] * fade + total
            self.weights[n] = self.weights[n] * fade + slots
        ends = (end for each in steps for end in each.ends())
        verified = [(sum(slot[:size]), accepted) for slot, (size, accepted) in zip(survival, ends, strict=True)]
        promised = sum(each for each, accepted in verified if accepted >= 0)
        fade = (1 - 1 / self.COMPARED) ** promised
        self.accepted = self.accepted * fade + sum(accepted for _, accepted in verified if accepted >= 0)
        self.promised = self.promised * fade + promised


def columns(survival: Survival, scale: float = 1.0) -> list[float]:
    """Sum over slots of a, for the first nodes, the second nodes, and so on, times `scale`."""
    live = float(len(survival))
    return [min(live, scale * sum(column)) for column in zip_longest(*survival, fillvalue=0.0)]


def admitted_columns(gains: Sequence[float], live: int, rate: Rate, means: Sequence[float] = ()) -> int:
    """DSpark's Algorithm 1 over columns: how many of them to verify.  gains: from `columns`.

    means: of a by node, from earlier steps.  Later columns are expected to decrease in the same way, and a column is
    admitted if it or a later one is expected to raise the rate.  () disables this, as in the paper.
    """
    expected, current = float(live), live * rate(live)
    for n, gain in enumerate(gains):
        expected += gain
        new = expected * rate(live * (2 + n))
        if new <= current:
            fall = gain / means[n] if n < len(means) and means[n] > 0 else 0.0
            following = accumulate((fall * mean for mean in means[n + 1 :]), initial=expected)
            if all(each * rate(live * (2 + later)) <= current for later, each in enumerate(following, n)):
                return n
        current = new
    return len(gains)
