"""Logs: every format is read for what it says, what is written is read back, and redaction leaves no word."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, DataError
from outrider.traffic.logs.calls import Call
from outrider.traffic.logs.formats import FORMATS
from outrider.traffic.logs.traces import read, write

CHAT = {"model": "m", "messages": [{"role": "user", "content": "What is a heron?"}], "max_tokens": 5}


def log(folder: Path, rows: list[Any], name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lengths(at: float, tokens: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"timestamp": at, "input_length": tokens, "output_length": 7, "hash_ids": blocks} | more


SAMPLES: dict[str, list[Any]] = {
    "outrider": [{"t": 3.5, "session": "s", "body": CHAT, "expected_output_tokens": 4, "meta": {"id": "one"}}],
    "openai-batch": [{"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}],
    "raw": [CHAT | {"timestamp": 1_700_000_000_000}],
    "gateway": [
        {
            "request_id": "one", "timestamp": "2026-01-05T10:00:00+00:00", "request": CHAT,
            "response": {"choices": [{"message": {"content": "A bird."}}], "usage": {"completion_tokens": 4}},
        }
    ],
    "mooncake": [lengths(27482, 1100, [4, 5, 6])],
    "timed": [lengths(2.5, 40, [1, 2, 3])],
    "bailian": [lengths(2.5, 40, [1, 2, 3], chat_id=9, parent_chat_id=-1, type="text", turn=1)],
    "sharegpt": [{"id": "one", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}],
    "vllm-custom": [{"prompt": "What is a heron?", "output_tokens": 5}],
}  # fmt: skip
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,600,20,620,Conversation log\n"


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_of_each_format_is_recognised_and_read(name, tmp_path):
    """Catches a format taken for another, lengths taken for text, and milliseconds for seconds."""
    path = log(tmp_path, SAMPLES.get(name, []))
    if name == "burstgpt":
        path.write_text(BURST)
    trace = read(path)
    assert trace.format == name and trace.size == 1
    (call,) = trace.calls()
    assert call.at_s == (None if name in ("openai-batch", "sharegpt", "vllm-custom") else 0.0)
    tokens = {"mooncake": 1100, "timed": 40, "bailian": 40, "burstgpt": 600}.get(name)
    assert call.synthetic == (tokens is not None)
    text = call.body["messages"][0]["content"]
    if tokens is not None:
        assert len(text.split()) == tokens and call.body["max_tokens"] == call.expected_tokens
    else:
        assert text == ("Hi" if name == "sharegpt" else "What is a heron?")
    assert call.answer == {"gateway": "A bird.", "sharegpt": "Ho"}.get(name)
    assert read(path, format=name).size == 1


def test_calls_come_in_the_order_of_their_times_and_the_first_at_0(tmp_path):
    """Catches a log that its server wrote as answers ended."""
    rows = [CHAT | {"timestamp": at, "id": str(at)} for at in (130.0, 110.5, 120.0, 110.5)]
    trace = read(log(tmp_path, rows))
    assert [call.at_s for call in trace.calls()] == [0, 0, 9.5, 19.5]
    assert trace.span_s == 19.5 and trace.has_times
    assert list(trace.calls()) == list(trace.calls())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


CALLS = st.builds(
    Call,
    body=st.fixed_dictionaries({"messages": st.just(CHAT["messages"])}, optional={"temperature": st.floats(0, 2)}),
    id=st.text(max_size=5), at_s=st.floats(0, 1e6), session=st.none() | st.text(max_size=5),
    expected_tokens=st.none() | st.integers(0, 9), synthetic=st.booleans(), answer=st.none() | st.text(max_size=5),
)  # fmt: skip


@settings(max_examples=25)
@given(st.lists(CALLS, min_size=1, max_size=6))
def test_what_is_written_is_read_back(kept, calls):
    """Catches a field that is dropped, a line that text breaks in two, and times that move."""
    path = kept / "log.jsonl"
    assert write(path, calls) == len(calls)
    back = list(read(path).calls())
    inorder = sorted(calls, key=lambda call: call.at_s or 0)
    for one, other in zip(back, inorder, strict=True):
        assert other.at_s is not None and one.at_s == pytest.approx(other.at_s - (inorder[0].at_s or 0), abs=1e-6)
        assert [one.body, one.id, one.session, one.answer] == [other.body, other.id, other.session, other.answer]
        assert (one.expected_tokens, one.synthetic) == (other.expected_tokens, other.synthetic)


@pytest.mark.parametrize(("name", "block"), [("mooncake", 512), ("timed", 16), ("bailian", 16)])
def test_equal_hashes_are_equal_text_and_others_differ_from_the_first_word_of_their_block(name, block, tmp_path):
    """Catches text that does not share its beginning, so that a prefix cache sees nothing of the log's own sharing."""
    more = {"chat_id": 1, "parent_chat_id": -1} if name == "bailian" else {}
    rows = [
        lengths(at, 3 * block - 5, blocks, **more) for at, blocks in ((0, [1, 2, 3]), (1, [1, 2, 4]), (2, [8, 2, 3]))
    ]
    first, second, third = (
        call.body["messages"][0]["content"].split() for call in read(log(tmp_path, rows), name).calls()
    )
    assert first[: 2 * block] == second[: 2 * block] and first[2 * block :] != second[2 * block :]
    assert first[:block] != third[:block]


def test_a_longer_last_block_begins_as_the_shorter_one_did(tmp_path):
    """Catches a next turn whose text is new from its last block on, though the log says that it went on."""
    rows = [lengths(0, 600, [1, 2]), lengths(1, 900, [1, 2])]
    short, long = (call.body["messages"][0]["content"] for call in read(log(tmp_path, rows)).calls())
    assert long.startswith(short)


def test_each_turn_of_a_conversation_is_a_call_with_the_logs_own_answers_before_it(tmp_path):
    turns = [("system", "S"), ("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d"), ("human", "e")]
    row = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}
    path = tmp_path / "log.json"
    path.write_text(json.dumps([row, {"id": "y", "conversations": []}]))
    trace = read(path)
    calls = list(trace.calls())
    assert [[part["content"] for part in call.body["messages"]] for call in calls] == [
        ["S", "a"], ["S", "a", "b", "c"], ["S", "a", "b", "c", "d", "e"],
    ]  # fmt: skip
    assert [call.answer for call in calls] == ["b", "d", None]
    assert (trace.size, trace.num_answers, dict(trace.left_out)) == (3, 2, {"nothing asked": 1})


BAD = {
    "not JSON": "{", "JSON list": "[1]", "neither messages": json.dumps({"t": 1, "body": {"model": "m"}}),
    "not a list of objects": json.dumps({"t": 1, "body": {"messages": ["x"]}}),
    "number of seconds": json.dumps({"t": True, "body": CHAT}), "no 'body'": json.dumps({"t": 1}),
    "neither a text": json.dumps({"t": 1, "body": {"prompt": {"a": 1}}}),
    "number of tokens": json.dumps({"t": 1, "body": CHAT, "expected_output_tokens": -1}),
    "max_tokens must be": json.dumps({"t": 1, "body": CHAT | {"max_tokens": "256"}}),
    "max_completion_tokens must be": json.dumps({"t": 1, "body": CHAT | {"max_completion_tokens": True}}),
    "the answer is not a text": json.dumps({"t": 1, "body": CHAT, "meta": {"answer": {"content": "x"}}}),
    "objects with a role": json.dumps({"t": 1, "body": {"messages": [{"role": ["user"], "content": "x"}]}}),
    "cannot convert float infinity": '{"t": 1, "body": {"prompt": "x"}, "expected_output_tokens": 1e400}',
    "too large": '{"t": 1' + "0" * 400 + ', "body": {"prompt": "x"}}',
    "nested too deeply": '{"t": 1, "body": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not UTF-8": '{"t": 1, "body": "\udcff"}',
}  # fmt: skip


def test_a_bad_row_is_named_by_its_line_or_counted(tmp_path):
    """Catches a log that is half sent before its fault is found, and one whose faults nobody hears of."""
    good = json.dumps({"t": 0, "body": CHAT})
    path = tmp_path / "log.jsonl"
    for message, row in BAD.items():
        path.write_bytes("\n".join([good, "", row, good]).encode("utf-8", "surrogateescape"))
        with pytest.raises(DataError, match=rf"log\.jsonl:3: .*{message}"):
            read(path)
        trace = read(path, skip_bad=True)
        assert trace.size == 2 and dict(trace.left_out) == {"not readable": 1}
        assert len(list(trace.calls())) == 2


CHANGES = {
    "not JSON": "", "neither messages": json.dumps({"t": 1, "body": {}}),
    "its call has no time": json.dumps({"body": CHAT}), "not UTF-8": '{"t": 1, "body": "\udcff"}',
}  # fmt: skip


@pytest.mark.parametrize("message", CHANGES)
def test_a_row_that_changed_since_the_first_reading_is_named_by_its_line(message, tmp_path):
    """Catches a traceback in the middle of a replay."""
    path = log(tmp_path, [{"t": 0, "body": CHAT}, {"t": 1, "body": CHAT}])
    trace = read(path)
    first = path.read_bytes().splitlines()[0]
    path.write_bytes(first + b"\n" + CHANGES[message].encode("utf-8", "surrogateescape"))
    calls = trace.calls()
    assert next(calls).at_s == 0
    with pytest.raises(DataError, match=rf"log\.jsonl:2: .*{message}.*the log has changed.*; use a copy"):
        next(calls)


def test_half_a_character_is_written_and_read_back(tmp_path):
    """Catches text that was cut within a character, as logs hold it, and that UTF-8 can't: the log was half written."""
    path = log(tmp_path, [{"t": 0, "body": {"prompt": "cut \ud83d"}, "session": "\ud83d"}])
    for redact in (True, False):
        write(tmp_path / "kept.jsonl", read(path).calls(), redact)
        (call,) = read(tmp_path / "kept.jsonl").calls()
        assert (call.body["prompt"] == "cut \ud83d") != redact


def test_a_log_that_holds_no_calls_is_refused_with_what_was_wanted(tmp_path):
    for text, message in [("", "no JSON object"), ('{"a": 1}\n', "a row has a"), ("[]", "no JSON object")]:
        (tmp_path / "log").write_text(text)
        with pytest.raises(DataError, match=message):
            read(tmp_path / "log")
    (tmp_path / "log").write_bytes(b"\x1f\x8b123")
    with pytest.raises(DataError, match="gzip"):
        read(tmp_path / "log")
    with pytest.raises(DataError, match="no log"):
        read(tmp_path / "absent")
    with pytest.raises(ConfigError, match="choose from outrider"):
        read(log(tmp_path, [CHAT]), format="tape")
    with pytest.raises(DataError, match="1 of 2 rows have a time"):
        read(log(tmp_path, [CHAT, CHAT | {"timestamp": 2}]))


def test_a_row_of_csv_that_can_not_be_read_is_named_or_counted(tmp_path):
    """Catches a traceback of the csv module: a carriage return within a row, and a cell too large for it."""
    path = tmp_path / "log.csv"
    path.write_text(BURST + "6,ChatGPT,600,0,600,Conversation log\n")
    assert (read(path).size, dict(read(path).left_out)) == (1, {"failed in the log": 1})
    for row in ("6,Chat\rGPT,600,20,620,log", f"6,{'x' * 200_000},600,20,620,log"):
        path.write_bytes(f"{BURST}{row}\n".encode())
        with pytest.raises(DataError, match=r"log\.csv:3: "):
            read(path)
        trace = read(path, skip_bad=True)
        assert trace.size == 1 and dict(trace.left_out) == {"not readable": 1}


SECRET = ["Wolfram", "tango-7", "sk-live-99", "ada@example.org", "get_salary", "Ottakring"]


def secretive() -> list[Call]:
    """Calls that hold a secret in every place where there is text."""
    body = {
        "model": "m", "api_key": "sk-live-99", "user": "ada@example.org", "temperature": 0.5, "stop": ["Ottakring"],
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Wolfram"}]},
            {"role": "user", "content": "tango-7", "name": "ada@example.org"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "get_salary"}}]},
            {"role": "Wolfram", "content": "Wolfram"},
        ],
        "tools": [{"type": "function", "function": {"name": "get_salary"}}], "metadata": {"tango-7": "Wolfram"},
        "max_tokens": 9, "logit_bias": {"tango-7": 1},
    }  # fmt: skip
    return [
        Call(body, "ada@example.org", 0.0, "ada@example.org", 3, answer="Wolfram"),
        Call({"model": "m", "prompt": "tango-7"}, "2", 1.0, None),
        Call({"model": "m", "prompt": [71, 72, 73]}, "3", 2.0, None),
        Call({"model": "m", "prompt": "tango-7"}, "4", 3.0, None),
    ]


def test_a_redacted_log_holds_no_word_of_anybodys_and_can_still_be_sent(tmp_path):
    """Catches a field that redaction forgot, and hashes that anyone can find by trying texts."""
    path = tmp_path / "kept.jsonl"
    write(path, secretive(), redact=True)
    text = path.read_text()
    assert not [secret for secret in SECRET if secret in text]
    assert "71, 72" not in text
    first, second, third, fourth = read(path).calls()
    assert first.synthetic and first.body["temperature"] == 0.5 and first.body["max_tokens"] == 9
    assert [len(part["content"]) for part in first.body["messages"]][1] == len("tango-7")
    assert second.body["prompt"] == fourth.body["prompt"] != third.body["prompt"]
    write(tmp_path / "again.jsonl", secretive(), redact=True)
    hashes = [json.loads(file.read_text().splitlines()[1])["body"]["prompt"]["hidden"] for file in tmp_path.iterdir()]
    assert hashes[0] != hashes[1]
    write(path, secretive(), redact=False)  # where all is there but the key, which is never carried on
    assert {secret for secret in SECRET if secret in path.read_text()} == set(SECRET)
    assert "api_key" not in next(iter(read(path).calls())).body


def test_a_file_that_can_not_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(DataError, match="can't write"):
        write(tmp_path / "absent" / "x.jsonl", [])

    def broken():
        yield Call(CHAT, "1", 0.0)
        raise ValueError("the log ends here")

    with pytest.raises(ValueError):
        write(tmp_path / "x.jsonl", broken())
    assert list(tmp_path.iterdir()) == []
