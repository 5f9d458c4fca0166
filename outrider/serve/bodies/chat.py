"""Chats as the target reads them: messages and tools through its tokenizer's own chat template, in Jinja's sandbox."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from outrider.serve.bodies.refusals import invalid
from outrider.serve.bodies.schema import Content, Message, Tool

log = logging.getLogger(__name__)

TAKEN = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
}  # fmt: skip
"""What a client may not set as a variable of the template."""


def tokens_of(
    messages: Sequence[Message], tools: Sequence[Tool] | None, variables: Mapping[str, Any] | None, tokenizer: Any
) -> list[int]:
    """Token ids of a chat, up to where the answer begins.  Raises Refusal for what the template does not take."""
    if tokenizer is None or tokenizer.chat_template is None:
        raise invalid("this model has no chat template; use /v1/completions with a prompt", "messages")
    given = [_plain(message) for message in messages]
    functions = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
    template = tokenizer.get_chat_template(None, functions)
    _check(variables or {}, template)
    settings = {"add_generation_prompt": True, "tokenize": True, "return_dict": False, **(variables or {})}
    try:
        return list(tokenizer.apply_chat_template(given, tools=functions, **settings))
    except TemplateError as error:
        raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from None
    except Exception as error:  # the template is a program, and its input is the client's
        log.info("a chat template failed: %r", error)
        raise invalid(
            "the model's chat template can't render these messages; see its model card for their form", "messages"
        ) from None


def text_of(content: Content | None) -> str:
    """The text of a message; a line for each part."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates know it: contents are texts, arguments of tools are objects."""
    found = message.model_dump(exclude_none=True, exclude={"content", "annotations", "refusal"})
    found["content"] = text_of(message.content)
    if found["role"] == "developer":  # OpenAI's newer word
        found["role"] = "system"
    for call in found.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return found


def _arguments(text: str) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text


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
