"""benchmarks/client.py in short: 80 requests against a server that misbehaves."""

from benchmarks import client


def test_every_request_is_answered_once_or_reported_failed_once():
    """Catches an answer that is lost, doubled or asked for again after it began."""
    found = client.misused(80, None)
    assert found["violations"] == []
    assert found["answered"] + found["failed"] == 80
    assert found["answered"] > 25
    assert found["failures"].keys() == {"Unavailable", "RefusedError", "TornStream"}
    assert found["sent_again"] > 10
