"""Tool calls over HTTP: forced ones by a grammar, those that a model writes by itself, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import NotFoundError, OpenAI

from outrider import generation
from outrider.serve.bodies.answers import Answer, Choice
from outrider.serve.bodies.chat import calls_of
from outrider.serve.bodies.request_models import ChatRequest
from outrider.serve.calls import Call, Output
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.token_texts import TokenTexts

from .running import MODEL, Running, running

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.role }}={{ m.content }};{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% endfor %}{% endfor %}"
)
COUNT = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "count", "parameters": COUNT}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "additionalProperties": False}}},
]
ASK: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "temperature": 0, "max_tokens": 80,
}  # fmt: skip
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_a_forced_call_is_a_call(server: Running, client, talker, monkeypatch, choice: Any) -> None:
    """Catches a forced tool that is answered in text, arguments that do not fit the schema, another tool than the named
    one, and a stream that says something else."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", TEMPLATE)
    answer = client.chat.completions.create(**ASK, tool_choice=choice).choices[0]
    [call] = answer.message.tool_calls
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ({"count"} if choice is NAMED else {"count", "stop"})
    assert arguments.get("n") in (1, 2) if call.function.name == "count" else arguments == {}

    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ASK, tool_choice=choice, stream=True)]
    [streamed] = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert (streamed.index, streamed.function.name, streamed.function.arguments) == (
        0, call.function.name, call.function.arguments,
    )  # fmt: skip
    assert chunks[-1].finish_reason == "tool_calls" and not any(chunk.delta.content for chunk in chunks)


TEXT = 'So.\n<tool_call>{"name": "count", "arguments": {"n": 1}}</tool_call>\n<tool_call>{"name": "stop"}</tool_call>'


def answer_of(talker: TransformersTarget, **more: Any) -> Answer:
    """The format of an answer to a chat with tools."""
    body = ChatRequest.model_validate(ASK | {"stream": True} | more)
    return Answer(body, MODEL, TokenTexts(talker.tokenizer), lambda token: "", lambda: calls_of(body, talker.tokenizer))


@pytest.mark.parametrize(("more", "names"), [({}, ["count", "stop"]), ({"parallel_tool_calls": False}, ["count"])])
def test_calls_that_a_model_writes_are_parsed(
    talker: TransformersTarget, monkeypatch, more: dict[str, Any], names: list[str]
) -> None:  # fmt: skip
    """Catches calls that a client gets as text, in a whole answer or a stream, and calls without an index or id."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", TEMPLATE)
    choice, call = Choice(0), Call(talker_request(talker), lambda output: None)
    answer, deltas, reasons = answer_of(talker, **more), [], []
    for at in range(0, len(TEXT), 5):
        is_last = at + 5 >= len(TEXT)
        output = Output([0], TEXT[at : at + 5], finish_reason="stop" if is_last else None)
        choice.add(output)
        if chunk := answer.chunk(choice, output, call):
            event = json.loads(chunk.removeprefix(b"data: "))["choices"][0]
            deltas.append(event["delta"])
            reasons.append(event["finish_reason"])
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [(call["index"], call["function"]["name"]) for call in calls] == list(enumerate(names))
    assert "".join(delta.get("content", "") for delta in deltas) == "So."
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]

    whole = answer_of(talker, **more).whole([choice], [call])["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == ("So.", "tool_calls")
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [call["function"] for call in calls]
    assert len({call["id"] for call in calls}) == len(names)


def talker_request(talker: TransformersTarget) -> Any:
    [request] = generation.requests(talker, ["hi"], 1, None)
    return request


def test_a_model_of_an_unknown_form_answers_in_text(server: Running, client, talker, monkeypatch) -> None:
    """Catches text that is taken for calls where it is not known how the model writes them; `none` shows no tools."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", TEMPLATE.replace("<tool_call>", ""))
    shown = client.chat.completions.create(**ASK | {"max_tokens": 4}).choices[0]
    hidden = client.chat.completions.create(**ASK | {"max_tokens": 4}, tool_choice="none").choices[0]
    assert shown.message.content and shown.message.tool_calls is None and hidden.message.tool_calls is None


def test_embeddings_are_refused_in_a_sentence(server: Running, client) -> None:
    """Catches a client of another route that learns only that its path is unknown."""
    with pytest.raises(NotFoundError, match="generates text and has no embeddings"):
        client.embeddings.create(model=MODEL, input="a")
    assert httpx.get(f"{server.url}/v1/embeddings").status_code == 405
