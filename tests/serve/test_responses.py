"""OpenAI's responses API, asked by OpenAI's own client: the same answers as a chat's."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from outrider.targets.hf.transformers import TransformersTarget

from .running import MODEL, Running, running
from .test_tool_calls import COUNT, TEMPLATE

ASK = "hi"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
TOOL = {"type": "function", "name": "count", "parameters": COUNT}


class Answer(BaseModel):
    """What has to be answered."""

    n: Literal[1, 2]


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch, running(talker) as server:
        patch.setattr(talker.tokenizer, "chat_template", TEMPLATE)
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def chat(client: OpenAI) -> Any:
    """The answer of a chat, with its log probabilities."""
    return client.chat.completions.create(**GREEDY, messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=2)


def test_a_response_is_the_chats_answer(client, chat):
    """Catches instructions or items of a conversation that are lost, and counts, an end or log probabilities that are
    not the chat's."""
    written = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}
    more: dict[str, Any] = GREEDY | {"max_output_tokens": 8}
    for given in (ASK, [{"role": "user", "content": ASK}], [written]):
        response = client.responses.create(**more, instructions="Be brief.", input=given)
        assert response.output_text == chat.choices[0].message.content
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert response.usage.input_tokens == chat.usage.prompt_tokens
        assert response.usage.output_tokens == chat.usage.completion_tokens
    detailed = client.responses.create(**more, input=CHAT, include=["message.output_text.logprobs"], top_logprobs=2)
    [logprobs] = [part.logprobs for item in detailed.output for part in item.content]
    assert [one.model_dump() for one in logprobs] == [one.model_dump() for one in chat.choices[0].logprobs.content]


def test_a_stream_has_the_documented_events_and_the_same_text(client, chat):
    """Catches an event that is missing, out of order or numbered wrong, and text that is lost in a stream."""
    more: dict[str, Any] = GREEDY | {"max_output_tokens": 8, "input": CHAT}
    events = list(client.responses.create(**more, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    text = "".join(event.delta for event in events[4:-4])
    assert text == events[-1].response.output_text == chat.choices[0].message.content
    with client.responses.stream(**GREEDY, input=CHAT, text_format=Answer) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_functions_are_called_and_their_outputs_read(client):
    """Catches calls in a form that a client can't parse or send back, whole or streamed, and a schema that is not
    enforced."""
    forced: dict[str, Any] = GREEDY | {
        "input": ASK,
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "count"},
    }
    [call] = client.responses.create(**forced).output
    assert json.loads(call.arguments)["n"] in (1, 2)
    events = list(client.responses.create(**forced, stream=True))
    [streamed] = events[-1].response.output
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments) and streamed.id != call.id
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == [call.arguments] and events[-1].type == "response.completed"
    said = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    talk = [{"role": "user", "content": ASK}, call, said]
    after = client.responses.create(**GREEDY, input=talk, max_output_tokens=4)
    calls = [{"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}]
    messages = [
        {"role": "user", "content": ASK}, {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": call.call_id, "content": "done"},
    ]  # fmt: skip
    chat = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=4)
    assert (after.output_text, after.usage.input_tokens) == (
        chat.choices[0].message.content, chat.usage.prompt_tokens
    )  # fmt: skip
    assert isinstance(client.responses.parse(**GREEDY, input=ASK, text_format=Answer).output_parsed, Answer)


REFUSED = {
    "previous_response_id": ({"previous_response_id": "resp_1"}, "nothing is stored"),
    "background": ({"background": True}, "connection"),
    "conversation": ({"conversation": "conv_1"}, "nothing is stored"),
    "truncation": ({"truncation": "auto"}, "shorten"),
    "reasoning": ({"reasoning": {"effort": "low"}}, "chat_template_kwargs"),
    "max_output_tokens": ({"max_output_tokens": 9999}, "max_output_tokens is 9999"),
    "input": ({"input": []}, "at least 1 item"),
    "tools.0.type": ({"tools": [{"type": "web_search"}]}, "function"),
}


@pytest.mark.parametrize("param", REFUSED)
def test_what_would_change_the_answer_is_refused_by_name(client, param):
    """Catches a field that is ignored though it would change the answer, and a refusal in the words of a chat."""
    fields, message = REFUSED[param]
    with pytest.raises(BadRequestError, match=message) as error:
        client.responses.create(**{"model": MODEL, "input": ASK} | fields)
    assert error.value.param == param


def test_what_has_no_effect_is_named(client):
    """Catches a field that is dropped in silence, and a model that is not served."""
    idle = {"store": True, "metadata": {"a": "b"}, "user": "ann", "prompt_cache_key": "k"}
    raw = client.responses.with_raw_response.create(
        **GREEDY, input=ASK, max_output_tokens=1, include=["reasoning.encrypted_content"], **idle
    )
    assert set(raw.headers["x-ignored-fields"].split(", ")) == {*idle, "include"}
    assert raw.parse().store is False
    assert "x-ignored-fields" not in client.responses.with_raw_response.create(
        **GREEDY, input=ASK, max_output_tokens=1, store=False
    ).headers  # fmt: skip
    with pytest.raises(NotFoundError):
        client.responses.create(model="none", input=ASK)
