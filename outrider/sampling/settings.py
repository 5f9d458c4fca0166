"""How a request wants its tokens drawn.

Applied in this order: what depends on the text before a token (`prefix`: logit bias, repetition penalty, frequency and
presence penalty, bad words, end tokens before `min_new_tokens`, grammar, own processors), then `distribution`: temperature,
top-k, top-p, min-p, typical-p.  It is the order of transformers, which has no frequency and presence penalty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ConfigError
from outrider.sampling.grammar import Rules

Processor = Callable[[Tensor, Tensor], Tensor]
"""(input_ids [1, n], scores [1, V]) to scores [1, V], as transformers' LogitsProcessor.  It must hang on its arguments alone:
it is called once for every path of a draft, and again for what was rejected."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens drawn.  The default is greedy; greedy with any other setting is the argmax after it."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep this many most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probabilities reach this sum."""
    seed: int | None = None
    """Same seed, same text, whatever drafts for it; None draws a fresh one and accepts more of a sampled draft."""
    min_p: float = 0.0
    """Keep the tokens at least this share as likely as the likeliest; 0 keeps all."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the entropy, until their probabilities reach this sum."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output are divided by this, negative ones multiplied, as transformers does."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token in the output; the prompt does not count, as OpenAI and vLLM do."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as it stands in the output."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Token id to what is added to its logit; kept as sorted pairs."""
    bad_words: Sequence[tuple[int, ...]] = ()
    """Sequences of token ids of which none is completed in the output; its beginning may stand in the prompt."""
    min_new_tokens: int = 0
    """End tokens are impossible before so many tokens; stop strings are not."""
    logprobs: int | None = None
    """Log probabilities of the emitted tokens, and of this many likeliest at their places; None reports none."""
    processors: Sequence[Processor] = ()
    """Called in order on each node's own prefix."""
    grammar: Rules | None = None
    """What the output must look like: `Grammar.json(schema)`, `Grammar.regex(pattern)`, `Grammar.lark(text)`."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, float):
                object.__setattr__(self, field.name, _real(field.name, value))
            elif isinstance(field.default, int) or (field.name in ("seed", "logprobs") and value is not None):
                object.__setattr__(self, field.name, whole(field.name, value))
        try:
            pairs = dict(self.logit_bias).items()
            bias = tuple(sorted((whole("a token of logit_bias", token), _real("logit_bias", value)) for token, value in pairs))
            words = tuple(tuple(whole("a token of bad_words", token) for token in word) for word in self.bad_words)
            processors = tuple(self.processors)
        except TypeError as error:
            raise ConfigError(
                f"logit_bias {self.logit_bias!r}, bad_words {self.bad_words!r} or processors {self.processors!r} can't be read "
                f"({error}); give {{token id: bias}}, lists of token ids, and functions"
            ) from error
        for name, value in (("logit_bias", bias), ("bad_words", words), ("processors", processors)):
            object.__setattr__(self, name, value)
        for is_right, message in self._checks():
            if not is_right:
                raise ConfigError(message)

    def _checks(self) -> Iterator[tuple[bool, str]]:
        """What must hold of each setting, and what is said where it does not; NaN is in no range."""
        yield 0 <= self.temperature < math.inf, f"temperature {self.temperature} is not a number of 0 or more; 0 is greedy"
        yield self.top_k >= 0, f"top_k {self.top_k} is negative; 0 keeps every token"
        yield 0 < self.top_p <= 1, f"top_p {self.top_p} lies outside (0, 1]; 1 keeps every token"
        yield 0 <= self.min_p <= 1, f"min_p {self.min_p} lies outside [0, 1]; 0 keeps every token"
        yield 0 < self.typical_p <= 1, f"typical_p {self.typical_p} lies outside (0, 1]; 1 keeps every token"
        yield -(2**63) <= (self.seed or 0) < 2**63, f"seed {self.seed} does not fit in 64 bits"
        negative = f"logprobs {self.logprobs} is negative; 0 reports the emitted tokens alone, None nothing"
        yield (self.logprobs or 0) >= 0, negative
        repetition = f"repetition_penalty {self.repetition_penalty} is not a number above 0; 1 changes nothing"
        yield 0 < self.repetition_penalty < math.inf, repetition
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            yield math.isfinite(value), f"{name} {value} is not a finite number; 0 changes nothing"
        yield self.min_new_tokens >= 0, f"min_new_tokens {self.min_new_tokens} is negative; 0 lets a text end at once"
        for token, value in self.biases:
            message = f"logit_bias {value} of token {token} is not a finite number; bad_words forbids a token"
            yield math.isfinite(value), message
        yield all(self.bad_words), "bad_words holds an empty sequence, which every text completes; leave it out"
        grammars = "Grammar.json(schema), Grammar.regex(pattern) or Grammar.lark(text)"
        is_grammar = self.grammar is None or callable(getattr(self.grammar, "start", None))
        yield is_grammar, f"grammar {self.grammar!r} is none; give {grammars}"
        for each in self.processors:
            yield callable(each), f"processors holds {each!r}; wanted functions (input_ids, scores) -> scores"

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as it is kept."""
        return self.logit_bias  # type: ignore[return-value]

    @property
    def penalises(self) -> bool:
        """A penalty looks at the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_processed(self) -> bool:
        """Logits change before the draw, by what stands before a token."""
        return bool(self.penalises or self.logit_bias or self.forbids)

    @property
    def forbids(self) -> bool:
        """Some tokens may become impossible by what stands before them."""
        return bool(self.bans or self.processors)

    @property
    def bans(self) -> bool:
        """Of some tokens that is known without their logits."""
        return bool(self.bad_words or self.min_new_tokens or self.grammar is not None)

    def check(self, vocabulary: int) -> None:
        """Refuse token ids that a target of this vocabulary does not have, and bans that leave it nothing to say."""
        ids = [token for token, _ in self.biases] + [token for word in self.bad_words for token in word]
        wrong = sorted({token for token in ids if not 0 <= token < vocabulary})
        if wrong:
            raise ConfigError(
                f"logit_bias or bad_words name token {wrong[0]}, outside the target's vocabulary of {vocabulary}; "
                f"choose ids from 0 to {vocabulary - 1}"
            )
        if len({word[0] for word in self.bad_words if len(word) == 1}) == vocabulary:
            raise ConfigError(f"bad_words forbids all {vocabulary} tokens of the vocabulary; leave at least one")


def whole(name: str, value: Any) -> int:
    """`value` as an int.  Raises ConfigError where it is no whole number, as True is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _real(name: str, value: Any) -> float:
    """`value` as a float that is no infinity in float32, in which most laws are computed; NaN is left to the caller."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    most = torch.finfo(torch.float32).max
    if value != math.inf and abs(value) > most:  # type: ignore[operator]
        raise ConfigError(f"{name} must be at most {most:.2g} in size, which float32 holds, got {value}")
    return float(value)
