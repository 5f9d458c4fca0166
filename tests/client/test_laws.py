"""benchmarks/client.py in short: 150 requests against a server that misbehaves."""

from decimal import Decimal

import pytest

from benchmarks import client


@pytest.mark.parametrize("budget", [None, Decimal("0.02")])
def test_every_request_is_answered_once_or_reported_failed_once(budget):
    """Catches an answer that is lost, doubled or asked for again after it began, and a budget that is passed."""
    found = client.misused(150, budget)
    assert found["violations"] == []
    assert found["answered"] + found["failed"] == 150
    assert found["answered"] > (50 if budget is None else 10)
    kinds = {"Unavailable", "RefusedError", "TornStream"}
    if budget is None:
        assert found["failures"].keys() == kinds
    else:  # which may be spent before each of the others has happened
        assert {"BudgetExceeded"} <= found["failures"].keys() <= {"BudgetExceeded", *kinds}
    assert found["sent_again"] > 20 or budget is not None
