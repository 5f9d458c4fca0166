"""How much to speculate next.

A policy is a stopping rule.  Whether node n of a slot stays may depend on the confidences of that slot's nodes 0..n, each
known before its own token was drawn, and on other slots; never on a later confidence of the same slot, nor on the drafted
tokens.  Dropping a token for its own value, or looking ahead, breaks the law.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Verdict
from outrider.decoding.state import DecodeState, Request, Timing


class Policy(Protocol):
    """Decides before the draft how many nodes to ask for, and before the verification how many of them stay."""

    def budget(self, state: DecodeState) -> Tensor:
        """[B] int64 on the CPU, nodes wanted."""

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        """[B] int64 on the CPU, at most `sizes`: how many of each slot's nodes stay."""

    def observe(self, state: DecodeState, sizes: Tensor, verdict: Verdict, timing: Timing) -> None:
        """After every step."""

    def free(self, rows: Sequence[int]) -> None:
        """The requests in these slots are over."""


class Fixed:
    """The same number of nodes every time, all of them verified."""

    def __init__(self, nodes: int):
        self.nodes = nodes

    def budget(self, state: DecodeState) -> Tensor:
        return torch.full((len(state.rows),), self.nodes)

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, verdict: Verdict, timing: Timing) -> None: ...
    def free(self, rows: Sequence[int]) -> None: ...


class ByConfidence(Fixed):
    """Verify a slot's nodes up to, and without, the first that is unlikely to be reached and kept.

    The running product of a node's own and its elders' confidences must reach `least`; drafters without confidences are
    verified whole.  Made for chains.
    """

    def __init__(self, nodes: int, least: float):
        super().__init__(nodes)
        self.least = least

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        if confidence is None:
            return sizes
        likely = (confidence.cumprod(-1) >= self.least).cumprod(-1).sum(-1).cpu()
        return torch.minimum(sizes, likely)


class Adaptive:
    """As many nodes as pay, by the acceptance and the seconds measured so far; none where plain steps are faster.

    Every step asks for the budget that maximises committed tokens per second over all live slots,

        (B + sum of s[b, n] over the nodes asked for) / (draft(deepest) + pass(rows)),

    where s[b, n] is the chance that node n of slot b is kept (`_Acceptance`) and the seconds are measured (`_Costs`); all
    slots share the pass, so nodes enter in the order of their s.  (Expected-goodput argmax: SmartSpec 2406.14066, Leviathan
    2211.17192.)  Nothing at all is asked for where that falls below a plain step's 1 token a slot and plain seconds.

    One step in `EXPLORE` tries another length, plain steps among them, so that no measure grows old.  While off, two steps
    in 16, 32, ... at most `REST` draft a little: under 2 % of the steps once it is long off, and it comes back by itself.
    It is decided before anything is drawn, from earlier steps alone, and so keeps the law; equal timings, equal budgets.
    """

    EXPLORE = 64
    """Steps between two that try another length."""
    REST = 128
    """Most steps between two probes while off."""
    LOYALTY = 0.98
    """A budget stays until another is better by more than this leaves; nobody commutes between equals."""
    PRICE = 0.01
    """Tokens a node must be worth beside its seconds."""

    def __init__(self, limit: int, *, ragged: bool = False):
        """`ragged`: the pass costs by the nodes it has; otherwise, as in our targets, by those of its widest slot."""
        self.limit, self.ragged = limit, ragged
        self.acceptance = _Acceptance(limit)
        self.costs: dict[int, _Costs] = {}
        """By the live slots' number in bits: 1, 2, 3-4, 5-8 ..."""
        self.turn = self.pause = self.since = self.burst = self.tries = 0
        self.cap = limit
        """Deepest node asked for; 0 while off."""
        self.interval = 16
        self.wanted = torch.empty(0, dtype=torch.int64)
        caps = {*range(1, 13), *(2**n for n in range(4, 20)), *(3 * 2**n for n in range(3, 20)), limit}
        self.caps = sorted(cap for cap in caps if cap <= limit)

    def budget(self, state: DecodeState) -> Tensor:
        self.acceptance.meet(state)
        self.turn += 1
        room = state.room.clamp(0, self.limit)
        if not self.caps or not len(room):
            self.wanted = torch.zeros_like(room)
            return self.wanted
        kept = self.acceptance.kept(state.rows)
        kept[torch.arange(self.limit) >= room[:, None]] = 0
        self.wanted = torch.minimum(self._wanted(state.rows, kept), room)
        self.acceptance.expect(kept, self.wanted)
        return self.wanted

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, verdict: Verdict, timing: Timing) -> None:
        self.acceptance.observe(state, self.wanted, sizes, verdict)
        asked, seconds = max(self.wanted.tolist(), default=0), timing.verify + timing.other
        if self.burst and asked:
            self.burst += self._paid(len(sizes), verdict, asked) - 1
        # the first step of all warms caches up; the first draft after a pause reads what it has missed
        if self.turn > 1:
            costs = self._costs_of(len(sizes))
            if not asked:
                costs.plain.add(len(sizes), timing.draft + seconds, self.turn)
            else:
                costs.verify.add(self._rows(sizes), seconds, self.turn)
                if self.pause < 8:
                    costs.draft.add(asked, timing.draft, self.turn)
        self.pause = 0 if asked else self.pause + 1

    def free(self, rows: Sequence[int]) -> None:
        self.acceptance.free(rows)

    def _rows(self, sizes: Tensor) -> int:
        return len(sizes) + int(sizes.sum()) if self.ragged else len(sizes) * (1 + int(sizes.max()))

    def _costs_of(self, live: int) -> _Costs:
        """What steps of about so many slots cost; a new size begins with what the nearest one knows, and a few tries."""
        bits = (live - 1).bit_length()
        if bits not in self.costs:
            near = min(self.costs, key=lambda other: abs(other - bits), default=None)
            if near is None:
                some = [self.limit, 0, (self.limit + 1) // 2, 1]
                self.costs[bits] = _Costs(None, [self.limit, *some, *some, *some])
            else:
                self.costs[bits] = _Costs(self.costs[near], [0, self.cap, 0, self.cap])
        return self.costs[bits]

    def _wanted(self, rows: Sequence[int], kept: Tensor) -> Tensor:
        """[B] nodes: what is still to be tried, or is due to be tried again, or else the best."""
        costs = self._costs_of(len(rows))
        if costs.todo:
            return torch.full((len(rows),), costs.todo.pop(0))
        best = self._best(kept, costs)
        self.since += 1
        if self.cap:
            self.burst = 0
            if self.since < self.EXPLORE:
                return best
            return self._explored(best)
        if not self.burst and self.since < self.interval:
            return best
        if not self.burst:
            self.since, self.interval, self.burst = 0, min(2 * self.interval, self.REST), 2
        return torch.full((len(rows),), self._small(costs, len(rows)))

    def _explored(self, best: Tensor) -> Tensor:
        """Nothing, more and less than the best, by turns; slots that are asked for nothing have a turn as well."""
        self.since, self.tries, self.interval = 0, self.tries + 1, 16
        if self.tries % 2:
            return torch.zeros_like(best)
        at = self.caps.index(self.cap) + (1 if self.tries % 4 else -1)
        cap = self.caps[min(max(at, 0), len(self.caps) - 1)]
        return torch.full_like(best, cap)

    def _paid(self, live: int, verdict: Verdict, asked: int) -> bool:
        """Whether a probe committed tokens faster than plain steps do; then another follows."""
        costs = self._costs_of(live)
        taken = float(costs.seconds(torch.tensor([asked]), torch.tensor([live * (1.0 + asked)])))
        return (live + int(verdict.accepted.sum())) / taken > live / costs.plain_seconds(live)

    def _small(self, costs: _Costs, live: int) -> int:
        """The most nodes whose step takes at most a quarter longer than that of one node: a parallel drafter's are many."""
        seconds = costs.seconds(torch.tensor(self.caps), live * (1.0 + torch.tensor(self.caps)))
        return max(cap for cap, taken in zip(self.caps, seconds.tolist(), strict=True) if taken <= 1.25 * float(seconds[0]))

    def _best(self, kept: Tensor, costs: _Costs) -> Tensor:
        """[B] nodes of the fastest plan: for each deepest node allowed, nodes enter by their chance until it stops to pay."""
        live = len(kept)
        order = kept.cummin(-1).values.flatten().argsort(descending=True, stable=True)
        depth = (torch.arange(self.limit).expand(live, -1).flatten())[order]
        caps = torch.tensor(self.caps)
        inside = (depth < caps[:, None]).double()
        gain = ((kept.flatten()[order] - self.PRICE) * inside).cumsum(-1)
        if self.ragged:
            width = (self.acceptance.offered[depth] * inside).cumsum(-1)
        else:
            somewhere = 1 - (1 - self.acceptance.offered) ** live
            width = live * somewhere.cumsum(0)[caps - 1, None].expand_as(gain)
        rates = (live + gain) / costs.seconds(caps[:, None].expand_as(gain), live + width)
        most, at = rates.max(-1)
        chosen = self._chosen(most.tolist(), live / costs.plain_seconds(live))
        if chosen is None:
            return torch.zeros(live, dtype=torch.int64)
        within = inside[chosen].bool()
        within[int(at[chosen]) + 1 :] = False
        return torch.zeros(live, dtype=torch.int64).index_add_(0, order.div(self.limit, rounding_mode="floor"), within.long())

    def _chosen(self, rates: list[float], plain: float) -> int | None:
        """Which of `caps`, with loyalty to the one of before; None is off."""
        best = max(range(len(rates)), key=rates.__getitem__)
        if plain > rates[best] * (1 if self.cap else self.LOYALTY):
            self.since = self.since if not self.cap else 0
            self.cap = 0
            return None
        if self.cap in self.caps and rates[self.caps.index(self.cap)] >= self.LOYALTY * rates[best]:
            best = self.caps.index(self.cap)
        self.cap = self.caps[best]
        return best


class _Acceptance:
    """How likely each node is to be kept, by slot; a slot begins with, and leans on, what all slots have shown.

    Discounted counts at node n.  In a chain, of how often n was kept where n - 1 was: a[n], independent estimates that fall
    with n; kept[n] = a[0] ... a[n].  In a tree, whose parents a policy does not see, of how often n was on the path, which
    no later node can change.  A node that was wanted and not offered counts as rejected.  An estimate begins with, and
    fades back to, that of the node before it: what is not tried looks worth a try.
    """

    WINDOW, SHARED = 96.0, 192.0
    """Tests after which a count has faded to 1/e."""
    LEAN, GUESS = 8.0, 0.7
    """Tests that the shared estimate counts for in a slot; what the first node of all is taken for, for 2 tests."""

    def __init__(self, limit: int):
        self.limit = limit
        self.slots = torch.zeros(0, 2, limit, dtype=torch.float64)
        """Kept and tested, by slot and node."""
        self.shared = torch.zeros(2, limit, dtype=torch.float64)
        self.surprise = torch.zeros(0, 2, dtype=torch.float64)
        """By slot: nodes kept beyond what was expected, and the variance of that; the last dozen steps."""
        self.offered = torch.ones(limit, dtype=torch.float64)
        self.expected = self.variance = torch.zeros(0, dtype=torch.float64)
        self.is_tree = False
        self.serving: dict[int, Request] = {}

    def meet(self, state: DecodeState) -> None:
        """Forget slots that serve another request than before."""
        missing = len(state.tokens) - len(self.slots)
        if missing > 0:
            self.slots = torch.cat([self.slots, torch.zeros(missing, 2, self.limit, dtype=torch.float64)])
            self.surprise = torch.cat([self.surprise, torch.zeros(missing, 2, dtype=torch.float64)])
        self.free([row for row in state.rows if self.serving.get(row) is not state.requests[row]])
        self.serving |= state.requests

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.serving.pop(row, None)
            if row < len(self.slots):
                self.slots[row] = 0
                self.surprise[row] = 0

    def kept(self, rows: Sequence[int]) -> Tensor:
        """[B, limit] chance of every node to be kept, were it asked for."""
        guess, shared = self.GUESS, []
        for hits, tests in self.shared.T.tolist():
            guess = (hits + 2 * guess) / (tests + 2)
            shared.append(guess)
        hits, tests = self.slots[list(rows)].unbind(1)
        chance = (hits + self.LEAN * torch.tensor(shared, dtype=torch.float64)) / (tests + self.LEAN)
        return chance if self.is_tree else chance.cumprod(-1)

    def expect(self, kept: Tensor, wanted: Tensor) -> None:
        """Remember what should come of this step: mean and variance of the nodes kept (exact for a chain)."""
        nodes = torch.arange(self.limit)
        asked = kept * (nodes < wanted[:, None])
        self.expected = asked.sum(-1)
        self.variance = ((2 * nodes + 1) * asked).sum(-1) - self.expected**2

    def observe(self, state: DecodeState, wanted: Tensor, sizes: Tensor, verdict: Verdict) -> None:
        if not wanted.any():
            return
        if not self.is_tree and state.reached != sizes.tolist():
            self.is_tree = True
            self.slots.zero_()
            self.shared.zero_()
        nodes = torch.arange(self.limit)
        asked = nodes < wanted[:, None]
        came = ((nodes < sizes[:, None]) & asked).double().sum(0) / asked.sum(0).clamp(min=1)
        self.offered += 0.1 * asked.any(0) * (came - self.offered)
        whole = (verdict.next_token >= 0).cpu()  # a slot that ended in mid-block did not show what it would have kept
        accepted = verdict.accepted.cpu()
        if self.is_tree:
            path = verdict.path.cpu()
            hits = torch.zeros(len(sizes), self.limit + 1, dtype=torch.bool).scatter_(1, path % (self.limit + 1), True)[:, :-1]
            tests = asked & whole[:, None]
        else:
            hits = nodes < accepted[:, None]
            tests = asked & (nodes <= accepted[:, None]) & whole[:, None]
        self._wonder(state.rows, (accepted - self.expected) * whole, self.variance * whole)
        self._count(state.rows, torch.stack([hits & tests, tests], 1).double())

    def _count(self, rows: Sequence[int], counts: Tensor) -> None:
        """Fade by the tests that came, and a little where none came, then add them."""
        tests = counts[:, 1:]
        rows = list(rows)
        self.slots[rows] = self.slots[rows] * (1 - 1 / self.WINDOW) ** tests.clamp(min=0.25) + counts
        self.shared = self.shared * (1 - 1 / self.SHARED) ** tests.sum(0).clamp(min=0.25) + counts.sum(0)

    def _wonder(self, rows: Sequence[int], gap: Tensor, variance: Tensor) -> None:
        """Where a dozen steps lie 3 standard deviations off, the text has changed: the old counts weigh little from now on."""
        at = torch.tensor(rows)
        self.surprise[at] = self.surprise[at] * (1 - 1 / 12) + torch.stack([gap, variance], -1)
        off, spread = self.surprise[at].unbind(-1)
        changed = at[off.abs() > 3 * (spread + 1).sqrt()]
        self.lighten(changed.tolist(), 4)
        self.surprise[changed] = 0

    def lighten(self, rows: Sequence[int], tests: float = 1) -> None:
        """Let these slots' counts, and the shared ones, weigh as few tests as this at most."""
        if not rows:
            return
        rows = list(rows)
        self.slots[rows] *= (tests / self.slots[rows][:, 1:].clamp(min=1e-9)).clamp(max=1)
        self.shared *= (2 * tests / self.shared[1:].clamp(min=1e-9)).clamp(max=1)


class _Costs:
    """Seconds of a step of about so many slots: plain, the pass by its rows, the draft by its deepest node."""

    def __init__(self, near: _Costs | None, todo: list[int]):
        self.plain, self.verify, self.draft = _Curve(), _Curve(), _Curve()
        self.near = near
        """Costs at another number of slots, for what was not measured at this one."""
        self.todo = todo
        """Budgets still to be tried."""

    def seconds(self, deepest: Tensor, rows: Tensor) -> Tensor:
        near = self.near
        drafting = self.draft.at(deepest, near.draft if near else None)
        return drafting + self.verify.at(rows, near.verify if near else None)

    def plain_seconds(self, live: int) -> float:
        return float(self.plain.at(torch.tensor([live]), self.near.plain if self.near else None))


class _Curve:
    """Seconds over a size that they never fall with: trimmed means of recent samples in bins, monotone, linear between."""

    WINDOW, AGE = 48, 2048
    """Samples a bin holds, and steps until one is too old."""

    def __init__(self) -> None:
        self.bins: dict[int, deque[tuple[int, int, float]]] = {}
        self.means: dict[int, tuple[float, float, float]] = {}
        """Mean size, mean seconds and number of samples of every bin."""
        self.line: tuple[Tensor, Tensor] | None = None

    def add(self, size: int, seconds: float, turn: int) -> None:
        bin = round(8 * math.log(size))  # sizes within an eighth are one
        samples = self.bins.setdefault(bin, deque(maxlen=self.WINDOW))
        samples.append((turn, size, seconds))
        while samples[0][0] < turn - self.AGE:
            samples.popleft()
        ordered = sorted(taken for _, _, taken in samples)
        trim = len(ordered) // 8
        ordered = ordered[trim : len(ordered) - trim]
        self.means[bin] = sum(s for _, s, _ in samples) / len(samples), sum(ordered) / len(ordered), len(samples)
        self.line = None

    def at(self, sizes: Tensor, near: _Curve | None) -> Tensor:
        """Seconds at these sizes; `near` gives the shape where nothing was measured here."""
        if self.line is None or near is not None:
            self.line = _rising(self._with(near))
        x, y = self.line
        if len(x) == 1:
            return y.expand(sizes.shape)
        sizes = sizes.double()
        right = torch.searchsorted(x, sizes.contiguous()).clamp(1, len(x) - 1)
        slope = (y[right] - y[right - 1]) / (x[right] - x[right - 1])
        last = (y[-1] - y[0]) / (x[-1] - x[0])  # beyond the last bin the whole curve's slope: two bins' is noise
        inside = y[right - 1] + slope * (sizes.clamp(float(x[0]), float(x[-1])) - x[right - 1])
        return inside + last * (sizes - x[-1]).clamp(min=0)

    def _with(self, near: _Curve | None) -> list[tuple[float, float, float]]:
        """Own bins, and those of `near` that are missing here, scaled to agree where both have been measured."""
        if near is None or not near.means:
            return sorted(self.means.values()) or [(1.0, 1e-9, 1.0)]
        if not self.means:
            return sorted(near.means.values())
        own = list(self.means.values())
        there = near.at(torch.tensor([size for size, _, _ in own]), None).tolist()
        scale = sum(taken for _, taken, _ in own) / max(sum(there), 1e-12)
        borrowed = [(size, taken * scale, 0.5) for bin, (size, taken, _) in near.means.items() if bin not in self.means]
        return sorted(own + borrowed)


def _rising(points: list[tuple[float, float, float]]) -> tuple[Tensor, Tensor]:
    """Sizes and seconds of the nearest curve that never falls (weighted isotonic regression by pooling neighbours)."""
    pools: list[list[float]] = []
    for _, seconds, weight in points:
        pools.append([seconds, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            after, before = pools.pop(), pools.pop()
            weight = before[1] + after[1]
            pools.append([(before[0] * before[1] + after[0] * after[1]) / weight, weight, before[2] + after[2]])
    risen = [seconds for seconds, _, count in pools for _ in range(int(count))]
    return torch.tensor([size for size, _, _ in points], dtype=torch.float64), torch.tensor(risen, dtype=torch.float64)
