"""Servers behind a plain proxy are restarted without a lost answer."""

from pathlib import Path

import pytest

from benchmarks import rolling_restart


@pytest.mark.slow
@pytest.mark.skipif(not Path(rolling_restart.NGINX).exists(), reason="nginx is not installed")
def test_a_rolling_restart_loses_no_answer_and_gives_none_twice() -> None:
    """Catches a server that takes requests while it stops or before it can answer, a connection that is closed under a
    request, and a proxy configuration that sends what was answered again."""
    result = rolling_restart.measured(60, 16)
    assert rolling_restart.is_clean(result), result
    assert result["restarts"] >= 2 and not result["exit_codes_not_0"]
