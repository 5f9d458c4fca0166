"""Conversations from every layout; bad rows are named or counted; exactly the assistants' tokens train."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tokenizer

from outrider.data.config import Config
from outrider.data.conversations import Conversation, Skipped, available, read
from outrider.data.rendering import prompt_tokens, render
from outrider.data.sources import select
from outrider.errors import DataError
from outrider.measure import tasks

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_all(path: Path, **settings: Any) -> list[Conversation]:
    return list(read(Config(conversations=str(path), **settings)))


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [USER, REPLY]}, [USER, REPLY]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}, [USER, REPLY]),
        ({"conversations": [{"role": "user", "content": "hi"}]}, [USER]),
        ({"messages": [], "conversations": [USER]}, [USER]),
        ({"turns": ["hi", "hi"]}, [USER, USER]),
        ({"prompt": "hi"}, [USER]),
        ({"prompt": "🙂"}, [{"role": "user", "content": "🙂"}]),  # JSON writes it as a pair of surrogates
        ({"prompt": "hi", "response": "yo"}, [USER, REPLY]),
        ({"instruction": "hi", "output": "yo"}, [USER, REPLY]),
        ({"instruction": "hi", "input": "", "output": "yo"}, [USER, REPLY]),
        (
            {"instruction": "add", "input": "1, 2", "output": "yo"},
            [{"role": "user", "content": "add\n\n### Input:\n1, 2"}, REPLY],
        ),
        ({"text": "hi"}, [USER]),
        ({"prompt": "hi", "completion": "yo", "other": 3}, [USER, REPLY]),
        (
            {"messages": [{"role": "system", "content": "be"}, USER, {"role": "tool", "content": "4"}, REPLY]},
            [{"role": "system", "content": "be"}, USER, {"role": "tool", "content": "4"}, REPLY],
        ),
    ],
)
def test_every_layout_is_read(row: dict, messages: list, tmp_path: Path) -> None:
    """Catches a column name, a role name or an answer that gets lost."""
    (found,) = read_all(write(tmp_path / "a.jsonl", row))
    assert found == Conversation("a.jsonl:1", messages, "a.jsonl:1")
    assert not found.has_own_id


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1, 2], "got list"), ("hi", "must be a mapping such as"), ({}, "keys: none"),
        ({"question": "hi"}, "keys: question"), ({"messages": ["hi"]}, "got 'hi'"), ({"messages": "hi"}, "got 'h"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "needs a role"),
        ({"messages": [{"role": "user"}]}, "text as content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "text as content"), ({"messages": [REPLY]},
        "no user turn"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "needs a role"),
        ({"prompt": "  \n"}, "no user turn"), ({"messages": 5}, "messages"), ({"conversations": {"a": 1}}, "message"),
        ({"prompt": [USER]}, "prompt must be text, got [{'role'"), ({"text": 7},
        "put a list of messages under `messages`"),
        ({"prompt": "a", "response": {"b": 1}}, "response must be text"),
        ({"instruction": "a", "input": 3}, "input must be text, got 3"),
        ({"prompt": "a \ud83d b"}, "holds '\\ud83d', half of a surrogate pair"),
        ({"id": "\udc00", "prompt": "a"}, "'\\udc00'"),
        ({"messages": [USER, {"role": "assistant", "content": "\udfff"}]}, "surrogate"),
        ({"turns": 5}, "turns"), ({"turns": "hello"}, "turns"), ({"turns": [["hi"]]}, "turns"),
    ],
)  # fmt: skip
def test_a_row_of_no_layout_is_named(row: Any, said: str, tmp_path: Path) -> None:
    """Catches a TypeError, or a text that is read letter by letter; the message says which line."""
    with pytest.raises(DataError) as caught:
        read_all(write(tmp_path / "a.jsonl", {"prompt": "hi"}, row))
    assert "a.jsonl:2" in str(caught.value)
    assert said in str(caught.value)


def test_bad_rows_are_counted_where_that_is_asked(tmp_path: Path) -> None:
    """Catches --skip-bad that stops all the same, skips in silence, or uses up the count."""
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {}, {"prompt": "b"}, {"messages": ["x"]}, {"prompt": "c"})
    path.write_text(path.read_text() + '{"prompt": "d"}\n{"prompt": "e')
    skipped = Skipped()
    found = list(read(Config(conversations=str(path), skip_bad=True), skipped))
    assert [conversation.messages[0]["content"] for conversation in found] == ["a", "b", "c", "d"]
    assert len(skipped.reasons) == 3
    assert [reason.partition(": ")[0] for reason in skipped.reasons[:2]] == ["a.jsonl:2", "a.jsonl:4"]
    assert "line 7 is not JSON (the line is cut off)" in skipped.reasons[2]
    assert len(read_all(path, skip_bad=True, count=2)) == 2


def test_a_list_of_rows_is_read_as_lines_are(tmp_path: Path) -> None:
    """Catches ShareGPT's file, one JSON list, being asked of the hub; and lines of JSON under the name .json."""
    talk = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    rows = [{"id": "one", "conversations": talk}, {"conversations": talk}]
    (tmp_path / "list.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed, lined = (read_all(tmp_path / name) for name in ("list.json", "lines.json"))
    assert [one.messages for one in listed] == [one.messages for one in lined]
    assert [one.id for one in listed] == ["one", "list.json[1]"]
    assert listed[0].messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    wrong = {'{"a": 1}': "must hold a list of rows, got dict", '[{"prompt": "a"},': "is not JSON", "[1]": "a mapping"}
    for text, said in wrong.items():
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(DataError, match=said):
            read_all(tmp_path / "bad.json")


def test_every_row_is_used_unless_a_count_is_given(tmp_path: Path) -> None:
    """Catches rows that are cut at a number that nobody asked for, and a count of what there is that is cut too."""
    path = write(tmp_path / "a.jsonl", *({"prompt": str(i)} for i in range(1200)))
    assert len(read_all(path)) == 1200
    assert len(read_all(path, count=7)) == 7
    assert available(Config(conversations=str(path), count=7)) == 1200
    assert available(Config(conversations="org/rows", count=7)) is None


def test_every_turn_is_counted_in_what_will_be_written(tmp_path: Path) -> None:
    """Catches a plan of one answer for a talk of three turns, and one beyond the length of a text."""
    path = write(tmp_path / "a.jsonl", {"messages": [USER]}, {"messages": [USER, REPLY, USER, REPLY, USER]})
    settings = {"conversations": str(path), "max_new_tokens": 10}
    assert select(Config(**settings)).most_tokens == 40
    assert select(Config(**settings, length=25)).most_tokens == 35
    assert select(Config(**settings, regenerate=False, length=25)).most_tokens == 50


def test_a_missing_file_is_not_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a folder that does not exist being looked for on the network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for name in ("runs/prompts", "./prompts", "prompts.csv"):
        with pytest.raises(DataError, match=f"no such f.*{name}"):
            list(read(Config(conversations=name)))


def test_a_line_cut_inside_a_character_is_named_with_its_number(tmp_path: Path) -> None:
    """Catches one torn byte making the whole file unreadable, and a number that does not count empty lines."""
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "a"}\n\n{"prompt": "über"}\n{"prompt": "ü'.encode()[:-1])
    with pytest.raises(DataError, match=r"a\.jsonl, line 4.*--skip-bad"):
        read_all(path)
    assert [conversation.messages[0]["content"] for conversation in read_all(path, skip_bad=True)] == ["a", "über"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(name: str, tmp_path: Path) -> None:
    """Catches a prompt that begins with an invisible character."""
    path, line = tmp_path / name, '{"prompt": "hi"}' if name == "a.jsonl" else "hi"
    for mark in ("\ufeff", "\ufeff\n"):
        path.write_text(f"{mark}{line}\n{line}\n", encoding="utf-8")
        assert [conversation.messages for conversation in read_all(path)] == [[USER], [USER]]
    for encoding in ("utf-16", "utf-16-be"):
        path.write_bytes(f"\ufeff{line}\n".encode(encoding) if encoding == "utf-16-be" else line.encode(encoding))
        with pytest.raises(DataError, match=rf"{name}, line 1 begins with a UTF-16 byte order mark; save the file as"):
            read_all(path)


def test_a_text_file_is_a_prompt_a_line(tmp_path: Path) -> None:
    """Catches empty lines as prompts, and ids that change when one is added at the end."""
    path = tmp_path / "a.txt"
    path.write_text("first\n\n  second \n")
    assert [(c.id, c.messages[0]["content"]) for c in read_all(path)] == [
        ("a.txt:1", "first"),
        ("a.txt:3", "  second "),
    ]


@pytest.mark.parametrize("name", ["none.jsonl", "none.txt", "folder.jsonl", "binary.txt", "empty.jsonl", "empty.txt"])
def test_a_file_without_prompts_is_refused(name: str, tmp_path: Path) -> None:
    """Catches an OSError, or a preparation that finds nothing to do and says so by silence."""
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x80")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        read_all(tmp_path / name)


def test_a_data_set_that_is_not_to_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exception of the hub's, or a long wait."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"can't load data set 'no-such/set'.*local \.jsonl"):
        read_all(Path("no-such/set"))


def test_an_id_is_the_row_s_own_or_its_place(tmp_path: Path) -> None:
    """Catches ids that depend on how many rows were read, and a report with two prompts under one name."""
    path = write(tmp_path / "a.jsonl", {"id": 7, "prompt": "a"}, {"prompt": "b"}, {"id": "x", "prompt": "c"})
    assert [conversation.id for conversation in read_all(path)] == ["7", "a.jsonl:2", "x"]
    write(path, {"id": 1, "prompt": "a"}, {"id": 1, "prompt": "b"}, {"id": 2, "prompt": "c"})
    assert len({conversation.id for conversation in read_all(path)}) == 3


def test_an_unknown_library_split_or_task_is_refused() -> None:
    """Catches prompts of the training split being measured because a name was misspelt."""
    with pytest.raises(DataError, match="use stdlib:train or stdlib:held_out"):
        read_all(Path("stdlib:test"))
    with pytest.raises(DataError, match="unknown task 'gsmk8'; did you mean 'gsm8k'"):
        list(tasks.prompts("gsmk8", 3))


def test_packages_are_read_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches code that runs because its source was asked for, tests taken for source."""
    package = tmp_path / "quietpkg"
    (package / "tests").mkdir(parents=True)
    for name in ("__init__.py", "deep/a.py", "tests/b.py"):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text("raise SystemExit('imported')\n" * 9)
    monkeypatch.syspath_prepend(tmp_path)
    found = select(Config(conversations="packages:quietpkg"))
    assert {one.id for one in found} == {"quietpkg/__init__.py:1", "quietpkg/deep/a.py:1"}
    assert all(one.messages[0]["content"].endswith("\n") for one in found)
    for name in ("nosuch", "os.path", "", "../quietpkg"):
        with pytest.raises(DataError, match="no installed package with Python source"):
            select(Config(conversations=f"packages:{name}"))


TALKS = {
    "one turn": [USER, REPLY],
    "three turns": [
        USER,
        REPLY,
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "ü\nno"},
        USER,
        REPLY,
    ],
    "a system": [{"role": "system", "content": "be"}, USER, REPLY],
    "a question left": [USER, REPLY, USER],
    "an empty answer": [USER, {"role": "assistant", "content": ""}, USER, REPLY],
    "two answers": [USER, REPLY, REPLY],
    "two questions": [USER, USER, REPLY],
}


@pytest.mark.parametrize("talk", TALKS)
def test_exactly_the_assistants_tokens_train(talk: str) -> None:
    """Catches a role's name, a user's word or a closing token on the wrong side."""
    tokenizer, messages = make_tokenizer(), TALKS[talk]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    wanted = tokenizer.apply_chat_template(messages[: last + 1], return_dict=True, return_assistant_tokens_mask=True)
    found = render(tokenizer, messages, 10_000)
    assert found.tokens == wanted["input_ids"]
    mask = [0] * len(found.tokens)
    for start, end in found.learn:
        mask[start:end] = [1] * (end - start)
    assert mask == wanted["assistant_masks"]
    assert sum(end - start for start, end in found.learn) == sum(mask)


@pytest.mark.parametrize("talk", ["one turn", "three turns", "a system", "two questions"])
def test_without_a_template_exactly_the_answers_train(talk: str) -> None:
    """Catches the first token of the next question being learnt as the end of an answer."""
    tokenizer, messages = make_tokenizer(template=None), TALKS[talk]
    found = render(tokenizer, messages, 10_000)
    assert found.tokens == [*tokenizer.encode("".join(m["content"] for m in messages)), tokenizer.eos_token_id]
    texts = [tokenizer.decode(found.tokens[start:end]).removesuffix("<|end|>") for start, end in found.learn]
    assert texts == [m["content"] for m in messages if m["role"] == "assistant"]
    endless = render(make_tokenizer(template=None, end=None), [USER, REPLY], 100)
    assert None not in endless.tokens and endless.learn[0][1] == len(endless.tokens)


def test_a_text_is_cut_at_its_length() -> None:
    """Catches spans that reach beyond the tokens, or an answer that is all cut off and still counted."""
    tokenizer, messages = make_tokenizer(), TALKS["three turns"]
    whole = render(tokenizer, messages, 10_000)
    for length in range(1, len(whole.tokens) + 1):
        cut = render(tokenizer, messages, length)
        assert cut.tokens == whole.tokens[:length]
        assert cut.learn == [(start, min(end, length)) for start, end in whole.learn if start < length]


STRICT = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}hi"


@pytest.mark.parametrize("template", [STRICT, "{{ messages[0]['content'] + 1 }}", "{{ messages[0].no.such }}"])
def test_what_the_template_refuses_is_a_data_error(template: str) -> None:
    """Catches a traceback of jinja's where a target knows no system role, as Gemma does not."""
    tokenizer = make_tokenizer(template)
    messages = TALKS["a system"]
    for call in (lambda: prompt_tokens(tokenizer, messages[:2]), lambda: render(tokenizer, messages, 99)):
        with pytest.raises(DataError, match=r"target's chat template refuses these messages \(.+\); correct the row"):
            call()


def test_messages_that_a_target_refuses_are_a_data_error(talker, monkeypatch) -> None:
    """Catches the same traceback where prompts are not prepared but decoded or measured."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", STRICT)
    with pytest.raises(DataError, match="chat template refuses these messages: System role not supported"):
        talker.encode(TALKS["a system"][:2])
