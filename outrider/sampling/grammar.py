"""Structured output: restricts tokens so that the text matches a JSON schema, a regular expression or a Lark grammar.

A grammar is text; compiled for a target's tokenizer it becomes `Rules` over token ids, and every request walks its own
`Automaton`.  End tokens are allowed exactly where the grammar may end; after a text that can't continue, they are the
only ones allowed.  The rules are llguidance's (an extra); any other object with `start` works as well.

V vocabulary.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.errors import ConfigError

Kind = Literal["json", "regex", "lark"]


class Automaton(Protocol):
    """One request's position in its grammar."""

    def push(self, tokens: Sequence[int]) -> None:
        """Advance over committed tokens."""

    def allowed(self, path: tuple[int, ...]) -> Tensor:
        """Which tokens may follow the committed text and this path, [V] bool on the CPU; none after an invalid path."""


class Rules(Protocol):
    """A grammar over one target's token ids."""

    def start(self) -> Automaton:
        """The position before the first new token."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar of a whole output, without the prompt.  Made by `json`, `regex` or `lark`.

    Raises ConfigError for an invalid grammar, or a missing extra.
    """

    kind: Kind
    text: str

    def __post_init__(self) -> None:
        _source(self.kind, self.text)

    @classmethod
    def json(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that matches this schema, with keys in the schema's order."""
        try:
            text = json.dumps(json.loads(schema) if isinstance(schema, str) else dict(schema))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the JSON schema {_short(schema)} can't be read ({error}); give a dict or its JSON"
            ) from error
        return cls("json", text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that this pattern, in Rust's regex syntax, matches completely."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text derived from the rule `start` of this Lark grammar."""
        return cls("lark", text)

    def compiled(self, target: Any) -> Rules:
        """The rules over the token ids of this target, which must have a tokenizer; compiled once."""
        compilers = _COMPILERS.setdefault(target, {})
        if target.ends not in compilers:
            compilers[target.ends] = _compiler(target)
        return compilers[target.ends](self)

    def start(self) -> Automaton:
        raise ConfigError(f"{self} is not compiled for a target; give the Request `grammar.compiled(target)`")

    def __str__(self) -> str:
        return f"the {'JSON schema' if self.kind == 'json' else self.kind} {_short(self.text)}"


def _short(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    return repr(text if len(text) <= 60 else text[:57] + "...")


# ── llguidance ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise ConfigError(
            "a grammar needs llguidance, which is not installed: pip install 'outrider[grammar]'"
        ) from error
    return LLMatcher


@functools.lru_cache(256)
def _source(kind: Kind, text: str) -> str:
    """The grammar in llguidance's format, validated."""
    matcher = _matcher()
    makers: dict[Kind, tuple[Callable[[str], str], str]] = {
        "json": (matcher.grammar_from_json_schema, "JSON schema that llguidance supports"),
        "regex": (matcher.grammar_from_regex, "regular expression of Rust's syntax"),
        "lark": (matcher.grammar_from_lark, "Lark grammar"),
    }
    make, expected = makers[kind]
    try:
        source = make(text)
        is_wrong, messages = matcher.validate_grammar_with_warnings(source)
    except (TypeError, ValueError) as error:
        is_wrong, messages = True, [str(error)]
    if is_wrong:
        raise ConfigError(f"the grammar {_short(text)} is not a {expected}: {_first_line(messages[0])}")
    for message in messages:
        logging.getLogger(__name__).warning("grammar %s: %s", _short(text), message)
    return source


def _first_line(message: str) -> str:
    return " ".join(message.split())[:200]


def _compiler(target: Any) -> Callable[[Grammar], Rules]:
    """Compiles grammars for this target's tokenizer, each once.  Keeps no reference to the target."""
    name, tokenizer, size = target.spec.name, getattr(target, "tokenizer", None), target.spec.vocabulary
    if tokenizer is None:
        raise ConfigError(f"target {name!r} has no tokenizer, which a grammar needs; load the target by name or folder")
    if not target.ends:
        raise ConfigError(
            f"target {name!r} has no end token, and a grammar needs one to end; set eos_token_id in its config"
        )
    matcher_of = _matcher()
    from llguidance.hf import from_tokenizer

    try:
        # a tokenizer may have more tokens than the target, or fewer
        vocabulary = from_tokenizer(tokenizer, n_vocab=max(size, len(tokenizer)), eos_token=sorted(target.ends))
    except Exception as error:  # from a Rust library: no narrower type is guaranteed
        raise ConfigError(
            f"llguidance can't read the tokenizer of {name!r}: {_first_line(str(error))}; leave out the grammar"
        ) from error

    @functools.lru_cache(256)
    def compiled(grammar: Grammar) -> Rules:
        matcher = matcher_of(vocabulary, _source(grammar.kind, grammar.text), log_level=0)
        if matcher.is_error():
            raise ConfigError(f"{grammar} can't be compiled: {_first_line(matcher.get_error())}; simplify it")
        return _Walk(matcher, size, grammar)

    return compiled


_COMPILERS: WeakKeyDictionary[Any, dict[frozenset[int], Callable[[Grammar], Rules]]] = WeakKeyDictionary()
"""By target and its end tokens."""
_BITS = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 1
"""[256, 8], the bits of each byte, lowest first."""


class _Walk:
    """A matcher that has read the committed text and the last path; it rolls back only as far as necessary.

    It is also `Rules`: the first one of a grammar reads nothing, and is copied for every request.
    """

    def __init__(self, matcher: Any, vocabulary: int, grammar: Grammar):
        self.matcher, self.vocabulary, self.grammar = matcher, vocabulary, grammar
        self._path: list[int] = []
        self.is_lost = False

    def start(self) -> Automaton:
        return _Walk(self.matcher.deep_copy(), self.vocabulary, self.grammar)

    def push(self, tokens: Sequence[int]) -> None:
        self.is_lost = not self._go(tuple(tokens)) or self.is_lost
        self._path = []

    def allowed(self, path: tuple[int, ...]) -> Tensor:
        if self.is_lost or not self._go(path):
            return torch.zeros(self.vocabulary, dtype=torch.bool)
        bits = bytearray(self.matcher.compute_bitmask())
        self._refuse_errors()
        return _BITS.index_select(0, torch.frombuffer(bits, dtype=torch.uint8).int()).flatten()[: self.vocabulary]

    def _go(self, path: tuple[int, ...]) -> bool:
        """Move to this path after the committed text; returns whether the grammar allows it."""
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(self._path, path, strict=False))])
        if common < len(self._path):
            self.matcher.rollback(len(self._path) - common)
        length = common + self.matcher.try_consume_tokens(list(path[common:]))
        self._refuse_errors()
        self._path = list(path[:length])
        return length == len(path)

    def _refuse_errors(self) -> None:
        if self.matcher.is_error():
            raise ConfigError(
                f"{self.grammar} became too complex for llguidance: {_first_line(self.matcher.get_error())}; simplify "
                f"it"
            )
