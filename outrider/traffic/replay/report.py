"""The result of a replay.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from outrider.report.bootstrap import Interval
from outrider.traffic.replay.comparison import TextComparison
from outrider.traffic.replay.latencies import Endpoint, Spread


@dataclass(frozen=True)
class ServerComparison:
    """Another server, compared with the first one."""

    url: str
    ratios: Mapping[str, Interval]
    """Ratios of the mean TTFT, TPOT and E2E, this server / the first, with 95 % intervals."""
    answers: TextComparison | None
    """Over the calls that both answered."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay."""

    log: str
    format: str
    mode: str
    measured: str
    calls: int
    """Number of planned calls, whether or not they were sent."""
    not_sent: int
    """Calls not sent because the replay was stopped; 0 for a whole run."""
    left_out: Mapping[str, int]
    """Numbers of skipped rows of the log, by reason."""
    synthetic: int
    """Calls with generated text: their acceptance is meaningless."""
    is_whole: bool
    seconds: float
    schedule_error_s: Spread | None
    """Delay of all calls relative to their due time; None in a closed loop."""
    endpoints: tuple[Endpoint, ...]
    comparisons: tuple[ServerComparison, ...]
    """Every other server, compared with the first."""
    log_answers: Mapping[str, TextComparison]
    """By server: its answers compared with those of the log."""
    slo: Mapping[str, float]
    notes: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """The result as values for JSON."""
        return {"outrider_replay": 1} | _plain(self)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread | Interval):
        value = value._asdict()
    elif isinstance(value, Endpoint):
        value = value.json()
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, tuple | list) else value
