"""Encodes chats so that control tokens spelled out in messages are ordinary text.

A user who writes `<|im_end|>` must not end their turn.  Control tokens in messages, tools and variables are replaced by
placeholders while the template renders them, so that every control token in the rendered text comes from the template.
The rendered text is then encoded by a copy of the tokenizer in which control tokens have unguessable names, and the
placeholders become text again.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.errors import DataError

Span = tuple[int, int]
BARS = re.compile(r"<[|｜].*[|｜]>")
OWN = ("assistant", "system", "developer")
"""Roles whose texts may contain those template marks that are not special tokens, such as <think>: the model generates
them, and system prompts explain them."""


def chat_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *,
    variables: Mapping[str, Any] | None = None, parse_special: bool = False, add_generation_prompt: bool = True,
    check: Callable[[str], None] = lambda text: None,
) -> list[int]:  # fmt: skip
    """Token ids of a chat, rendered with the tokenizer's template.

    parse_special: control tokens spelled in messages become control tokens.  check: called with the rendered text, and
    may raise, before it is encoded.  Raises DataError if a tokenizer without a tokenizer.json would have to read a
    control token as text, otherwise whatever the template raises.
    """
    settings = {"add_generation_prompt": add_generation_prompt, **(variables or {})}
    placeholders = Placeholders(tokenizer)
    if not parse_special:
        messages = [placeholders.message(message) for message in messages]
        tools, settings = [placeholders.plain(tool) for tool in tools], placeholders.plain(settings, is_own=True)
    options = settings | ({"tools": list(tools)} if tools else {})
    text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
    check(placeholders.shown(text))
    if placeholders.spelled:
        return list(placeholders.encoded(text).ids)
    return list(tokenizer.encode(text, add_special_tokens=False))


def text_tokens(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text; control tokens spelled out in it are text.  Raises DataError like `chat_tokens`."""
    placeholders = Placeholders(tokenizer)
    hidden = placeholders.plain(text)
    if not placeholders.spelled:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    return list(placeholders.encoded(hidden, add_special_tokens=add_special_tokens).ids)


class Encoded:
    """Token ids [S], their start and end in the text, and spans of the rendered text in that text."""

    def __init__(self, ids: list[int], offsets: list[Span], spans: list[Span]):
        self.ids, self.offsets, self.spans = ids, offsets, spans


class Placeholders:
    """Control tokens spelled out in messages, replaced by placeholders until the messages are rendered."""

    def __init__(self, tokenizer: Any):
        self.controls = _controls_of(tokenizer)
        self.spelled: list[str] = []
        self._nonce = f"{secrets.randbelow(10**24):024d}"  # digits survive everything that templates do with texts
        self._back = re.compile(f"{self._nonce}([0-9]{{9}})")

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without control tokens."""
        hidden: dict[str, Any] = self.plain(message, is_own=message.get("role") in OWN)
        return hidden

    def plain(self, value: Any, is_own: bool = False) -> Any:
        """A value without control tokens in any of its texts, names of fields included."""
        if isinstance(value, str):
            pattern = self.controls.special if is_own else self.controls.all
            return value if pattern is None else pattern.sub(self._put, self.controls.undisguised(value, pattern))
        if isinstance(value, Mapping):
            return {self.plain(name, is_own): self.plain(one, is_own) for name, one in value.items()}
        return [self.plain(one, is_own) for one in value] if isinstance(value, list | tuple) else value

    def _put(self, match: re.Match[str]) -> str:
        self.spelled.append(match[0])
        return f"{self._nonce}{len(self.spelled) - 1:09d}"

    def shown(self, rendered: str) -> str:
        """The rendering with the control tokens that messages spell."""
        return self._back.sub(lambda match: self.spelled[int(match[1])], rendered) if self.spelled else rendered

    def encoded(self, rendered: str, spans: Sequence[Span] = (), *, add_special_tokens: bool = False) -> Encoded:
        """Token ids of the template's rendering; spans [start, end) of it."""
        names, text, moved = self.controls.names, rendered, list(spans)
        if self.controls.all is not None:
            text, moved = _replaced(self.controls.all, lambda match: names[match[0]], text, moved)
        text, moved = _replaced(self._back, lambda match: self.spelled[int(match[1])], text, moved)
        made = self.controls.copy.encode(text, add_special_tokens=add_special_tokens)
        return Encoded([self.controls.ids.get(token, token) for token in made.ids], made.offsets, moved)


def chat_with_answers(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> Encoded:  # fmt: skip
    """A whole chat with these spans if the template marks what the assistant generates; otherwise like
    `chat_tokens`."""
    placeholders = Placeholders(tokenizer)
    hidden = [placeholders.message(message) for message in messages]
    tools = [placeholders.plain(tool) for tool in tools]
    options = ({"tools": tools} if tools else {}) | placeholders.plain(variables, is_own=True)
    draw: Any = render_jinja_template  # its annotation says that it returns a single text
    texts, marks = draw(
        conversations=[hidden], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True,
        **(tokenizer.special_tokens_map | options),
    )  # fmt: skip
    if placeholders.spelled:
        return placeholders.encoded(texts[0], marks[0])
    made = tokenizer(texts[0], add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    return Encoded(made["input_ids"], made["offset_mapping"], list(marks[0]))


# ── the tokenizer's control tokens ────────────────────────────────────────────────────────────────────────────────────


class Controls:
    """A tokenizer's control tokens: special tokens, and added tokens that are marks, such as <tool_call>."""

    def __init__(self, tokenizer: Any, template: str):
        added = {entry.content: entry.special for entry in tokenizer.added_tokens_decoder.values()}
        special = {text for text, is_special in added.items() if is_special or text in tokenizer.all_special_tokens}
        written = {text for text in added if _is_mark(text, template)}
        self.template = template
        self.special, self.all = _pattern(special), _pattern(special | written)
        nonce = secrets.token_hex(16).translate(str.maketrans("abcdef", "012345"))
        self.names = {text: f"\ue000{nonce}{i:06d}\ue001" for i, text in enumerate(sorted(special | written))}
        """Name of each control token in the copy."""
        self.ids: dict[int, int] = {}
        """Ids of control tokens in the copy to those in the tokenizer, once there is a copy."""
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._copy: Tokenizer | None = None
        self._normalizer = getattr(self._backend, "normalizer", None)

    def undisguised(self, text: str, pattern: re.Pattern[str]) -> str:
        """The text, normalised if normalisation yields other control tokens, such as <｜im_end｜> under NFKC."""
        normalized = text if self._normalizer is None else self._normalizer.normalize_str(text)
        return text if pattern.findall(normalized) == pattern.findall(text) else normalized

    @property
    def copy(self) -> Tokenizer:
        """The tokenizer with other names for control tokens; created when first needed."""
        if self._copy is None:
            if not isinstance(self._backend, Tokenizer):
                raise DataError(
                    f"a text spells a control token of the chat template, such as {next(iter(self.names))!r}, and this "
                    "tokenizer, which has no tokenizer.json, can't read one as text; remove it"
                )
            copy = Tokenizer.from_str(json.dumps(_renamed(json.loads(self._backend.to_str()), self.names)))
            for text, name in self.names.items():
                copy_id, token = copy.token_to_id(name), self._backend.token_to_id(text)
                if copy_id is not None and token is not None and copy_id != token:
                    self.ids[copy_id] = token
            self._copy = copy
        return self._copy


def _is_mark(text: str, template: str) -> bool:
    """Whether an added token is a mark: the template contains it or its opening or closing counterpart, or it has bars.
    Others are text, such as a run of spaces or HTML's <b>."""
    other = text.replace("</", "<", 1) if text.startswith("</") else text.replace("<", "</", 1)
    return bool(text.strip()) and (text in template or other in template or BARS.fullmatch(text) is not None)


_controls: WeakKeyDictionary[Any, Controls] = WeakKeyDictionary()


def _controls_of(tokenizer: Any) -> Controls:
    template = str(tokenizer.chat_template or "")
    controls = _controls.get(tokenizer)
    if controls is None or controls.template != template:
        controls = _controls[tokenizer] = Controls(tokenizer, template)
    return controls


def _renamed(state: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json with other names for tokens, in its model's vocabulary too."""
    model = state["model"]
    for entry in state["added_tokens"]:
        entry["content"] = names.get(entry["content"], entry["content"])
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token for text, token in vocabulary.items()}
    else:  # Unigram: pieces with their scores
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return state | {"truncation": None, "padding": None}


def _replaced(pattern: re.Pattern[str], by: Any, text: str, spans: Iterable[Span]) -> tuple[str, list[Span]]:
    """The text with each match replaced, and these spans moved accordingly."""
    parts, ends, longer = [], [0], [0]  # end of each match, and how much longer the new text is up to that point
    for match in pattern.finditer(text):
        new = by(match)
        parts += [text[ends[-1] : match.start()], new]
        ends.append(match.end())
        longer.append(longer[-1] + len(new) - len(match[0]))
    at = ends[-1]

    def moved(position: int) -> int:
        return position + longer[bisect_right(ends, position) - 1]

    return "".join([*parts, text[at:]]), [(moved(start), moved(end)) for start, end in spans]


def _pattern(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that matches any of these texts, the longest first, in time independent of their number."""
    tree: dict[str, Any] = {}
    for text in filter(None, texts):
        at = tree
        for letter in text:
            at = at.setdefault(letter, {})
        at[""] = {}
    return re.compile(_branch(tree)) if tree else None


def _branch(tree: Mapping[str, Any]) -> str:
    """A trie as a regular expression."""
    tails = [f"{re.escape(letter)}{_branch(rest)}" for letter, rest in sorted(tree.items()) if letter]
    if not tails:
        return ""
    joined = tails[0] if len(tails) == 1 else f"(?:{'|'.join(tails)})"
    return f"(?:{joined})?" if "" in tree else joined
