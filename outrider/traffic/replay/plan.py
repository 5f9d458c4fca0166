"""How the calls of a log are sent: when each is due, and the body that each server receives.  No torch."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import field

from pydantic.dataclasses import dataclass

from outrider.errors import ConfigError
from outrider.targets.text.parts import text_of
from outrider.traffic.logs.calls import Call
from outrider.traffic.logs.traces import Trace
from outrider.traffic.replay.servers import Server

LIMITS = ("ttft", "tpot", "e2e")
OPTIONS = {
    "speed": "--speed", "rate": "--rate", "concurrency": "--concurrency", "limit": "--calls",
    "max_tokens": "--max-tokens",
    "timeout_s": "--timeout",
}  # fmt: skip
"""Numbers in a plan that must be above 0, and their command-line options."""


@dataclass(frozen=True, config={"use_attribute_docstrings": True})
class Plan:
    """How the calls are sent."""

    speed: float = 1.0
    """Divide the log's times by this."""
    rate: float | None = None
    """Calls per second at random (Poisson) times, instead of the log's times."""
    concurrency: int | None = None
    """Callers that each send a call as soon as their previous one is answered, instead of the log's times."""
    split: bool = False
    """Send each session to one of the servers instead of to all."""
    limit: int | None = None
    """Send only this many calls, the first ones; by default, all calls of the log."""
    warmup: int = 0
    """Number of initial calls that are sent and counted, but not timed."""
    model: str | None = None
    """Model to request instead of the log's; by default, a model that a server does not have is replaced by its first
    one."""
    max_tokens: int | None = None
    """Maximum number of tokens of an answer; a call with a lower limit keeps it."""
    greedy: bool = False
    """Use temperature 0 for every call, so that answers can be compared."""
    ignore_eos: bool = False
    """Make answers to synthetic calls as long as in the log; text after an end token is not real output."""
    completions: bool = False
    """Send messages as a prompt to /v1/completions, for targets without a chat template."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Limits in seconds for ttft, tpot, e2e."""
    retries: int = 3
    """Maximum number of retries of a failed call."""
    timeout_s: float = 120.0
    """Maximum time without a byte, in seconds."""
    seed: int = 0
    """Seed of the random times."""
    redact: bool = False
    """Write a keyed hash and a length instead of texts."""

    def check(self, trace: Trace | None = None) -> None:
        """Raises ConfigError if the plan is impossible for `trace`, or without it, for any log."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{option} must be above 0, got {value}")
        if self.warmup < 0 or self.retries < 0:
            raise ConfigError(f"--warmup and --retries must be at least 0, got {self.warmup} and {self.retries}")
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate and --concurrency were both given; choose one")
        if self.speed != 1 and (self.rate is not None or self.concurrency is not None):
            raise ConfigError(
                "--speed has no effect with --rate or --concurrency, which do not use the log's times; choose one"
            )
        for name, limit in self.slo.items():
            if name not in LIMITS:
                raise ConfigError(f"--slo has no limit {name!r}; choose from {', '.join(LIMITS)}")
            if not 0 < limit < math.inf:
                raise ConfigError(f"--slo {name} must be above 0 ms, got {limit * 1e3:g}")
        if trace is not None and self.rate is None and self.concurrency is None and not trace.has_times:
            raise ConfigError(f"{trace.path} has no times ({trace.format}); give --rate or --concurrency")

    @property
    def mode(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} calls/s, Poisson, seed {self.seed}"
        if self.concurrency is not None:
            return f"{self.concurrency} callers"
        return "the log's times" + (f", {self.speed:g} times as fast" if self.speed != 1 else "")

    def count(self, trace: Trace) -> int:
        """Calls of `trace` that are sent."""
        return min(trace.size, self.limit or trace.size)

    def seconds(self, trace: Trace) -> float | None:
        """Approximate duration of sending; None if it depends on the servers, or on the choice of calls."""
        if self.rate is not None:
            return self.count(trace) / self.rate
        return trace.span_s / self.speed if self.concurrency is None and self.count(trace) == trace.size else None


def limits(text: str | None) -> dict[str, float]:
    """Parse `ttft=500,tpot=50` in ms to seconds by name.  Raises ConfigError."""
    seconds = {}
    for part in filter(None, map(str.strip, (text or "").split(","))):
        name, _, value = part.partition("=")
        try:
            seconds[name] = float(value.removesuffix("ms")) / 1000
        except ValueError:
            raise ConfigError(f"--slo {part!r} is not name=milliseconds; write it as ttft=500,tpot=50") from None
    return seconds


def prepared(call: Call, server: Server, plan: Plan) -> tuple[str, bytes]:
    """(path, body) for the server."""
    body = dict(call.body)
    if plan.completions and "messages" in body:
        body["prompt"] = "\n\n".join(text_of(message.get("content")) for message in body["messages"])
        for name in ("messages", "tools", "tool_choice", "response_format", "parallel_tool_calls"):
            body.pop(name, None)
    model = plan.model or server.model_for(body.get("model"))
    if model is not None:
        body["model"] = model
    if plan.greedy:
        body["temperature"] = 0
    if plan.max_tokens is not None:
        name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        body[name] = min(plan.max_tokens, body.get(name) or plan.max_tokens)
    if plan.ignore_eos and call.synthetic:
        body["ignore_eos"] = True
    if server.before is not None and server.before.server == "SGLang":
        body["return_spec_tokens_details"] = True
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions" if "messages" in body else "/v1/completions", json.dumps(body).encode()


def schedule(trace: Trace, plan: Plan) -> Iterator[tuple[Call, float]]:
    """Every call and its due time, in seconds after the start."""
    noise, at_s = random.Random(plan.seed), 0.0
    for call in itertools.islice(trace.calls(), plan.limit):
        if plan.rate is None:
            yield call, (call.at_s or 0.0) / plan.speed
        else:
            yield call, at_s
            at_s += noise.expovariate(plan.rate)
