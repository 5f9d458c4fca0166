"""Servers answer the prompts: what the target writes, each prompt once, whatever the servers do."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from data.answering import Stub, serving
from data.test_regenerate import TURNS, answer_all, asked, by_id, config, room_of
from outrider.data.answers import server
from outrider.data.answers.ledger import LEDGER, Ledger
from outrider.data.answers.regenerate import prepare
from outrider.data.answers.store import ANSWERS, Answer, read_answers
from outrider.data.sources.conversations import Conversation
from outrider.errors import ConfigError, DataError
from outrider.targets.hf.transformers import TransformersTarget


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(server, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(server, "RETRIES", server.Retries(attempts=2, base_s=0.01, cap_s=0.02, share=1.0))


@pytest.fixture(scope="module")
def whole(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """The answers of the target here."""
    return by_id(answer_all(talker, tmp_path_factory.mktemp("here")))


def ask(target: TransformersTarget, folder: Path, *stubs: Stub | str, **settings: Any) -> list[Answer]:
    conversations = settings.pop("conversations", None)
    urls = tuple(stub if isinstance(stub, str) else stub.url for stub in stubs)
    return answer_all(target, folder, conversations, servers=urls, **({"in_flight": 4, "patience_s": 20} | settings))


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The ledger's entries by id."""
    with sqlite3.connect(folder / LEDGER) as db:
        db.row_factory = sqlite3.Row
        return {row["id"]: dict(row) for row in db.execute("SELECT * FROM prompts")}


def counts(folder: Path) -> dict[str, int]:
    with Ledger(folder) as ledger:
        return dict(ledger.counts())


@pytest.mark.parametrize("ids", ["return_token_ids", "logprobs"])
def test_servers_write_what_the_target_writes_here(ids, talker, whole, tmp_path) -> None:
    """Catches a prompt, a seed or a setting that does not arrive, a prompt asked twice, and ids that are lost."""
    with serving(talker, ids=ids) as one, serving(talker, ids=ids) as two:
        assert by_id(ask(talker, tmp_path, one, two)) == whole
        assert sorted((one.answered + two.answered).values()) == [1] * 8
        entries = rows(tmp_path).values()
        assert {row["server"] for row in entries} <= {one.url, two.url}
        assert {(row["model"], row["tokens_from"], row["attempts"]) for row in entries} == {("tiny", "ids", 1)}
        assert [answer.id for answer in ask(talker, tmp_path, one)] == [f"p{i}" for i in range(8)]
        assert sum((one.answered + two.answered).values()) == 8


def test_a_text_without_ids_is_tokenised_and_marked(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches ids that pass for the model's own, a text without its end, and an end after a text that was cut."""
    with serving(talker, ids=None, ends=True) as stub:
        found = ask(talker, tmp_path, stub, max_new_tokens=6)
    end = talker.tokenizer.eos_token_id
    assert {answer.finish_reason for answer in found} == {"stop", "length"}
    for answer in found:
        assert answer.retokenised
        ((start, stop),) = answer.learn
        assert stop == len(answer.tokens) and stop - start <= 6
        assert (answer.tokens[-1] == end) == (answer.finish_reason == "stop")
    assert {row["tokens_from"] for row in rows(tmp_path).values()} == {"text"}
    assert all(json.loads(line)["retokenised"] for line in (tmp_path / ANSWERS).read_text().splitlines())


def test_turns_are_answered_on_the_servers_own_answers(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a given answer left in the history, and a turn that is asked before the one ahead of it is answered."""
    talks = [Conversation(f"talk{i}", [*TURNS[:1], {"role": "user", "content": str(i)}, *TURNS[1:]]) for i in range(2)]
    here = by_id(answer_all(talker, tmp_path / "here", talks, length=200, temperature=0.0))
    with serving(talker) as one, serving(talker) as two:
        found = ask(talker, tmp_path / "there", one, two, conversations=talks, length=200, temperature=0.0, ask="chat")
    assert by_id(found) == here
    assert all(len(answer.learn) == 4 for answer in found)


def test_a_server_that_dies_and_returns_loses_no_prompt(talker, whole, tmp_path) -> None:
    """Catches prompts lost with a server, asked of it for ever, or answered twice."""
    with serving(talker) as good:
        with serving(talker) as mortal:
            port = mortal.server_port
            born: list[Stub] = []

            def on_answer(done: int, answer: Answer) -> None:
                if done == 2:
                    mortal.die()
                if done == 5:
                    born.append(Stub(talker, port=port).start())

            settings = config(servers=(good.url, mortal.url), in_flight=1, patience_s=20)
            path = prepare(talker, talker.tokenizer, asked(24), tmp_path, settings, on_answer=on_answer)
        for stub in born:
            stub.die()
    found = by_id(read_answers(path))
    assert len(found) == 24 and {name: found[name] for name in whole} == whole
    assert counts(tmp_path) == {"open": 0, "taken": 0, "answered": 24, "failed": 0, "skipped": 0}
    assert sum(born[0].answered.values()) > 0


def test_answers_that_are_torn_or_nonsense_are_asked_for_again(talker, whole, tmp_path) -> None:
    """Catches half an answer that trains, ids of another vocabulary."""
    troubles = {1: "503", 3: "cut", 5: "nonsense", 7: "wrong ids", 9: "aborted"}
    with serving(talker, trouble=troubles.get) as stub:
        assert by_id(ask(talker, tmp_path, stub, in_flight=2)) == whole
    assert max(stub.answered.values()) == 1
    assert counts(tmp_path)["answered"] == 8


def test_a_server_that_always_fails_ends_the_run_with_a_reason(talker, whole, tmp_path) -> None:
    """Catches a run that asks for ever, and answers before it that are lost."""
    with serving(talker, trouble=lambda number: "500" if number >= 3 else None) as stub:
        with pytest.raises(DataError, match=r"no server has answered for 0\.5 s: http.*HTTP 500.*told to fail"):
            ask(talker, tmp_path, stub, in_flight=1, patience_s=0.5, attempts=1000)
        assert len(read_answers(tmp_path / ANSWERS)) == 3
        stub.trouble = lambda number: None
        assert by_id(ask(talker, tmp_path, stub)) == whole


def test_a_prompt_that_is_refused_fails_and_is_asked_again_by_the_next_run(talker, whole, tmp_path) -> None:
    """Catches one bad prompt that stops the others, and counts that do not add up."""
    with serving(talker, trouble=lambda number: "400" if number == 2 else None) as stub:
        assert len(ask(talker, tmp_path, stub, in_flight=1)) == 7
        assert counts(tmp_path) == {"open": 0, "taken": 0, "answered": 7, "failed": 1, "skipped": 0}
        (failed,) = [row for row in rows(tmp_path).values() if row["status"] == "failed"]
        assert "told to fail, request 2" in failed["reason"] and failed["attempts"] == 1
        assert by_id(ask(talker, tmp_path, stub)) == whole
    assert counts(tmp_path)["answered"] == 8


def test_a_prompt_that_fails_too_often_has_failed(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches one prompt that brings every server down, again and again."""
    long = json.dumps(talker.encode(asked()[2].messages))
    with serving(talker) as stub:
        answer = stub.trouble
        stub.trouble = lambda number: "aborted" if json.dumps(stub.bodies[-1]["prompt"]) == long else answer(number)
        assert len(ask(talker, tmp_path, stub, attempts=2, in_flight=1)) == 7
    assert stub.asked[long] == 2
    assert rows(tmp_path)["p2"]["status"] == "failed"


def test_servers_of_other_models_are_refused(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches answers of two models in one file."""
    with serving(talker) as one, serving(talker, model="other") as two:
        with pytest.raises(DataError, match=rf"{two.url} serves other, but {one.url} serves tiny; give servers of one"):
            ask(talker, tmp_path, one, two)
        with pytest.raises(DataError, match="serves tiny, and prepare.model asks for huge; correct one of them"):
            ask(talker, tmp_path, one, model="huge")
        assert not (one.asked or two.asked)
        assert len(ask(talker, tmp_path, two, conversations=asked(1), model="other")) == 1
    assert {body["model"] for body in two.bodies} == {"other"}


def test_servers_that_are_not_there_are_named(talker, whole, tmp_path, monkeypatch) -> None:
    """Catches a run that waits for servers which nobody started, and one dead server that stops it."""
    with serving(talker) as gone:
        dead = gone.url
    with pytest.raises(DataError, match=f"no server can be reached: {dead}: .*; start one, or correct"):
        ask(talker, tmp_path, dead)
    with pytest.raises(ConfigError, match="not the address of a server"):
        ask(talker, tmp_path, "ftp://x")
    with pytest.raises(ConfigError, match=r"prepare\.key_from: the environment has no NO_KEY"):
        ask(talker, tmp_path, dead, key_from="NO_KEY")
    with serving(talker) as stub:
        assert by_id(ask(talker, tmp_path, dead, stub)) == whole


def _refuse(handler: Any) -> None:
    handler.rfile.read(int(handler.headers["content-length"]))
    handler._send(422, {"error": {"message": "prompt must be a text"}})


def test_a_server_that_refuses_token_ids_is_asked_by_chat(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches an error that does not say what to do."""

    with serving(talker) as stub, pytest.MonkeyPatch.context() as patched:
        patched.setattr(stub.RequestHandlerClass, "do_POST", _refuse)
        with pytest.raises(DataError, match=r"refuses the request: .*must be a text.*set prepare\.ask to chat"):
            ask(talker, tmp_path, stub)


def test_a_full_disk_on_servers_keeps_what_is_written(talker, whole, tmp_path) -> None:
    """Catches an answer that the ledger has and the file does not, and an error that a worker swallows."""
    with serving(talker) as stub:
        with room_of(40_000), pytest.raises(DataError, match=r"can't write answers to .*free some space and run again"):
            ask(talker, tmp_path, stub, in_flight=1)
        assert 0 < len(read_answers(tmp_path / ANSWERS)) < 8
        assert by_id(ask(talker, tmp_path, stub)) == whole
