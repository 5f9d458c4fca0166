"""The table of step rates: what it says between measured sizes, and that it is measured fairly.  No test sleeps."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from contracts.parties import Proposer, TableCache, TableTarget
from hypothesis import given
from hypothesis import strategies as st

from outrider.costs import passes
from outrider.costs.passes import PassSeconds, measured
from outrider.costs.steps import StepCosts, StepSize
from outrider.decoding.draft import Draft
from outrider.decoding.state import Scores
from outrider.errors import ConfigError


@given(
    st.integers(1, 40), st.integers(1, 12),
    st.tuples(st.floats(0.1, 2), st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 0.01)),
)  # fmt: skip
def test_between_measured_sizes_seconds_are_linear(slots, width, terms):
    """Catches a neighbour taken in place of the line between two, and slots confused with tokens: the table is right
    wherever the truth is linear in each."""
    fixed, by_slot, by_token, by_both = terms

    def truth(slots: float, width: float) -> float:
        return fixed + by_slot * slots + by_token * width + by_both * slots * width

    table = PassSeconds({(row, n): truth(row, n) for row in (1, 4, 16, 40) for n in (1, 3, 12)})
    assert table.seconds(slots, slots * width) == pytest.approx(truth(slots, width))
    assert table.seconds(slots, slots * width) == pytest.approx(truth(slots, width))  # as remembered


def test_beyond_the_table_seconds_go_on_and_never_fall():
    """Catches a larger pass that costs less than the largest one measured."""
    table = PassSeconds({(2, 1): 1.0, (2, 2): 1.5, (2, 4): 2.5})
    assert table.seconds(2, 16) == pytest.approx(4.5)
    assert table.seconds(4, 16) == pytest.approx(4.5)
    assert table.seconds(1, 1) == 1.0
    falling = PassSeconds({(1, 1): 1.0, (1, 2): 0.5})
    assert falling.seconds(1, 9) == 0.5


def test_what_is_no_table_is_refused():
    for wrong in ({}, {(0, 1): 1.0}, {(1, 0): 1.0}, {(1, 1): 0.0}, {(1, 1): math.nan}, {(1, 1): math.inf}):
        with pytest.raises(ConfigError, match="seconds above 0 by"):
            PassSeconds(wrong)
    with pytest.raises(ConfigError, match="steps per second must be above 0"):
        PassSeconds.by_tokens({1: 1.0, 2: 0.0})


class Timed(TableTarget):
    """A table whose passes take scripted seconds on a clock of its own, one in ten of them much longer."""

    now = 0.0

    def takes(self, seconds: Callable[[int, int], float], outliers: float = 0.1) -> Timed:
        self.seconds, self.outliers, self.random = seconds, outliers, random.Random(0)
        self.passes: list[tuple[int, int]] = []
        self.read: list[Sequence[int]] = []
        return self

    def prefill(self, cache: TableCache, rows: Any, tokens: torch.Tensor, lengths: Any, taps: Any = ()) -> Scores:
        self.read.append(lengths)
        return super().prefill(cache, rows, tokens, lengths, taps)

    def verify(
        self, cache: TableCache, rows: Any, anchor: torch.Tensor, draft: Draft, taps: Any = (), probe: None = None
    ) -> Scores:
        size = len(rows), 1 + draft.tokens.shape[1]
        assert draft.live == [draft.tokens.shape[1]] * len(rows)
        self.passes.append(size)
        self.now += self.seconds(*size) * (30 if self.random.random() < self.outliers else 1)
        return super().verify(cache, rows, anchor, draft, taps, probe)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    target = Timed.random(5)
    monkeypatch.setattr(passes.time, "perf_counter", lambda: target.now)
    return target


def drafter(limit: int) -> Proposer:
    made = Proposer()
    made.limit = limit
    return made


def test_every_size_is_timed_in_turn_and_outliers_do_not_count(timed):
    """Catches a size timed all at once, in the one moment in which the machine was busy; a mean; a warm-up that counts;
    and a table that lacks the widest pass or the full batch."""

    def seconds(slots: int, width: int) -> float:
        return 0.01 * (1 + 0.2 * slots * width)

    timed.takes(lambda *size: seconds(*size) * (1 if timed.passes.count(size) > 1 else 50))  # the first of each is slow
    table = measured(timed, drafter(6), 12, repeats=9, most_s=1e9)
    sizes = [(slots, width) for slots in (1, 2, 4, 8, 12) for width in (1, 2, 3, 4, 6, 7)]
    assert timed.passes == sizes * 10
    for slots, width in sizes:
        assert table.seconds(slots, slots * width) == pytest.approx(seconds(slots, width))
    assert timed.read == [[32] * 12]


def test_a_target_that_verifies_nothing_has_plain_passes_timed(timed):
    """Catches drafts given to a target that can't read them."""
    object.__setattr__(timed.spec, "mode", "off")
    timed.takes(lambda slots, width: 1.0)
    measured(timed, drafter(6), 2)
    assert {width for _, width in timed.passes} == {1}
    for wrong in ({"slots": 0}, {"slots": 1, "repeats": 0}):
        with pytest.raises(ConfigError, match="must be at least 1, got"):
            measured(timed, drafter(2), **wrong)


def test_a_real_target_is_measured_and_its_context_is_not_exceeded(short_target):
    """Catches passes that a real cache refuses."""
    table = measured(short_target, drafter(4), 3, repeats=2)
    assert table.slots == [1, 2, 3]
    assert all(list(widths) == [1, 2, 3, 4, 5] for widths, _ in table.curves.values())


def test_what_is_timed_while_decoding_scales_the_table():
    """Catches a table that a slower machine leaves as it was, and a plain step scaled by drafts."""
    known = StepCosts(4, PassSeconds({(1, 1): 1.0, (1, 5): 2.0}))
    assert (known.draft(1, 4), known.verify(1, 5, 1)) == (0.0, 2.0)
    known.add(StepSize(1, 4, 5, 1), [(0.25, 3.0)] * 4, step=8)
    known.add(StepSize(1, 0, 1, 0), [(0.0, 1.1)] * 4, step=16)
    assert known.draft(1, 4) == pytest.approx(0.25)
    assert known.verify(1, 5, 1) == pytest.approx(3.0)
    assert known.verify(1, 3, 1) == pytest.approx(2.25)
    assert known.verify(1, 1, 0) == pytest.approx(1.1)


def test_a_size_that_the_table_has_wrong_is_corrected_alone():
    """Catches one factor for all sizes: width 3 was timed at half of what it takes, the others were timed right."""
    rates = PassSeconds({(2, 1): 1.0, (2, 3): 0.7, (2, 5): 1.8})
    known = StepCosts(4, rates)
    for tokens, seconds in ((2, 1.0), (6, 1.4), (10, 1.8)):
        known.add(StepSize(2, 4, tokens, min(tokens - 2, 1)), [(0.1, seconds)] * 2, step=8)
    assert [known.verify(2, tokens, 1) for tokens in (6, 10)] == pytest.approx([1.4, 1.8])
    assert known.verify(2, 2, 0) == pytest.approx(1.0)
    assert known.verify(16, 48, 1) == pytest.approx(2 * rates.seconds(16, 48))  # the nearest number of slots
