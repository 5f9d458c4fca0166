"""One answer from a server: its text, when each piece arrived, how it ended, and whether to retry.  No torch.

TTFT: from the first time the call is sent to its first text.  E2E: to the end of its answer, including pauses and
retries.  TPOT = (E2E - TTFT) / (tokens - 1), which speculation shortens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.storage.json_text import parse_json

PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
"""A longer Retry-After counts as a refusal."""


@dataclass(slots=True)
class Answer:
    """The answer to one request.  Times are seconds of `time.perf_counter`."""

    began_s: float
    """When the call was first sent."""
    first_s: float | None = None
    """When the first text arrived."""
    ended_s: float = 0.0
    last_s: float | None = None
    """When the last text arrived."""
    gaps_s: list[float] = field(default_factory=list)
    """Between the pieces of text."""
    status: int | None = None
    """None if no byte arrived."""
    failure: str | None = None
    """Why the answer is missing or incomplete; None if it is complete."""
    retry_after_s: float | None = None
    pieces: list[str] = field(default_factory=list)
    """Text of the first choice."""
    chunks: int = 0
    """Events with text."""
    tokens: int | None = None
    """As the server counts them."""
    prompt_tokens: int | None = None
    finish: str | None = None
    acceptance: dict[str, int] | None = None
    """For this request: drafts, drafted, accepted, if the server reports them."""
    is_done: bool = False
    """Whether the server sent [DONE]."""
    attempts: int = 1
    """How often the call was sent."""
    due_s: float | None = None
    """When the call was due to be sent; None in a closed loop."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def kind(self) -> str:
        """answered, failed (no text arrived) or cut off (some did)."""
        return "answered" if self.failure is None else "failed" if self.first_s is None else "cut off"

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.began_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token; None for an answer of one token, or of an unknown number of tokens."""
        if self.tokens is None or self.tokens < 2 or self.first_s is None:
            return None
        return (self.ended_s - self.first_s) / (self.tokens - 1)

    def meets(self, slo: Mapping[str, float]) -> bool:
        """Whether the call was answered within all limits, in seconds."""
        if "tpot" in slo and self.tpot_s is None and (self.tokens is None or self.tokens > 1):  # unknown
            return False
        latencies = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return self.failure is None and all((latencies[name] or 0.0) <= limit for name, limit in slo.items())

    @property
    def is_retryable(self) -> bool:
        """Whether the call may succeed on a retry.  After a time-out, a retry would only lengthen the queue."""
        if self.kind != "failed" or (self.failure or "").startswith(("timeout", "stopped", "not understood")):
            return False
        return self.status is None or self.status in (200, 408, 429, 500, 502, 503, 504)

    def backoff_s(self, noise: random.Random) -> float | None:
        """How long to wait before the next attempt; None if the server asks for too long."""
        if self.retry_after_s is not None:
            return self.retry_after_s if self.retry_after_s <= LONGEST_PAUSE_S else None
        return min(PAUSE_S * 2 ** (self.attempts - 1), LONGEST_PAUSE_S) * noise.uniform(0.5, 1.5)

    @property
    def reason(self) -> str:
        """The failure without the server's message about this one call."""
        failure = self.failure or ""
        return failure.split(":")[0] if failure.startswith(("HTTP", "error in", "not understood")) else failure

    def take(self, event: str | bytes, at_s: float) -> None:
        """Add one event that arrived at `at_s`.  An error in it becomes the failure.  Raises ValueError for a malformed
        event."""
        if event == "[DONE]":
            self.is_done = True
            return
        chunk = parse_json(event)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event that is a {type(chunk).__name__}")
        if (error := chunk.get("error")) is not None or chunk.get("object") == "error":
            message = error.get("message", error) if isinstance(error, dict) else error or chunk.get("message")
            self.failure = f"error in the stream: {str(message)[:200]}"
            return
        has_text = False
        for choice in chunk.get("choices") or ():
            piece = _text_of(choice.get("delta") or choice.get("message") or choice)
            has_text |= bool(piece)
            if piece and choice.get("index", 0) == 0:
                self.pieces.append(piece)
            if choice.get("finish_reason") is not None:
                self.finish = str(choice["finish_reason"])
        if has_text:
            if self.last_s is None:
                self.first_s = at_s
            else:
                self.gaps_s.append(at_s - self.last_s)
            self.chunks += 1
            self.last_s = at_s
        if usage := chunk.get("usage"):
            self.tokens = _count(usage.get("completion_tokens"))
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.acceptance = reported_acceptance(chunk) or self.acceptance

    def refuse(self, body: bytes) -> None:
        """Set the failure of an answer whose status is not 200, from its body."""
        try:
            content = parse_json(body)
            error = content.get("error", content)
            message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
        except (ValueError, AttributeError):
            message = body[:120].decode("utf-8", "replace")
        self.failure = f"HTTP {self.status}: {str(message)[:200]}" if message else f"HTTP {self.status}"

    def end(self, at_s: float, failure: str | None) -> None:
        """End the answer.  Ignored for a complete answer, which may lose its connection afterwards."""
        self.failure = None if self.is_done else failure
        self.ended_s = at_s


def _text_of(part: Mapping[str, Any]) -> str:
    """Everything the model generated: text, reasoning, arguments of a tool call."""
    text = part.get("content") or part.get("text") or part.get("reasoning_content") or part.get("reasoning") or ""
    for call in part.get("tool_calls") or ():
        function = call.get("function") or {}
        text = f"{text}{function.get('name') or ''}{function.get('arguments') or ''}"
    return text if isinstance(text, str) else json.dumps(text)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


ACCEPTANCE_FIELDS: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (
        ("metrics", "speculative_decoding"),
        {"drafts": "num_spec_steps", "drafted": "num_draft_tokens", "accepted": "num_accepted_draft_tokens"},
    ),
    (
        ("sglext", "spec_tokens_details"),
        {"drafts": "spec_verify_ct", "drafted": "spec_num_proposed_drafts", "accepted": "spec_num_correct_drafts"},
    ),
    (("timings",), {"drafted": "draft_n", "accepted": "draft_n_accepted"}),
)
"""Where vLLM, SGLang and llama-server report the drafts of one request, and under which names."""


def reported_acceptance(chunk: Mapping[str, Any]) -> dict[str, int] | None:
    """Counts of the request's drafts in an event; None if it has none."""
    for path, names in ACCEPTANCE_FIELDS:
        inner: Any = chunk
        for step in path:
            inner = inner.get(step) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            # SGLang has used its names with and without the prefix
            values = {key: inner.get(name, inner.get(name.removeprefix("spec_"))) for key, name in names.items()}
            if counts := {key: count for key, value in values.items() if (count := _count(value)) is not None}:
                return counts
    return None
