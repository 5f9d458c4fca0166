"""Answers to the letter: names and bytes of tokens, white space in JSON, and what has no effect is said."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.sampling.grammar import Grammar
from outrider.serve.bodies.schemas import bounded
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.token_texts import Offsets, TokenTexts
from serve.running import Running, running

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "look"}}


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, length=96) as found:
        yield found


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


@pytest.mark.parametrize("text", ["a\U0001f60a", "\u20ac\u00e9", "plain", " \u4e16\u754c \n"])
def test_bytes_of_tokens_are_the_texts(talker: TransformersTarget, text: str) -> None:
    """Catches the bytes of U+FFFD where a token is a part of a character, and two such with one name."""
    texts, tokens = TokenTexts(talker.tokenizer), talker.tokenizer.encode(text)
    assert b"".join(map(texts.bytes_of, tokens)).decode() == text
    assert len(set(map(texts.name_of, tokens))) == len(set(tokens))
    begins = Offsets().push(map(texts.bytes_of, tokens))
    for at, token in zip(begins, tokens, strict=True):
        if not texts.name_of(token).startswith("bytes:"):
            assert text[at:].startswith(texts.name_of(token))


def test_offsets_go_on_inside_a_character() -> None:
    """Catches a stream whose step ends in the middle of a character."""
    offsets = Offsets()
    assert offsets.push([b"a", b"\xe2"]) == [0, 1]
    assert offsets.push([b"\x82", b"\xac", b"b", b""]) == [1, 1, 2, 3]


def test_names_keep_the_space_that_decoding_hides() -> None:
    """Catches `the` for a token that is ` the`: joined, the names would be another text."""
    vocabulary = {text: i for i, text in enumerate(["\u2581the", "\u2581fox", "s", "<0xE2>", "\u2581"])}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=raw))
    assert [texts.name_of(token) for token in range(3)] == [" the", " fox", "s"]
    assert texts.name_of(3) == "bytes:\\xe2"
    assert texts.name_of(99) == ""


def test_likeliest_tokens_of_one_name_are_all_there(server: Running, talker: TransformersTarget) -> None:
    """Catches parts of characters that read alike and become one entry, with the lower of their values."""
    parts = [token for letter in "\u20ac\u00e9" for token in talker.tokenizer.encode(letter)][:2]
    bias = {str(token): 60.0 + i for i, token in enumerate(parts)}
    more = {"max_tokens": 1, "temperature": 0, "logit_bias": bias}
    body = {"prompt": "x = ", "logprobs": 3} | more
    [top] = post(server, "completions", body).json()["choices"][0]["logprobs"]["top_logprobs"]
    told = post(server, "chat/completions", CHAT | more | {"logprobs": True, "top_logprobs": 3}).json()
    [one] = told["choices"][0]["logprobs"]["content"]
    assert len(top) == len(one["top_logprobs"]) == 3
    assert sorted(top.values(), reverse=True) == list(top.values())
    assert one["bytes"] == list(TokenTexts(talker.tokenizer).bytes_of(parts[1]))


@pytest.mark.parametrize("more", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "auto"}])
def test_tools_that_no_template_shows_are_refused(server: Running, more: dict[str, Any]) -> None:
    """Catches tools that a client believes to be known to the model."""
    answer = post(server, "chat/completions", CHAT | more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert post(server, "chat/completions", CHAT | more | {"tool_choice": "none"}).status_code == 200


def test_calls_that_no_template_shows_are_refused(server: Running) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = post(server, "chat/completions", CHAT | {"messages": messages})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_calls")


def test_what_has_no_effect_is_named_and_what_would_have_is_refused(server: Running) -> None:
    """Catches fields of agents' clients that are refused though they do nothing, or dropped in silence."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    body = CHAT | {
        "messages": [{"role": "user", "content": [part]}],
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
    }
    answer = post(server, "chat/completions", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "user, metadata, store, cache_control"
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}) as streamed:
        assert streamed.headers["x-ignored-fields"] == "user, metadata, store, cache_control"
    plain = post(server, "chat/completions", CHAT)
    assert "x-ignored-fields" not in plain.headers
    assert plain.json()["choices"][0]["message"] == answer.json()["choices"][0]["message"]
    for name in ("reasoning_effort", "reasoning", "thinking"):
        refused = post(server, "chat/completions", CHAT | {name: {"effort": "high"}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ('{"a":1}', True), ('{"a": 1}', True), ('{\n  "a": 1\n}', True), ('{\n\t"a":\n1}', True),
        ('{\n\n"a": 1}', False), ('{   "a": 1}', False), ("{" + "\n" + " " * 30 + '"a": 1}', False),
    ],
)  # fmt: skip
def test_white_space_in_json_ends(talker: TransformersTarget, text: str, is_valid: bool) -> None:
    """Catches an answer that writes line feeds until it is cut off; what people write stays possible."""
    pytest.importorskip("llguidance")
    schema = bounded({"type": "object", "properties": {"a": {"type": "integer"}}})
    walk = Grammar.json(schema).compiled(talker).start()
    fits = True
    for token in talker.tokenizer.encode(text):
        fits = fits and bool(walk.allowed(())[token])
        walk.push([token])
    assert fits == is_valid


def test_an_answer_has_no_properties_that_its_schema_does_not_name(server: Running) -> None:
    """Catches an answer that adds properties until it is cut off, which random weights do."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    choice = post(server, "chat/completions", CHAT | {"max_tokens": 40, "response_format": form}).json()["choices"][0]
    assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["a"] in (1, 2)


A, B = {"a": {"type": "string"}}, {"b": {"type": "string"}}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": A, "allOf": [{"properties": B}]}, {"properties": A, "anyOf": [{"properties": B}]},
        {"allOf": [{"$ref": "#/$defs/x"}, {"properties": A}], "$defs": {"x": {"properties": B, "required": ["b"]}}},
        {"properties": A, "required": ["b"]}, {"properties": A, "additionalProperties": {"type": "integer"}},
        {"properties": A, "minProperties": 2}, {"const": {"properties": A}}, {"type": "object"}, {"properties": []},
    ],
)  # fmt: skip
def test_a_schema_that_may_need_other_properties_stays_as_it_is(schema: dict[str, Any]) -> None:
    """Catches a schema that no answer fits any more, or one that says what it wants and is overruled."""
    changed = bounded(schema)
    del changed["x-guidance"]
    assert changed == schema
