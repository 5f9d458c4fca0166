"""Traces for OpenTelemetry: a span for each request, with times and counts and no text, sent as OTLP in JSON."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

import outrider
from outrider.errors import ConfigError
from outrider.serve.calls import Call

log = logging.getLogger("outrider.serve")

TIMEOUT_S = 2.0
"""For one post of spans; the log of requests is written by the same thread."""
SERVER, ERROR = 2, 2
"""OTLP's kind of a server's span, and its status of one that failed."""
NAMES = {"prompt_tokens": "gen_ai.usage.input_tokens", "tokens": "gen_ai.usage.output_tokens"}
"""OpenTelemetry's own names of figures; the others are called `outrider.NAME`."""
FIGURES = (
    "prompt_tokens", "tokens", "cached_tokens", "steps", "drafted", "accepted", "queue_s", "first_token_s", "seconds",
)  # fmt: skip


class Traces:
    """Sends spans to a collector.  If it can't be reached, a warning is logged once, and the spans are dropped."""

    def __init__(self, url: str):
        """url: where the collector takes traces, such as http://127.0.0.1:4318/v1/traces.  Raises ConfigError for
        anything else."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"serve.traces must be a URL such as http://127.0.0.1:4318/v1/traces, got {url!r}")
        self.url = url
        self._has_failed = False

    def send(self, spans: Sequence[Mapping[str, Any]]) -> None:
        scope = {"scope": {"name": "outrider", "version": outrider.__version__}, "spans": list(spans)}
        resource = {"attributes": _attributes({"service.name": "outrider"})}
        try:
            body = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
            httpx.post(self.url, json=body, timeout=TIMEOUT_S).raise_for_status()
            self._has_failed = False
        except httpx.HTTPError as error:
            if not self._has_failed:
                log.warning("traces can't be sent to %s (%s); they are dropped until it answers", self.url, error)
            self._has_failed = True


def span_of(
    answer_id: str, calls: Sequence[Call], reasons: Sequence[str], figures: Mapping[str, Any]
) -> dict[str, Any]:
    """The span of a request that has ended.  figures: as in the request log."""
    arrived = min(call.arrived for call in calls)
    began_ns = time.time_ns() - round(1e9 * (time.monotonic() - arrived))
    counts = {NAMES.get(name, f"outrider.{name}"): figures[name] for name in FIGURES if figures[name] is not None}
    about = {"gen_ai.response.id": answer_id, "gen_ai.response.finish_reasons": ",".join(reasons)}
    return {
        "traceId": secrets.token_hex(16), "spanId": secrets.token_hex(8), "name": "generate", "kind": SERVER,
        "startTimeUnixNano": str(began_ns), "endTimeUnixNano": str(began_ns + round(1e9 * figures["seconds"])),
        "attributes": _attributes(about | counts), "status": {"code": ERROR} if "error" in reasons else {},
    }  # fmt: skip


def _attributes(values: Mapping[str, str | int | float]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _typed(value)} for name, value in values.items()]


def _typed(value: str | int | float) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    return {"intValue": str(value)} if isinstance(value, int) else {"doubleValue": value}
