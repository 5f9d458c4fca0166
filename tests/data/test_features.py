"""Live features: what the target says of each text, in an order that depends on seed and step alone."""

from collections import Counter

import pytest
import torch

from outrider import machine
from outrider.data.answers.store import Answer
from outrider.data.features.live import MIN_LEARNT, LiveFeatures, most_cached
from outrider.data.features.prefetch import Prefetcher
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget

TAPS = (0, 2)


def texts(count: int, start: int = 6) -> list[Answer]:
    """Texts that differ in their first token."""
    return [Answer(f"t{i}", [i] + [100 + i] * (start + i % 5), [(1, 1 + start)]) for i in range(count)]


def source(
    target: TransformersTarget, answers: list[Answer], batch: int = 3, seed: int = 0, length: int = 64
) -> LiveFeatures:
    return LiveFeatures(target, answers, TAPS, batch=batch, length=length, seed=seed)


def first_tokens(features: LiveFeatures, step: int) -> list[int]:
    return features.batch(step).tokens[:, 0].tolist()


@pytest.mark.parametrize(("count", "batch"), [(7, 3), (9, 3), (2, 3), (30, 1)])
def test_every_text_comes_once_a_pass(count: int, batch: int, talker: TransformersTarget) -> None:
    """Catches texts that come twice or never because groups or the last, shorter batch are cut wrongly."""
    features = source(talker, texts(count), batch)
    for turn in range(2):
        steps = range(turn * features.steps_per_pass, (turn + 1) * features.steps_per_pass)
        seen = Counter(token for step in steps for token in first_tokens(features, step))
        assert seen == Counter(range(count))
    assert features.steps_per_pass == -(-count // batch)


def test_the_order_depends_on_seed_and_step_alone(talker: TransformersTarget) -> None:
    """Catches an order that depends on the steps asked for before."""
    steps = [5, 0, 3, 3, 7, 1]
    torch.manual_seed(1)
    jumping = {step: first_tokens(source(talker, texts(8)), step) for step in steps}
    torch.manual_seed(2)
    features = source(talker, texts(8))
    in_order = {step: first_tokens(features, step) for step in range(8)}
    assert jumping == {step: in_order[step] for step in jumping}
    assert in_order != {step: first_tokens(source(talker, texts(8), seed=1), step) for step in range(8)}
    assert [in_order[step] for step in range(3)] != [in_order[step] for step in range(3, 6)]


def test_taps_are_the_layers_outputs(talker: TransformersTarget) -> None:
    """Catches a tap that is off by one layer, states that padding has moved, and spans shifted against their tokens."""
    features = source(talker, texts(5), batch=5)
    batch = features.batch(0)
    lengths = (batch.documents > 0).sum(1).tolist()
    assert len(set(lengths)) > 1
    for b, length in enumerate(lengths):
        out = talker.model(batch.tokens[b : b + 1, :length], output_hidden_states=True)
        for t, layer in enumerate(TAPS):
            torch.testing.assert_close(batch.taps[b, :length, t], out.hidden_states[layer + 1][0])
        torch.testing.assert_close(batch.hidden[b, :length], out.hidden_states[-1][0])
        torch.testing.assert_close(talker.head(batch.hidden[b, :length]), out.logits[0])
    for b, first in enumerate(batch.tokens[:, 0].tolist()):
        answer = texts(5)[first]
        length = len(answer.tokens)
        assert batch.tokens[b].tolist() == answer.tokens + [0] * (batch.tokens.shape[1] - length)
        assert batch.documents[b].tolist() == [1] * length + [0] * (batch.tokens.shape[1] - length)
        assert batch.loss_mask[b].nonzero()[:, 0].tolist() == [
            i for start, end in answer.learn for i in range(start, end)
        ]


def test_texts_with_too_little_to_learn_are_left_out_and_counted(talker: TransformersTarget) -> None:
    """Catches empty rows in a batch, and texts that vanish without a word; what is cut off no longer counts."""
    short = Answer("short", [9] * 30, [(1, MIN_LEARNT)])
    late = Answer("late", [9] * 30, [(13, 30)])
    enough = Answer("enough", [9] * 30, [(1, 3), (10, 10 + MIN_LEARNT - 2)])
    features = source(talker, [short, late, enough], length=16)
    assert [text.id for text in features.texts] == ["enough"]
    assert features.left_out == 2
    assert features.manifest.texts == 1
    assert features.manifest.tokens == 16
    long = source(talker, [Answer("long", [9] * 300, [(1, 300)])], length=1000)
    assert long.batch(0).tokens.shape == (1, 256), "the target's context"
    with pytest.raises(DataError, match="none of the 2 answers has 4 tokens to learn within 16 tokens"):
        source(talker, [short, late], length=16)


def test_kept_features_are_the_live_ones_whoever_asks_first(talker: TransformersTarget) -> None:
    """Catches states filed under another text, padding that is kept."""
    live = LiveFeatures(talker, texts(8), TAPS, batch=3, length=64, cache_bytes=0)
    assert not live.is_cached
    in_order, jumping = source(talker, texts(8)), source(talker, texts(8))
    assert in_order.is_cached and in_order.bytes == in_order.manifest.tokens * 3 * talker.spec.hidden * 8
    late = jumping.batch(5)
    for step in range(6):
        now, wanted = in_order.batch(step), live.batch(step)
        real = wanted.documents > 0
        assert torch.equal(now.tokens, wanted.tokens)
        assert torch.equal(now.loss_mask, wanted.loss_mask)
        torch.testing.assert_close(now.taps[real], wanted.taps[real])
        torch.testing.assert_close(now.hidden[real], wanted.hidden[real])
    assert torch.equal(late.taps, now.taps)
    assert torch.equal(late.hidden, now.hidden)


def test_a_sixth_of_the_memory_of_a_cpu_is_cached_and_shared_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a share of what is free, which another process could change between a training and its resume."""
    monkeypatch.setattr(machine, "memory", lambda: 24 * 2**30)
    assert most_cached(torch.device("cpu")) == 4 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert most_cached(torch.device("cpu")) == 2 * 2**30
    monkeypatch.setattr(machine, "memory", lambda: 3 * 2**30)
    assert most_cached(torch.device("cpu")) == most_cached(torch.device("cuda")) == 2**30


@pytest.mark.parametrize("budget", [None, 64])
def test_batches_read_ahead_are_those_read_when_they_are_needed(budget, talker) -> None:
    """Catches batches that were read for another step, also where steps are asked for again or left out."""
    given = {"batch": 2, "length": 64, "cache_bytes": 0, "budget": budget}
    plain = LiveFeatures(talker, texts(9), TAPS, **given)
    ahead = Prefetcher(LiveFeatures(talker, texts(9), TAPS, **given).made, talker.device)
    for step in (0, 1, 1, 4, 2):
        if budget is None:
            pairs = [(plain.batch(step), ahead.batch(step))]
        else:
            steps = range(step, step + 2)
            pairs = list(zip(plain.packed(steps), ahead.packed(steps, len(plain.order.packed(steps))), strict=True))
        for one, other in pairs:
            for name in ("tokens", "loss_mask", "documents", "taps", "hidden"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
    ahead.close()
