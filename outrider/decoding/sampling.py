"""From logits to the distribution that drafter and target both mean; temperature 0 is one-hot.

The order is part of the definition.  What hangs on a node's own prefix comes first and is `penalties.processed`: logit bias,
repetition penalty, frequency and presence penalty, bad words, end tokens before `min_new_tokens`, grammar, own processors.
Then, here: temperature, top-k, top-p, min-p, typical-p.  It is the order of transformers, which has no frequency and presence.

All noise is counter-based: a number is a hash of (seed, output index, purpose, salt) and of nothing else, so a slot's text
does not depend on who shares its batch, and a step that is repeated draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.grammar import Rules
from outrider.errors import ConfigError

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
        for name in ("top_k", "seed", "min_new_tokens", "logprobs"):
            value = getattr(self, name)
            if value is not None or name in ("top_k", "min_new_tokens"):
                object.__setattr__(self, name, whole(name, value))
        for name in REAL:
            object.__setattr__(self, name, _real(name, getattr(self, name)))
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
        self._check_draw()
        self._check_prefix()

    def _check_draw(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature {self.temperature} is not a number of 0 or more; 0 is greedy")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p {self.top_p} lies outside (0, 1]; 1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p {self.min_p} lies outside [0, 1]; 0 keeps every token")
        if not 0 < self.typical_p <= 1:
            raise ConfigError(f"typical_p {self.typical_p} lies outside (0, 1]; 1 keeps every token")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} does not fit in 64 bits")
        if self.logprobs is not None and self.logprobs < 0:
            raise ConfigError(f"logprobs {self.logprobs} is negative; 0 reports the emitted tokens alone, None nothing")

    def _check_prefix(self) -> None:
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ConfigError(f"repetition_penalty {self.repetition_penalty} is not a number above 0; 1 changes nothing")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} {getattr(self, name)} is not a finite number; 0 changes nothing")
        if self.min_new_tokens < 0:
            raise ConfigError(f"min_new_tokens {self.min_new_tokens} is negative; 0 lets a text end at once")
        for token, value in self.biases:
            if not math.isfinite(value):
                raise ConfigError(f"logit_bias {value} of token {token} is not a finite number; bad_words forbids a token")
        if not all(self.bad_words):
            raise ConfigError("bad_words holds an empty sequence, which every text completes; leave it out")
        if self.grammar is not None and not callable(getattr(self.grammar, "start", None)):
            raise ConfigError(
                f"grammar {self.grammar!r} is none; give Grammar.json(schema), Grammar.regex(pattern) or Grammar.lark(text)"
            )
        for processor in self.processors:
            if not callable(processor):
                raise ConfigError(f"processors holds {processor!r}; wanted functions (input_ids, scores) -> scores")

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


REAL = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


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


FEW, SPARE = 1024, 64
"""Most tokens of a top-k that are cut out before the rest is done, and how many equals of the last are looked for."""


class Settings(NamedTuple):
    """The `Sampling` of every live slot, as tensors [B]; None where no slot asks for it."""

    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None = None
    typical_p: Tensor | None = None

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device | str = "cpu") -> Settings:
        def column(values: list, idle: float) -> Tensor | None:
            return None if all(v == idle for v in values) else torch.tensor(values, device=device)

        return cls(
            column([s.temperature for s in samplings], 0.0),
            column([s.top_k for s in samplings], 0),
            column([s.top_p for s in samplings], 1.0),
            column([s.min_p for s in samplings], 0.0),
            column([s.typical_p for s in samplings], 1.0),
        )

    def of_slots(self, slots: Tensor) -> Settings:
        """Those of some slots, [B] bool."""
        return Settings(*(None if column is None else column[slots] for column in self))

    @property
    def is_greedy(self) -> bool:
        """Every live slot is at temperature 0."""
        return self.temperature is None

    @property
    def is_tempered(self) -> bool:
        """Every live slot draws at a temperature above 0 from all tokens: its law is `tempered`."""
        cuts = (self.top_k, self.top_p, self.min_p, self.typical_p)
        return self.temperature is not None and cuts == (None,) * 4 and bool((self.temperature > 0).all())


def distribution(logits: Tensor, settings: Settings) -> Tensor:
    """The law of the next token.  logits [B, ..., V]; returns the same shape, each row summing to 1.

    The target's logits come from `penalties.processed`; a drafter may give its own as they are, and need not be right.
    float32, or float64 where the logits are: bf16 softmax loses mass over 150k tokens.  Ties at temperature 0 go to the
    lowest token id.  A slot's law is computed the same way whoever shares the batch.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if settings.temperature is None:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if settings.top_k is None:
        return _law(logits, settings)
    top_k = settings.top_k.tolist()
    kinds = sorted(set(top_k))
    if len(kinds) == 1:
        return _law_of_few(logits, settings, kinds[0])
    p = torch.empty_like(logits)
    for k in kinds:
        slots = torch.tensor([own == k for own in top_k], device=logits.device)
        p[slots] = _law_of_few(logits[slots], settings.of_slots(slots), k)
    return p


def _law(logits: Tensor, settings: Settings) -> Tensor:
    """Temperature, then every cut but top-k; slots at temperature 0 are one-hot."""
    assert settings.temperature is not None
    shape = (-1,) + (1,) * (logits.dim() - 1)
    is_cold = settings.temperature == 0
    p = tempered(logits, torch.where(is_cold, 1.0, settings.temperature))
    is_cold = is_cold.view(shape)
    for column, keep in ((settings.top_p, _keep_top_p), (settings.min_p, _keep_min_p), (settings.typical_p, _keep_typical)):
        if column is not None:
            p = keep(p, column.to(p.dtype).view(shape))
    if bool(is_cold.any()):
        cold = torch.zeros_like(p).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        p = torch.where(is_cold, cold, p)
    return p


def tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits / temperature), for logits [B, ..., V] and temperatures [B] above 0."""
    heat = temperature.to(logits.dtype).view((-1,) + (1,) * (logits.dim() - 1))
    # the largest is 0, so that a temperature near 0 overflows to -inf alone: of two +inf softmax makes NaN
    return ((logits - logits.amax(-1, keepdim=True)) / heat).softmax(-1)


def _law_of_few(logits: Tensor, settings: Settings, k: int) -> Tensor:
    """The law of slots that all keep the k most likely tokens and equals of the k-th; 0 keeps all.

    Few candidates are cut out first, in the order of their ids, and all else is done on them: of 150k tokens one pass is read.
    """
    if not 0 < k < logits.shape[-1]:
        return _law(logits, settings)
    best = logits.topk(min(k + SPARE, logits.shape[-1]), -1)
    least = best.values[..., k - 1 : k]
    if k > FEW or bool((best.values[..., -1:] == least).any()):
        return _law(logits.masked_fill(logits < least, -torch.inf), settings)
    ids, order = best.indices.sort(-1)
    few = best.values.gather(-1, order)
    p = _law(few.masked_fill(few < least, -torch.inf), settings)
    return torch.zeros_like(logits).scatter_(-1, ids, p)


def _keep_top_p(p: Tensor, top_p: Tensor) -> Tensor:
    """The most likely tokens until their sum reaches top_p, at least one, normalised again; 1 keeps all."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    top_p = top_p.clamp(min=torch.finfo(top_p.dtype).tiny)  # what float32 rounds to 0 keeps one all the same
    kept = torch.zeros_like(p).scatter_(-1, order, ranked.masked_fill((before >= top_p) & (top_p < 1), 0.0))
    return kept / kept.sum(-1, keepdim=True)


def _keep_min_p(p: Tensor, min_p: Tensor) -> Tensor:
    """The tokens at least min_p times as likely as the likeliest, normalised again."""
    kept = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    return kept / kept.sum(-1, keepdim=True)


def _keep_typical(p: Tensor, typical_p: Tensor) -> Tensor:
    """The tokens whose surprise -log p is nearest to the entropy until their sum reaches typical_p; equals of the last stay.

    typical_p 1 keeps all.
    """
    surprise = -p.log()
    entropy = (p * surprise).nan_to_num(0.0).sum(-1, keepdim=True)
    ranked, order = (surprise - entropy).abs().sort(dim=-1, stable=True)
    last = (p.gather(-1, order).cumsum(-1) < typical_p).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
    is_odd = (surprise - entropy).abs() > ranked.gather(-1, last)
    kept = p.masked_fill(is_odd & (typical_p < 1), 0.0)
    return kept / kept.sum(-1, keepdim=True)


class Purpose(IntEnum):
    """What a number is drawn for; numbers of different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    TARGET = 3


@dataclass(frozen=True, slots=True)
class Streams:
    """The noise of every live slot, from the token that is committed next on."""

    seeds: Tensor
    """[B] int64."""
    index: Tensor
    """[B] int64, output index of the next token; depth d of a draft stands at index + d."""
    seeded: Tensor | None = None
    """[B] bool, slots that draft with the target's own noise; None where none does.  Their drafts are deterministic nodes to
    the law, which emits the target's own draw: the text is the same whatever was drafted.  Daliri, Musco and Suresh 2024."""

    def uniform(self, depth: Tensor | int, purpose: Purpose, salt: int = 0) -> Tensor:
        """[B] float64 in (0, 1)."""
        return _to_unit(_mix(self._key(depth, purpose) + _wrap(salt * _STEP)))

    def draw(self, weights: Tensor, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        """One token a row with probability in proportion to its weight.  weights [B, V], or [B, W, V] with a salt [W] that
        tells a slot's rows apart; returns [B] or [B, W] int64.

        An exponential race: token x wins with the largest weights[x] / E[x], where E[x] depends on (seed, index, purpose,
        salt, x) alone, so two laws that are close mostly draw the same token from the same noise; and with the winner's weight
        at 0 the same noise draws the runner-up, as if anew.  The target's noise has no salt: a seeded slot drafts without.
        """
        if weights.shape[-1] > MANY and weights.device.type == "cpu":
            flat = weights.flatten(0, -2)
            rows, tokens = flat.nonzero().unbind(-1)
            if 8 * len(rows) < flat.numel():
                key = self._key(depth, purpose, salt)
                times = flat[rows, tokens] / _exponential(key.expand(weights.shape[:-1]).flatten()[rows], tokens)
                return _first_of_largest(times, rows, tokens, len(flat)).view(weights.shape[:-1])
        return race(weights, self._key(depth, purpose, salt), torch.arange(weights.shape[-1], device=weights.device))

    def keys(self, depths: int, purpose: Purpose) -> Tensor:
        """What `race` needs to draw as `draw` does at depths 0 to `depths` - 1: [B, depths] int64."""
        seeded = None if self.seeded is None else self.seeded[:, None]
        every = torch.arange(depths, device=self.seeds.device)
        return Streams(self.seeds[:, None], self.index[:, None], seeded)._key(every, purpose)

    def _key(self, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        """[B], or [B, W] for a salt [W]."""
        own = self._hash(depth, purpose, salt)
        if purpose is not Purpose.DRAFT or self.seeded is None:
            return own
        seeded, target = self.seeded, self._hash(depth, Purpose.TARGET)
        if salt is not None:
            seeded, target = seeded.unsqueeze(-1), target.unsqueeze(-1)
        return torch.where(seeded, target, own)

    def _hash(self, depth: Tensor | int, purpose: Purpose, salt: Tensor | None = None) -> Tensor:
        counter = (self.index + depth) * _wrap(_STEP * 3) + int(purpose)
        if purpose is Purpose.DRAFT:
            # Fresh in every step: a policy may have seen what an earlier draft held here, behind its rejected token.
            counter = counter + _mix(self.index + 1)
        seeds = _mix(self.seeds + _STEP)
        if salt is not None:
            # salt 0 adds nothing: it is the noise that a draw without salt has
            counter, seeds = counter.unsqueeze(-1) + _mix(salt * _STEP), seeds.unsqueeze(-1)
        return _mix(seeds ^ _mix(counter))


def salted(seeds: Tensor, part: int) -> Tensor:
    """Seeds of one of several drafters that must draw independently.  Of a part's own parts they are salted again: parts on
    another path have other seeds.  seeds [B]."""
    return _mix(_mix(seeds + _STEP) ^ _wrap((part + 1) * _STEP))


def race(weights: Tensor, key: Tensor, tokens: Tensor) -> Tensor:
    """The token with the largest weight / E, where E is exponential noise of this key.  weights [..., V], key [...].

    tokens: 0 to V - 1; made while being traced, torch 2.13 would compile them into code that crashes.
    """
    return (weights / _exponential(key.unsqueeze(-1), tokens)).argmax(-1)


def _wrap(value: int) -> int:
    """An integer as int64 sees it."""
    return (value + 2**63) % 2**64 - 2**63


MANY = 8192
"""Vocabulary from which on it pays to draw noise only for tokens that can win."""


def _exponential(key: Tensor, tokens: Tensor) -> Tensor:
    """Standard exponential noise of these tokens, float64."""
    return -_to_unit(_mix(key + tokens * _STEP)).log()


def _first_of_largest(values: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """For each of `count` rows the token with the largest value, the lowest of equals; 0 for a row without any."""
    best = values.new_zeros(count).scatter_reduce(0, rows, values, "amax", include_self=False)
    wins = values == best[rows]
    return tokens.new_zeros(count).scatter_reduce(0, rows[wins], tokens[wins], "amin", include_self=False)


# SplitMix64's increment and finaliser (Steele, Lea and Flood, 2014), in int64 that wraps.
_STEP = _wrap(0x9E3779B97F4A7C15)
_FIRST = _wrap(0xBF58476D1CE4E5B9)
_SECOND = _wrap(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _to_unit(x: Tensor) -> Tensor:
    """float64 in (0, 1) from the upper 52 bits: never 0, never 1.  With 53, the half would be rounded up to 1."""
    return (((x >> 12) & 0xFFFFFFFFFFFFF).double() + 0.5) * 2.0**-52
