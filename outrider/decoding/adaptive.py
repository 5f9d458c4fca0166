"""A policy that measures: as many nodes as pay, and none where plain steps are faster.

Expected-goodput argmax (SmartSpec 2406.14066, Leviathan 2211.17192).  Differs from SmartSpec: acceptance is counted node by
node, and seconds are measured while decoding, not fitted beforehand.  Counts and seconds are plain lists: at these sizes
tensors are ten times slower.  s[n] is the chance that node n is kept, B the number of live slots.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from outrider.decoding.accept import Kept
from outrider.decoding.state import DecodeState, Request, Timing


class Adaptive:
    """As many nodes as pay, by the acceptance and the seconds measured so far; none where plain steps are faster.

    Every step asks for the depth that maximises committed tokens per second,

        B * (1 + s[0] + ... + s[depth - 1]) / (draft(depth) + pass(B * (1 + depth))),

    or for nothing, where plain steps commit more.  All slots are asked for the same: a pass costs by its widest slot, and the
    sum over unlike slots is B times that of their mean.

    One step in `EXPLORE` tries another depth, plain steps among them, so that no measure grows old.  While off, a `SHARE` of
    the time goes into probes, so that it comes back by itself: many where they lose little, few where drafts are dear.
    Budgets hang on earlier steps alone, and so keep the law; equal outcomes and equal timings give equal budgets.
    """

    EXPLORE = 64
    """Steps between two that try another depth."""
    SHARE = 0.02
    """Of a plain step, what each step while off puts aside for probes."""
    FUND = 3.0
    """Plain steps that may be put aside; what it has when it first turns off, or after drafts have paid for a while."""
    FEE = 0.1
    """Plain steps that a step of a probe counts beside what it loses."""
    LOYALTY = 0.98
    """A depth stays until another is better by more than this leaves; nobody commutes between equals."""

    def __init__(self, limit: int):
        self.limit = limit
        self.acceptance = _Acceptance(limit)
        self.costs: dict[int, _Costs] = {}
        """By the live slots' number in bits: 1, 2, 3-4, 5-8 ..."""
        depths = {*range(1, 13), *(2**n for n in range(4, 20)), *(3 * 2**n for n in range(3, 20)), limit}
        self.depths: list[int] = sorted(depth for depth in depths if 0 < depth <= limit)
        """What is chosen from."""
        self.depth = limit
        """Of the deepest node asked for; 0 while off."""
        self.wanted: list[int] = []
        self.turn = 0
        self.pause = 0
        """Plain steps since the last draft."""
        self.since = 0
        """Steps on since another depth was tried."""
        self.tries = 0
        self.credit = self.FUND
        """Plain steps put aside for probes."""
        self.probing = 0
        """Steps left of a probe."""
        self.late = 0.0
        """Seconds that the last probe's first step took longer than usual."""

    def budget(self, state: DecodeState) -> Tensor:
        self.turn += 1
        room = state.room.tolist()
        live, most = len(room), min(max(room, default=0), self.limit)
        self.acceptance.meet(state)
        depth = 0
        if most > 0:
            costs = self._costs_of(live)
            depth = costs.todo.pop(0) if costs.todo else self._planned(live, most, costs)
        self.wanted = [max(0, min(depth, left)) for left in room]
        return torch.tensor(self.wanted, dtype=torch.int64)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, kept: Kept, timing: Timing) -> None:
        live, asked = len(self.wanted), max(self.wanted, default=0)
        if not live:
            return
        offered = sizes.tolist()
        if asked:
            self.acceptance.observe(state, self.wanted, offered, kept)
        # the first step of all warms caches up
        if self.turn > 1:
            self._observe_costs(live, asked, max(offered), timing)
        if self.probing and asked:
            self._charge(live, asked, max(offered), sum(kept.accepted), timing)
        self.pause = 0 if asked else self.pause + 1

    def _observe_costs(self, live: int, asked: int, width: int, timing: Timing) -> None:
        costs, rest = self._costs_of(live), timing.verify + timing.other
        if not asked:
            costs.plain.add(live, timing.draft + rest, self.turn)
            return
        costs.verify.add(live * (1 + width), rest, self.turn)
        # the first draft after a pause reads what it has missed
        if self.pause < 8:
            costs.draft.add(asked, timing.draft, self.turn)

    def _charge(self, live: int, asked: int, width: int, accepted: int, timing: Timing) -> None:
        """Pay for a step of a probe: what it lost against a plain step, and a fee; one that paid brings the next nearer."""
        self.probing -= 1
        costs = self._costs_of(live)
        plain, seconds = costs.plain.at(live), costs.seconds(asked, live * (1 + width))
        if self.pause:
            # the lesser of two probes': an outlier comes once, reading what was missed every time
            late = timing.draft + timing.verify + timing.other - seconds
            seconds += max(0.0, min(late, self.late))
            self.late = late
        self.credit -= seconds / plain - 1 - accepted / live + self.FEE

    def _costs_of(self, live: int) -> _Costs:
        """What steps of about so many slots cost; a new size begins with what the nearest one knows, and a few tries."""
        bits = (live - 1).bit_length()
        if bits not in self.costs:
            near = self.costs[min(self.costs, key=lambda other: abs(other - bits))] if self.costs else None
            self.costs[bits] = _Costs(near)
            self.costs[bits].try_once([self.depth or 1, 0] if near else [self.limit, 0, (self.limit + 1) // 2, 1])
        return self.costs[bits]

    def _planned(self, live: int, most: int, costs: _Costs) -> int:
        """The best depth, unless another is due to be tried."""
        rates = self._rates(live, most, costs)
        self._choose(rates)
        if self.depth:
            self.since, self.probing = self.since + 1, 0
            costs.try_once(self._beside())
            return self._other() if self.since >= self.EXPLORE else self.depth
        self.credit = min(self.credit + self.SHARE, self.FUND)
        if not self.probing and self.credit > 0:
            # two steps, since the first after a pause says nothing of a draft's seconds
            self.probing = 2
        return self._probe(rates) if self.probing else 0

    def _rates(self, live: int, most: int, costs: _Costs) -> dict[int, float]:
        """Tokens per second by depth, where no slot has room for more than `most` nodes."""
        kept, widths = self.acceptance.kept(), self.acceptance.widths(live)
        rates = {0: live / costs.plain.at(live)}
        for depth in self.depths:
            asked = min(depth, most)
            rates[depth] = live * (1 + kept[asked]) / costs.seconds(asked, live * (1 + widths[asked]))
        return rates

    def _choose(self, rates: dict[int, float]) -> None:
        """Set `depth` to the fastest, with loyalty to that of before."""
        best = max(rates, key=rates.__getitem__)
        # what drafts bring is an estimate, what a plain step brings is not: off needs no margin, on does
        is_loyal = rates[self.depth] >= self.LOYALTY * rates[best] and (best or not self.depth)
        if not is_loyal:
            self.depth = best

    def _other(self) -> int:
        """Nothing, more and less than the best, by turns."""
        self.since, self.tries, self.credit = 0, self.tries + 1, self.FUND
        return 0 if self.tries % 2 else self._beside()[-1 if self.tries % 4 else 0]

    def _beside(self) -> list[int]:
        """The next smaller depth, this one and the next larger."""
        at = self.depths.index(self.depth)
        return self.depths[max(0, at - 1) : at + 2]

    def _probe(self, rates: dict[int, float]) -> int:
        """The deepest that is hardly slower than the best draft: a parallel drafter's costs little more."""
        least = 0.9 * max(rates[depth] for depth in self.depths)
        return max(depth for depth in self.depths if rates[depth] >= least)


# ── acceptance ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Acceptance:
    """How likely each node is to be kept.

    In a chain, node n is tested where n - 1 was kept, and s[n] is the product of the first n + 1 shares kept.  In a tree,
    whose parents a policy does not see, s[n] is the share of steps with n on the path, which no later node can change.  A
    node that was wanted and not offered counts as rejected.  An estimate begins with, and fades back to, that of the node
    before it: what is not tried looks worth a try.
    """

    WINDOW = 256.0
    """Tests after which a count has faded to 1/e."""
    GUESS, DOUBT = 0.7, 4.0
    """What the first node is taken for, and every other for the one before it: for so many tests."""
    NEW_TEXT = 16.0
    """Tests that counts of other texts weigh at most."""

    def __init__(self, limit: int):
        self.limit = limit
        self.hits, self.tests = [0.0] * limit, [0.0] * limit
        """How often each node was kept and tested; fading by the tests that come, and by one a step where none comes."""
        self.offered = [1.0] * limit
        """How often a node that was wanted was there."""
        self.is_tree = False
        self.serving: dict[int, Request] = {}
        """By slot."""
        self.gap = self.variance = 0.0
        """Nodes kept beyond what was expected in the last dozen steps, and the variance of that."""

    def meet(self, state: DecodeState) -> None:
        """Let old counts weigh less where slots serve other requests than before."""
        requests = state.requests
        known = [row for row in state.rows if self.serving.get(row) is requests[row]]
        if len(known) < len(state.rows):
            self.serving = dict(requests)
            self._lighten(self.NEW_TEXT, len(known) / len(state.rows))

    def shares(self) -> list[float]:
        """[limit] s of every node."""
        guess, shares = self.GUESS, []
        for hits, tests in zip(self.hits, self.tests, strict=True):
            guess = (hits + self.DOUBT * guess) / (tests + self.DOUBT)
            shares.append(guess)
        return shares if self.is_tree else list(accumulate(shares, mul))

    def kept(self) -> list[float]:
        """Expected nodes kept, by the depth asked for, from 0 on."""
        return list(accumulate(self.shares(), initial=0.0))

    def widths(self, live: int) -> list[float]:
        """Expected width of the widest slot's draft, by the depth asked for, from 0 on."""
        return list(accumulate([1 - (1 - offered) ** live for offered in self.offered], initial=0.0))

    def observe(self, state: DecodeState, wanted: list[int], sizes: list[int], kept: Kept) -> None:
        if not self.is_tree and state.reached != sizes:
            self.is_tree = True
            self.hits, self.tests = [0.0] * self.limit, [0.0] * self.limit
            return
        for n in range(max(wanted)):
            came = [size > n for size, most in zip(sizes, wanted, strict=True) if most > n]
            self.offered[n] += 0.1 * (sum(came) / len(came) - self.offered[n])
        accepted = kept.accepted
        # a slot that ended in mid-block did not show what it would have kept
        whole = [b for b, token in enumerate(kept.next_tokens) if token >= 0]
        self._wonder([accepted[b] for b in whole], [wanted[b] for b in whole])
        hits, tests = [0] * self.limit, [0] * self.limit
        for b in whole:
            for n in kept.paths[b] if self.is_tree else range(min(accepted[b], wanted[b])):
                hits[n] += 1
            for n in range(wanted[b] if self.is_tree else min(accepted[b] + 1, wanted[b])):
                tests[n] += 1
        fades = [(1 - 1 / self.WINDOW) ** max(test, 1) for test in tests]
        self.hits = [old * fade + new for old, fade, new in zip(self.hits, fades, hits, strict=True)]
        self.tests = [old * fade + new for old, fade, new in zip(self.tests, fades, tests, strict=True)]

    def _wonder(self, accepted: list[int], wanted: list[int]) -> None:
        """Where a dozen steps lie 3 standard deviations off, the text has changed: old counts weigh little from now on."""
        shares = self.shares()
        means = list(accumulate(shares, initial=0.0))
        # of a chain's length; near enough for a tree's
        squares = list(accumulate(map(mul, range(1, 2 * self.limit, 2), shares), initial=0.0))
        self.gap = self.gap * (1 - 1 / 12) + sum(accepted) - sum([means[n] for n in wanted])
        self.variance = self.variance * (1 - 1 / 12) + sum([squares[n] - means[n] ** 2 for n in wanted])
        if self.gap**2 > 9 * (self.variance + 1):
            self._lighten(4)
            self.gap = self.variance = 0.0

    def _lighten(self, least: float, share: float = 0.0) -> None:
        """Let every node's counts weigh this share of their tests, or as few tests as `least`."""
        for n, tests in enumerate(self.tests):
            if tests > least:
                self.tests[n] = max(least, share * tests)
                self.hits[n] *= self.tests[n] / tests


# ── seconds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Costs:
    """Seconds of a step of about so many slots: plain, the pass by its rows, the draft by its deepest node."""

    def __init__(self, near: _Costs | None):
        """`near`: costs at another number of slots, for what is not yet measured at this one."""
        self.plain: _Curve = _Curve(near.plain if near else None)
        self.verify: _Curve = _Curve(near.verify if near else None)
        self.draft: _Curve = _Curve(near.draft if near else None)
        self.tried: set[int] = set()
        self.todo: list[int] = []
        """Depths still to be tried."""

    def try_once(self, depths: Sequence[int]) -> None:
        """See to it that each of these depths has been tried, twice: of two samples one may be an outlier."""
        fresh = [depth for depth in depths if depth not in self.tried]
        self.tried.update(fresh)
        self.todo += 2 * fresh

    def seconds(self, depth: int, rows: float) -> float:
        return self.draft.at(depth) + self.verify.at(rows)


class _Curve:
    """Seconds over a size that they never fall with: trimmed means of recent samples in bins, monotone, linear between."""

    WINDOW, AGE = 32, 1024
    """Samples a bin holds, and steps until one is too old."""

    def __init__(self, near: _Curve | None):
        """`near` gives the shape where nothing is measured here."""
        self.bins: dict[int, deque[tuple[int, int, float]]] = {}
        """Step, size and seconds of the samples of sizes that lie within an eighth."""
        self.means: dict[int, tuple[float, float, int]] = {}
        """Mean size, mean seconds and number of samples of every bin."""
        self.near = near.line() if near else None
        self.found: tuple[list[float], list[float]] | None = None

    def add(self, size: int, seconds: float, turn: int) -> None:
        bin = round(8 * math.log(size))
        if bin not in self.bins:
            self.bins[bin] = deque(maxlen=self.WINDOW)
        samples = self.bins[bin]
        samples.append((turn, size, seconds))
        while samples[0][0] < turn - self.AGE:
            samples.popleft()
        ordered = sorted([taken for _, _, taken in samples])
        # outliers are slow, and of few samples one may be one
        trim = len(ordered) // 8
        ordered = ordered[trim : max(1, len(ordered) - trim - 1)]
        mean_size = sum([size for _, size, _ in samples]) / len(samples)
        self.means[bin] = mean_size, sum(ordered) / len(ordered), len(samples)
        self.found = None

    def at(self, size: float) -> float:
        sizes, seconds = self.line()
        if len(sizes) == 1:
            return seconds[0]
        if size >= sizes[-1]:
            # beyond the last bin the whole curve's slope: that of two bins is noise
            return seconds[-1] + (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0]) * (size - sizes[-1])
        if size <= sizes[0]:
            return seconds[0]
        right = bisect(sizes, size)
        left = right - 1
        return seconds[left] + (seconds[right] - seconds[left]) / (sizes[right] - sizes[left]) * (size - sizes[left])

    def line(self) -> tuple[list[float], list[float]]:
        """Sizes and seconds."""
        if self.found is None:
            points = sorted([*self.means.values(), *self._borrowed()])
            # nothing known costs nothing: it will be tried
            self.found = _rising(points) if points else ([1.0], [1e-9])
        return self.found

    def _borrowed(self) -> list[tuple[float, float, float]]:
        """The points of `near` that are missing here, scaled to agree where both have been measured."""
        if self.near is None:
            return []
        own = list(self.means.values())
        there = _Curve(None)
        there.found = self.near
        scale = sum(taken for _, taken, _ in own) / max(sum(there.at(size) for size, _, _ in own), 1e-12) if own else 1.0
        return [
            (size, seconds * scale, 0.5)
            for size, seconds in zip(*self.near, strict=True)
            if round(8 * math.log(size)) not in self.means
        ]


def _rising(points: Sequence[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Sizes and seconds of the nearest curve that never falls (weighted isotonic regression by pooling neighbours)."""
    pools: list[tuple[float, float, int]] = []
    for _, seconds, weight in points:
        count = 1
        while pools and pools[-1][0] > seconds:
            before, heavy, many = pools.pop()
            seconds = (before * heavy + seconds * weight) / (heavy + weight)
            weight, count = heavy + weight, count + many
        pools.append((seconds, weight, count))
    return [size for size, _, _ in points], [seconds for seconds, _, count in pools for _ in range(count)]
