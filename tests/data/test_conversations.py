"""Conversations from every layout; bad rows are named or counted; exactly the assistants' tokens train."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import make_tokenizer

from outrider.data.config import Config
from outrider.data.rendering import render
from outrider.data.sources.conversations import Conversation, Skipped, available, read
from outrider.data.sources.mixture import select
from outrider.errors import DataError
from outrider.measure.tasks import names

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be"}


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
        ({"messages": [], "conversations": [USER]}, [USER]),
        ({"turns": ["hi", "hi"]}, [USER, USER]),
        ({"prompt": "hi"}, [USER]),
        ({"prompt": "🙂"}, [{"role": "user", "content": "🙂"}]),  # JSON writes it as a pair of surrogates
        ({"prompt": "hi", "response": "yo"}, [USER, REPLY]),
        ({"instruction": "hi", "output": "yo"}, [USER, REPLY]),
        ({"instruction": "hi", "input": "", "output": "yo"}, [USER, REPLY]),
        ({"instruction": "add", "input": "1, 2", "output": "yo"},
         [{"role": "user", "content": "add\n\n### Input:\n1, 2"}, REPLY]),
        ({"text": "hi"}, [USER]),
        ({"prompt": "hi", "completion": "yo", "other": 3}, [USER, REPLY]),
        ({"messages": [SYSTEM, USER, {"role": "tool", "content": "4"}, REPLY]},
         [SYSTEM, USER, {"role": "tool", "content": "4"}, REPLY]),
    ],
)  # fmt: skip
def test_every_layout_is_read(row: dict, messages: list, tmp_path: Path) -> None:
    """Catches a column name, a role name or an answer that gets lost."""
    (found,) = read_all(write(tmp_path / "a.jsonl", row))
    assert found == Conversation("a.jsonl:1", messages, "a.jsonl:1")
    assert not found.has_own_id


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1, 2], "got list"), ({}, "keys: none"), ({"ask": "hi"}, "keys: ask"),
        ({"messages": ["hi"]}, "got 'hi'"), ({"messages": "hi"}, "got 'h"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "needs a role"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "text as content"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "needs a role"),
        ({"prompt": "  \n"}, "no user turn"), ({"messages": 5}, "messages"), ({"conversations": {"a": 1}}, "message"),
        ({"text": 7}, "put a list of messages under `messages`"),
        ({"prompt": "a", "response": {"b": 1}}, "response must be text"),
        ({"instruction": "a", "input": 3}, "input must be text, got 3"),
        ({"prompt": "a \ud83d b"}, "holds '\\ud83d', half of a surrogate pair"),
        ({"id": "\udc00", "prompt": "a"}, "'\\udc00'"), ({"turns": "hello"}, "turns"), ({"turns": [["hi"]]}, "turns"),
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


@pytest.mark.parametrize("name", ["none.jsonl", "none/x", "folder.jsonl", "binary.txt", "empty.jsonl", "empty.txt"])
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


def test_an_unknown_library_split_or_task_is_refused() -> None:
    """Catches prompts of the training split being measured because a name was misspelt."""
    with pytest.raises(DataError, match="use stdlib:train or stdlib:held_out"):
        read_all(Path("stdlib:test"))
    with pytest.raises(DataError, match="unknown task 'gsmk8'; did you mean 'gsm8k'"):
        list(names.prompts("gsmk8", 3))


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
        with pytest.raises(DataError, match="is not an installed package with Python source"):
            select(Config(conversations=f"packages:{name}"))


TALKS = {
    "one turn": [USER, REPLY],
    "three turns": [USER, REPLY, USER | {"content": "and?"}, REPLY | {"content": "ü\nno"}, USER, REPLY],
    "a system": [SYSTEM, USER, REPLY],
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


@pytest.mark.parametrize("talk", ["three turns", "two questions"])
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


def test_messages_that_a_target_refuses_are_a_data_error(talker, monkeypatch) -> None:
    """Catches the same traceback where prompts are not prepared but decoded or measured."""
    monkeypatch.setattr(talker.tokenizer, "chat_template", STRICT)
    with pytest.raises(DataError, match="chat template refuses these messages: System role not supported"):
        talker.encode(TALKS["a system"][:2])
