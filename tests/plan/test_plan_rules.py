"""Rules of the field: what a plan says of them follows from its rows, what we measured from our results."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import load_target
from outrider.plan import asked as asking
from outrider.plan import rules
from outrider.plan.asked import Asked
from outrider.plan.measured import profile
from outrider.plan.paper.hardware import place
from outrider.plan.schema import Plan
from outrider.plan.subject import subject

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def of(*methods: str, **words: Any) -> Plan:
    asked = Asked(hardware="h100", prompt_tokens=200, new_tokens=200, concurrency=1, method=methods)._replace(**words)
    own = asked.subject()
    return asking.on_paper(asked, own, *asked.demand(own))


def holding(found: Plan) -> dict[str, bool | None]:
    return {rule.name: rule.holds for rule in found.rules}


def test_every_rule_says_what_holds_here_and_what_was_measured() -> None:
    """Catches a rule that is repeated as it was read."""
    found = of()
    assert holding(found) == {"size": False, "acceptance": False, "training": True, "utilisation": True}
    size = found.rules[0]
    assert "eagle3, 7 deep, has 0.083 of the target's weights" in size.here and "dspark" in size.here
    assert "dspark has 2.3 M weights and is 1.58 times as fast" in size.measured
    assert all(rule.sources and (RESULTS.parents[1] / rule.sources[0]).exists() for rule in found.rules)


def test_a_share_that_must_be_accepted_is_the_plan_s_own_break_even_point() -> None:
    """Catches a threshold that does not follow the costs."""
    found = of("ngram", "dspark")
    shares = [point.acceptance for point in found.break_even if point.method == "dspark" and point.acceptance]
    least = min(shares)
    assert f"{least:.0%} (dspark, " in found.rules[1].here


@pytest.mark.parametrize(
    ("methods", "size", "training"),
    [(("ngram",), None, None), (("ngram", "dspark"), None, True)],
)
def test_what_was_not_compared_is_not_judged(methods: Sequence[str], size: bool | None, training: bool | None) -> None:
    """Catches a verdict on one method alone."""
    found = holding(of(*methods))
    assert (found["size"], found["training"]) == (size, training)


def test_utilisation_is_rows_over_those_that_saturate() -> None:
    """Catches a share that does not grow with the requests at once, or that is judged between the marks."""
    own, h100 = subject("demo", ["ngram"]), place("h100")
    text, holds = rules.utilisation(own, 150, h100, None)
    assert "a plain step has 150 rows" in text and "68%" in text and holds is None
    assert rules.utilisation(own, 1000, h100, None)[1] is True and rules.utilisation(own, 1, h100, None)[1] is False
    assert rules.utilisation(own, 1, None, None)[1] is None


def test_kernels_side_by_side_are_counted_once() -> None:
    """Catches a device that is busy for more than all of the time."""
    assert profile.busy_seconds([(0, 10), (5, 20), (6, 7), (30, 40)]) == pytest.approx(30e-6)
    assert profile.busy_seconds([]) == 0


@pytest.mark.parametrize(
    ("shares", "said"), [((0.7, 0.2, 0.1), "launch"), ((0.1, 0.8, 0.3), "memory"), ((0.0, 0.4, 0.6), "compute")]
)
def test_a_step_is_bound_by_what_takes_most_of_it(shares: tuple[float, float, float], said: str) -> None:
    assert profile.bound(*shares) == said


@pytest.mark.gpu
def test_a_gpu_is_profiled() -> None:
    """Catches spans that are not the device's, and a copy or a product that is not waited for."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    loaded = load_target("demo", device="cuda")
    found = profile.profile(loaded, subject("demo", ["ngram"]).model, 1, 64)
    assert found is not None and 0 < found.busy <= 1
    assert 0 < found.memory < 1 and 0 < found.compute < 1
