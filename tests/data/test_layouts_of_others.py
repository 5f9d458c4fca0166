"""Rows as others write them: no known field is lost, unknown ones are named, and what trains is what is served."""

import datetime
import json
import logging
import os
import random
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tiny import TEMPLATE, make_tokenizer

from outrider.data.config import Config, Source
from outrider.data.rendering import check_template, prompt_tokens, render
from outrider.data.sources.conversations import Conversation, Skipped, from_source, parse
from outrider.data.sources.messages import Message
from outrider.data.sources.mixture import select
from outrider.data.sources.readers import ENDINGS
from outrider.errors import DataError
from outrider.measure.tasks import names
from outrider.plan.demand import of_log
from outrider.plan.measured import sample
from outrider.serve.bodies import chat
from outrider.serve.bodies.refusals import Refusal
from outrider.serve.bodies.request_models import ChatRequest
from outrider.targets.text.prompts import ids_of
from outrider.traffic.logs import traces

TOOLS = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXTS = TOOLS.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
"""As DeepSeek's: arguments are added to a text."""
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {
           "city": {"type": "string"}}}}}  # fmt: skip
CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def say(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


ASK, REPLY, BE = say("user", "hi"), say("assistant", "ho"), say("system", "be")


# ── fields ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"system": "be", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
         [BE, ASK, REPLY]),
        ({"system_prompt": "be", "question": "hi", "response": "ho"}, [BE, ASK, REPLY]),
        ({"system": "be", "prompt": "hi", "completion": "ho"}, [BE, ASK, REPLY]),
        ({"system": "be", "turns": ["hi"]}, [BE, ASK]),
        ({"system": "be", "messages": [BE, ASK, REPLY]}, [BE, ASK, REPLY]),
        ({"system": "", "messages": [ASK, REPLY]}, [ASK, REPLY]),
        ({"request": {"system": [{"type": "text", "text": "be"}], "messages": [ASK]}, "response": "ho"},
         [BE, ASK, REPLY]),
        ({"instruction": "hi", "output": "ho", "system": "be", "history": [["a", "b"], ["c", "d"]]},
         [BE, say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d"), ASK, REPLY]),
        ({"prompt": "hi", "history": [say("user", "a"), say("assistant", "b")]},
         [say("user", "a"), say("assistant", "b"), ASK]),
        ({"instruction": "hi", "context": "there", "response": "ho"},
         [say("user", "hi\n\n### Input:\nthere"), REPLY]),
        ({"question": "hi", "answer": "ho"}, [ASK, REPLY]),
        ({"prompt": [BE, ASK], "completion": [REPLY]}, [BE, ASK, REPLY]),
        ({"prompt": [ASK], "chosen": [REPLY], "rejected": [ASK]}, [ASK, REPLY]),
        ({"messages": [ASK, REPLY | {"weight": 0}, ASK, REPLY | {"weight": 1}]},
         [ASK, REPLY | {"weight": 0}, ASK, REPLY]),
        ({"messages": [ASK, REPLY | {"train": False}]}, [ASK, REPLY | {"weight": 0}]),
        ({"messages": [ASK, REPLY | {"loss": True, "weight": None}]}, [ASK, REPLY]),
        ({"messages": [ASK, say("assistant", "ho", reasoning="hm")]}, [ASK, REPLY | {"reasoning_content": "hm"}]),
        ({"messages": [ASK, {"role": "assistant", "content": None, "reasoning_content": "hm"}]},
         [ASK, say("assistant", "", reasoning_content="hm")]),
        ({"messages": [ASK, {"role": "assistant", "content": None, "function_call": CALL["function"]},
                       {"role": "function", "name": "weather", "content": "19"}]},
         [ASK, say("assistant", "", tool_calls=[CALL]), say("tool", "19", name="weather")]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": '{"name": "a"}'},
                            {"from": "observation", "value": "19"}, {"from": "gpt", "value": "ho"}]},
         [ASK, say("assistant", "", tool_calls=[{"name": "a"}]), say("tool", "19"), REPLY]),
        ({"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])}]},
         [ASK, say("assistant", "", tool_calls=[CALL])]),
        ({"messages": [say("user", [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}])]},  # type: ignore[arg-type]
         [say("user", "a\nb")]),
        ({"messages": None, "conversations": None, "prompt": "hi", "response": None}, [ASK]),
        ({"conversation": [ASK, REPLY]}, [ASK, REPLY]), ({"turns": [ASK, REPLY]}, [ASK, REPLY]),
        ({"messages": json.dumps([BE, ASK, REPLY])}, [BE, ASK, REPLY]),
        ({"prompt": "hi", "history": '[["a", "b"]]'}, [say("user", "a"), say("assistant", "b"), ASK]),
        ({"conversations": {"from": ["human", "gpt"], "value": ["hi", "ho"]}}, [ASK, REPLY]),
        ({"prompt": [BE, ASK], "response": "ho"}, [BE, ASK, REPLY]),
        ({"prompt": "hi", "chosen": [REPLY]}, [ASK, REPLY]),
        ({"prompt": '[{"role": "user"}]', "response": '{"content": "ho"}'},
         [say("user", '[{"role": "user"}]'), say("assistant", '{"content": "ho"}')]),
        ({"messages": [ASK, {"role": "assistant", "content": None, "function_call": json.dumps(CALL["function"])}]},
         [ASK, say("assistant", "", tool_calls=[CALL])]),
        ({"messages": [{"role": "user", "from": "human", "content": "hi", "value": ""}, REPLY]}, [ASK, REPLY]),
        ({"request": json.dumps({"messages": [ASK]}), "response": json.dumps({"choices": [{"message": REPLY}]})},
         [ASK, REPLY]),
        ({"request": {"system": "be", "messages": [ASK]}, "response": {"role": "assistant", "content": [
          {"type": "text", "text": "ho"}]}}, [BE, ASK, REPLY]),
    ],
)  # fmt: skip
def test_every_known_field_is_read(row: dict[str, Any], messages: list[Message]) -> None:
    """Catches a system text, an earlier turn, a context, a weight, a call or a thought that is dropped in silence."""
    skipped = Skipped()
    assert parse(row, "a:1", skipped).messages == messages
    assert set(skipped.unread) <= {"rejected"}


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        ({"prompt": "hi", "source": "x", "score": 3}, ["source", "score"]),
        ({"messages": [ASK, REPLY | {"mood": "glad"}], "prompt": "hi"}, ["messages[].mood"]),
        ({"messages": [ASK], "prompt": "other"}, ["prompt"]),
        ({"prompt": "hi", "response": "ho", "output": "hm"}, ["output"]),
        ({"prompt": "hi", "chosen": "ho", "rejected": "no"}, ["rejected"]),
        ({"body": {"messages": [ASK], "model": "m", "max_tokens": 3, "chat_template_kwargs": {"a": 1}}},
         ["body.chat_template_kwargs"]),
        ({"request": {"messages": [ASK]}, "response": {"choices": [{"message": REPLY}, {"message": BE}]}},
         ["response.choices[1:]"]),
        ({"request": {"messages": [ASK]}, "response": [{"delta": "h"}]}, ["response"]),
        ({"request": {"messages": [ASK]}, "response": {"choices": [{"message": "ho"}]}}, ["response"]),
        ({"request": {"messages": [ASK]}, "response": {"status_code": 500, "body": "overloaded"}}, []),
        ({"id": 3, "category": "a", "prompt": "hi", "empty": "", "none": None, "list": []}, []),
    ],
)  # fmt: skip
def test_what_is_not_read_is_named(row: dict[str, Any], unread: list[str]) -> None:
    """Catches a field that is lost unseen, and a warning of one that is read, empty, or says what a message says."""
    skipped = Skipped()
    parse(row, "a:1", skipped)
    assert sorted(skipped.unread) == sorted(unread)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"system": "be", "messages": [say("system", "other"), ASK]}, "system is another one"),
        ({"system": ["a"], "prompt": "hi"}, "part of type 'str'"),
        ({"system": 3, "prompt": "hi"}, "system must be text"),
        ({"prompt": "hi", "history": [["a", "b", "c"]]}, "pairs"), ({"prompt": "hi", "history": "a"}, "pairs"),
        ({"messages": [ASK, REPLY | {"weight": 0.5}]}, "weight of a message must be 0 or 1"),
        ({"messages": [ASK, REPLY | {"train": "no"}]}, "train of a message must be 0 or 1"),
        ({"messages": [ASK, {"from": "function_call", "value": "weather()"}]}, "JSON"),
        ({"messages": [ASK, REPLY | {"tool_calls": 3}]}, "list of calls"),
        ({"messages": [ASK, REPLY | {"reasoning": {"text": "hm"}}]}, "reasoning_content of a message must be text"),
        ({"messages": [ASK, REPLY | {"thinking": ["hm"]}]}, "thinking of a message must be text"),
        ({"messages": [ASK, REPLY | {"function_call": "auto"}]}, "JSON"),
        ({"messages": [ASK, REPLY | {"function_call": 3}]}, "name and arguments"),
        ({"messages": [ASK | {"from": "gpt"}]}, "has role 'user' and from 'gpt'"),
        ({"messages": [ASK | {"value": "other"}]}, "has content 'hi' and value 'other'"),
        ({"conversations": {"from": ["human", "gpt"], "value": ["hi"]}}, "must be a list of messages"),
        ({"messages": "hi"}, "must be a list of messages"), ({"prompt": "hi", "tools": ["weather"]}, "definitions"),
    ],
)  # fmt: skip
def test_a_field_that_can_not_be_read_is_refused(row: dict[str, Any], problem: str) -> None:
    """Catches a known field of another form that is dropped, or that a template trips over later."""
    with pytest.raises(DataError, match=f"a:1: .*{problem}"):
        parse(row, "a:1")


def test_unknown_fields_are_reported_once_with_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a line for each row, and none at all; and weights of answers that the target writes anew."""
    rows = [{"prompt": f"hi {i}", "mood": "x", **({"note": 1} if i % 3 == 0 else {})} for i in range(9)]
    rows.append({"messages": [ASK, REPLY | {"weight": 0}]})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.WARNING):
        select(Config(conversations=str(tmp_path / "a.jsonl")))
    [line] = [record.getMessage() for record in caplog.records if "not read" in record.getMessage()]
    assert "mood (9 rows), note (3 rows), messages[].weight" in line


# ── containers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def tool_row(name: str, arguments: dict[str, Any], properties: dict[str, Any]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    return {"messages": [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, say("tool", "5"), REPLY],
            "tools": [tool]}  # fmt: skip


ROWS = [
    tool_row("weather", {"city": "Rome"}, {"city": {"type": "string"}}),
    tool_row("add", {"a": 2, "b": 3}, {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    {"messages": [BE, ASK, REPLY]}, {"prompt": "hi", "response": "ho"},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "system": "be"},
]  # fmt: skip


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path.with_suffix(".jsonl")


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(_columns(rows)), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def arrow(path: Path, rows: list[dict[str, Any]], opened: Callable[..., Any] = pyarrow.ipc.new_stream) -> Path:
    table = pyarrow.Table.from_pylist(_columns(rows))
    with opened(str(path.with_suffix(".arrow")), table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


def arrow_file(path: Path, rows: list[dict[str, Any]]) -> Path:
    return arrow(path, rows, pyarrow.ipc.new_file)


def saved(path: Path, rows: list[dict[str, Any]]) -> Path:
    datasets.Dataset.from_list(_columns(rows)).save_to_disk(path / "saved", num_shards=min(2, len(rows)))
    return path / "saved"


def _columns(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row with every column, as a table has them."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]


def read(path: Path, **settings: Any) -> list[Conversation]:
    return list(from_source(Source(path=str(path)), Config(**settings), Skipped()))


@pytest.mark.parametrize("write", [parquet, arrow, arrow_file, saved])
def test_every_container_gives_the_rows_that_were_put_in(write: Callable[..., Path], tmp_path: Path) -> None:
    """Catches the null fields that a table gives each row being shown to the model, and rows of several layouts in one
    file that are read as the first one's."""
    plain = read(jsonl(tmp_path / "a", ROWS))
    made = read(write(tmp_path / "b", ROWS))
    assert [(one.messages, one.tools) for one in made] == [(one.messages, one.tools) for one in plain]
    tokenizer = make_tokenizer(TOOLS)
    for one, other in zip(made, plain, strict=True):
        assert render(tokenizer, one.messages, 10_000, tools=one.tools) == render(
            tokenizer, other.messages, 10_000, tools=other.tools
        )


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    """Catches arguments that come as a list of pairs."""
    call = pyarrow.struct([("name", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), pyarrow.string()))])
    message = pyarrow.struct(
        [("role", pyarrow.string()), ("content", pyarrow.string()), ("tool_calls", pyarrow.list_(call))]
    )
    calls = [{"name": "a", "arguments": [("city", "Rome")]}]
    table = pyarrow.table({"messages": pyarrow.array([[ASK, {"role": "assistant", "tool_calls": calls}]],
                                                     pyarrow.list_(message))})  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    [found] = read(tmp_path / "a.parquet")
    assert found.messages[1]["tool_calls"] == [{"name": "a", "arguments": {"city": "Rome"}}]


@pytest.mark.parametrize("write", [parquet, arrow])
def test_values_that_json_lacks_are_texts_and_numbers(write: Callable[..., Path], tmp_path: Path) -> None:
    """Catches a traceback of json.dumps, long after the row was read."""
    tool = {"name": "f", "at": datetime.datetime(2020, 1, 1), "day": datetime.date(2020, 1, 1), "price": Decimal("1.5"),
            "bytes": b"hi", "image": b"\xff\xfe"}  # fmt: skip
    [row] = read(write(tmp_path / "a", [{"prompt": b"hi", "tools": [tool]}]))
    assert row.messages == [ASK] and row.prompt_hash(answered=True)
    assert row.tools == ({"name": "f", "at": "2020-01-01T00:00:00", "day": "2020-01-01", "price": 1.5, "bytes": "hi",
                          "image": "fffe"},)  # fmt: skip


def test_a_table_with_two_columns_of_a_name_is_refused(tmp_path: Path) -> None:
    """Catches the second one in place of the first."""
    pyarrow.parquet.write_table(pyarrow.table([pyarrow.array(["a"])] * 2, names=["prompt"] * 2), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="more than one column 'prompt'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_data_is_named(ending: str, tmp_path: Path) -> None:
    """Catches a pointer that trains or gives a parser's error, and a pipe that is read for ever."""
    path = tmp_path / f"a{ending}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 25834496\n")
    with pytest.raises(DataError, match="Git LFS pointer"):
        read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        read(path)


def test_what_a_folder_has_besides_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches files that are left out in silence, an editor's copies that train, and a test split that does."""
    for name in ("train.jsonl", "TEST.JSONL", ".ipynb_checkpoints/train-copy.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"prompt": "hi"}\n')
    for name in ("README.md", "more.csv", "more.jsonl.gz"):
        (tmp_path / name).write_text("x")
    for _ in range(2):
        assert len(read(tmp_path)) == 2
    others, splits = caplog.messages
    assert "2 files of" in others and "more.csv, more.jsonl.gz" in others
    assert "several splits, test, train" in splits


def test_a_saved_data_set_gives_its_split_or_says_which_there_are(tmp_path: Path) -> None:
    """Catches a folder of which state.json trains, splits that are mixed, and a file that is missing."""
    made = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(made).save_to_disk(tmp_path / "all")
    assert [one.messages[0]["content"] for one in read(tmp_path / "all")] == ["train"]
    asked = list(from_source(Source(path=str(tmp_path / "all"), split="test"), Config(), Skipped()))
    assert [one.messages[0]["content"] for one in asked] == ["test"]
    with pytest.raises(DataError, match="has the splits"):
        list(from_source(Source(path=str(tmp_path / "all"), split="dev"), Config(), Skipped()))
    next((tmp_path / "all" / "train").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="lacks data-"):
        read(tmp_path / "all")


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    """Catches a traceback of Arrow, and rows before the damage that pass for all."""
    for write in (parquet, arrow, arrow_file):
        path = write(tmp_path / "a", [{"prompt": f"hi {i}"} for i in range(3000)])
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(DataError, match="can't be read after row"):
            read(path)


def test_nulls_that_say_something_stay(tmp_path: Path) -> None:
    """Catches a default of null that is taken for a table's padding, and padding that JSON was written with."""
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}, "b": None}}
    tool = {"name": "f", "description": None, "parameters": schema}
    tokenizer = make_tokenizer("{{ tools | tojson }}")
    [found] = read(jsonl(tmp_path / "a", [{"prompt": "hi", "tools": [tool]}]))
    shown = json.loads(tokenizer.decode(prompt_tokens(tokenizer, found.messages, tools=found.tools)))
    wanted = {"type": "object", "properties": {"a": {"type": ["string", "null"], "default": None}}}
    assert shown == [{"type": "function", "function": {"name": "f", "parameters": wanted}}]


# ── rendered ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(noise: random.Random) -> dict[str, Any]:
    """A chat of any shape that OpenAI's API takes, which ends with a question."""
    word = lambda: noise.choice(["hi", "ü🙂", " a b ", "", "{x}", "1\n2"])
    content = lambda: noise.choice([word(), [{"type": "text", "text": word()} for _ in range(noise.randrange(1, 4))]])
    messages: list[dict[str, Any]] = []
    if noise.random() < 0.5:
        messages.append({"role": noise.choice(["system", "developer"]), "content": content()})
    for _ in range(noise.randrange(1, 4)):
        messages.append({"role": "user", "content": content()} | ({"name": "bo"} if noise.random() < 0.2 else {}))
        answer: dict[str, Any] = {"role": "assistant", "content": content()}
        if noise.random() < 0.4:
            answer["reasoning_content"] = "hm"
        if noise.random() < 0.4:
            arguments = noise.choice(['{"a": 1}', '{"a": null}', "{}", '{"b": {"c": [1, null]}}'])
            answer |= {"content": noise.choice([None, ""]), "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}  # fmt: skip
        messages.append(answer)
        if "tool_calls" in answer:
            messages.append({"role": "tool", "content": content(), "tool_call_id": "1"})
    messages.append({"role": "user", "content": "what?"})
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}
    return {"messages": messages} | ({"tools": [tool]} if noise.random() < 0.5 else {})


@pytest.mark.parametrize("template", [TOOLS, TEXTS, TEMPLATE], ids=["objects", "texts", "marks"])
def test_what_trains_is_what_is_served(template: str) -> None:
    """Catches a chat that training renders in one way and the server in another: 200 of every shape."""
    tokenizer = make_tokenizer(template)
    for number in range(200):
        asked = drawn(random.Random(number))
        body = ChatRequest.model_validate(asked)
        if template is TEMPLATE and any(message.get("tool_calls") for message in asked["messages"]) | (
            "tools" in asked
        ):
            with pytest.raises(Refusal, match="can't be shown to this model"):  # which trains without them
                chat.tokens_of(body.messages, body.tools, None, tokenizer)
            continue
        served = chat.tokens_of(body.messages, body.tools, None, tokenizer)
        found = parse(asked, "a:1")
        assert prompt_tokens(tokenizer, found.messages, tools=found.tools) == served, asked
        if "tools" not in asked:
            assert ids_of(asked["messages"], tokenizer, 10_000, {}) == served
        whole = [*found.messages, REPLY]
        trained = render(tokenizer, whole, 10_000, tools=found.tools)
        assert trained.tokens[: len(served)] == served
        assert trained.learn[-1][0] == len(served)


def test_an_answer_of_weight_0_is_context() -> None:
    """Catches a wrong answer that trains, by prompts, by marks, and without a template."""
    wrong, right = say("assistant", "wrong", weight=0), say("assistant", "right")
    unmarked = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    for template in (TEMPLATE, unmarked, None):
        tokenizer = make_tokenizer(template)
        found = render(tokenizer, [ASK, wrong, ASK, right], 10_000)
        [(start, end)] = found.learn
        assert tokenizer.decode(found.tokens[start:end]).removesuffix("<|end|>") == "right"
        assert "wrong" in tokenizer.decode(found.tokens[:start])
        assert found.unstable == 0


def test_what_a_template_refuses_is_found_before_anything_is_written() -> None:
    """Catches a refusal that only the first answer brings, whatever the template raises."""
    for broken in ("{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ messages[9].content.x }}", "{{ 'a' + 1 }}"):
        with pytest.raises(DataError, match="a:1: the target's chat template refuses these messages"):
            check_template(make_tokenizer(broken), parse({"prompt": "hi", "response": "ho"}, "a:1"))
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    row = parse({"messages": [ASK, REPLY, say("tool", "x"), REPLY]}, "a:2")
    with pytest.raises(DataError, match="a:2: .*no tools"):
        check_template(make_tokenizer(template), row, answered=True)


# ── logs and tasks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"system": "be", "conversations": [{"from": "human", "value": "hi"}]}, "sharegpt"),
        ({"system": "be", "messages": [ASK]}, "raw"), ({"system": "be", "prompt": "hi"}, "vllm-custom"),
        ({"body": {"system": "be", "messages": [ASK]}, "t": 0.0}, "outrider"),
        ({"custom_id": "a", "body": {"system": "be", "messages": [ASK]}}, "openai-batch"),
        ({"request": {"system": "be", "messages": [ASK]}, "response": {}}, "gateway"),
    ],
)  # fmt: skip
def test_a_log_sends_the_system_text_beside_its_messages(row: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Catches a prompt that is replayed without its system text."""
    path = jsonl(tmp_path / "log", [row])
    trace = traces.read(path)
    assert trace.format == name
    [call] = trace.calls()
    assert call.body["messages"] == [BE, ASK] and "system" not in call.body


def test_a_log_of_tools_is_replayed_with_them(tmp_path: Path) -> None:
    """Catches a ShareGPT log with tools that is refused, or sent without them."""
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}], "tools": [WEATHER]}
    [call] = traces.read(jsonl(tmp_path / "log", [row])).calls()
    assert (call.body["tools"], call.answer) == ([WEATHER], "ho")


@pytest.mark.parametrize(
    "response",
    [
        "ho", json.dumps({"choices": [{"message": REPLY}]}), {"choices": [{"text": "ho"}]},
        {"body": {"choices": [{"message": REPLY}]}}, {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
    ],
)  # fmt: skip
def test_an_answer_in_a_log_is_found_however_it_is_written(response: Any, tmp_path: Path) -> None:
    """Catches an answer that training finds and replay does not."""
    row = {"request": json.dumps({"messages": [ASK]}), "response": response}
    [call] = traces.read(jsonl(tmp_path / "log", [row])).calls()
    assert (call.body, call.answer) == ({"messages": [ASK]}, "ho")


def test_a_plan_reads_what_the_server_would(tmp_path: Path) -> None:
    """Catches parts that are joined in another way, and calls and tools that are left out."""
    parts: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    used = [say("user", parts), say("assistant", "", tool_calls=[CALL]), say("tool", "19"), ASK]
    path = jsonl(tmp_path / "log", [{"body": {"messages": used, "tools": [WEATHER]}, "t": 0.0}])
    [question] = sample.draw(path, None, 1).questions
    tokenizer = make_tokenizer(TOOLS)
    body = ChatRequest.model_validate({"messages": used, "tools": [WEATHER]})
    served = chat.tokens_of(body.messages, body.tools, None, tokenizer)
    assert ids_of(question.prompt, tokenizer, 10_000, {}, tools=question.tools) == served
    image = say("user", [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x" * 9999}}])  # type: ignore[arg-type]
    demand = of_log(jsonl(tmp_path / "image", [{"body": {"messages": [image]}, "t": 0.0}]), count=len)
    assert demand.prompt_tokens == 2


def test_a_task_has_the_system_text_of_its_row(tmp_path: Path) -> None:
    """Catches a task that is measured without what its users see first."""
    path = jsonl(tmp_path / "task", [{"system": "be", "conversations": [{"from": "human", "value": "hi"}]}])
    [prompt] = names.prompts(str(path), 5)
    assert prompt.messages() == [BE, ASK]


def test_a_task_says_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches tools that are left out in silence, or in a line for each row."""
    row = {"messages": [ASK, say("assistant", "", tool_calls=[CALL]), say("tool", "19")], "tools": [WEATHER]}
    assert len(list(names.prompts(str(jsonl(tmp_path / "task", [row] * 3)), 5))) == 3
    assert [message.split(" have ")[1].split(",")[0] for message in caplog.messages] == ["tools", "answers of tools"]


# ── whatever comes ────────────────────────────────────────────────────────────────────────────────────────────────────

LAYOUTS: list[Callable[[str, str], dict[str, Any]]] = [
    lambda q, a: {"messages": [say("user", q), say("assistant", a)]},
    lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    lambda q, a: {"system": "be", "conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    lambda q, a: {"prompt": q, "response": a},
    lambda q, a: {"prompt": q, "completion": a, "system": "be"},
    lambda q, a: {"instruction": q, "input": "", "output": a, "history": [["x", "y"]]},
    lambda q, a: {"question": q, "answer": a},
    lambda q, a: {"system_prompt": "be", "question": q, "response": a},
    lambda q, a: {"custom_id": "c", "body": {"messages": [say("user", q), say("assistant", a)]}},
    lambda q, a: {"request": {"messages": [say("user", q)]}, "response": a},
    lambda q, a: {"messages": [say("user", q), {"role": "assistant", "content": a, "tool_calls": [CALL], "weight": 0}],
                  "tools": [WEATHER]},
    lambda q, a: {"turns": [q, a]},
]  # fmt: skip
"""Twelve, each with a question and an answer."""
BAD = [None, 3, "", [], {}, True, ["x"], {"a": None}, "\ud800", 1e400]


def test_rows_of_every_layout_are_read_or_refused(tmp_path: Path) -> None:
    """Catches a traceback, a row that is lost in silence, and a text that is lost from a row: in twelve layouts and
    three containers, a third of JSON's rows with a field of a wrong kind, by --seed; 20,000 rows every night."""
    count = int(os.environ.get("OUTRIDER_FUZZ_ROWS", "600"))
    noise = random.Random(os.environ["OUTRIDER_TEST_SEED"])
    for number in range(count // 50):
        layout, write = noise.randrange(len(LAYOUTS)), noise.choice([jsonl, parquet, arrow])
        rows, wanted, spoilt = [], [], 0
        for place in range(50):
            question, answer = f"q{number}.{place} ü🙂", f"a{place}\n"
            row = LAYOUTS[layout](question, answer)
            if write is jsonl and noise.random() < 1 / 3:
                owner = noise.choice([row, *(one for one in row.values() if isinstance(one, dict))])
                owner[noise.choice(sorted(owner))] = noise.choice(BAD)
                spoilt += 1
            else:
                wanted.append((question, answer))
            rows.append(row)
        skipped = Skipped()
        source = Source(path=str(write(tmp_path / "rows", rows)))
        found = list(from_source(source, Config(skip_bad=True), skipped))
        assert len(found) + len(skipped.reasons) == 50
        assert len(skipped.reasons) <= spoilt
        said = [{message["content"] for message in one.messages} for one in found]
        assert all(any({q, a} <= texts for texts in said) for q, a in wanted), (layout, write)
