"""Chats as the target reads them: messages and tools through its tokenizer's own chat template, in Jinja's sandbox."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from outrider.errors import DataError
from outrider.serve.bodies.refusals import invalid
from outrider.serve.bodies.request_models import Message, Tool
from outrider.targets.text.chat import rendered
from outrider.targets.text.parts import text_of

log = logging.getLogger(__name__)

TAKEN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
}  # fmt: skip
"""What a client may not set as a variable of the template."""


def tokens_of(
    messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any] | None, tokenizer: Any,
    parse_special: bool = False,
) -> list[int]:  # fmt: skip
    """Token ids of a chat, up to where the answer begins.  Raises Refusal for what the template does not take."""
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
        return rendered(tokenizer, rows, functions, variables, add_generation_prompt=True, parse_special=parse_special)
    except DataError as error:
        if (cause := error.__cause__) is None:
            raise invalid(str(error), "messages") from None
        if isinstance(cause, TemplateError):
            raise invalid(f"the model's chat template refuses these messages: {cause}", "messages") from None
        log.info("a chat template failed: %r", cause)  # the template is a program, and its input is the client's
        raise invalid(
            "the model's chat template can't render these messages; see its model card for their form", "messages"
        ) from None


def texts_of(messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[str]:
    """All that a template may be given to write."""
    texts = [text_of(message.model_dump().get("content")) for message in messages]
    texts += [message.model_dump_json(exclude={"content"}) for message in messages if message.role == "assistant"]
    return texts + [tool.model_dump_json() for tool in tools or ()]


def _check_tools(messages: Sequence[Mapping[str, Any]], functions: Sequence[Any], template: str) -> None:
    """Refuse tools and their calls where the model would not be told of them."""
    used = {"tools": bool(functions), "tool_calls": any(message.get("tool_calls") for message in messages)}
    for name in (name for name, is_given in used.items() if is_given and not re.search(rf"\b{name}\b", template)):
        raise invalid(
            f"{name} can't be shown to this model: its template has no place for them; leave them out, or describe "
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
                f"chat_template_kwargs.{name} is no variable of the model's chat template; leave it out",
                "chat_template_kwargs",
            )
