"""How likely each node of a draft is to be accepted: by what was accepted so far, or by the drafter's confidences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, islice, repeat, zip_longest
from operator import mul
from typing import NamedTuple

from outrider.decoding.accept import Accepted
from outrider.decoding.state import DecodeState, Request

Survival = Sequence[Sequence[float]]
"""a of every slot: the probability that a node and all before it are accepted.  It never rises; slots may have
different numbers of nodes."""
Rate = Callable[[int], float]
"""Steps per second by tokens in the pass, anchors included."""
GUESS, DOUBT = 0.7, 4.0
"""Prior of the first node, and how many tests it counts as; every other node's prior is the node before it."""


class Acceptance:
    """How often each node of a draft was accepted lately, over all slots."""

    WINDOW, NEW_TEXT = 256.0, 16.0
    """Tests after which a count has faded to 1/e, and most tests that counts of other requests weigh."""

    def __init__(self, limit: int):
        self.limit = limit
        self.accepted, self.tests = [0.0] * limit, [0.0] * limit
        """How often each node was accepted, and tested; fading."""
        self.is_tree = False
        self.serving: dict[int, Request] = {}
        self.gap = self.variance = 0.0
        """Accepted nodes minus expected ones in the last dozen steps, and the variance of that."""

    def shares(self) -> list[float]:
        """s of every node.  In a chain a node is tested where the one before it was accepted, and s is the product of
        the shares so far; in a tree, whose parents a policy does not know, every node is tested."""
        found = shares(self.accepted, self.tests)
        return found if self.is_tree else list(accumulate(found, mul))

    def see_tree(self) -> None:
        """A draft was a tree: nodes count by their numbers from now on."""
        if not self.is_tree:
            self.is_tree, self.accepted, self.tests = True, [0.0] * self.limit, [0.0] * self.limit

    def meet(self, state: DecodeState) -> list[Request]:
        """Reduce the weight of old counts where slots serve other requests than before, which are returned."""
        new = [state.requests[row] for row in state.rows if self.serving.get(row) is not state.requests[row]]
        if new:
            self.serving = dict(state.requests)
            self.lighten(self.NEW_TEXT, 1 - len(new) / len(state.rows))
        return new

    def lighten(self, most: float, share: float = 0.0) -> None:
        """Reduce every count to this share of its weight, or to `most` tests, whichever is more."""
        for n, tests in enumerate(self.tests):
            left = min(tests, max(most, share * tests))
            self.accepted[n], self.tests[n] = self.accepted[n] * left / max(tests, 1e-9), left

    def count(self, steps: Sequence[tuple[Sequence[int], int]]) -> None:
        """Count accepted nodes of steps (path, nodes wanted).  A node that was wanted but not offered counts as
        rejected."""
        for n in range(self.limit):
            tests = sum(wanted > n and (self.is_tree or len(path) >= n) for path, wanted in steps)
            self.add(n, sum(n in path for path, wanted in steps if wanted > n), tests)

    def add(self, n: int, accepted: float, tests: int) -> None:
        """Node n was tested so often, and accepted in so many of these."""
        fade = (1 - 1 / self.WINDOW) ** tests
        self.tests[n] = self.tests[n] * fade + tests
        self.accepted[n] = self.accepted[n] * fade + accepted

    def wonder(self, steps: Sequence[tuple[Sequence[int], int]], num_steps: int) -> None:
        """Where the accepted nodes of a dozen steps are 3 standard deviations off, the text has changed: old counts
        weigh little."""
        fade = (11 / 12) ** num_steps
        shares = self.shares()
        means = list(accumulate(shares, initial=0.0))
        squares = list(
            accumulate(((2 * n + 1) * share for n, share in enumerate(shares)), initial=0.0)
        )  # of a chain's length
        self.gap = self.gap * fade + sum(len(path) - means[wanted] for path, wanted in steps)
        self.variance = self.variance * fade + sum(squares[wanted] - means[wanted] ** 2 for _, wanted in steps)
        if self.gap**2 > 9 * (self.variance + 1):
            self.lighten(4.0)
            self.gap = self.variance = 0.0


def shares(accepted: list[float], tests: list[float]) -> list[float]:
    """Share of its tests in which each node was accepted.  With few tests it is near that of the node before, so that
    untried nodes are tried."""
    guess, found = GUESS, []
    for own, tested in zip(accepted, tests, strict=True):
        guess = (own + DOUBT * guess) / (tested + DOUBT)
        found.append(guess)
    return found


class Outcome(NamedTuple):
    """What a step did."""

    wanted: list[int]
    sizes: list[int]
    """Verified nodes of each slot."""
    survival: list[list[float]] | None
    accepted: Accepted
    draft_s: float
    pass_s: float
    """Seconds of all but the draft."""
    is_odd: bool
    """Its seconds are not usual."""
    is_first: bool
    """It follows plain steps."""

    @property
    def has_confidences(self) -> bool:
        """Whether it has any, and they can be probabilities."""
        own = self.survival
        return own is not None and all(0.0 <= each[-1] <= each[0] <= 1.0 for each in own if each)

    def paths(self) -> list[tuple[list[int], int]]:
        """Accepted nodes and nodes wanted, of each slot that did not end inside its block."""
        slots = zip(self.accepted.paths, self.wanted, self.accepted.next_tokens, strict=True)
        return [(path, own) for path, own, token in slots if token >= 0]

    def ends(self) -> list[tuple[int, int]]:
        """Verified and accepted nodes of every slot; -1 accepted where it ended inside its block."""
        slots = zip(self.sizes, self.accepted.paths, self.accepted.next_tokens, strict=True)
        return [(size, len(path) if token >= 0 else -1) for size, path, token in slots]


class Promises:
    """What confidences promised lately: the mean of a by node, and how much of it was accepted."""

    WINDOW, NEW_TEXT = 64.0, 16.0
    """Slots' steps after which a mean has faded to 1/e, and most that it weighs once it is in doubt."""
    COMPARED, PRIOR = 256.0, 16.0
    """Promised nodes after which the comparison has faded to 1/e, and how many its first guess, 1, counts as."""

    def __init__(self, limit: int):
        self.sums, self.weights = [0.0] * limit, [0.0] * limit
        self.accepted = self.promised = self.PRIOR

    @property
    def scale(self) -> float:
        """Accepted nodes over promised ones."""
        return self.accepted / self.promised

    def means(self) -> list[float]:
        """Mean of a by node, over slots that were to draft it; 0 where none was."""
        return [total / max(weight, 1e-9) for total, weight in zip(self.sums, self.weights, strict=True)]

    def lighten(self) -> None:
        """Old means weigh little from now on."""
        for n, weight in enumerate(self.weights):
            share = min(1.0, self.NEW_TEXT / max(weight, 1e-9))
            self.sums[n], self.weights[n] = share * self.sums[n], share * weight

    def read(self, steps: Sequence[Outcome]) -> None:
        """What steps with confidences promised, and what was accepted of what they verified."""
        survival = [own for each in steps for own in each.survival or ()]
        wanted = sorted(own for each in steps for own in each.wanted)
        for n, total in enumerate(islice(chain(columns(survival), repeat(0.0)), wanted[-1])):
            slots = len(wanted) - bisect_right(wanted, n)
            fade = (1 - 1 / self.WINDOW) ** slots
            self.sums[n] = self.sums[n] * fade + total
            self.weights[n] = self.weights[n] * fade + slots
        ends = (end for each in steps for end in each.ends())
        verified = [(sum(own[:size]), accepted) for own, (size, accepted) in zip(survival, ends, strict=True)]
        promised = sum(each for each, accepted in verified if accepted >= 0)
        fade = (1 - 1 / self.COMPARED) ** promised
        self.accepted = self.accepted * fade + sum(accepted for _, accepted in verified if accepted >= 0)
        self.promised = self.promised * fade + promised


def columns(survival: Survival, scale: float = 1.0) -> list[float]:
    """The sum of a over slots of the first nodes, of the second nodes, and so on, times `scale`."""
    live = float(len(survival))
    return [min(live, scale * sum(column)) for column in zip_longest(*survival, fillvalue=0.0)]


def admitted_columns(gains: Sequence[float], live: int, rate: Rate, means: Sequence[float] = ()) -> int:
    """Algorithm 1 over columns: how many of them are verified.  gains: as `columns` says.

    means: of a by node, from earlier steps; columns that follow are expected to fall as these do, and a column is
    admitted where it or some later one is expected to improve the rate.  () expects nothing, as the paper.
    """
    expected, current = float(live), live * rate(live)
    for n, gain in enumerate(gains):
        expected += gain
        own = expected * rate(live * (2 + n))
        if own <= current:
            fall = gain / means[n] if n < len(means) and means[n] > 0 else 0.0
            following = accumulate((fall * mean for mean in means[n + 1 :]), initial=expected)
            if all(each * rate(live * (2 + later)) <= current for later, each in enumerate(following, n)):
                return n
        current = own
    return len(gains)
