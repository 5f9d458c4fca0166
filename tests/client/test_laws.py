"""benchmarks/client.py in short: 300 requests against a server that misbehaves, and the same laws broken on purpose."""

from __future__ import annotations

from decimal import Decimal

import pytest

from benchmarks import client


@pytest.mark.parametrize("budget", [None, Decimal("0.04")])
def test_every_request_is_answered_once_or_reported_failed_once(budget: Decimal | None) -> None:
    """Catches an answer that is lost, doubled or asked for again after it began, and a budget that is passed."""
    found = client.misused(300, budget)
    assert found["violations"] == []
    assert found["answered"] + found["failed"] == 300
    assert found["answered"] > (100 if budget is None else 20)
    kinds = {"Unavailable", "RefusedError", "TornStream"}
    if budget is None:
        assert found["failures"].keys() == kinds
    else:  # which may be spent before each of the others has happened
        assert {"BudgetExceeded"} <= found["failures"].keys() <= {"BudgetExceeded", *kinds}
    assert found["sent_again"] > 50 or budget is not None


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("sends again after a partial answer", "sent again after the answer began"),
        ("checks the budget after sending", "charged beyond the budget"),
        ("takes what broke off for free", "charged beyond what the client expects at most"),
        ("decodes parts that end inside a character", "texts that are not the server's"),
    ],
)
def test_a_planted_fault_breaks_its_law(fault: str, law: str) -> None:
    """Catches a check that finds nothing because it looks at nothing."""
    assert any(line.startswith(law) for line in client.caught(fault, 120))


def test_every_planted_fault_is_tried() -> None:
    """Catches a fault that was added and never planted."""
    assert len(client.FAULTS) == 4
