"""A sample of a log's requests, to be replayed on the target: drawn by a seed, with a category each."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import ConfigError
from outrider.sampling.settings import Sampling
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import Call
from outrider.traffic.logs.categories import Category, Messages, category_of

MOST_NEW = 64
"""Tokens of a replayed answer at the most."""
DRAWN = {"temperature": float, "top_p": float, "top_k": int, "min_p": float}
"""Settings of a request that its replay keeps, and their types."""


class Question(NamedTuple):
    """One request, as it is replayed."""

    number: int
    """In the log, in the order of the times, counted from 0."""
    category: Category
    prompt: str | Messages
    new_tokens: int
    sampling: Sampling


@dataclass(frozen=True)
class Sample:
    """Requests that were drawn, and what the log holds."""

    questions: tuple[Question, ...]
    calls: int
    """Of the whole log."""
    categories: Mapping[Category, int]
    """Requests of the whole log that have a text, by category."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Requests of the whole log that can't be replayed, by reason."""

    @property
    def texts(self) -> int:
        """Requests of the whole log that can be replayed."""
        return sum(self.categories.values())


def draw(path: Path, format: str | None, count: int, seed: int = 0) -> Sample:
    """Draw `count` of the requests that have a text, each with the same chance; fewer where there are fewer.

    A smaller count gives the first of the same requests.  The log is not held in memory.  Raises DataError.
    """
    trace, left_out, categories = traces.read(path, format), Counter[str](), Counter[Category]()
    found = heapq.nsmallest(count, _questions(trace, seed, left_out, categories), key=lambda own: _rank(seed, own))
    return Sample(tuple(found), trace.size, categories, left_out)


def _questions(
    trace: traces.Trace, seed: int, left_out: Counter[str], categories: Counter[Category]
) -> Iterator[Question]:
    """The requests of a log that have a text; what they are about, and what was left out, is counted."""
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
        yield Question(number, category, prompt, _new_tokens(call), sampling)


def _rank(seed: int, question: Question) -> bytes:
    return hashlib.sha256(f"{seed} {question.number}".encode()).digest()


def _prompt(body: Mapping[str, Any]) -> str | Messages | None:
    """What is asked, where it is text and no more."""
    if body.get("messages") is None:
        prompt = body.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and len(prompt) == 1 else prompt
        return prompt if isinstance(prompt, str) else None
    found = []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            content = "".join(str(part.get("text")) for part in content)
        if not isinstance(content, str) or message.get("tool_calls"):
            return None
        found.append({"role": message["role"], "content": content})
    return found


def _new_tokens(call: Call) -> int:
    """Of the answer in the log, else the most that was asked for; no more than `MOST_NEW`."""
    most = call.body.get("max_completion_tokens") or call.body.get("max_tokens") or MOST_NEW
    return max(1, min(MOST_NEW, call.expected_tokens or MOST_NEW, most))


def _sampling(body: Mapping[str, Any], seed: int) -> Sampling:
    """As the request asked; greedy where it names no temperature."""
    given: dict[str, Any] = {
        name: max(0, kind(body[name])) for name, kind in DRAWN.items() if isinstance(body.get(name), int | float)
    }
    return Sampling(**{"temperature": 0.0, **given, "seed": seed})
