"""What tokens cost: a table with a date and a currency, and exact decimal arithmetic.

Costs follow from the tokens that a server counted, never from the length of a text.  A model that is not in the table
has an unknown cost, which is not 0.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from outrider import config as configs
from outrider.config import Config
from outrider.errors import ConfigError

MILLION = Decimal(1_000_000)
TEMPLATE_TOKENS = 256
"""Tokens that a chat template may add to a prompt."""
Amount = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]


class Price(Config):
    """Of 1,000,000 tokens."""

    input: Amount
    """Tokens of prompts."""
    output: Amount
    """Tokens of answers, with those of reasoning and of rejected predictions."""
    cached_input: Amount | None = None
    """Tokens of prompts that the server had read before; `input` unless given."""


class Prices(Config):
    """Prices of models by the names they are asked for."""

    date: datetime.date
    """When they were looked up."""
    currency: str
    models: dict[str, Price] = Field(default_factory=dict)


def load_prices(path: str | Path | None = None) -> Prices:
    """The table in a YAML file; the empty one of the package unless given.  Raises ConfigError."""
    found = Path(path or Path(__file__).with_name("prices.yaml"))
    if not found.is_file():
        raise ConfigError(f"there is no table of prices at {found}; docs/ask-files.md shows what one looks like")
    with configs.located(found):
        return configs.build(Prices, configs.read(found))


class Usage(NamedTuple):
    """Tokens of one answer, as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt."""
    reasoning_tokens: int = 0
    """Of the completion, as the two below."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage_of(raw: Any) -> Usage | None:
    """The `usage` of an answer or of a stream's event; None where the server did not count."""
    found = raw.get("usage") if isinstance(raw, Mapping) else None
    prompt, completion = _count(found, "prompt_tokens"), _count(found, "completion_tokens")
    if not isinstance(found, Mapping) or prompt is None or completion is None:
        return None
    read, written = found.get("prompt_tokens_details"), found.get("completion_tokens_details")
    more = [_count(written, name) or 0 for name in Usage._fields[3:]]
    return Usage(prompt, completion, min(_count(read, "cached_tokens") or 0, prompt), *more)


def _count(found: Any, name: str) -> int | None:
    value = found.get(name) if isinstance(found, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def cost_of(usage: Usage | None, price: Price | None) -> Decimal | None:
    """What an answer cost; None where its tokens or their price are unknown."""
    if usage is None or price is None:
        return None
    cached = price.input if price.cached_input is None else price.cached_input
    new = usage.prompt_tokens - usage.cached_tokens
    return (new * price.input + usage.cached_tokens * cached + usage.completion_tokens * price.output) / MILLION


def highest_cost(body: Mapping[str, Any], size: int, price: Price) -> Decimal:
    """The most that one attempt can cost.  size: of the body in bytes; no token is shorter than one.

    Raises ConfigError where the answer may have any length, or where the prompt is not text.
    """
    longest = body.get("max_completion_tokens") or body.get("max_tokens")
    if not isinstance(longest, int):
        raise ConfigError("a budget needs max_tokens: without it, an answer could cost any amount")
    if any(_has_media(message) for message in body.get("messages") or ()):
        raise ConfigError("a budget needs prompts of text: what an image or a sound costs is not known before")
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    texts = prompts * max(int(body.get("n") or 1), int(body.get("best_of") or 1))
    rejected = size if body.get("prediction") else 0  # tokens of a prediction are charged where they are wrong
    read = max(price.input, price.cached_input or Decimal(0))
    return ((size + TEMPLATE_TOKENS * prompts) * read + texts * (longest + rejected) * price.output) / MILLION


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal") for part in content
    )
