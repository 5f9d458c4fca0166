"""Chats to token ids: renders messages and tools with the tokenizer's chat template, in Jinja's sandbox."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from outrider.errors import DataError
from outrider.serve.bodies.refusals import Refusal, invalid
from outrider.serve.bodies.request_models import ChatRequest, Message, NamedTool, TextFormat, Tool, offered_tools
from outrider.targets.text.chat import rendered
from outrider.targets.text.tool_calls import CallParser, form_of

log = logging.getLogger(__name__)

TAKEN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
}  # fmt: skip
"""Names that a client may not set as variables of the template."""


def tokens_of(
    messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any] | None, tokenizer: Any,
    parse_special: bool = False, check: Callable[[str], None] = lambda text: None,
) -> list[int]:  # fmt: skip
    """Token ids of a chat, up to the beginning of the answer.  check: may refuse the rendered text before it is
    encoded.  Raises Refusal if the template rejects the chat."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise invalid("this model has no chat template; use /v1/completions with a prompt", "messages")
    rows = [
        message.model_dump(exclude_none=True, exclude={"annotations", "refusal", "cache_control"})
        for message in messages
    ]
    functions = [tool.model_dump(exclude_none=True, exclude={"cache_control"}) for tool in tools or ()]
    template = tokenizer.get_chat_template(None, functions or None)
    _check(variables or {}, template)
    _check_tools(rows, functions, template)
    try:
        return rendered(
            tokenizer, rows, functions, variables, add_generation_prompt=True, parse_special=parse_special, check=check
        )
    except DataError as error:
        if isinstance(cause := error.__cause__, Refusal):
            raise cause from None
        if cause is None:
            raise invalid(str(error), "messages") from None
        if isinstance(cause, TemplateError):
            raise invalid(f"the model's chat template refuses these messages: {cause}", "messages") from None
        log.info("a chat template failed: %r", cause)  # withheld from the client: the template is a program
        raise invalid(
            "the model's chat template can't render these messages; see the model card for its format", "messages"
        ) from None


def calls_of(body: ChatRequest, tokenizer: Any) -> CallParser | None:
    """The parser of the tool calls in an answer; None for an answer that is text.  Raises Refusal for a choice that
    matches no tool."""
    tools, choice = offered_tools(body), body.tool_choice
    is_forced = isinstance(choice, NamedTool) or choice == "required"
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    if is_forced and not tools:
        names = ", ".join(tool.function.name for tool in body.tools or ()) or "none"
        raise invalid(f"tool_choice needs a tool of this request, which has {names}; add it to tools", "tool_choice")
    if is_forced and not isinstance(body.response_format, TextFormat | None):
        raise invalid("response_format has no effect on a tool call; leave out one of the two", "response_format")
    if not tools or tokenizer is None or tokenizer.chat_template is None:
        return None
    form = form_of(tokenizer.get_chat_template(None, [tool.model_dump(exclude_none=True) for tool in tools]))
    if form is None and not is_forced:
        return None  # this model's tool-call format is unknown
    most = 1 if is_forced or body.parallel_tool_calls is False else None
    return CallParser(form, {tool.function.name for tool in tools}, is_forced=is_forced, most=most)


def _check_tools(messages: Sequence[Mapping[str, Any]], functions: Sequence[Any], template: str) -> None:
    """Refuse tools and tool calls that the template would not render."""
    used = {"tools": bool(functions), "tool_calls": any(message.get("tool_calls") for message in messages)}
    for name, is_used in used.items():
        if is_used and not re.search(rf"\b{name}\b", template):
            raise invalid(
                f"{name} can't be shown to this model: its template does not render them; leave them out, or describe "
                "them in a message", name, "unsupported_field",
            )  # fmt: skip


def _check(variables: Mapping[str, Any], template: str) -> None:
    for name in variables:
        if (
            not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII)
            or name in TAKEN
            or not re.search(rf"\b{name}\b", template)
        ):
            raise invalid(
                f"chat_template_kwargs.{name} is not a variable of the model's chat template; leave it out",
                "chat_template_kwargs",
            )
