"""The texts of a training stay in their file, and the order of its batches does not know it."""

from pathlib import Path

import pytest
import torch

from outrider.data.answers.store import Answer, StoredAnswers, to_line
from outrider.data.texts import Texts


def some(count: int = 37) -> list[Answer]:
    """Of unequal lengths; some have too little to learn, or end behind the cut."""
    noise = torch.Generator().manual_seed(3)
    lengths = torch.randint(5, 40, (count,), generator=noise).tolist()
    return [
        Answer(f"a{i}", torch.randint(90, (n,), generator=noise).tolist(), [(n - 2 if i % 5 == 0 else 2, n)],
               prompt_hash=f"{i:016x}")
        for i, n in enumerate(lengths)
    ]  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path) -> StoredAnswers:
    path = tmp_path / "answers.jsonl"
    path.write_text("".join(to_line(answer, "s" * 16) for answer in some()), encoding="utf-8")
    return StoredAnswers.read(path)


def test_texts_of_a_file_are_read_as_those_in_memory(stored: StoredAnswers) -> None:
    """Catches a text that is cut elsewhere, counted twice, or in another batch."""
    mine, theirs = (Texts(answers, batch=4, length=24, seed=1) for answers in (stored, some()))
    assert mine.left_out == theirs.left_out > 0 and mine.tokens == theirs.tokens == sum(map(int, mine.answers.lengths))
    assert torch.equal(mine.counts(90), theirs.counts(90)) and int(mine.counts(90).sum()) > 0
    for step in range(2 * mine.steps_per_pass):
        assert mine.chosen(step) == theirs.chosen(step)
        rows = [[i] for i in mine.chosen(step)]
        for one, other in zip(mine.tensors(rows), theirs.tensors(rows), strict=True):
            assert torch.equal(one, other)
    assert [list(text.tokens) for text in mine.answers] == [
        list(mine.answers[i].tokens) for i in range(len(mine.answers))
    ]
    assert max(len(text.tokens) for text in mine.answers) == 24


def test_a_file_that_another_run_sorts_anew_is_read_on_as_it_was(stored: StoredAnswers, tmp_path: Path) -> None:
    """Catches lines found by their old places in a new file."""
    texts, path = Texts(stored, batch=4, length=24), tmp_path / "answers.jsonl"
    before = [list(text.tokens) for text in texts.answers]
    other = tmp_path / "sorted"
    other.write_bytes(b"".join(sorted(path.read_bytes().splitlines(keepends=True), reverse=True)))
    other.replace(path)
    assert [list(text.tokens) for text in texts.answers] == before
