"""Packed batches: every text once, within the budget, with the states that it has alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.data.packing import packed
from outrider.errors import DataError
from outrider.targets.cache.attention_mask import positions
from outrider.targets.hf.transformers import TransformersTarget

TAPS = (0, 2)
BUDGET = 40


def texts(count: int = 11) -> list[Answer]:
    """Texts of 8 to 20 tokens that differ in their first."""
    return [Answer(f"t{i}", [i] + [100 + i] * (7 + 5 * i % 13), [(1, 7)]) for i in range(count)]


def source(target: TransformersTarget, budget: int | None = BUDGET, **how: int) -> LiveFeatures:
    return LiveFeatures(target, texts(), TAPS, **({"batch": 4, "length": 64} | how), budget=budget)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 90))
def test_every_text_is_packed_once_and_no_batch_exceeds_the_budget(lengths: list[int], budget: int) -> None:
    """Catches a text that is lost or comes twice, and a row that is too short for its texts."""
    batches = packed(range(len(lengths)), lengths, budget)
    assert sorted(i for rows in batches for row in rows for i in row) == list(range(len(lengths)))
    for rows in batches:
        width = max(sum(lengths[i] for i in row) for row in rows)
        assert width * len(rows) <= max(budget, max(lengths[i] for row in rows for i in row))
        assert width == max(lengths[i] for row in rows for i in row)


def test_a_step_has_the_same_texts_packed_as_padded(talker: TransformersTarget) -> None:
    """Catches packing that moves texts between steps, a loss mask that is shifted, and states of another text."""
    full, plain = source(talker), source(talker, None)
    for steps in (range(2), range(2, 4)):
        wanted = {}
        for step in steps:
            batch = plain.batch(step)
            for b, tokens in enumerate(batch.tokens):
                real = batch.documents[b] > 0
                states = batch.taps[b, real], batch.hidden[b, real]
                wanted[int(tokens[0])] = (tokens[real], batch.loss_mask[b, real], *states)
        for batch in full.packed(steps):
            assert batch.tokens.numel() <= BUDGET
            assert batch.per_row == int(batch.documents.max())
            for b, row in enumerate(batch.documents):
                for number in range(1, int(row.max()) + 1):
                    own = row == number
                    assert positions(batch.documents)[b, own].tolist() == list(range(int(own.sum())))
                    tokens, mask, taps, hidden = wanted.pop(int(batch.tokens[b, own][0]))
                    assert torch.equal(batch.tokens[b, own], tokens) and torch.equal(batch.loss_mask[b, own], mask)
                    torch.testing.assert_close(batch.taps[b, own], taps)
                    torch.testing.assert_close(batch.hidden[b, own], hidden)
        assert not wanted


def test_texts_read_live_are_read_within_the_budget(talker: TransformersTarget, monkeypatch) -> None:
    """Catches a pass of the target over more tokens than the budget allows, and a budget exceeded in silence."""
    seen, read = [], talker.read
    monkeypatch.setattr(talker, "read", lambda tokens, taps: seen.append(tokens.numel()) or read(tokens, taps))
    for cache_bytes in (0, 2**30):
        features = source(talker, batch=8, cache_bytes=cache_bytes)
        assert features.is_cached == bool(cache_bytes)
        list(features.packed(range(2)))
    assert len(seen) > 4 and max(seen) <= BUDGET
    with pytest.raises(DataError, match="train.tokens 19 is less than the longest text, 20 tokens; set at least"):
        source(talker, 19)
    # rows hold several texts
    varied = [Answer(f"t{n}", [n] * n, [(1, 6)]) for n in (20, 13, 12, 8, 7, 14, 6)]
    features = LiveFeatures(talker, varied, TAPS, batch=7, length=64, budget=BUDGET)
    found = [(tuple(batch.tokens.shape), batch.per_row) for batch in features.packed(range(1))]
    assert found == [((2, 20), 2), ((3, 13), 1), ((1, 7), 1)]
