"""Traffic of a server: lengths and concurrency, from a log or from options.  No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from outrider.data.sources.messages import texts_of
from outrider.errors import ConfigError
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import Call

CHARACTERS = 4
"""Characters per token, for logs with texts but without token counts."""


class Demand(NamedTuple):
    """Mean lengths of requests, and their concurrency or rate."""

    prompt_tokens: float
    new_tokens: float
    concurrency: float | None = None
    """Concurrent requests; None if only the rate is known."""
    rate: float | None = None
    """Requests per second."""
    slo: Mapping[str, float] = {}
    """Limits in seconds: ttft, tpot, e2e."""
    source: str = "as given"

    @property
    def context(self) -> float:
        """Tokens of a text in the middle of its answer."""
        return self.prompt_tokens + self.new_tokens / 2


def resolve(
    prompt_tokens: float | None, new_tokens: float | None, concurrency: float | None, rate: float | None,
    slo: Mapping[str, float], log: Demand | None = None,
) -> tuple[Demand | None, str]:  # fmt: skip
    """The demand, or None and what is missing.  Numbers override the log.  Raises ConfigError."""
    numbers = {
        "--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens, "--concurrency": concurrency, "--rate": rate,
    }  # fmt: skip
    for option, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{option} must be above 0, got {value:g}")
    prompt = prompt_tokens or (log.prompt_tokens if log else None)
    new = new_tokens or (log.new_tokens if log else None) or None
    final_rate = rate or (log.rate if log and concurrency is None else None)
    missing = [name for name, value in (("--prompt-tokens", prompt), ("--new-tokens", new)) if value is None]
    if final_rate is None and concurrency is None:
        missing.append("--concurrency or --rate")
    if prompt is None or new is None or missing:
        return None, f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
    return Demand(prompt, new, concurrency, final_rate, slo, log.source if log else "as given"), ""


def of_log(path: Path, format: str | None = None, count: Callable[[str], int] | None = None) -> Demand:
    """Mean lengths and rate of a log; `new_tokens` is 0 if no call has the length of its answer.  Raises DataError.

    count: number of tokens of a text, by the target's tokenizer; default a quarter of its characters.
    """
    trace = traces.read(path, format)
    measure = count or (lambda text: max(1, len(text) // CHARACTERS))
    prompts = answers = answered = 0
    for call in trace.calls():
        prompts += measure(_text(call))
        tokens = _answer_tokens(call, measure)
        if tokens is not None:
            answers, answered = answers + tokens, answered + 1
    rate = trace.size / trace.span_s if trace.has_times and trace.span_s > 0 else None
    about = f"{path}, {trace.size} calls" + ("" if rate is None else f" over {trace.span_s:.0f} s")
    return Demand(prompts / trace.size, answers / answered if answered else 0.0, None, rate, {}, about)


def _text(call: Call) -> str:
    """Its texts, without images, and the tools it offers."""
    if not (messages := call.body.get("messages")):
        return str(call.body.get("prompt"))
    contents = [message.get("content") for message in messages]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    more = texts_of([[message.get("tool_calls") for message in messages], call.body.get("tools")])
    return "\n".join([*(text for text in texts if isinstance(text, str)), *more])


def _answer_tokens(call: Call, measure: Callable[[str], int]) -> int | None:
    """Tokens of the answer in the log, else the request's maximum."""
    if call.expected_tokens is not None:
        return call.expected_tokens
    if call.answer is not None:
        return measure(call.answer)
    most = call.body.get("max_tokens") or call.body.get("max_completion_tokens")
    return int(most) if most else None


def at_once(rate: float, seconds_of: Callable[[float], float], most: float) -> float | None:
    """Concurrent requests by Little's law: `rate` times the seconds of a request at that concurrency.  None if that
    exceeds `most`: the server can't keep up."""
    busy = lambda many: rate * seconds_of(many)
    if busy(most) > most:
        return None
    low, high = 0.0, most
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if busy(max(middle, 1.0)) > middle else (low, middle)
    return high
