"""The ledger: what became of every prompt adds up, and the lines of answers.jsonl decide."""

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from data.test_regenerate import answer_all, answer_rest, asked, by_id
from outrider.data.answers.ledger import LEDGER, Ledger, Origin
from outrider.data.answers.store import (
    ANSWERS,
    Answer,
    StoredAnswers,
    hash_number,
    hold_out,
    iterate_answers,
    read_answers,
    to_line,
)
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget


def test_a_ledger_that_is_ahead_of_the_file_is_put_right(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches an answer that a killed run entered and did not write: it would never be asked for again."""
    whole = by_id(answer_all(talker, tmp_path))
    lines = (tmp_path / ANSWERS).read_text().splitlines(keepends=True)
    (tmp_path / ANSWERS).write_text("".join(lines[:3] + lines[4:6]))
    with Ledger(tmp_path) as ledger:
        assert ledger.counts()["answered"] == 8
    assert sorted(name for _, name in answer_rest(talker, tmp_path)) == ["p3", "p6", "p7"]
    assert by_id(read_answers(tmp_path / ANSWERS)) == whole


def test_answers_without_a_ledger_are_entered(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches folders of before the ledger, and one that was deleted, being answered again."""
    answer_all(talker, tmp_path)
    before = (tmp_path / ANSWERS).read_bytes()
    (tmp_path / LEDGER).unlink()
    assert answer_rest(talker, tmp_path) == [] and (tmp_path / ANSWERS).read_bytes() == before
    with Ledger(tmp_path) as ledger:
        assert ledger.counts()["answered"] == 8


def test_a_damaged_ledger_is_named_and_may_be_deleted(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches sqlite's traceback, and answers that go with it."""
    answer_all(talker, tmp_path, asked(2))
    (tmp_path / LEDGER).write_bytes(b"no data base " * 1000)
    with pytest.raises(DataError, match=r"answers\.sqlite is damaged \(.*\); delete it \(the answers are kept\)"):
        answer_all(talker, tmp_path, asked(2))
    (tmp_path / LEDGER).unlink()
    with sqlite3.connect(tmp_path / LEDGER) as db:
        db.execute("PRAGMA user_version = 7")
    with pytest.raises(DataError, match="has format 7, but this Outrider reads 1; delete it"):
        answer_all(talker, tmp_path, asked(2))
    (tmp_path / LEDGER).unlink()
    assert len(answer_all(talker, tmp_path, asked(2))) == 2


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    """Catches prompts that are half entered when a row can't be read."""
    with Ledger(tmp_path) as ledger:
        with pytest.raises(ValueError), ledger.transaction():  # noqa: PT012
            ledger.ask("a", "one", 0)
            raise ValueError
        assert sum(ledger.counts().values()) == 0
        with ledger.transaction():
            ledger.ask("a", "one", 0)
        ledger.answer("a", 3, "length", Origin("text", "http://x", "m", 2))
        assert ledger.facts() == {"retokenised": 1, "truncated": 1}
        assert ledger.servers() == {"http://x": 1}
        assert (ledger.status("a"), ledger.status("b")) == ("answered", "open")


def test_stored_answers_are_those_of_the_file(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches lines that are cut in the wrong place, and tokens that are held as lists: 1 G of them would take 40
    GB."""
    wanted = answer_all(talker, tmp_path)
    found = StoredAnswers.read(tmp_path / ANSWERS)
    for answers in (found, found[:], list(iterate_answers(tmp_path / ANSWERS))):
        assert by_id([*answers]).keys() == by_id(wanted).keys()
    for index, answer in enumerate(wanted):
        assert found[index].tokens.itemsize == 4
        assert (list(found[index].tokens), found[index].learn) == (answer.tokens, answer.learn)
    assert [answer.id for answer in found[2:5]] == ["p2", "p3", "p4"]
    assert sum(part.nbytes for part in (found.begins, found.sizes, found.hashes)) == 24 * 8


def test_the_same_answers_are_held_out_of_a_file_as_of_a_list(tmp_path: Path) -> None:
    """Catches answers that train today and are held out tomorrow, because they were read another way."""
    wanted = [Answer(f"p{i}", [i, 5, 6, 7], [(1, 4)], prompt_hash=f"{(i + 1) * 2**58 + 7:016x}") for i in range(40)]
    (tmp_path / ANSWERS).write_text("".join(to_line(answer, "s" * 16) for answer in wanted))
    stored = StoredAnswers.read(tmp_path / ANSWERS)
    for count in (0, 1, 2, 9):
        for one, other in zip(hold_out(stored, count), hold_out(wanted, count), strict=True):
            assert [answer.id for answer in one] == [answer.id for answer in other]
    chosen = stored.to_prompts(np.array([hash_number(wanted[i].prompt_hash) for i in (3, 30)] + [0], np.uint64))
    assert [answer.id for answer in chosen] == ["p3", "p30"]
