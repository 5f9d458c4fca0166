"""benchmarks/client.py in short: 80 requests against a server that misbehaves."""

from benchmarks import client


def test_every_request_is_answered_once_or_reported_failed_once():
    """Catches an answer that is lost, doubled or asked for again after it began."""
    counts = client.misused(80, None)
    assert counts["violations"] == []
    assert counts["answered"] + counts["failed"] == 80
    assert counts["answered"] > 25
    assert counts["failures"].keys() == {"Unavailable", "RefusedError", "TornStream"}
    assert counts["sent_again"] > 10
