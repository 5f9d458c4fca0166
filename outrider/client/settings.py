"""Settings of a client: time-outs, retries, limits, fallbacks, and profiles of workloads."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from outrider import config as configs
from outrider.config import Config
from outrider.errors import ConfigError


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {value}")


@dataclass(frozen=True)
class Timeouts:
    """Seconds for each phase of a request."""

    connect_s: float = 10.0
    write_s: float = 30.0
    """Between two writes of the request."""
    first_byte_s: float = 120.0
    """From sending a request to the first byte of its stream.  Answers that are not streams have `total_s` instead:
    they arrive when they are complete."""
    idle_s: float = 60.0
    """Between two bytes of an answer, including comments in a stream."""
    total_s: float = 600.0
    """Of a request, including the wait for its turn, all attempts, and the pauses between them."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "write_s", "first_byte_s", "idle_s", "total_s"):
            _above_zero(f"timeouts.{name}", getattr(self, name))


@dataclass(frozen=True)
class Retries:
    """When a request is retried.  This only happens before its answer begins."""

    attempts: int = 4
    """The most for one request; 1 disables retries."""
    base_s: float = 0.5
    cap_s: float = 8.0
    """The n-th pause is drawn between 0 and the smaller of `cap_s` and base_s · 2^(n-1), unless the server asks for a
    certain pause."""
    longest_wait_s: float = 120.0
    """The client gives up at once if the server asks for a longer pause."""
    share: float = 0.2
    """Share of requests that may be retried, so that retries do not multiply the load of a failing server."""
    spare: int = 10
    """Requests that may be retried in addition to `share`."""
    torn: bool = False
    """Also retry a request whose answer broke off, which may charge it twice.  Streams are never retried."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retries.attempts must be at least 1, got {self.attempts}")
        for name in ("base_s", "cap_s", "longest_wait_s"):
            _above_zero(f"retries.{name}", getattr(self, name))
        if not self.share >= 0 or self.spare < 0:
            raise ConfigError(f"retries.share and retries.spare must not be below 0, got {self.share} and {self.spare}")


@dataclass(frozen=True)
class Limits:
    """Concurrency, rate limits, the circuit breaker, and the size of answers."""

    concurrency: int = 64
    """Requests in flight at the same time."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    """Of prompts and answers: estimated when a request is sent, then corrected by the server's count."""
    failures: int = 10
    """Failed attempts in a row after which nothing is sent for `reset_s`; then one request probes the server."""
    reset_s: float = 30.0
    answer_bytes: int = 64 * 2**20
    """Size limit of an answer."""
    min_accepted: float = 0.2
    """Predictions are left out when, after 2,000 predicted tokens, a smaller share was accepted: providers charge for
    rejected ones."""

    def __post_init__(self) -> None:
        for name in ("concurrency", "failures", "answer_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("requests_per_minute", "tokens_per_minute"):
            if getattr(self, name) is not None and not getattr(self, name) >= 1:
                raise ConfigError(f"limits.{name} must be at least 1, got {getattr(self, name)}; omit it for no limit")
        _above_zero("limits.reset_s", self.reset_s)
        if not 0 <= self.min_accepted <= 1:
            raise ConfigError(f"limits.min_accepted must be between 0 and 1, got {self.min_accepted}")


TIMEOUTS, RETRIES, LIMITS = Timeouts(), Retries(), Limits()
"""The defaults."""


@dataclass(frozen=True)
class Fallback:
    """A server, or another model of the same server, for requests that got no answer."""

    base_url: str | None = None
    """None: the client's server."""
    model: str | None = None
    """None: the model that the request names."""
    api_key: str | None = None
    """The client's key is sent to the client's server only."""
    timeouts: Timeouts | None = None
    """None, here and below: the client's."""
    retries: Retries | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if self.base_url is None and self.model is None:
            raise ConfigError("a fallback needs a base_url or a model; give at least one")


class Profile(Config):
    """Defaults for the requests of a workload; what a request sets itself comes first."""

    settings: dict[str, Any] = Field(default_factory=dict)
    """Fields of the request body, such as temperature, max_tokens, and `speculative: {depth: 4}`."""
    timeouts: Timeouts = TIMEOUTS

    @model_validator(mode="after")
    def _has_no_content(self) -> Profile:
        if content := {"messages", "prompt", "stream"} & self.settings.keys():
            raise ValueError(f"settings has {', '.join(sorted(content))}, which belongs to a request; leave it out")
        return self


def load_profiles(path: str | Path | None = None) -> dict[str, Profile]:
    """The profiles in a YAML file by name; by default chat, code, extract and write.  Raises ConfigError."""
    file = Path(path or Path(__file__).with_name("profiles.yaml"))
    if not file.is_file():
        raise ConfigError(f"no profiles at {file}; docs/client.md shows an example")
    with configs.located(file):
        return {name: configs.build(Profile, values or {}, name) for name, values in configs.read(file).items()}
