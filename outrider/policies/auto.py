"""Draft and verify the number of nodes that maximises expected tokens/s over all slots; none if plain steps are faster.

Argmax of the expected goodput (SmartSpec 2406.14066, Leviathan 2211.17192), with DSpark's hardware-aware prefix
scheduler (Algorithm 1 of its paper) for drafters whose confidences are known before they sample.  Differs from both:
times and acceptance are learnt while decoding, starting from a table of the target's passes if there is one; the time
of drafting and the choice not to draft are included; and since a pass is padded to its widest slot, whole columns of
nodes are admitted, not single nodes.

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

from outrider.costs.passes import PassSeconds
from outrider.costs.steps import StepCosts, StepSize
from outrider.costs.stored import NO_SECONDS, StoredCosts
from outrider.decoding.accept import Accepted
from outrider.decoding.protocols import Policy
from outrider.decoding.state import DecodeState, Timing
from outrider.policies.probing import Probes, PromptCosts
from outrider.policies.survival import NodeAcceptance, Promises, Rate, StepOutcome, Survival, admitted_columns, columns


class Auto(Policy):
    """As many nodes as pay off, for a single text and for a busy server.

    If a drafter's confidences are known before it samples, it drafts all its nodes, or fewer if deeper drafts take
    longer, and `keep` admits nodes by these confidences.  Any other drafter drafts to the depth with the highest
    expected rate, from the acceptance of each node so far.  Requests with max_draft 0 get no drafts.

    table: seconds of the target's passes, from `costs.passes.measured`, rescaled by the times seen while decoding; None
    learns all times while decoding.  stored: times from earlier processes, to start from.

    The first nodes of all slots are admitted together, then the second ones, and so on, while this column or a later
    one is expected to raise the rate.  Later columns are expected to gain what they gained in earlier steps.

    Exact, since a slot's cut-off depends only on the confidences of its nodes up to the cut-off and on other slots: the
    decision on a column uses the confidences up to it, and means of earlier steps for later columns.  Choosing the best
    number from all confidences of the step would be inexact: the confidence of node n + 1 depends on the token of node
    n, so whether a token is verified would depend on the token itself.

    While drafts do not pay off, plain steps earn credit for rare probes; see `Probes`.  Confidences are scaled by the
    ratio of actual to predicted acceptance in earlier steps.
    """

    OFF, ON, LOYALTY = 1.0, 1.02, 0.98
    """Expected rate with drafts / rate of plain steps: below OFF drafting stops, from ON it resumes.  The depth changes
    only if another one's rate times LOYALTY is higher."""
    EXPLORE, REST = 64, 16
    """Steps between two trials of another depth or of a plain step; maximum number of steps between two decisions while
    drafting."""
    OFFERS = 32
    """Steps after which the average of `fill` has faded to 1/e."""
    FIRST_WRITE = 32
    """Steps after which costs are first stored; after that, whenever the number of steps has doubled."""

    def __init__(self, limit: int, table: PassSeconds | None = None, stored: StoredCosts | None = None):
        self.limit = limit
        depths = {*range(1, 13), *(2**n for n in range(4, 20)), *(3 * 2**n for n in range(3, 20)), limit}
        self.depths = sorted(depth for depth in depths if 0 < depth <= limit)
        self.table, self.stored = table, stored
        self.earlier = {} if stored is None else stored.read()
        """By runner: seconds from earlier processes."""
        self.runners = dict[str, StepCosts]()
        """By runner: its seconds."""
        self.costs = self._costs_of("plain")
        self.acceptance, self.promises = NodeAcceptance(limit), Promises(limit)
        self.probes, self.prompts = Probes(), PromptCosts()
        self.is_confident, self.is_on = False, True
        self.depth = limit
        """The best depth, whether or not drafting pays off."""
        self.num_nodes = self.decided = self.step = self.since = self.tries = self.pause = self.roomy_until = 0
        """Nodes to draft now; the step of the last decision; steps; steps since the last trial; trials; plain steps
        since the last draft; the last step until which every slot is certain to have room for `num_nodes`."""
        self.next_write = self.FIRST_WRITE
        """The step at which costs are stored next."""
        self.interval = 1
        """Steps between decisions, doubled after each decision that changes nothing."""
        self.is_trial = self.is_brief = False
        """Whether this step's draft is verified in full so that it can be timed; whether the next step decides again.
        """
        self.rows, self.requested, self.last_budget = list[int](), list[int](), torch.empty(0, dtype=torch.int64)
        self.survival: list[list[float]] | None = None
        """a of the current step; None without confidences."""
        self.fill: dict[int, float] = {}
        """By bit length of the number of live slots: recent mean of offered / requested nodes, without confidences.  A
        drafter may offer fewer than requested."""
        self.outcomes: list[StepOutcome] = []
        self._rates: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
        """Cached rates since the last decision, by (live slots, requested nodes), then by tokens."""
        self._means = [0.0] * limit

    def budget(self, state: DecodeState) -> Tensor:
        self.step, self.survival = self.step + 1, None
        if self.runners.get(state.runner) is not self.costs:
            self._learn()
            self.costs = self._costs_of(state.runner)
            self.decided = self.step - self.interval
        is_same = state.rows is self.rows or (not self.num_nodes and len(state.rows) == len(self.requested))
        if not self.is_brief and is_same and self.step < self.decided + self.interval:
            if self.step <= self.roomy_until or not self.num_nodes:
                return self.last_budget
            room = state.room
        else:
            room = state.room
            self._learn()
            self.prompts.admit(self.acceptance.admit(state), self.step, state)
            before, self.num_nodes = self.num_nodes, self._planned(room)
            longest = self.REST if self.num_nodes else self.probes.wait(self.REST)
            self.interval = min(2 * self.interval, longest) if self.num_nodes == before else 1
            self.rows, self.decided = state.rows, self.step
            self.roomy_until = self.step + (min(room, default=0) - self.num_nodes) // (self.num_nodes + 1)
        budget = [max(0, min(self.num_nodes, slot_room)) for slot_room in room]
        if budget != self.requested or not budget:
            self.requested, self.last_budget = budget, torch.tensor(budget, dtype=torch.int64)
        return self.last_budget

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        nodes = sizes.tolist()
        if not any(nodes):
            return sizes
        # in a tree, whose parents a policy can't see, the product over the nodes is not a
        self.is_confident = confidence is not None and not self.acceptance.is_tree
        if confidence is None or not self.is_confident:
            return sizes
        slots = zip(confidence.tolist(), nodes, strict=True)
        self.survival = [list(accumulate(slot[:size], mul)) for slot, size in slots]
        if self.is_trial:
            return sizes
        lengths = self._lengths(self.survival)
        return sizes if lengths == nodes else torch.tensor(lengths, dtype=torch.int64)

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Timing) -> None:
        verified, requested = sizes.tolist(), max(self.requested, default=0)
        if requested and state.reached != verified:
            self.acceptance.switch_to_tree()
        # times of these steps are atypical: the very first one warms up the caches, the first plain step finds the
        # drafter's weights in them, and the first draft after a pause reads what the drafter missed
        is_odd = self.step == 1 or (self.pause >= 8 if requested else not self.pause)
        seconds = timing.draft, timing.verify + timing.other
        self.outcomes.append(
            StepOutcome(self.requested, verified, self.survival, accepted, *seconds, is_odd, bool(self.pause))
        )
        self.pause = 0 if requested else self.pause + 1

    def _lengths(self, survival: Survival) -> list[int]:
        """How many nodes of each slot to verify."""
        live, most = len(survival), max(self.requested, default=self.limit)
        gains = columns(survival, self.promises.scale)
        width = admitted_columns(gains, live, self._rate(live, most), self._means[:most])
        return [min(width, len(slot)) for slot in survival]

    def _rate(self, live: int, depth: int) -> Rate:
        """Steps per second with a draft of `depth` nodes, by the tokens in the pass."""
        rates = self._rates[live, depth]

        def rate(tokens: int) -> float:
            steps_per_s = rates.get(tokens)
            if steps_per_s is None:
                verify = self.costs.verify(live, tokens, min(1, tokens - live))
                steps_per_s = rates[tokens] = 1 / (self.costs.draft(live, depth) + verify)
            return steps_per_s

        return rate

    # ── whether to draft, and how deep ────────────────────────────────────────────────────────────────────────────────

    def rates(self, room: Sequence[int]) -> dict[int, float]:
        """Expected tokens/s by requested nodes, 0 for a plain step.  room: maximum number of nodes of each slot."""
        live, most, ordered = len(room), min(max(room), self.limit), sorted(room)
        shares = self.acceptance.shares()
        if self.is_confident:
            shares = [min(1.0, self.promises.scale * mean) for mean in self._means]
        drafting = (live - bisect_right(ordered, n) for n in range(most))  # number of slots that may draft node n
        expected = list(accumulate(map(mul, shares, drafting), initial=float(live)))
        rates = {0: live / self.costs.verify(live, live, 0)}
        reading = self.prompts.step_s
        depths = {
            depth: (min(depth, most), self.costs.draft(live, min(depth, most)) + reading) for depth in self.depths
        }
        if self.is_confident:  # it is not known yet how many of the requested nodes will be verified
            passes = [self.costs.verify(live, live * (1 + n), min(n, 1)) for n in range(most + 1)]
            for depth, (nodes, draft) in depths.items():
                rates[depth] = max(expected[n] / (draft + passes[n]) for n in range(nodes + 1))
        else:
            fill = self.fill.get((live - 1).bit_length(), 1.0)
            for depth, (nodes, draft) in depths.items():
                rates[depth] = expected[nodes] / (draft + self.costs.verify(live, live * (1 + fill * nodes), 1))
        return rates

    def _planned(self, room: Sequence[int]) -> int:
        """Nodes to request until the next decision."""
        live, since = len(room), self.step - self.decided
        self.is_trial = self.is_brief = False
        if min(max(room, default=0), self.limit) < 1:
            return 0
        untried = self.costs.untried(live)
        if untried:
            self.is_trial = self.is_brief = True
            return untried.pop(0)
        rates = self.rates(room)
        plain = rates.pop(0)
        best = max(rates, key=rates.__getitem__)
        if self.is_confident:  # the deepest near-best one, since the best cut differs from step to step
            self.depth = max(depth for depth, rate in rates.items() if rate >= self.LOYALTY * rates[best])
        elif rates[self.depth] < self.LOYALTY * rates[best]:
            self.depth = best
        promise = rates[self.depth] / plain
        self.is_on = promise >= (self.OFF if self.is_on else self.ON)
        if self.is_on:
            self.probes.left = 0
            return self._explored(live, since)
        if not self.probes.left:
            self.promises.discount()  # otherwise a probe would change nothing
        self.is_brief = self.probes.due(promise, since)
        return max(depth for depth, rate in rates.items() if rate >= 0.9 * rates[best]) if self.is_brief else 0

    def _explored(self, live: int, since: int) -> int:
        """The best depth, unless a trial of another one or of a plain step is due."""
        self.since += since
        if self.since < self.EXPLORE:
            return self.depth
        self.since, self.tries, self.probes.credit = 0, self.tries + 1, self.probes.FUND
        self.is_brief = True
        untried = self.costs.untried(live)
        if self.tries % 3 == 1:
            untried.append(0)  # two, since the first plain step is not counted
            return 0
        if self.is_confident:
            return self.limit
        at = self.depths.index(self.depth)
        depth = self.depths[max(0, at - 1) : at + 2][-1 if self.tries % 3 else 0]
        if not self.costs.knows(live, depth):
            untried.append(depth)  # two, since one of them may be an outlier
        return depth

    # ── learning from steps ───────────────────────────────────────────────────────────────────────────────────────────

    def _costs_of(self, runner: str) -> StepCosts:
        if runner not in self.runners:
            self.runners[runner] = StepCosts(self.limit, self.table, self.earlier.get(runner, NO_SECONDS))
        return self.runners[runner]

    def _write_costs(self) -> None:
        """Store costs for the next process."""
        self.next_write = 2 * self.step
        if self.stored is not None:
            runners = {runner: costs.seconds for runner, costs in self.runners.items()}
            self.stored.write(self.earlier | {runner: seconds for runner, seconds in runners.items() if seconds.passes})

    def _learn(self) -> None:
        """Learn from the steps since the last decision."""
        outcomes, self.outcomes = self.outcomes, []
        self._rates.clear()
        groups: dict[StepSize, list[tuple[float, float]]] = defaultdict(list)
        for each in outcomes:
            if not each.is_odd and each.requested:
                groups[self._size(each)].append((each.draft_s, each.pass_s))
        for size, seconds in groups.items():
            self.costs.add(size, seconds, self.step)
        if self.step >= self.next_write:
            self._write_costs()
        drafted = [each for each in outcomes if any(each.requested)]
        for each in drafted if self.probes.left else ():
            self._charge(each)
        if promised := [each for each in drafted if each.has_confidences]:
            self.promises.read(promised)
            self._means = self.promises.means()
        if counted := [each for each in drafted if each.survival is None]:
            for each in counted:
                live, requested, tokens, _ = self._size(each)
                key = (live - 1).bit_length()
                ratio, before = (tokens / live - 1) / requested, self.fill.get(key, 1.0)
                self.fill[key] = before + (ratio - before) / self.OFFERS
            steps = [pair for each in counted for pair in each.paths()]
            self.acceptance.detect_change(steps, len(counted))
            self.acceptance.count(steps)

    def _size(self, each: StepOutcome) -> StepSize:
        live = len(each.requested)
        nodes = live * max(each.sizes)
        return StepSize(live, max(each.requested), live + nodes, min(nodes, 1))

    def _charge(self, each: StepOutcome) -> None:
        live, requested, tokens, kind = self._size(each)
        reading = self.prompts.step_s
        usual = self.costs.draft(live, requested) + self.costs.verify(live, tokens, kind) + reading
        plain, accepted = self.costs.verify(live, live, 0), sum(each.accepted.counts) / live
        self.probes.charge(each.draft_s + each.pass_s + reading, None if each.is_first else usual, plain, accepted)
