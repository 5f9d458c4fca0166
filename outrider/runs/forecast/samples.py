"""Samples of training texts: tokens as the target reads them, and which of them are trained on.  Loads no weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import located
from outrider.data.answers.store import ANSWERS, iterate_answers
from outrider.data.corpus import tokenizer_of
from outrider.data.rendering import Rendered, prompt_tokens, render
from outrider.data.sources.conversations import at_place
from outrider.data.sources.mixture import Selection
from outrider.runs.file import load
from outrider.runs.forecast.checks import check


class Sample(NamedTuple):
    """One text."""

    id: str
    pieces: list[tuple[str, bool]]
    """Its text in pieces, and whether each is trained on."""
    tokens: int
    trained: int
    """Tokens that train."""
    unstable: int
    """Answers that are not trained on because their boundaries are ambiguous."""
    is_answered: bool
    """False for a prompt that the target has not answered yet."""


def samples(file: str | Path, overrides: Sequence[str], count: int) -> Iterator[Sample]:
    """Up to `count` texts of a run: the target's answers if there are any, else conversations of the sources.

    Raises the errors of `plan`, and TargetError if the target's tokenizer can't be loaded.
    """
    settings, _ = load(file, overrides)
    with located(file, overrides):
        conversations = check(settings, ["prepare"]).conversations
    tokenizer, path = tokenizer_of(settings.target.name), settings.answers / ANSWERS
    if path.exists():
        for answer in islice(iterate_answers(path), count):
            yield _sample(tokenizer, answer.id, Rendered(list(answer.tokens), answer.learn))
        return
    yield from _of_sources(tokenizer, conversations, count)


def _of_sources(tokenizer: Any, conversations: Selection, count: int) -> Iterator[Sample]:
    config = conversations.config
    for one in islice(iter(conversations), count):
        with at_place(one):
            if not config.regenerate:
                rendered = render(tokenizer, one.messages, config.length, config.enable_thinking, one.tools)
                yield _sample(tokenizer, one.id, rendered)
                continue
            first = next(i for i, message in enumerate(one.messages) if message["role"] == "user")
            tokens = prompt_tokens(tokenizer, one.messages[: first + 1], config.enable_thinking, one.tools)
            yield _sample(tokenizer, one.id, Rendered(tokens, []))._replace(is_answered=False)


def _sample(tokenizer: Any, id: str, rendered: Rendered) -> Sample:
    tokens, pieces, at = rendered.tokens, list[tuple[str, bool]](), 0
    for start, end in rendered.learn:
        pieces += [(tokenizer.decode(tokens[at:start]), False), (tokenizer.decode(tokens[start:end]), True)]
        at = end
    pieces.append((tokenizer.decode(tokens[at:]), False))
    trained = sum(end - start for start, end in rendered.learn)
    return Sample(id, [one for one in pieces if one[0]], len(tokens), trained, rendered.unstable, True)
