"""Processes that share the prompts of a folder: each prompt is answered once, and the file is that of one process.

Threads stand for processes here, each with a ledger's connection of its own.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from outrider.data.answers.ledger import Ledger
from outrider.data.answers.regenerate import prepare
from outrider.data.answers.sharing import merge_parts, part_path
from outrider.data.answers.store import ANSWERS
from outrider.data.config import Config
from outrider.data.sources.conversations import Conversation
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget

COUNT = 16
CONVERSATIONS = [Conversation(f"p{i}", [{"role": "user", "content": "ab" * (i % 3) + str(i)}]) for i in range(COUNT)]
CONFIG = Config(max_new_tokens=12, length=48, slots=1, temperature=0.9, top_k=0, top_p=0.95)


class Thread:
    """One of several that stand for processes."""

    def __init__(self, rank: int, barrier: threading.Barrier):
        self.rank, self.count, self._barrier = rank, barrier.parties, barrier

    def gather(self, value: Any) -> list[Any]:
        self._barrier.wait(120)
        return [value] * self.count


def together(target: TransformersTarget, folder: Path, count: int = 2) -> list[int]:
    """Answer all prompts by so many; how many answers each of them wrote."""
    barrier, written = threading.Barrier(count), [0] * count

    def answer(rank: int) -> None:
        def tell(done: int, *_: Any) -> None:
            assert done <= COUNT
            written[rank] += 1

        prepare(target, target.tokenizer, CONVERSATIONS, folder, CONFIG, None, tell, processes=Thread(rank, barrier))

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(answer, rank) for rank in range(count)]:
            done.result()
    return written


@pytest.fixture(scope="module")
def alone(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The answers of one process."""
    return prepare(talker, talker.tokenizer, CONVERSATIONS, tmp_path_factory.mktemp("alone"), CONFIG)


def test_several_processes_write_the_file_of_one(alone, talker, tmp_path) -> None:
    """Catches a prompt that two answer, one that nobody does, and an order that depends on who was faster."""
    written = together(talker, tmp_path, 3)
    assert sum(written) == COUNT and all(written)
    assert (tmp_path / ANSWERS).read_bytes() == alone.read_bytes()
    left = {path.name for path in tmp_path.glob("answers.*")}
    assert left == {"answers.json", "answers.jsonl", "answers.sqlite"}
    with Ledger(tmp_path) as ledger:
        assert ledger.counts() == {"open": 0, "taken": 0, "answered": COUNT, "failed": 0, "skipped": 0}


def test_what_a_killed_process_wrote_is_used(alone, talker, tmp_path) -> None:
    """Catches a share that is lost or answered again: of three, one was killed in a line."""
    lines = alone.read_bytes().splitlines(keepends=True)
    prepare(talker, talker.tokenizer, CONVERSATIONS[:1], tmp_path, CONFIG)
    (tmp_path / ANSWERS).write_bytes(b"".join([lines[0], *lines[3:5]]))
    part_path(tmp_path, 1).write_bytes(b"".join([*lines[8:14], lines[15][:25]]))
    part_path(tmp_path, 2).write_bytes(b"".join(lines[3:5]))
    with Ledger(tmp_path) as ledger:
        for number in (5, 15):
            ledger.ask(f"lost {number}", "x", number)
            assert ledger.take(f"lost {number}")
    written = together(talker, tmp_path)
    assert sum(written) == COUNT - 3 - 6
    assert (tmp_path / ANSWERS).read_bytes() == alone.read_bytes()


def test_of_several_one_gets_a_prompt(tmp_path: Path) -> None:
    with Ledger(tmp_path) as first, Ledger(tmp_path) as second:
        first.ask("a", "p0", 0)
        assert [first.take("a"), second.take("a"), first.take("a"), second.take("b")] == [True, False, False, False]
        assert first.counts()["taken"] == 1


def test_a_damaged_line_of_a_part_is_named(talker: TransformersTarget, tmp_path: Path) -> None:
    """Taken in as it is, so that who reads the file says where."""
    part_path(tmp_path, 1).write_bytes(b"{no json}\n")
    merge_parts(tmp_path)
    with pytest.raises(DataError, match=r"answers.jsonl.*1"):
        prepare(talker, talker.tokenizer, CONVERSATIONS, tmp_path, CONFIG)
