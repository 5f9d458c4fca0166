"""The target answers the prompts: as `generate` would, each once, whatever happened in between."""

import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TEMPLATE, make_folder, make_tokenizer

from outrider import generate, load_drafter
from outrider.data.answers.dialogue import hash_conversations
from outrider.data.answers.regenerate import answered, prepare
from outrider.data.answers.store import ANSWERS, MANIFEST, Answer, answers_for, hash_number, read_answers
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens, render
from outrider.data.sources.conversations import Conversation, Skipped, read
from outrider.errors import DataError
from outrider.sampling.settings import Sampling
from outrider.storage.lock import held
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target


def asked(count: int = 8) -> list[Conversation]:
    return [Conversation(f"p{i}", [{"role": "user", "content": "ab" * (i % 3) + str(i)}]) for i in range(count)]


def config(**settings: Any) -> Config:
    return Config(
        **({"max_new_tokens": 12, "length": 48, "slots": 3, "temperature": 0.9, "top_k": 0, "top_p": 0.95} | settings)
    )


def there(folder: Path, conversations: list[Conversation], **settings: Any) -> int:
    """How many of these conversations have an answer."""
    hashes = [hash_number(one.prompt_hash) for one in hash_conversations(conversations, config(**settings))]
    return answered(folder, np.array(hashes, np.uint64))


def answer_all(
    target: TransformersTarget, folder: Path, conversations: list[Conversation] | None = None, **settings: Any
) -> list[Answer]:
    path = prepare(target, target.tokenizer, conversations or asked(), folder, config(**settings))
    return read_answers(path)


def by_id(answers: list[Answer]) -> dict[str, tuple[Any, ...]]:
    """What an answer is; an id that comes twice is an error here already."""
    assert len({answer.id for answer in answers}) == len(answers)
    return {answer.id: (answer.tokens, answer.learn, answer.finish_reason) for answer in answers}


def answer_rest(target: Any, folder: Path, conversations: Any = None) -> list[tuple[int, str]]:
    """Number and id of each answer that was not there yet."""
    seen: list[tuple[int, str]] = []
    note = lambda number, answer: seen.append((number, answer.id))
    prepare(target, target.tokenizer, conversations or asked(), folder, config(), on_answer=note)
    return seen


@pytest.fixture(scope="module")
def whole(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """The answers of a run that nothing stopped."""
    return by_id(answer_all(talker, tmp_path_factory.mktemp("whole")))


def test_an_answer_is_what_generate_says(talker: TransformersTarget, whole: dict[str, tuple[Any, ...]]) -> None:
    """Catches a prompt without its template, a lost end token, or settings that do not arrive."""
    for conversation in asked():
        prompt = prompt_tokens(talker.tokenizer, conversation.messages)
        seed = zlib.crc32(f"{conversation.id} 1".encode())  # noise is of the id and the turn, not of the place
        (alone,) = generate(talker, [prompt], max_new_tokens=12, sampling=Sampling(0.9, 0, 0.95, seed))
        learn = [(len(prompt), len(prompt) + len(alone.tokens))]
        assert whole[conversation.id] == (prompt + alone.tokens, learn, alone.finish_reason)
    assert len({tuple(answer[0]) for answer in whole.values()}) == 8


def test_neither_slots_nor_order_change_an_answer(talker, whole, tmp_path) -> None:
    """Catches noise that depends on the batch: a resumed run would write other texts."""
    assert by_id(answer_all(talker, tmp_path, asked()[::-1], slots=8)) == whole


def test_a_drafter_makes_no_answer_different(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches training text that depends on what helped to write it; greedy, where the text itself is promised."""
    plain = by_id(answer_all(talker, tmp_path / "plain", temperature=0.0))
    ngram = load_drafter("ngram", talker, shortest=1)
    path = prepare(talker, talker.tokenizer, asked(), tmp_path / "drafted", config(temperature=0.0), drafter=ngram)
    assert by_id(read_answers(path)) == plain


def test_a_killed_process_loses_only_what_it_was_writing(talker, whole, tmp_path) -> None:
    """Catches answers that wait in a buffer: after kill -9 all that were given out are on disk."""
    given, slowly = (talker, talker.tokenizer, asked(), tmp_path, config()), lambda n, _: time.sleep(0.2 * (n > 2))
    child = multiprocessing.get_context("fork").Process(target=prepare, args=given, kwargs={"on_answer": slowly})
    child.start()
    path = tmp_path / ANSWERS
    give_up = time.monotonic() + 20
    while not (path.exists() and path.read_bytes().count(b"\n") >= 3) and time.monotonic() < give_up:
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    there = path.read_bytes().count(b"\n")
    assert 3 <= there < 8
    assert len(answer_rest(talker, tmp_path)) == 8 - there
    assert by_id(read_answers(path)) == whole


@contextmanager
def room_of(size_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the kernel refuses the write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_what_is_written(talker: TransformersTarget, whole: dict[str, Any], tmp_path: Path) -> None:
    """Catches a traceback, or a half line that spoils the answers before it."""
    with (
        room_of(40_000),  # the ledger is a file, too
        pytest.raises(
            DataError, match=r"can't write answers to .*the answers so far are kept; free some space and run"
        ),
    ):
        answer_all(talker, tmp_path)
    known = there(tmp_path, asked())
    assert 0 < known < 8
    assert len(answer_rest(talker, tmp_path)) == 8 - known
    assert by_id(read_answers(tmp_path / ANSWERS)) == whole


def test_answers_that_are_not_there_or_damaged_are_named(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a traceback where a file was copied wrongly; the line is named."""
    with pytest.raises(DataError, match="run `outrider prepare` first"):
        read_answers(tmp_path / ANSWERS)
    path = prepare(talker, talker.tokenizer, asked(3), tmp_path, config())
    lines = path.read_text().splitlines()
    for damage in ("no json", "[1]", '{"id": "x"}', '{"id": "x", "tokens": [1], "learn": [[1]]}'):
        path.write_text("\n".join([lines[0], damage, lines[2]]) + "\n")
        with pytest.raises(DataError, match="line 2 is not an answer"):
            read_answers(path)
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(DataError):
        read_answers(path)


@pytest.mark.parametrize("tokens", [[1, 5000], [-1], ["a"], [True], []], ids=str)
def test_an_answers_tokens_are_ids_of_the_target(tokens: object, tmp_path: Path) -> None:
    """Catches an index error of the embedding, hours later, from an answer that was edited or is another target's."""
    path = tmp_path / ANSWERS
    path.write_text('{"id": "x", "tokens": [4999], "learn": [[0, 1]]}\n')
    assert read_answers(path, 5000)[0].tokens == [4999]
    path.write_text(path.read_text() + json.dumps({"id": "y", "tokens": tokens, "learn": []}) + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_answers(path, 5000)
    path.write_text(json.dumps({"id": "y", "tokens": [1, 2], "learn": [[1, 3]]}) + "\n")
    with pytest.raises(DataError, match="line 1"):
        read_answers(path)


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_new_tokens": 9}, {"regenerate": False}])
def test_answers_of_other_settings_are_not_mixed(change, talker, tmp_path) -> None:
    """Catches a folder whose texts follow two distributions."""
    answer_all(talker, tmp_path, asked(2))
    before = (tmp_path / ANSWERS).read_bytes()
    with pytest.raises(DataError, match=r"contains answers made with another config; name another prepare.folder, or"):
        answer_all(talker, tmp_path, **change)
    assert (tmp_path / ANSWERS).read_bytes() == before


def test_answers_of_another_target_or_template_are_not_mixed(talker, tmp_path) -> None:
    """Catches training on another model's text: same shapes, other weights."""
    answer_all(talker, tmp_path / "answers", asked(2))
    other = load_target(make_folder(tmp_path / "other", seed=5), dtype="float64")
    template = make_tokenizer("{{ messages[0]['content'] }}")
    for use in (
        lambda *who: prepare(*who, asked(), tmp_path / "answers", config()),
        lambda *who: answers_for(tmp_path / "answers", *who),
    ):
        with pytest.raises(DataError, match="made with another target;"):
            use(other, other.tokenizer)
        with pytest.raises(DataError, match="made with another template;"):
            use(talker, template)


def test_a_line_of_another_folder_is_refused(talker, tmp_path) -> None:
    """Catches two files of answers joined by hand, and answers that were known by file and line."""
    path = prepare(talker, talker.tokenizer, asked(2), tmp_path / "one", config())
    other = prepare(talker, talker.tokenizer, asked(2), tmp_path / "two", config(temperature=0.1))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    older = "".join(json.dumps({key: row[key] for key in row if "hash" not in key}) + "\n" for row in rows)
    joined = path.read_text() + other.read_text(), "line 3 was made with another target, template or config"
    for text, said in (joined, (older, "older Outrider wrote .*delete this file")):
        path.write_text(text)
        for use in (answer_all, lambda target, folder: answers_for(folder, target, target.tokenizer)):
            with pytest.raises(DataError, match=said):
                use(talker, path.parent)


def test_two_processes_do_not_answer_into_one_folder(talker, tmp_path, monkeypatch) -> None:
    """Catches every prompt answered twice: both read what is there, and both write the rest."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)
    busy = pytest.raises(DataError, match="another process is writing answers to .*; wait for it, or name another")
    with held(tmp_path, AssertionError()), busy:
        answer_all(talker, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't write answers"):
        answer_all(talker, tmp_path / "file")


def test_answers_whose_manifest_is_lost_are_still_their_targets(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches another target that adopts the answers of a folder because answers.json was not copied with them."""
    path = prepare(talker, talker.tokenizer, asked(3), tmp_path / "answers", config())
    whole, said = path.read_bytes(), (tmp_path / "answers" / MANIFEST).read_text()
    other = load_target(make_folder(tmp_path / "other", seed=5), dtype="float64")
    for damage in ("", "{", "[]"):
        (tmp_path / "answers" / MANIFEST).write_text(damage)
        with pytest.raises(DataError, match="line 1 was made with another target, template or config"):
            answer_all(other, tmp_path / "answers")
        with pytest.raises(DataError, match=r"answers\.json is missing or damaged; run `outrider prepare` again"):
            answers_for(tmp_path / "answers", talker, talker.tokenizer)
    (tmp_path / "answers" / MANIFEST).unlink()
    answer_all(talker, tmp_path / "answers", asked(3))
    assert path.read_bytes() == whole
    assert json.loads((tmp_path / "answers" / MANIFEST).read_text()).keys() == json.loads(said).keys()
    assert len(answers_for(tmp_path / "answers", talker, talker.tokenizer)) == 3


def lines_of(path: Path, *prompts: str, **settings: Any) -> list[Conversation]:
    """Conversations of a file with these lines; they have no ids but their places."""
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return list(read(Config(conversations=str(path), **settings)))


def by_text(target: TransformersTarget, answers: list[Answer]) -> dict[str, str]:
    """Prompt to answer."""
    spans = [(answer.tokens[: answer.learn[0][0]], answer.tokens[answer.learn[0][0] :]) for answer in answers]
    return {target.decode(prompt): target.decode(text) for prompt, text in spans}


def test_an_edited_line_is_answered_anew_and_a_moved_one_is_not(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches answers known by file and line: an edited line kept its old one."""
    path, folder = tmp_path / "a.jsonl", tmp_path / "answers"
    answer_all(talker, folder, lines_of(path, "one", "two", "three"))
    edited = lines_of(path, "zero", "one", "2", "three")
    numbers, ids = zip(*answer_rest(talker, folder, edited), strict=True)
    assert numbers == (3, 4) and sorted(ids) == ["a.jsonl:1", "a.jsonl:3"]
    assert there(folder, edited) == 4
    found = by_text(talker, read_answers(folder / ANSWERS))
    assert found.keys() == {"one", "two", "three", "zero", "2"}
    fresh = by_text(talker, answer_all(talker, tmp_path / "fresh", edited))
    assert fresh == {prompt: found[prompt] for prompt in fresh}


def test_a_text_that_is_asked_twice_is_answered_twice(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches two equal rows that become one, or get one answer from the same noise."""
    twice = lines_of(tmp_path / "a.jsonl", "same", "same")
    first = answer_all(talker, tmp_path / "answers", twice)
    assert len(first) == 2
    assert first[0].tokens != first[1].tokens
    thrice = lines_of(tmp_path / "a.jsonl", "before", "same", "same", "same")
    found = answer_all(talker, tmp_path / "answers", thrice)
    assert found[1:3] == first
    assert len(found) == 4


def test_answers_stand_in_the_order_of_their_prompts(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches an order in which the answers were finished: training after a stop would see other batches."""
    whole = answer_all(talker, tmp_path / "one", slots=1)
    assert [answer.id for answer in whole] == [f"p{i}" for i in range(8)]
    answer_all(talker, tmp_path / "two", asked()[5:])
    answer_all(talker, tmp_path / "two", asked(2))
    found = answer_all(talker, tmp_path / "two", asked(6))
    assert [answer.id for answer in found] == [f"p{i}" for i in range(8)]
    assert found == whole


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TEMPLATE
)


@pytest.mark.parametrize("regenerate", [True, False])
def test_a_row_that_the_template_refuses_is_named_or_counted(regenerate, talker, tmp_path) -> None:
    """Catches jinja's traceback, an hour of answers before it, or one row that can't be left out."""
    rows = [[*TURNS[1:3]], [*TURNS[:3]], [TURNS[1], {"role": "assistant", "content": "two"}]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": row}) + "\n" for i, row in enumerate(rows)))
    dialogues, tokenizer = list(read(Config(conversations=str(path)))), make_tokenizer(NO_SYSTEM)
    with pytest.raises(DataError, match=r"a\.jsonl:2: the target's chat template refuses.*System role not supported"):
        prepare(talker, tokenizer, dialogues, tmp_path / "answers", config(regenerate=regenerate))
    assert there(tmp_path / "answers", dialogues, regenerate=regenerate) == (0 if regenerate else 1)
    skipped, settings = Skipped(), config(regenerate=regenerate, skip_bad=True)
    found = read_answers(prepare(talker, tokenizer, dialogues, tmp_path / "answers", settings, skipped=skipped))
    assert sorted(answer.id for answer in found) == ["0", "2"]
    assert [reason.partition(": ")[0] for reason in skipped.reasons] == ["a.jsonl:2"]


TURNS = [
    {"role": "system", "content": "s"}, {"role": "user", "content": "a"}, {"role": "assistant", "content": "given"},
    {"role": "user", "content": "b"}, {"role": "user", "content": "c"},
]  # fmt: skip


def test_every_turn_is_answered_on_the_target_s_own_answers(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a given answer left in the history, a turn that is skipped."""
    (answer,) = answer_all(talker, tmp_path, [Conversation("dialogue", TURNS)], length=200, temperature=0.0)
    said, spans = [TURNS[0]], []
    for turn in (TURNS[1], TURNS[3], TURNS[4]):
        said.append(turn)
        prompt = prompt_tokens(talker.tokenizer, said)
        (alone,) = generate(talker, [prompt], max_new_tokens=12)
        spans.append((len(prompt), len(prompt) + len(alone.tokens)))
        said.append({"role": "assistant", "content": alone.text})
    assert answer.tokens == prompt + alone.tokens
    assert answer.learn == spans


def test_a_talk_that_outgrows_its_length_keeps_the_answers_it_has(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a first answer that is written by the target, thrown away in silence."""
    dialogue = Conversation("dialogue", [{"role": "user", "content": "a"}, {"role": "user", "content": "b" * 60}])
    first = by_id(answer_all(talker, tmp_path / "one", [Conversation("dialogue", dialogue.messages[:1]), *asked(2)]))
    found = by_id(answer_all(talker, tmp_path / "two", [dialogue, *asked(2)]))
    assert found.get("dialogue") == first["dialogue"]


def test_a_prompt_without_room_for_an_answer_is_left_out(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches one long prompt that stops the run, or is asked with a negative limit."""
    long = [Conversation(f"long{n}", [{"role": "user", "content": "x" * n}]) for n in (44, 45, 46, 300)]
    found = by_id(answer_all(talker, tmp_path, [*long, *asked(2)]))
    # three tokens of template: 44 + 3 leave room for one token of 48
    assert found.keys() == {"long44", "p0", "p1"}
    assert found["long44"][1] == [(47, 48)]


def test_given_answers_are_kept_where_that_is_asked(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches `regenerate: false` that lets the target answer all the same, or trains on prompts."""
    dialogues = [Conversation("t", TURNS), *asked(2)]
    (answer,) = answer_all(talker, tmp_path, dialogues, regenerate=False)
    rendered = render(talker.tokenizer, TURNS, 48)
    assert (answer.tokens, answer.learn) == (rendered.tokens, rendered.learn)
