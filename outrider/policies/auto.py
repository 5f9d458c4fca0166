"""Draft and verify the nodes that raise expected tokens per second, over all slots; none where plain steps are faster.

Argmax of the expected goodput (SmartSpec 2406.14066, Leviathan 2211.17192), with DSpark's hardware-aware prefix
scheduler (Algorithm 1 of its paper) for drafters whose confidences are known before they draw.  Differs from both:
seconds and acceptance are learnt while decoding, from a table of the target's passes where there is one; seconds of
drafts and the choice to draft at all are part of it; and since a pass is padded to its widest slot, columns of nodes
are admitted, not single nodes.

a[r][n] is the probability that node n of slot r and all nodes before it are accepted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from outrider.costs.kept import NOTHING, KeptCosts
from outrider.costs.passes import PassSeconds
from outrider.costs.steps import StepCosts, StepSize
from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Timing
from outrider.policies.probing import Probes, PromptCosts
from outrider.policies.survival import Acceptance, Outcome, Promises, Rate, Survival, admitted_columns, columns


class Auto(Policy):
    """As many nodes as pay, for one text and for a busy server.

    A drafter whose confidences are known before it draws is asked for all its nodes, or for fewer where their seconds
    rise with the depth, and `keep` admits nodes by these confidences.  Any other is asked for the depth that pays most,
    by what was accepted of each node so far.  A slot whose request has max_draft 0 is never drafted for.

    table: the target's passes, from `costs.passes.measured`; what is timed while decoding scales it.  None learns
    seconds while decoding alone.  kept: what earlier processes learnt of them, from where this one goes on.

    The first nodes of all slots are admitted together, then the second ones, while one of them or of those that follow
    is expected to raise the rate; later columns are expected to bring what they brought in earlier steps.

    Exact, since a slot's cut depends on the confidences of its nodes up to the cut and on other slots: when a column's
    turn comes only columns before it were looked at, and the look at later ones is at earlier steps' means.  A search
    for the best number by the confidences of the step itself would be inexact: the confidence of node n + 1 has seen
    the token of node n, so whether that token is verified would depend on the token.

    While drafts do not pay, plain steps save for rare probes; see `Probes`.  Confidences are scaled by what was
    accepted of what they promised in earlier steps.
    """

    OFF, ON, LOYALTY = 1.0, 1.02, 0.98
    """Expected rate with drafts / rate of plain steps below which drafting stops, and from which on it resumes; and a
    depth changes only where another one's rate times LOYALTY is higher."""
    EXPLORE, REST = 64, 16
    """Steps between two tries of another depth or of a plain step, and most between two decisions while on."""
    OFFERS = 32
    """Steps after which the share of nodes that a drafter offers has faded to 1/e."""
    FIRST_KEPT = 32
    """Steps after which costs are kept, and again whenever there are twice as many."""

    def __init__(self, limit: int, table: PassSeconds | None = None, kept: KeptCosts | None = None):
        self.limit = limit
        few = {*range(1, 13), *(2**n for n in range(4, 20)), *(3 * 2**n for n in range(3, 20)), limit}
        self.depths = sorted(depth for depth in few if 0 < depth <= limit)
        self.table, self.kept = table, kept
        self.known = {} if kept is None else kept.read()
        """By runner: its seconds in earlier processes."""
        self.ways = dict[str, StepCosts]()
        """By runner: its seconds."""
        self.costs = self._costs_of("plain")
        self.acceptance, self.promises = Acceptance(limit), Promises(limit)
        self.probes, self.prompts = Probes(), PromptCosts()
        self.is_confident, self.is_on = False, True
        self.depth = limit
        """The best depth to draft, whether that pays or not."""
        self.asking = self.decided = self.step = self.since = self.tries = self.pause = self.roomy = 0
        """Nodes asked for now; the step of the last decision; steps; steps since the last try; tries; plain steps since
        the last draft; the last step before which every slot has room for what is asked."""
        self.keeps = self.FIRST_KEPT
        """The step at which costs are kept next."""
        self.rest = 1
        """Steps between decisions now: twice as many after each that changes nothing."""
        self.is_trial = self.is_brief = False
        """This step's draft is verified whole, to be timed; and the next step decides again."""
        self.rows, self.wanted, self.asked = list[int](), list[int](), torch.empty(0, dtype=torch.int64)
        self.survival: list[list[float]] | None = None
        """a of this step; None without confidences."""
        self.fill: dict[int, float] = {}
        """By the live slots' number in bits: nodes in a pass over nodes asked for, lately, where confidences don't cut.
        A drafter may offer fewer."""
        self.unread: list[Outcome] = []
        self._known: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """Rates since the last decision, by live slots and nodes asked for, then by tokens."""
        self._means = [0.0] * limit

    def budget(self, state: DecodeState) -> Tensor:
        self.step, self.survival = self.step + 1, None
        if self.ways.get(state.runner) is not self.costs:
            self._read()
            self.costs = self._costs_of(state.runner)
            self.decided = self.step - self.rest
        is_same = state.rows is self.rows or (not self.asking and len(state.rows) == len(self.wanted))
        if not self.is_brief and is_same and self.step < self.decided + self.rest:
            if self.step <= self.roomy or not self.asking:
                return self.asked
            room = state.room
        else:
            room = state.room
            self._read()
            self.prompts.meet(self.acceptance.meet(state), self.step, state)
            before, self.asking = self.asking, self._planned(room)
            longest = self.REST if self.asking else self.probes.wait(self.REST)
            self.rest = min(2 * self.rest, longest) if self.asking == before else 1
            self.rows, self.decided = state.rows, self.step
            self.roomy = self.step + (min(room, default=0) - self.asking) // (self.asking + 1)
        wanted = [max(0, min(self.asking, own)) for own in room]
        if wanted != self.wanted or not wanted:
            self.wanted, self.asked = wanted, torch.tensor(wanted, dtype=torch.int64)
        return self.asked

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        nodes = sizes.tolist()
        if not any(nodes):
            return sizes
        # in a tree, whose parents a policy does not know, a product along the nodes is not a
        self.is_confident = confidence is not None and not self.acceptance.is_tree
        if confidence is None or not self.is_confident:
            return sizes
        slots = zip(confidence.tolist(), nodes, strict=True)
        self.survival = [list(accumulate(own[:size], mul)) for own, size in slots]
        if self.is_trial:
            return sizes
        lengths = self._lengths(self.survival)
        return sizes if lengths == nodes else torch.tensor(lengths, dtype=torch.int64)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        own, asked = sizes.tolist(), max(self.wanted, default=0)
        if asked and state.reached != own:
            self.acceptance.see_tree()
        # the very first step warms up caches, the first plain step finds a draft's weights in them, and the first draft
        # after a pause reads what it has missed
        is_odd = self.step == 1 or (self.pause >= 8 if asked else not self.pause)
        seconds = timing.draft, timing.verify + timing.other
        self.unread.append(Outcome(self.wanted, own, self.survival, accepted, *seconds, is_odd, bool(self.pause)))
        self.pause = 0 if asked else self.pause + 1

    def _lengths(self, survival: Survival) -> list[int]:
        """How many nodes of each slot are verified."""
        live, most = len(survival), max(self.wanted, default=self.limit)
        gains = columns(survival, self.promises.scale)
        width = admitted_columns(gains, live, self._rate(live, most), self._means[:most])
        return [min(width, len(own)) for own in survival]

    def _rate(self, live: int, depth: int) -> Rate:
        """Steps per second of a draft of so many nodes and a pass, by the tokens in the pass."""
        known = self._known[live, depth]

        def rate(tokens: int) -> float:
            found = known.get(tokens)
            if found is None:
                verify = self.costs.verify(live, tokens, min(1, tokens - live))
                found = known[tokens] = 1 / (self.costs.draft(live, depth) + verify)
            return found

        return rate

    # ── whether to draft, and how deep ────────────────────────────────────────────────────────────────────────────────

    def rates(self, room: Sequence[int]) -> dict[int, float]:
        """Expected tokens per second by nodes asked for, 0 for a plain step.  room: nodes that each slot may draft."""
        live, most, ordered = len(room), min(max(room), self.limit), sorted(room)
        shares = self.acceptance.shares()
        if self.is_confident:
            shares = [min(1.0, self.promises.scale * mean) for mean in self._means]
        drafting = (live - bisect_right(ordered, n) for n in range(most))  # slots that may draft node n
        expected = list(accumulate(map(mul, shares, drafting), initial=float(live)))
        found = {0: live / self.costs.verify(live, live, 0)}
        reading = self.prompts.step_s
        depths = {
            depth: (min(depth, most), self.costs.draft(live, min(depth, most)) + reading) for depth in self.depths
        }
        if self.is_confident:  # which of the nodes asked for will be verified is not known yet
            passes = [self.costs.verify(live, live * (1 + n), min(n, 1)) for n in range(most + 1)]
            for depth, (nodes, draft) in depths.items():
                found[depth] = max(expected[n] / (draft + passes[n]) for n in range(nodes + 1))
        else:
            fill = self.fill.get((live - 1).bit_length(), 1.0)
            for depth, (nodes, draft) in depths.items():
                found[depth] = expected[nodes] / (draft + self.costs.verify(live, live * (1 + fill * nodes), 1))
        return found

    def _planned(self, room: Sequence[int]) -> int:
        """Nodes to ask for until the next decision."""
        live, since = len(room), self.step - self.decided
        self.is_trial = self.is_brief = False
        if min(max(room, default=0), self.limit) < 1:
            return 0
        todo = self.costs.todo(live)
        if todo:
            self.is_trial = self.is_brief = True
            return todo.pop(0)
        rates = self.rates(room)
        plain = rates.pop(0)
        best = max(rates, key=rates.__getitem__)
        if self.is_confident:  # the deepest, since the best of a step may lie anywhere
            self.depth = max(depth for depth, rate in rates.items() if rate >= self.LOYALTY * rates[best])
        elif rates[self.depth] < self.LOYALTY * rates[best]:
            self.depth = best
        promise = rates[self.depth] / plain
        self.is_on = promise >= (self.OFF if self.is_on else self.ON)
        if self.is_on:
            self.probes.left = 0
            return self._explored(live, since)
        if not self.probes.left:
            self.promises.lighten()  # or a probe would change nothing
        self.is_brief = self.probes.due(promise, since)
        return max(depth for depth, rate in rates.items() if rate >= 0.9 * rates[best]) if self.is_brief else 0

    def _explored(self, live: int, since: int) -> int:
        """The depth, unless it is time to time another one or a plain step."""
        self.since += since
        if self.since < self.EXPLORE:
            return self.depth
        self.since, self.tries, self.probes.credit = 0, self.tries + 1, self.probes.FUND
        self.is_brief = True
        todo = self.costs.todo(live)
        if self.tries % 3 == 1:
            todo.append(0)  # the first of two is not counted
            return 0
        if self.is_confident:
            return self.limit
        at = self.depths.index(self.depth)
        depth = self.depths[max(0, at - 1) : at + 2][-1 if self.tries % 3 else 0]
        if not self.costs.knows(live, depth):
            todo.append(depth)  # one of two may be an outlier
        return depth

    # ── what steps teach ──────────────────────────────────────────────────────────────────────────────────────────────

    def _costs_of(self, runner: str) -> StepCosts:
        if runner not in self.ways:
            self.ways[runner] = StepCosts(self.limit, self.table, self.known.get(runner, NOTHING))
        return self.ways[runner]

    def _keep_costs(self) -> None:
        """For the next process."""
        self.keeps = 2 * self.step
        if self.kept is not None:
            own = {runner: costs.known for runner, costs in self.ways.items()}
            self.kept.write(self.known | {runner: known for runner, known in own.items() if known.passes})

    def _read(self) -> None:
        """Learn from the steps since the last decision."""
        unread, self.unread = self.unread, []
        self._known.clear()
        groups: dict[StepSize, list[tuple[float, float]]] = defaultdict(list)
        for each in unread:
            if not each.is_odd and each.wanted:
                groups[self._size(each)].append((each.draft_s, each.pass_s))
        for size, seconds in groups.items():
            self.costs.add(size, seconds, self.step)
        if self.step >= self.keeps:
            self._keep_costs()
        drafted = [each for each in unread if any(each.wanted)]
        for each in drafted if self.probes.left else ():
            self._charge(each)
        if promised := [each for each in drafted if each.has_confidences]:
            self.promises.read(promised)
            self._means = self.promises.means()
        if counted := [each for each in drafted if each.survival is None]:
            for each in counted:
                live, asked, tokens, _ = self._size(each)
                key = (live - 1).bit_length()
                ratio, before = (tokens / live - 1) / asked, self.fill.get(key, 1.0)
                self.fill[key] = before + (ratio - before) / self.OFFERS
            steps = [pair for each in counted for pair in each.paths()]
            self.acceptance.wonder(steps, len(counted))
            self.acceptance.count(steps)

    def _size(self, each: Outcome) -> StepSize:
        live = len(each.wanted)
        nodes = live * max(each.sizes)
        return StepSize(live, max(each.wanted), live + nodes, min(nodes, 1))

    def _charge(self, each: Outcome) -> None:
        live, asked, tokens, kind = self._size(each)
        reading = self.prompts.step_s
        usual = self.costs.draft(live, asked) + self.costs.verify(live, tokens, kind) + reading
        plain, accepted = self.costs.verify(live, live, 0), sum(each.accepted.counts) / live
        self.probes.charge(each.draft_s + each.pass_s + reading, None if each.is_first else usual, plain, accepted)
