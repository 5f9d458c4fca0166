"""Tool calls: the forms in which chat templates teach models to write them, and their parser.

- Hermes, Qwen 2.5 and 3: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, once per call.
- Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; newer ones `[TOOL_CALLS]NAME[ARGS]{…}`, once per call.
- Llama 3: the whole answer is `{"name": …, "parameters": {…}}`, possibly after `<|python_tag|>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple


class Form(NamedTuple):
    """How a family of models writes calls."""

    open: str
    """Text before a call."""
    close: str
    """Text after a call; "" if calls continue to the end of the answer."""
    arguments: str = "arguments"
    """Key of the arguments."""
    others: tuple[str, ...] = ()
    """Further marks within calls."""
    is_bare: bool = False
    """Whether an answer that begins with a JSON object is a call without a mark."""

    @property
    def marks(self) -> set[str]:
        """All marks; where they are special tokens, the text must include them to be parsed."""
        return {self.open, self.close, *self.others} - {""}

    @property
    def begin(self) -> str:
        """How an answer that must be a call begins; a single JSON object follows."""
        return "" if self.is_bare else f"{self.open}\n"


HERMES = Form("<tool_call>", "</tool_call>")
MISTRAL = Form("[TOOL_CALLS]", "", others=("[ARGS]", "[CALL_ID]"))
LLAMA3 = Form("<|python_tag|>", "", "parameters", is_bare=True)
NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?={)")
"""Name of a call in Mistral's newer form."""
DECODER = json.JSONDecoder(strict=False)


class ToolCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object, as text."""


def form_of(template: str) -> Form | None:
    """The form that a chat template teaches; None for an unknown one."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    return LLAMA3 if "<|python_tag|>" in template or "ipython" in template else None


def schema_of(functions: Sequence[Mapping[str, Any]], form: Form | None) -> dict[str, Any]:
    """JSON schema of a call of one of these functions."""
    key = "arguments" if form is None else form.arguments
    calls, definitions = [], {}
    for number, function in enumerate(functions):
        definitions[str(number)] = _moved(function.get("parameters") or {"type": "object"}, f"#/$defs/{number}")
        properties = {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/{number}"}}
        calls.append(
            {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        )
    return {"anyOf": calls, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema embedded in another one at `place`: its references to itself are adjusted."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


class CallParser:
    """Splits an answer, as it grows, into content and tool calls.  A call that can't be parsed is content."""

    def __init__(self, form: Form | None, names: Collection[str], *, is_forced: bool = False, most: int | None = None):
        """names: of the functions; a call that no mark precedes must name one.  is_forced: the answer is a single JSON
        object.  most: calls beyond this number are dropped."""
        self.form, self.names, self.is_forced, self.most = form, names, is_forced, most
        self.count = 0
        """Calls so far."""
        self._held = ""
        """Text that may be, or begin, a call, and white space before it."""
        self._mark: str | None = None
        """What opened the call that is being read, if any."""
        self._tried = 0
        """The held text has no call that ends before this position."""
        self._is_first = True
        """Whether only white space was read so far."""

    def push(self, text: str, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Content and calls that are now complete."""
        self._held += text
        content, calls = "", list[ToolCall]()
        while self._held:
            if self._mark is None:
                before, self._mark, self._held = self._opening(is_last)
                content += before
                if self._mark is None:
                    break
            result = self._read(is_last)
            if result is None:
                if is_last:
                    content, self._held = f"{content}{self._mark}{self._held}", ""
                break
            new, self._held = result
            self._mark, self._tried = None, 0
            left = len(new) if self.most is None else max(0, self.most - self.count)
            calls += new[:left]
            self.count += len(new[:left])
        return content, calls

    def _opening(self, is_last: bool) -> tuple[str, str | None, str]:
        """The held text as content, the mark that follows it if any, and the text after both."""
        held, form = self._held, self.form
        if self.is_forced or form is None:
            return "", "", held
        if self._is_first and held.strip():
            self._is_first = False
            if form.is_bare and held.lstrip().startswith("{"):
                return "", "", held
        before, mark, after = held.partition(form.open)
        if mark:
            return before.rstrip(), mark, after
        if is_last:
            return "" if self.count and not held.strip() else held, None, ""
        cut = next(n for n in range(len(form.open) - 1, -1, -1) if held.endswith(form.open[:n]))
        content = held[: len(held) - cut].rstrip()
        return content, None, held[len(content) :]

    def _read(self, is_last: bool) -> tuple[list[ToolCall], str] | None:
        """The calls at the beginning of the held text, and the text after them; None if there are none yet."""
        held = self._held
        if not self.is_forced and self.form is not None and (close := self.form.close):
            while (at := held.find(close, self._tried)) >= 0:
                self._tried = at + len(close)
                if call := _parsed(held[:at]):
                    return [call], held[self._tried :]
        if not is_last:
            return None
        calls = _all(held, self.form.open if self.form else "")
        if self._mark == "" and not self.is_forced and not {call.name for call in calls} <= {*self.names}:
            return None
        return (calls, "") if calls else None


def _all(text: str, mark: str) -> list[ToolCall]:
    """The calls of a text that consists of nothing else; none otherwise."""
    calls: list[ToolCall] = []
    while text := text.strip("; \t\r\n").removeprefix(mark or "\0").lstrip():
        match = NAMED.match(text)
        try:
            value, end = DECODER.raw_decode(text, match.end() if match else 0)
        except (ValueError, RecursionError):
            return []
        values = [{"name": match[1], "arguments": value}] if match else value if isinstance(value, list) else [value]
        read = [_call(one) for one in values]
        if not all(read):
            return []
        calls += [call for call in read if call]
        text = text[end:]
    return calls


def _parsed(text: str) -> ToolCall | None:
    try:
        return _call(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
