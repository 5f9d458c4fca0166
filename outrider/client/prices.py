"""What tokens cost: a table with a date and a currency, and exact decimal arithmetic.

Costs are computed from the tokens that the server counted, never from the length of a text.  A model outside the table
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
    """Per 1,000,000 tokens."""

    input: Amount
    """Tokens of prompts."""
    output: Amount
    """Tokens of answers, including reasoning and rejected predictions."""
    cached_input: Amount | None = None
    """Prompt tokens that the server had cached; `input` by default."""


class Prices(Config):
    """Prices of models, by the names used in requests."""

    date: datetime.date
    """Day on which they were looked up."""
    currency: str
    models: dict[str, Price] = Field(default_factory=dict)


def load_prices(path: str | Path | None = None) -> Prices:
    """The table in a YAML file; by default, the empty table of the package.  Raises ConfigError."""
    file = Path(path or Path(__file__).with_name("prices.yaml"))
    if not file.is_file():
        raise ConfigError(f"no table of prices at {file}; docs/client.md shows an example")
    with configs.located(file):
        return configs.build(Prices, configs.read(file))


class Usage(NamedTuple):
    """Tokens of one answer, as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt."""
    reasoning_tokens: int = 0
    """Of the completion, like the next two."""
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


def usage_of(raw: Any) -> Usage | None:
    """The `usage` of an answer or of a stream's event; None if the server did not count."""
    usage = raw.get("usage") if isinstance(raw, Mapping) else None
    prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    if not isinstance(usage, Mapping) or prompt is None or completion is None:
        return None
    cached = _count(usage.get("prompt_tokens_details"), "cached_tokens") or 0
    details = [_count(usage.get("completion_tokens_details"), name) or 0 for name in Usage._fields[3:]]
    return Usage(prompt, completion, min(cached, prompt), *details)


def _count(counts: Any, name: str) -> int | None:
    value = counts.get(name) if isinstance(counts, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def cost_of(usage: Usage | None, price: Price | None) -> Decimal | None:
    """What an answer cost; None if its tokens or their price are unknown."""
    if usage is None or price is None:
        return None
    cached = price.input if price.cached_input is None else price.cached_input
    new = usage.prompt_tokens - usage.cached_tokens
    return (new * price.input + usage.cached_tokens * cached + usage.completion_tokens * price.output) / MILLION


def highest_cost(body: Mapping[str, Any], size: int, price: Price) -> Decimal:
    """The most that one attempt can cost.  size: of the body in bytes; every token has at least one.

    Raises ConfigError if the length of the answer is unlimited, or the prompt is not text.
    """
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    if not isinstance(max_tokens, int):
        raise ConfigError("a budget needs max_tokens: without it, an answer could cost any amount")
    if any(_has_media(message) for message in body.get("messages") or ()):
        raise ConfigError("a budget needs prompts of text: the cost of an image or a sound is not known in advance")
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    answers = prompts * max(int(body.get("n") or 1), int(body.get("best_of") or 1))
    rejected = size if body.get("prediction") else 0  # rejected tokens of a prediction are charged
    input_price = max(price.input, price.cached_input or Decimal(0))
    prompt_tokens = size + TEMPLATE_TOKENS * prompts
    return (prompt_tokens * input_price + answers * (max_tokens + rejected) * price.output) / MILLION


def _has_media(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, list) and any(
        not isinstance(part, Mapping) or part.get("type") not in ("text", "refusal") for part in content
    )
