"""Sampling settings of a request.

Settings that depend on the text before a token are applied first, in the order of `prefix`, then those of
`distribution`.  This is the order of transformers, which has no frequency and presence penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.sampling.grammar import Rules

Processor = Callable[[Tensor, Tensor], Tensor]
"""(input_ids [1, n], scores [1, V]) to scores [1, V], as transformers' LogitsProcessor.  It must depend only on its
arguments, since it is called once for every path of a draft, and again after a rejection."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling settings of a request.  The default is greedy; temperature 0 with other settings is the argmax after
    them."""

    temperature: float = 0.0
    """Logits are divided by this; 0 is greedy."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probabilities sum to this; 1 keeps all."""
    seed: int | None = None
    """The same seed gives the same text with any drafter; None draws a new seed and accepts more of a sampled draft."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this share of the most likely token's; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, until their probabilities sum to this; 1 keeps all."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this, negative ones multiplied, as in transformers."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output; the prompt does not count, as in OpenAI and vLLM."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Token id → the number added to its logit; stored as sorted (id, bias) pairs."""
    bad_words: Sequence[tuple[int, ...]] = ()
    """Sequences of token ids that are never completed in the output; they may begin in the prompt."""
    min_new_tokens: int = 0
    """End tokens are forbidden before this many tokens; stop strings are not."""
    logprobs: int | None = None
    """Report log probabilities of the tokens, and of this many most likely ones at each position; None reports none."""
    processors: Sequence[Processor] = ()
    """Functions that change logits, called in order on each node's own prefix."""
    grammar: Rules | None = None
    """Grammar of the output: `Grammar.json(schema)`, `Grammar.regex(pattern)` or `Grammar.lark(text)`."""

    def __post_init__(self) -> None:
        for name, (read, is_right, requirement) in NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in ("seed", "logprobs"):
                continue
            value = read(name, value)
            object.__setattr__(self, name, value)
            if not is_right(value):
                raise ConfigError(f"{name} {requirement}, got {value}")
        with _of_form("logit_bias", self.logit_bias, "a mapping {token id: bias}"):
            items = dict(self.logit_bias).items()
            bias = tuple(
                sorted((whole("a token of logit_bias", token), _real("logit_bias", value)) for token, value in items)
            )
        with _of_form("bad_words", self.bad_words, "a list of lists of token ids"):
            words = tuple(tuple(whole("a token of bad_words", token) for token in word) for word in self.bad_words)
        with _of_form("processors", self.processors, "a list of functions"):
            processors = tuple(self.processors)
        for name, value in (("logit_bias", bias), ("bad_words", words), ("processors", processors)):
            object.__setattr__(self, name, value)
        for token, value in bias:
            if not math.isfinite(value):
                raise ConfigError(
                    f"logit_bias must be a finite number, got {value} for token {token}; bad_words forbids a token"
                )
        if not all(words):
            raise ConfigError("bad_words has an empty sequence; leave it out")
        if self.grammar is not None and not callable(getattr(self.grammar, "start", None)):
            grammars = "Grammar.json(schema), Grammar.regex(pattern) or Grammar.lark(text)"
            raise ConfigError(f"grammar must be a grammar, got {self.grammar!r}; give {grammars}")
        for each in processors:
            if not callable(each):
                raise ConfigError(f"processors must be functions (input_ids, scores) -> scores, got {each!r}")

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as stored."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def penalises(self) -> bool:
        """Whether there is a penalty."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_processed(self) -> bool:
        """Whether logits are changed before sampling, depending on the earlier tokens."""
        return bool(self.penalises or self.logit_bias or self.forbids)

    @property
    def forbids(self) -> bool:
        """Whether tokens may become impossible because of earlier tokens."""
        return bool(self.bans or self.processors)

    @property
    def bans(self) -> bool:
        """Whether tokens may be impossible regardless of their logits."""
        return bool(self.bad_words or self.min_new_tokens or self.grammar is not None)

    def check(self, vocabulary: int) -> None:
        """Raises ConfigError for token ids outside this vocabulary, and for bad words that leave no token."""
        ids = [token for token, _ in self.biases] + [token for word in self.bad_words for token in word]
        wrong = sorted({token for token in ids if not 0 <= token < vocabulary})
        if wrong:
            raise ConfigError(
                f"logit_bias or bad_words has token {wrong[0]}, outside the target's vocabulary of {vocabulary}; "
                f"choose ids from 0 to {vocabulary - 1}"
            )
        if len({word[0] for word in self.bad_words if len(word) == 1}) == vocabulary:
            raise ConfigError(f"bad_words forbids all {vocabulary} tokens of the vocabulary; leave at least one")


@contextmanager
def _of_form(name: str, value: Any, expected: str) -> Iterator[None]:
    """A TypeError becomes a ConfigError that says what was given and what is expected."""
    try:
        yield
    except TypeError as error:
        raise ConfigError(f"{name} must be {expected}, got {value!r:.80}") from error


def whole(name: str, value: Any) -> int:
    """`value` as an int.  Raises ConfigError if it is not an integer; True is not accepted."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _real(name: str, value: Any) -> float:
    """`value` as a float within the range of float32, in which most distributions are computed; infinity and NaN pass,
    and are checked by the caller."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    most = torch.finfo(torch.float32).max
    if value != math.inf and abs(value) > most:  # type: ignore[operator]
        raise ConfigError(f"{name} must be at most {most:.2g} in size, the limit of float32, got {value}")
    return float(value)


NUMBERS: Mapping[str, tuple[Callable[[str, Any], float], Callable[[float], bool], str]] = {
    "temperature": (_real, lambda x: 0 <= x < math.inf, "must be a number of at least 0 (0 is greedy)"),
    "top_k": (whole, lambda x: x >= 0, "must be at least 0 (0 keeps every token)"),
    "top_p": (_real, lambda x: 0 < x <= 1, "must be above 0 and at most 1 (1 keeps every token)"),
    "seed": (whole, lambda x: -(2**63) <= x < 2**63, "must fit in 64 bits"),
    "min_p": (_real, lambda x: 0 <= x <= 1, "must be from 0 to 1 (0 keeps every token)"),
    "typical_p": (_real, lambda x: 0 < x <= 1, "must be above 0 and at most 1 (1 keeps every token)"),
    "repetition_penalty": (_real, lambda x: 0 < x < math.inf, "must be a number above 0 (1 changes nothing)"),
    "presence_penalty": (_real, math.isfinite, "must be a finite number (0 changes nothing)"),
    "frequency_penalty": (_real, math.isfinite, "must be a finite number (0 changes nothing)"),
    "min_new_tokens": (whole, lambda x: x >= 0, "must be at least 0 (0 lets a text end at once)"),
    "logprobs": (whole, lambda x: x >= 0, "must be at least 0 (0 reports only the emitted tokens, None nothing)"),
}
"""By setting: its parser, its condition, and the condition in words; NaN fails every condition."""
