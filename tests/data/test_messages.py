"""Messages of every kind of row: logs of requests, Batch files, tools, parts."""

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.data.config import Config, Source
from outrider.data.sources.conversations import Conversation, Skipped, from_source, parse
from outrider.errors import DataError
from outrider.traffic.logs import traces
from outrider.traffic.logs.calls import Call

USER, REPLY = {"role": "user", "content": "안녕"}, {"role": "assistant", "content": "네"}
TOOLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def answered(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.mark.parametrize(
    ("row", "id"),
    [
        ({"custom_id": "b1", "method": "POST", "url": "/v1/chat", "body": {"messages": [USER, REPLY]}}, "b1"),
        ({"body": {"messages": [USER]}, "meta": {"id": "m1", "answer": "네"}, "t": 0.5}, "m1"),
        ({"id": "g1", "request": {"body": {"messages": [USER]}}, "response": {"body": answered("네")}}, "g1"),
        ({"request_id": "g2", "request": {"messages": [USER]}, "response": answered("네")}, "g2"),
        ({"id": "g3", "request": json.dumps({"messages": [USER]}), "response": "네"}, "g3"),
        ({"id": "g4", "request": {"prompt": "안녕"}, "response": {"choices": [{"text": "네"}]}}, "g4"),
        ({"id": "p1", "messages": [{"role": "user", "content": parts("안녕")},
                                   {"role": "assistant", "content": parts("네")}]}, "p1"),
    ],
)  # fmt: skip
def test_a_row_of_a_log_is_its_request_and_its_answer(row: dict[str, Any], id: str) -> None:
    """Catches an answer that is lost, an id that a second reading does not find again, parts that are dropped."""
    found = parse(row, "log.jsonl:1")
    assert (found.messages, found.id) == ([USER, REPLY], id)


def test_a_call_of_a_tool_has_no_text_and_stays() -> None:
    """Catches `content: null`, as OpenAI writes it, being refused, and the call being lost."""
    messages = [
        {"role": "developer", "content": "be"}, USER, {"role": "assistant", "content": None, "tool_calls": TOOLS},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "assistant", "content": "네", "reasoning_content": "hm", "audio": None},
    ]  # fmt: skip
    found = parse({"messages": messages}, "a:1").messages
    assert [one["role"] for one in found] == ["system", "user", "assistant", "tool", "assistant"]
    assert found[2] == {"role": "assistant", "content": "", "tool_calls": TOOLS}
    assert found[3]["tool_call_id"] == "c1"
    assert found[4] == {"role": "assistant", "content": "네", "reasoning_content": "hm"}
    with pytest.raises(DataError, match="text as content"):
        parse({"messages": [USER, {"role": "assistant", "content": None}]}, "a:1")
    # an error's text is no answer
    row = {"id": "x", "request": {"messages": [USER]}, "response": {"status_code": 500, "body": answered("oops")}}
    assert parse(row, "a:1").messages == [USER]
    assert parse({"body": {"messages": [USER]}, "error": {"code": 1}, "response": answered("x")}, "a:1").messages == [
        USER
    ]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "type 'image_url'"),
        ({"input_length": 5, "output_length": 3, "timestamp": 0}, "lengths but no texts"),
        ({"body": {"messages": [{"role": "user", "content": {"hidden": "ab", "characters": 3}}]}}, "is redacted"),
        ({"custom_id": "a", "response": {"status_code": 200}}, "does not have the prompts"),
        ({"request": {"prompt": ["a", "b"]}}, "messages must be a list, or its prompt a text"),
        ({"messages": [USER, REPLY | {"tool_calls": [{"name": "\ud83d"}]}]}, "half of a surrogate pair"),
    ],
)  # fmt: skip
def test_a_row_without_text_is_refused_by_name(row: dict[str, Any], problem: str) -> None:
    """Catches an image that is left out in silence, and a traceback where a log has no texts."""
    with pytest.raises(DataError, match=f"a:1.*{problem}"):
        parse(row, "a:1")


def test_a_log_that_replay_writes_is_read(tmp_path: Path) -> None:
    """Catches our own recorded traffic being refused: `replay` and `prepare` read one file."""
    path = tmp_path / "log.jsonl"
    calls = [Call({"messages": [USER], "max_tokens": 5}, f"c{i}", float(i), "s", answer="네") for i in range(3)]
    traces.write(path, calls)
    found = list(from_source(Source(path=str(path)), Config(), Skipped()))
    assert [(one.id, one.messages) for one in found] == [(f"c{i}", [USER, REPLY]) for i in range(3)]
    traces.write(path, calls, redact=True)
    with pytest.raises(DataError, match="is redacted"):
        list(from_source(Source(path=str(path)), Config(), Skipped()))


def batch(tmp_path: Path, ids: list[str], answers: list[str]) -> Source:
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text(
        "".join(
            json.dumps({"custom_id": id, "body": {"messages": [USER, {"role": "user", "content": id}]}}) + "\n"
            for id in ids
        )
    )
    lines = [
        {"custom_id": id, "response": {"status_code": 200, "body": answered(f"to {id}")}, "error": None}
        for id in answers
    ]
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Source(path=str(asked), answers=str(out))


def conversations(source: Source, skipped: Skipped | None = None, **settings: Any) -> list[Conversation]:
    return list(from_source(source, Config(**settings), skipped or Skipped()))


def test_the_answers_of_a_batch_are_found_by_their_id(tmp_path: Path) -> None:
    """Catches answers that are taken in the order of the output, which is another; and one that is missing."""
    found = conversations(batch(tmp_path, list("abcd"), list("dbca")))
    assert [(one.id, one.messages[-1]["content"]) for one in found] == [(id, f"to {id}") for id in "abcd"]
    source = batch(tmp_path, list("abcd"), list("dca"))
    with pytest.raises(DataError, match=r"in\.jsonl:2: .*out\.jsonl has no answer to custom_id 'b'"):
        conversations(source)
    skipped = Skipped()
    assert [one.id for one in conversations(source, skipped, skip_bad=True)] == list("acd")
    assert len(skipped.reasons) == 1
    (tmp_path / "out.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="line 1 is not the output of a Batch"):
        conversations(source)
