"""A policy that measures: it drafts as many nodes as pay, and none where plain steps are faster.

Argmax of the expected goodput (SmartSpec 2406.14066, Leviathan 2211.17192).  Differs from SmartSpec: acceptance is
counted node by node, and seconds are measured while decoding, not fitted beforehand.  Plain lists, since tensors of
these sizes are ten times slower.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.policies.by_confidence import shares


class Adaptive(Policy):
    """Every step asks for the depth that commits most tokens per second, or for 0 where plain steps commit more:

        B * (1 + s[0] + ... + s[depth - 1]) / seconds(depth)

    with B live slots, s[n] the probability that node n is accepted, by recent steps, and the mean seconds of recent
    steps of that depth, with a step's share of the time in which the drafter reads prompts. All slots get the same
    depth: the widest slot sets the cost of a pass, and the sum over different slots is B times their mean's.

    One step in `EXPLORE` tries another depth, or a plain step, so that measurements stay recent.  While off, a share
    of the time goes into `Probes`, so that drafting resumes by itself: many probes where they lose little, few where
    drafts are slow. Measurements are evaluated every `REST` steps, and at once where something is tried or slots
    change; while off, before the next probe and where their number changes.  In between a step costs nothing.  Budgets
    depend on earlier steps alone, so the output stays exact; equal outcomes and timings give equal budgets.
    """

    EXPLORE = 64
    """Steps between two that try another depth."""
    REST = 8
    """Steps between two decisions; the fewest while off."""
    LOYALTY = 0.98
    """A depth changes only where another one's rate times this is higher, and drafts must beat plain steps by as
    much."""

    def __init__(self, limit: int):
        self.limit = self.depth = limit
        """`depth`: nodes asked for; 0 while off."""
        few = {*range(1, 13), *(2**n for n in range(4, 20)), *(3 * 2**n for n in range(3, 20)), limit}
        self.depths = sorted(depth for depth in few if 0 < depth <= limit)
        """The depths to choose from."""
        self.acceptance, self.probes, self.prompts = Acceptance(limit), Probes(), PromptCosts()
        self.costs: dict[int, Costs] = {}
        """By the live slots' number in bits: 1, 2, 3-4, 5-8 ..."""
        self.rows: list[int] = []
        self.wanted, self.asked = list[int](), torch.empty(0, dtype=torch.int64)
        self.unread: list[tuple[float, bool, Accepted]] = []
        """Steps since the last decision: seconds, whether the step was unusual, and what was accepted."""
        self.step = self.decided = 0
        """Number of steps; the step of the last decision."""
        self.rest, self.steady = 1, 0
        """Steps from the last decision to the next; decisions in a row that left the depth unchanged."""
        self.pause = self.paused = self.since = self.tries = 0
        """Plain steps since the last draft, and the same before the last step; steps since another depth was tried, and
        number of such tries."""

    def budget(self, state: DecodeState) -> Tensor:
        self.step += 1
        if self._can_rest(state):
            return self.asked
        self._read()
        self.prompts.meet(self.acceptance.meet(state), self.step, state)
        room = state.room
        live, most, depth = len(room), min(max(room, default=0), self.limit), 0
        if most > 0:
            costs = self.costs.setdefault((live - 1).bit_length(), Costs([self.limit, 0, (self.limit + 1) // 2, 1]))
            depth = costs.todo.pop(0) if costs.todo else self._planned(live, most, costs)
        wanted = [max(0, min(depth, left)) for left in room]
        # a try lasts one step, and a new depth is evaluated at every step
        as_before = wanted == self.wanted if depth else not any(self.wanted)
        is_steady = depth == self.depth and not self.probes.left and as_before
        self.steady, self.rows = self.steady + 1 if is_steady else 0, state.rows
        if depth:
            self.rest = self.REST if self.steady > self.REST else 1
        else:
            self.rest = self.probes.wait(self.REST) if is_steady else 1
        self.decided, self.wanted, self.asked = self.step, wanted, torch.tensor(wanted, dtype=torch.int64)
        return self.asked

    def _can_rest(self, state: DecodeState) -> bool:
        """Whether the last decision is still good: it is not old, and the same slots have room for it."""
        if self.step >= self.decided + self.rest:
            return False
        if self.depth:
            return state.rows is self.rows and min(state.room) >= self.depth
        return len(state.rows) == len(self.wanted)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        asked = max(self.wanted, default=0)
        if asked and state.reached != sizes.tolist():
            self.acceptance.see_tree()
        # the very first step warms up caches, the first plain step finds a draft's weights in them, and the first draft
        # after a pause reads what it has missed
        is_odd = self.step == 1 or (self.pause >= 8 if asked else not self.pause)
        self.unread.append((timing.draft + timing.verify + timing.other, is_odd, accepted))
        self.paused, self.pause = self.pause, 0 if asked else self.pause + 1

    def _read(self) -> None:
        """Learn from the steps since the last decision, which all had the same budgets."""
        unread, self.unread = self.unread, []
        live, asked = len(self.wanted), max(self.wanted, default=0)
        costs = self.costs.get((live - 1).bit_length())
        if costs is None or not unread:
            return
        if asked:
            # a slot that ended inside its block did not show what it would have accepted
            slots = [zip(each.paths, self.wanted, each.next_tokens, strict=True) for _, _, each in unread]
            steps = [(path, wanted) for step in slots for path, wanted, token in step if token >= 0]
            self.acceptance.wonder(steps, len(unread))
            self.acceptance.count(steps)
        costs.add(asked, [seconds for seconds, is_odd, _ in unread if not is_odd], self.step)
        for seconds, _, accepted in unread if self.probes.left and asked else ():
            usual = None if self.paused else costs.at(asked) + self.prompts.step_s
            self.probes.charge(seconds + self.prompts.step_s, usual, costs.at(0), sum(accepted.counts) / live)

    def rates(self, live: int, most: int, costs: Costs) -> dict[int, float]:
        """Tokens per second by depth, where no slot has room for more than `most` nodes."""
        expected = list(accumulate(self.acceptance.shares(), initial=0.0))
        seconds = {depth: costs.at(min(depth, most)) + self.prompts.step_s for depth in self.depths}
        found = {depth: live * (1 + expected[min(depth, most)]) / own for depth, own in seconds.items()}
        return {0: live / costs.at(0)} | found

    def _planned(self, live: int, most: int, costs: Costs) -> int:
        """The best depth, unless it is time to try another."""
        rates = self.rates(live, most, costs)
        best = max(rates, key=rates.__getitem__)
        if self.LOYALTY * rates[best] < rates[0]:
            best = 0  # a gain this small may be a measuring error
        # a draft's gain is an estimate, a plain step's is not: switching off needs no margin, switching on does
        if rates[self.depth] < self.LOYALTY * rates[best] or (self.depth and not best):
            self.depth = best
        if self.depth:
            at = self.depths.index(self.depth)
            near = self.depths[max(0, at - 1) : at + 2]
            costs.try_first(near)
            self.since, self.probes.left = self.since + self.step - self.decided, 0
            if self.since < self.EXPLORE:
                return self.depth
            self.since, self.tries, self.probes.credit = 0, self.tries + 1, self.probes.FUND
            if self.tries % 3 == 1:
                costs.todo += [0, 0]  # the first of three is not counted
                return 0
            return near[-1 if self.tries % 3 else 0]
        promise = max(rates[depth] for depth in self.depths) / rates[0]
        is_probe = self.probes.due(promise, self.step - self.decided)
        # the deepest depth that is nearly as fast as the best: with a parallel drafter it costs little more
        fast = [depth for depth in self.depths if rates[depth] >= 0.9 * max(rates[other] for other in self.depths)]
        return fast[-1] if is_probe else 0


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


class Probes:
    """Drafts while drafts do not pay, so that drafting resumes by itself; plain steps save for them."""

    SHARE, DOUBT, FUND, FEE = 0.015, 4, 3.0, 0.03
    """In plain steps: `SHARE` is what each step while off saves for probes, times (best draft's expected rate / plain
    rate) ** `DOUBT`; `FUND` is the most that is saved; `FEE` is the cost of a probe in addition to what it loses."""
    LONGEST = 64
    """Most steps without a look at what is saved."""

    def __init__(self) -> None:
        self.left = 0
        """Steps left of a probe."""
        self.credit, self.late = self.FUND, float("inf")
        """Plain steps saved; seconds of the last probe's first step, which reads what the drafter missed."""
        self.income = self.SHARE
        """What a plain step saves."""

    def due(self, promise: float, steps: int) -> bool:
        """Whether to draft now.  promise: best draft's expected rate / plain rate; steps since this was last asked."""
        self.income = self.SHARE * promise**self.DOUBT
        self.credit = min(self.credit + self.income * steps, self.FUND)
        if not self.left and self.credit > 0:
            self.left = 2  # since the first after a pause does not show a draft's usual seconds
        return self.left > 0

    def wait(self, minimum: int) -> int:
        """Steps until enough is saved for a probe, from `minimum` to `LONGEST`."""
        return max(minimum, min(self.LONGEST, math.ceil(-self.credit / max(self.income, 1e-9))))

    def charge(self, seconds: float, usual: float | None, plain: float, accepted: float) -> None:
        """Pay for a step of a probe: what it lost against a plain step, and a fee; a probe that gained adds credit.

        usual: seconds of such a step, None for the first after a pause.  accepted: drafted tokens a slot.
        """
        self.left -= 1
        paid = min(seconds, self.late if usual is None else usual)  # an outlier happens once
        self.late = seconds if usual is None else self.late
        self.credit -= paid / plain - 1 - accepted + self.FEE


class PromptCosts:
    """What a drafter's reading of prompts costs: it is done before a text's first step, and only while drafts are
    wanted, so it is part of what drafting costs and of no step's seconds."""

    WINDOW = 4096
    """Steps after which counts are halved."""

    def __init__(self) -> None:
        self.step_s = 0.0
        """Seconds a step."""
        self.tokens = self.steps = 0.0
        self.last = 0

    def meet(self, new: Sequence[Request], step: int, state: DecodeState) -> None:
        """These requests are new at this step.  The very first ones show no rate yet."""
        if self.last:
            self.steps += step - self.last
            self.tokens += sum(len(request.prompt) for request in new)
        self.last = step
        if self.steps > self.WINDOW:
            self.steps, self.tokens = self.steps / 2, self.tokens / 2
        if self.steps and state.read_tokens:
            self.step_s = state.read_s / state.read_tokens * self.tokens / self.steps


class Costs:
    """Seconds of a step at one batch size, by depth: trimmed means of recent samples, made to rise with depth."""

    WINDOW, AGE = 32, 512
    """Most samples of a depth, and steps after which samples are too old where there are newer ones."""

    def __init__(self, todo: list[int], age: float = AGE):
        self.age = age
        self.todo = [*todo[:1], *(depth for depth in dict.fromkeys(todo) for _ in range(2 if depth else 3))]
        """Depths still to be tried: twice, since one of two samples may be an outlier, and the very first is not
        counted; depth 0 three times, since the first plain step after a draft is not counted either."""
        self.tried = set(todo)
        self.samples: dict[int, deque[tuple[int, float]]] = {}
        """By depth: step and seconds."""
        self.means: dict[int, float] = {}
        self.curve = rising([])
        """Depths and seconds, rising."""

    def try_first(self, depths: list[int]) -> None:
        self.todo += [depth for depth in depths if depth not in self.tried for _ in range(2)]
        self.tried.update(depths)

    def add(self, depth: int, seconds: Sequence[float], step: int) -> None:
        if not seconds:
            return
        self.samples.setdefault(depth, deque(maxlen=self.WINDOW)).extend((step, each) for each in seconds)
        stale = [other for other, samples in self.samples.items() if other and samples[-1][0] < step - self.age]
        for other in stale if depth else ():
            del self.samples[other], self.means[other]
        self.means[depth] = self.mean(depth)
        self.curve = rising([(depth, self.means[depth], len(self.samples[depth])) for depth in sorted(self.samples)])

    def mean(self, depth: int) -> float:
        ordered = sorted(seconds for _, seconds in self.samples[depth])
        trim = len(ordered) // 8  # outliers are slow, and one of few samples may be an outlier
        left = ordered[trim : max(1, len(ordered) - trim - 1)]
        return sum(left) / len(left)

    def at(self, depth: float) -> float:
        """Linear between measured depths, with the whole curve's slope beyond them; nearly 0 before the first
        measurement."""
        (first, low), (last, high) = self.curve[0], self.curve[-1]
        if depth >= last:
            return high + (high - low) / max(1, last - first) * (depth - last)
        for (left, less), (right, more) in pairwise(self.curve):
            if left <= depth < right:
                return less + (more - less) * (depth - left) / (right - left)
        return low


def rising(points: list[tuple[int, float, int]]) -> list[tuple[int, float]]:
    """The nearest curve that never falls (pool adjacent violators).  points: depth, seconds and weight, by depth."""
    pools: list[tuple[float, int, list[int]]] = []
    for depth, seconds, weight in points or [(0, 1e-9, 1)]:
        depths = [depth]
        while pools and pools[-1][0] > seconds:
            before, heavy, others = pools.pop()
            seconds = (before * heavy + seconds * weight) / (heavy + weight)
            weight, depths = heavy + weight, others + depths
        pools.append((seconds, weight, depths))
    return [(depth, seconds) for seconds, _, depths in pools for depth in depths]
