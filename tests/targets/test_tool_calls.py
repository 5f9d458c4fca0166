"""Tool calls in the text of an answer: each family's form, whole and in any pieces, and what is not a call."""

import json
from dataclasses import replace

import pytest
from tiny import make_tokenizer

from outrider.sampling.text import TextStream
from outrider.targets.text.detokenizer import detokenizer, showing
from outrider.targets.text.tool_calls import HERMES, LLAMA3, MISTRAL, CallParser, Form, form_of, schema_of

LOOK, ADD = ("look", {"at": "a </tool_call> sky"}), ("add", {"a": 1, "b": [2, {}]})
CASES: dict[str, tuple[Form, str, str, list[tuple[str, dict]]]] = {
    "hermes": (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "look", "arguments": {"at": "a </tool_call> sky"}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"a": 1, "b": [2, {}]}, "name": "add"}\n</tool_call>\n',
        "Let me see.", [LOOK, ADD],
    ),
    "hermes without an end": (HERMES, '<tool_call>{"name": "add", "arguments": "{}"}', "", [("add", {})]),
    "hermes and text": (
        HERMES, '<tool_call>{"name": "add", "arguments": {}}</tool_call>\nDone.', "\nDone.", [("add", {})],
    ),
    "mistral": (
        MISTRAL, 'So: [TOOL_CALLS] [{"name": "look", "arguments": {"at": "a </tool_call> sky"}}, '
        '{"name": "add", "arguments": {"a": 1, "b": [2, {}]}}]', "So:", [LOOK, ADD],
    ),
    "newer mistral": (
        MISTRAL, '[TOOL_CALLS]look[CALL_ID]a1b2c3d4e[ARGS]{"at": "a </tool_call> sky"}'
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, {}]}', "", [LOOK, ADD],
    ),
    "llama": (
        LLAMA3, '\n{"name": "look", "parameters": {"at": "a </tool_call> sky"}}; '
        '{"name": "add", "parameters": {"a": 1, "b": [2, {}]}}', "", [LOOK, ADD],
    ),
    "llama with a mark": (LLAMA3, '<|python_tag|>{"name": "add", "parameters": null}', "", [("add", {})]),
    "text": (HERMES, "It is <b>5</b>. <tool\n", "It is <b>5</b>. <tool\n", []),
    "a call that is not JSON": (HERMES, "a <tool_call>{name}</tool_call> b", "a<tool_call>{name}</tool_call> b", []),
    "JSON that is not a call": (LLAMA3, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "half a call": (MISTRAL, '[TOOL_CALLS][{"name": "add"', '[TOOL_CALLS][{"name": "add"', []),
    "python": (LLAMA3, "<|python_tag|>search.call(q=1)", "<|python_tag|>search.call(q=1)", []),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_in_any_pieces(name: str) -> None:
    """Catches a mark that is shown since it came in two pieces, a call that is lost or doubled, and text that is
    swallowed because it looks like one."""
    form, text, content, calls = CASES[name]
    for size in (1, 2, 3, 7, len(text)):
        parser = CallParser(form, {"look", "add"})
        contents, found = [], []
        for at in range(0, len(text), size):
            part, new = parser.push(text[at : at + size], at + size >= len(text))
            contents.append(part)
            found += [(call.name, json.loads(call.arguments)) for call in new]
        assert ("".join(contents), found) == (content, calls), size
        assert parser.count == len(calls)


def test_a_call_is_sent_when_it_is_complete_and_only_the_first_where_one_is_wanted() -> None:
    """Catches calls that wait for the end of the answer, and parallel calls that the client refused."""
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    parser = CallParser(HERMES, {"add"}, most=1)
    assert [len(parser.push(part, False)[1]) for part in (call[:-1], call[-1], call)] == [0, 1, 0]
    forced = CallParser(None, {"add"}, is_forced=True)
    assert forced.push('{"name": "add", ', False) == ("", []) and len(forced.push('"arguments": {}}', True)[1]) == 1


def test_templates_are_known_by_what_they_teach() -> None:
    """Catches a template of one family that is read as another's; a form that is not known stays text."""
    assert form_of("{{ '<tool_call>' }}") is HERMES and form_of("[TOOL_CALLS] [ARGS] <tool_call>") is MISTRAL
    assert form_of("<tool_call><function=") is None and form_of("tools") is None
    assert form_of('{{ "ipython" }} "parameters": ') is form_of("<|python_tag|>") is LLAMA3


def test_marks_that_are_special_tokens_are_part_of_the_text() -> None:
    """Catches Mistral's [TOOL_CALLS], which a text does not have: the call would be content."""
    tokenizer = make_tokenizer()
    plain = detokenizer(tokenizer, len(tokenizer))
    marked = showing(plain, tokenizer, {"<|tool|>"})
    tokens = tokenizer.encode("a<|tool|>b<|end|>")
    assert TextStream(plain).push(tokens, True).text == "ab"
    assert TextStream(marked).push(tokens, True).text == "a<|tool|>b"
    assert showing(plain, tokenizer, {"[X]"}) is plain and replace(marked) == marked


def test_a_forced_calls_schema_keeps_its_references() -> None:
    """Catches parameters whose $ref points to nothing since they were moved, and a model that can't be forced."""
    point = {"$defs": {"p": {"type": "integer"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/p"}}}
    schema = schema_of([{"name": "go", "parameters": point}, {"name": "stop"}], LLAMA3)
    assert schema["$defs"]["0"]["properties"]["x"] == {"$ref": "#/$defs/0/$defs/p"}
    assert [call["required"] for call in schema["anyOf"]] == [["name", "parameters"]] * 2
