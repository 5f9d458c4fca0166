"""A random sample of a log's requests, to be replayed on the target."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ConfigError, DataError
from outrider.sampling.settings import Sampling
from outrider.targets.text.parts import text_of
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import Call
from outrider.traffic.logs.categories import Category, Messages, category_of

MOST_NEW = 64
"""Maximum number of tokens of a replayed answer."""
DRAWN = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
"""Settings of a request that its replay uses, and their types."""


class Question(NamedTuple):
    """A request to replay."""

    number: int
    """Position in the log by time, from 0."""
    category: Category
    prompt: str | Messages
    new_tokens: int
    sampling: Sampling
    tools: tuple[Mapping[str, Any], ...] = ()
    """Offered to the model."""


@dataclass(frozen=True)
class Sample:
    """The sampled requests, and counts of the log."""

    questions: tuple[Question, ...]
    calls: int
    """Requests in the log."""
    categories: Mapping[Category, int]
    """Requests of the log that have text, by category."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Requests of the log that can't be replayed, by reason."""

    @property
    def texts(self) -> int:
        """Number of requests of the log that can be replayed."""
        return sum(self.categories.values())


def draw(path: Path, format: str | None, count: int, seed: int = 0) -> Sample:
    """Draw `count` of the requests that have text, uniformly, or all if there are fewer.

    A smaller count gives a prefix of the same requests.  The log is not loaded into memory.  Raises DataError.
    """
    trace, left_out, categories = traces.read(path, format), Counter[str](), Counter[Category]()
    questions = heapq.nsmallest(
        count, _questions(trace, seed, left_out, categories), key=lambda question: _rank(seed, question)
    )
    return Sample(tuple(questions), trace.size, categories, left_out)


def _questions(
    trace: traces.Trace, seed: int, left_out: Counter[str], categories: Counter[Category]
) -> Iterator[Question]:
    """The requests of a log that have text.  Counts categories and left-out requests."""
    for number, call in enumerate(trace.calls()):
        prompt = None if call.synthetic else _prompt(call.body)
        if prompt is None:
            left_out["lengths or hashes, no text" if call.synthetic else "more than text, or token ids"] += 1
            continue
        try:
            sampling = _sampling(call.body, seed + number)
        except ConfigError:
            left_out["settings out of range"] += 1
            continue
        category = category_of(prompt, call.body)
        categories[category] += 1
        tools = tuple(call.body.get("tools") or ()) if call.body.get("tool_choice") != "none" else ()
        yield Question(number, category, prompt, _new_tokens(call), sampling, tools)


def _rank(seed: int, question: Question) -> bytes:
    return hashlib.sha256(f"{seed} {question.number}".encode()).digest()


def _prompt(body: Mapping[str, Any]) -> str | Messages | None:
    """The prompt, if it is text only."""
    if body.get("messages") is None:
        prompt = body.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        return prompt if isinstance(prompt, str) else None
    try:
        return [{**message, "content": text_of(message.get("content"))} for message in body["messages"]]
    except DataError:
        return None


def _new_tokens(call: Call) -> int:
    """Tokens of the answer in the log, else the request's maximum; at most `MOST_NEW`."""
    most = call.body.get("max_completion_tokens") or call.body.get("max_tokens") or MOST_NEW
    return max(1, min(MOST_NEW, call.expected_tokens or MOST_NEW, most))


def _sampling(body: Mapping[str, Any], seed: int) -> Sampling:
    """The request's settings; greedy without a temperature."""
    settings: dict[str, Any] = {
        name: max(0, convert(body[name])) for name, convert in DRAWN.items() if isinstance(body.get(name), int | float)
    }
    return Sampling(**{"temperature": 0.0, **settings, "seed": seed})
