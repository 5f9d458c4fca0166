"""Acceptance, speed-ups and decisions: known formulas, and no number where none is known."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import ConfigError, DataError
from outrider.plan import acceptance, demand
from outrider.plan.acceptance import Acceptance, alpha_of, even, survival, tokens_per_step
from outrider.plan.decide import PAYS, decide
from outrider.plan.demand import Demand, at_once
from outrider.plan.predict import StepCost, break_even, loads_up_to, row
from outrider.plan.schema import Row
from outrider.report.schema import Report

ASKED = Demand(200, 200, 1)


class Simple:
    """A draft of c plain steps a token, a verification of v, and nothing else."""

    def __init__(self, c: float, v: float = 1.0, error: float = 0.0, prompt: float = 0.0):
        self.c, self.v, self.error, self.reading = c, v, error, prompt

    def plain(self, batch: float, context: float) -> float:
        return 1.0

    def drafted(self, method: str, batch: float, depth: int, offered: Sequence[float], context: float) -> StepCost:
        return StepCost(self.c * depth, self.v * (batch if batch > 1 else 1), 0.0)

    def prompt(self, tokens: float) -> float:
        return 0.0

    def prompt_of(self, method: str, tokens: float) -> float:
        return self.reading * tokens


def accepted(alpha: float, depth: int = 20, spread: float = 0.0, basis: str = "report") -> Acceptance:
    low, center, high = (
        tuple(min(1.0, alpha * factor) ** (k + 1) for k in range(depth)) for factor in (1 - spread, 1, 1 + spread)
    )
    return Acceptance(low, center, high, basis, "made up for a test")  # type: ignore[arg-type]


def rows(costs: Simple, known: Acceptance, asked: Demand = ASKED, load: float = 1.0) -> list[Row]:
    return [row(costs, "eagle3", depth, known, asked, load, None) for depth in range(1, known.depth + 1)]


@given(st.floats(0, 0.99), st.integers(1, 16))
def test_a_chance_is_found_again_from_its_tokens_per_step(alpha: float, depth: int) -> None:
    """Catches an inversion of another formula than the one that is used."""
    tokens = tokens_per_step(alpha, depth)
    assert tokens_per_step(alpha_of(tokens, depth), depth) == pytest.approx(tokens, abs=1e-6)
    assert 1 + sum(even(tokens, depth, depth)) == pytest.approx(tokens, abs=1e-6)


def test_sixty_percent_at_depth_eight_are_two_and_a_half_tokens() -> None:
    """Catches the mistake of the articles, which take 60 % acceptance of 8 tokens for 5 tokens a step; five tokens a
    step of a draft of three; and shares that are added as if each depth were reached by every step."""
    assert tokens_per_step(0.6, 8) == pytest.approx(2.47, abs=0.005)
    assert tokens_per_step(0.8, float("inf")) == pytest.approx(5)
    with pytest.raises(DataError, match="must be 1 to 4 at depth 3, got 5"):
        alpha_of(5, 3)
    assert survival([0.8, 0.5, 0.5]) == pytest.approx((0.8, 0.4, 0.2))


def test_a_report_s_histogram_counts_steps_that_drafted_nothing(tmp_path: Path) -> None:
    """Catches a lookup's rare drafts taken for drafts of every step: 70 % of one step in five are not 70 %."""
    report = written(tmp_path, [[80], [0, 0], [0, 0, 0], [6, 4, 4, 6]], 1.24)
    found = acceptance.of_report(Report.load(report), "ngram", "report.json")
    assert found is not None and found.center == pytest.approx((0.14, 0.1, 0.06))
    assert found.offered == pytest.approx((0.2, 0.2, 0.2)) and found.drafted(2) == pytest.approx(0.4)
    assert found.low < found.center < found.high
    assert acceptance.of_report(Report.load(report), "suffix", "report.json") is None


def written(folder: Path, histogram: list[list[int]], tokens: float) -> Path:
    """A report of one drafter."""
    steps = sum(map(sum, histogram))
    own = {
        "drafter": "ngram", "task": "mine", "prompts": 20, "temperature": 0.0, "tokens_per_step": tokens,
        "accepted_by_depth": [0.7, 0.5, 0.3], "tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None,
        "exact": True, "compared_tokens": 1, "share": {}, "ttft_ms": {}, "itl_ms": {}, "steps": steps,
        "accepted_histogram": histogram,
    }  # fmt: skip
    path = folder / "report.json"
    path.write_text(json.dumps({"schema": 1, "target": "demo", "rows": [own]}))
    return path


@pytest.mark.parametrize(
    ("c", "alpha", "depth", "speedup"),
    [(0.02, 0.5, 4, 1.79), (0.05, 0.7, 6, 2.35), (0.10, 0.8, 6, 2.47), (0.20, 0.9, 7, 2.37), (0.30, 0.6, 1, 1.23)],
)
def test_the_best_depth_is_the_theory_s(c: float, alpha: float, depth: int, speedup: float) -> None:
    """Catches a draft that is paid once, or a bonus token that is left out."""
    best = max(rows(Simple(c), accepted(alpha)), key=lambda own: own.speedup.center or 0)
    assert best.depth == depth and best.speedup.center == pytest.approx(speedup, abs=0.01)


@given(st.floats(0.05, 0.95), st.floats(0.01, 0.5), st.integers(1, 12))
def test_break_even_acceptance_gives_a_speed_up_of_one(alpha: float, c: float, depth: int) -> None:
    """Catches a break-even point from another formula than the speed-ups."""
    point = break_even(Simple(c), "eagle3", depth, accepted(alpha), 300, 1, [1])
    if point.acceptance is None:
        assert 1 + depth * c > depth + 1
    else:
        found = row(Simple(c), "eagle3", depth, accepted(point.acceptance), ASKED, 1, None)
        assert found.speedup.center == pytest.approx(1, abs=1e-6)
    assert point.pays == ((rows(Simple(c), accepted(alpha, depth))[-1].speedup.center or 0) > 1)


def test_answers_must_win_back_what_reading_the_prompt_cost() -> None:
    """Catches a drafter's prompt that is read for nothing: 100 seconds at 0.5 saved a token are 200 tokens."""
    known = accepted(1.0, 1)
    found = row(Simple(0.0, prompt=0.5), "eagle3", 1, known, Demand(200, 400, 1), 1, None)
    assert found.speedup.center == 2 and found.break_even_tokens == pytest.approx(200)
    assert found.request_speedup == pytest.approx(400 / (100 + 200))
    choice = decide([found], Demand(200, 400, 1), 1, [])
    assert (
        choice.decision == "BATCH INSTEAD"
        and "answers of 400 tokens are shorter than 3 times the 200" in choice.because
    )


def test_the_crossover_is_the_last_load_that_pays() -> None:
    """Catches a crossover that is off by one load; verification grows with the batch here, plain steps do not."""
    point = break_even(Simple(0.0), "eagle3", 3, accepted(0.9), 300, 1, [1, 2, 3, 4, 6])
    assert point.crossover == 3 and point.pays  # 3.44 tokens a step
    assert loads_up_to(10) == [1, 2, 3, 4, 6, 8]


def test_a_sure_gain_is_enabled_at_its_best_depth() -> None:
    """Catches the deepest or the first depth in place of the best."""
    choice = decide(rows(Simple(0.1, error=0.1), accepted(0.8, 7)), ASKED, 1, [])
    assert choice.decision == "ENABLE" and choice.row is not None and choice.row.depth == 6
    assert choice.depths == {"1": 6} and f"above {PAYS:g}" in choice.because and "2.47 [2.22, 2.72]" in choice.because


def test_a_hopeless_draft_asks_for_batches() -> None:
    """Catches a plan that never says no."""
    choice = decide(rows(Simple(0.5, error=0.1), accepted(0.3, 4)), ASKED, 1, [])
    assert choice.decision == "BATCH INSTEAD" and "not even the upper end is above 1.1" in choice.because


def test_an_interval_on_both_sides_asks_for_what_would_narrow_it() -> None:
    """Catches a decision by the center alone."""
    wide = rows(Simple(0.1, error=0.1), accepted(0.4, 4, spread=0.6, basis="published"))
    assert "while nothing else runs" in decide(wide, ASKED, 1, [], error=0.5).because
    choice = decide(wide, ASKED, 1, [])
    assert choice.decision == "NEED DATA" and "outrider evaluate" in choice.because
    assert decide([], ASKED, 1, ["small_model"]).because.startswith("the acceptance of small_model is unknown")


def test_a_draft_that_does_not_fit_is_not_enabled() -> None:
    """Catches memory that is shown and not minded."""
    good = rows(Simple(0.1), accepted(0.8, 7))
    full = [own.model_copy(update={"fits": False, "slots": 0}) for own in good]
    choice = decide(full, ASKED, 1, [])
    assert choice.decision == "BATCH INSTEAD" and "0 texts fit beside the drafter" in choice.because
    late = [own.model_copy(update={"meets_slo": False}) for own in good]
    assert "ms per token are more than the limit" in decide(late, ASKED, 1, []).because


def test_requests_at_once_are_rate_times_time() -> None:
    """Catches Little's law with the wrong side fixed: a request takes 1 s and a tenth more for each other one."""
    found = at_once(5, lambda many: 1 + 0.1 * many, 1000)
    assert found == pytest.approx(10, rel=1e-6)
    assert at_once(20, lambda many: 1 + 0.1 * many, 1000) is None


def test_a_log_gives_mean_lengths_and_a_rate(tmp_path: Path) -> None:
    """Catches means over other calls than those that say how long they are."""
    log = tmp_path / "log.jsonl"
    body = {"prompt": "x" * 400}
    log.write_text("".join(
        json.dumps({"t": at, "body": body, "expected_output_tokens": tokens}) + "\n"
        for at, tokens in ((0, 10), (5, 30), (10, 20))
    ))  # fmt: skip
    found = demand.of_log(log)
    assert (found.prompt_tokens, found.new_tokens, found.rate) == (100, 20, 0.3)
    whole, missing = demand.resolve(None, None, None, None, {}, found)
    assert whole is not None and whole.rate == 0.3 and not missing
    whole, _ = demand.resolve(None, 50, 4, None, {}, found)
    assert whole is not None and (whole.new_tokens, whole.concurrency, whole.rate) == (50, 4, None)


def test_what_is_missing_of_the_traffic_is_named() -> None:
    """Catches a length that is made up."""
    found, missing = demand.resolve(None, 200, None, None, {})
    assert found is None and missing == "--prompt-tokens, --concurrency or --rate are missing"
    with pytest.raises(ConfigError, match="--rate must be above 0, got -1"):
        demand.resolve(1, 1, None, -1, {})
