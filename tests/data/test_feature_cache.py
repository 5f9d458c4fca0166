"""A feature cache: bound to its target, the same bytes whoever writes it and whatever stops it, damage named."""

import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.test_regenerate import room_of
from outrider import config
from outrider.data.answers.store import Answer
from outrider.data.config import Config
from outrider.data.features import cache
from outrider.data.features import shards as feature_shards
from outrider.data.features.cache import Binding, build
from outrider.data.features.cached import CachedFeatures, target_states
from outrider.data.features.live import LiveFeatures
from outrider.errors import ConfigError, DataError
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

TAPS = (0, 2)
KILLS = int(os.environ.get("OUTRIDER_TEST_KILLS", "4"))
"""Writers that are killed in one test; 50 are the promise."""


def texts(count: int = 8, start: int = 20) -> list[Answer]:
    """Texts of unequal length that differ in their first token, of which the later part trains."""
    return [Answer(f"t{i}", [i] + [100 + i] * (start + i % 5), [(start - 6, start)]) for i in range(count)]


def bound(target: TransformersTarget, **how: Any) -> Binding:
    return Binding.of(target, "template", how.pop("taps", TAPS), "float32", **({"encoding": "bf16"} | how))


def fill(target: TransformersTarget, folder: Path, answers: Sequence[Answer], **how: Any) -> Binding:
    mine, shard_tokens = bound(target, **how), 60
    states = target_states(target, mine.taps, "float32", batch=3)
    build(folder, answers, states, mine, head=target.head, shard_tokens=shard_tokens)
    return mine


def reader(
    target: TransformersTarget, folder: Path, mine: Binding, answers: Sequence[Answer], **how: Any
) -> CachedFeatures:
    return CachedFeatures(target, answers, mine, folder, **({"batch": 3, "length": 64} | how))


def read_all(found: CachedFeatures) -> None:
    """A pass over all texts."""
    for step in range(found.steps_per_pass):
        found.batch(step)


def damaged(folder: Path) -> list[Path]:
    """Shards whose content does not match their hash."""
    paths = []
    for path in sorted(folder.glob("features-*.safetensors")):
        try:
            feature_shards.open_shard(path)
        except DataError:
            paths.append(path)
    return paths


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("only_learnt", [False, True])
def test_cached_features_are_the_live_ones_in_the_same_order(only_learnt, talker, tmp_path) -> None:
    """Catches states of another text or tap, padding that counts, and a final state off by one position."""
    mine = fill(talker, tmp_path, texts(), only_learnt=only_learnt)
    cached, live = reader(talker, tmp_path, mine, texts()), LiveFeatures(talker, texts(), TAPS, batch=3, length=64)
    for step in (4, 0, 1, 2):
        found, wanted = cached.batch(step), live.batch(step)
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.equal(found.loss_mask, wanted.loss_mask)
        assert torch.equal(found.documents, wanted.documents)
        real = wanted.documents > 0
        assert found.taps.dtype == wanted.taps.dtype
        torch.testing.assert_close(found.taps[real], wanted.taps[real], rtol=1e-2, atol=1e-2)
        predicts = torch.zeros_like(real)
        predicts[:, :-1] = wanted.loss_mask[:, 1:]
        where = predicts if only_learnt else real
        torch.testing.assert_close(found.hidden[where], wanted.hidden[where], rtol=1e-2, atol=1e-2)
        assert not only_learnt or not found.hidden[~predicts].any()
    assert torch.equal(cached.counts, live.counts)
    assert (cached.manifest, cached.steps_per_pass) == (replace(live.manifest, template_hash="template"), 3)


def test_equal_beginnings_are_stored_once(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a prefix that is stored for every text, and one whose states are another text's."""
    beginning = list(range(40))
    answers = [Answer(f"t{i}", [*beginning, *[50 + i] * 12], [(40, 52)]) for i in range(4)]
    mine = bound(talker)
    states = target_states(talker, TAPS, "float32", batch=3)
    build(tmp_path, answers, states, mine, head=talker.head, shard_tokens=1000)
    [path] = tmp_path.glob("features-*")
    shard = feature_shards.open_shard(path)
    assert len(shard._tensors["tap.0.values"]) == 40 + 4 * 12
    batch = reader(talker, tmp_path, mine, answers, batch=4).batch(0)
    live = LiveFeatures(talker, answers, TAPS, batch=4, length=64).batch(0)
    torch.testing.assert_close(batch.taps, live.taps, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(batch.hidden, live.hidden, rtol=1e-2, atol=1e-2)


def test_taps_that_are_more_serve_those_that_are_fewer(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches columns taken by number and not by layer, and final states that were left out; more serve fewer."""
    fill(talker, tmp_path, texts(), taps=(0, 1, 2))
    found = reader(talker, tmp_path, bound(talker, taps=(0, 2)), texts()).batch(0)
    live = LiveFeatures(talker, texts(), (0, 2), batch=3, length=64).batch(0)
    real = live.documents > 0
    torch.testing.assert_close(found.taps[real], live.taps[real], rtol=1e-2, atol=1e-2)
    fill(talker, tmp_path / "fewer", texts(), taps=(0,))
    with pytest.raises(DataError, match=r"has taps \[0\], expected \[0, 2\]; name another prepare.feature_folder"):
        reader(talker, tmp_path / "fewer", bound(talker), texts())
    fill(talker, tmp_path / "all", texts())
    assert reader(talker, tmp_path / "all", bound(talker, only_learnt=True), texts()).batch(0).hidden.all(-1).any()
    fill(talker, tmp_path / "few", texts(), only_learnt=True)
    with pytest.raises(DataError, match="has only_learnt True, expected False"):
        reader(talker, tmp_path / "few", bound(talker), texts())


def test_the_likeliest_tokens_stand_in_for_final_states(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a distribution that does not sum to one, or is another position's."""
    mine = fill(talker, tmp_path, texts(), top_logprobs=250)
    batch = reader(talker, tmp_path, mine, texts()).batch(0)
    live = LiveFeatures(talker, texts(), TAPS, batch=3, length=64).batch(0)
    assert batch.hidden.shape[-1] == 0 and batch.top is not None
    real = (live.documents > 0).flatten()
    found = batch.top.flat().logits(slice(None), talker.spec.vocabulary)[real].softmax(-1)
    wanted = talker.head(live.hidden).flatten(0, 1)[real].softmax(-1)
    assert (found.sum(-1) - 1).abs().max() < 1e-4
    assert 0.5 * (found - wanted).abs().sum(-1).max() < 0.02


def test_many_shards_are_read_a_few_at_a_time(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches texts that come twice or never, and a pass that opens shards again and again."""
    answers = texts(60)
    mine = fill(talker, tmp_path, answers)
    assert len(list(tmp_path.glob("features-*"))) >= 20
    found = reader(talker, tmp_path, mine, answers, batch=4)
    for epoch in range(2):
        steps = range(epoch * 15, (epoch + 1) * 15)
        seen = [token for step in steps for token in found.batch(step).tokens[:, 0].tolist()]
        assert sorted(seen) == list(range(60))
        shards = [found._shard_of[found._keys[token]] for token in seen]
        # texts of a shard lie within two buffers, a small part of the pass
        spread = [len(shards) - 1 - shards[::-1].index(one) - shards.index(one) for one in set(shards)]
        assert max(spread) < 2 * 8 * 3
    again = reader(talker, tmp_path, mine, answers, batch=4)
    assert torch.equal(again.batch(7).tokens, found.batch(7).tokens)


def test_a_cache_of_another_target_or_template_is_refused_with_both_values(folder, talker, tmp_path) -> None:
    """Catches states of other weights, another quantisation or another dtype that train in silence."""
    mine = fill(talker, tmp_path, texts())
    other = replace(mine, target=mine.target | {"weights_hash": "0123", "precision": "int8"})
    there = mine.target["weights_hash"]
    with pytest.raises(DataError, match=rf"precision 'float64', expected 'int8'; target.weights_hash '{there}', exp"):
        reader(talker, tmp_path, other, texts())
    for key, value in (("template", "another"), ("dtype", "bfloat16"), ("encoding", "int8"), ("top_logprobs", 5)):
        with pytest.raises(DataError, match=f"has {key} {getattr(mine, key)!r}, expected {value!r}"):
            reader(talker, tmp_path, replace(mine, **{key: value}), texts())
        with pytest.raises(DataError, match=f"has {key} "):
            build(tmp_path, texts(), iter, replace(mine, **{key: value}), head=talker.head, shard_tokens=60)  # type: ignore[arg-type]
    moved = replace(mine, target=mine.target | {"name": "moved"})
    assert reader(talker, tmp_path, moved, texts()).batch(0)


def test_a_text_that_is_not_there_is_named(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a training on fewer texts than it says; new answers are added to the shards that are there."""
    mine = fill(talker, tmp_path, texts(5))
    with pytest.raises(DataError, match="3 of 8 texts are not in the feature cache .*, such as t5; run `outrider prep"):
        reader(talker, tmp_path, mine, texts(8))
    assert len(reader(talker, tmp_path, mine, texts(8), skip_bad=True).texts) == 5
    before = content(tmp_path)
    fill(talker, tmp_path, texts(8))
    after = content(tmp_path)
    assert before.items() <= after.items() and len(after) > len(before)
    assert len(reader(talker, tmp_path, mine, texts(8)).texts) == 8


def test_texts_are_compared_with_new_passes(folder: Path, talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches states that were written for other weights under this binding; rounding alone passes."""
    mine = fill(talker, tmp_path, texts())
    assert reader(talker, tmp_path, mine, texts(), recheck_every=1).batch(0)
    other = load_target(folder, dtype="float64")
    with torch.no_grad():
        for weight in other.layer(1).parameters():
            weight.mul_(1.5)
    false = replace(mine, target=Binding.of(other, None, TAPS, "float32").target)
    cache._write_json(tmp_path / cache.MANIFEST, false.as_json())
    with pytest.raises(DataError, match=r"text t\d: (tap 2|the final state) differs by \d+% from a pass of the t"):
        reader(other, tmp_path, false, texts(), recheck_every=1).batch(0)
    assert reader(other, tmp_path, false, texts(), recheck_every=0).batch(0)


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.99])
def test_a_flipped_bit_is_named(where: float, talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a damaged state that trains: in the header, in tokens, in states.  skip_bad leaves those texts out."""
    mine = fill(talker, tmp_path, texts())
    path = sorted(tmp_path.glob("features-*"))[1]
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 16
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path.name}.*(damaged|is missing)|texts are not in the feature cache"):
        read_all(reader(talker, tmp_path, mine, texts()))
    assert damaged(tmp_path) == [path]
    fewer = reader(talker, tmp_path, mine, texts(), skip_bad=True)
    assert 0 < len(fewer.texts) < 8
    read_all(fewer)
    path.unlink()
    fill(talker, tmp_path, texts())
    assert not damaged(tmp_path) and len(reader(talker, tmp_path, mine, texts()).texts) == 8


def test_a_full_disk_keeps_what_is_written(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a traceback, a half shard, and a shard that is written twice afterwards."""
    fill(talker, tmp_path / "whole", texts())
    largest = max(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    long = [*texts(), Answer("long", [7] * 120, [(1, 120)])]
    fill(talker, tmp_path / "reference", long)
    place = tmp_path / "full"
    with (
        room_of(largest + 500),
        pytest.raises(DataError, match=r"can't write features to .*full: File too large; \d shards are written and r"),
    ):
        fill(talker, place, long)
    before = content(place)
    assert not damaged(place) and before
    assert not [name for name in before if name.endswith((".part", ".claim"))]
    fill(talker, place, long)
    assert content(place) == content(tmp_path / "reference")


def slow_states(answers: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """States that depend on the text alone, each after a moment."""
    for number, text in enumerate(answers):
        time.sleep(0.002)
        noise = torch.Generator().manual_seed(text.tokens[0])
        states = torch.randn(len(text.tokens), 3, 16, generator=noise)
        yield number, states[:, :2], states[:, 2]


def test_a_killed_writer_loses_nothing_that_is_written(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches shards that depend on where a run was stopped, half of a file under its name."""
    answers, mine = texts(60), bound(talker, encoding="int4")
    head = torch.nn.Identity()

    def write(place: Path) -> None:
        build(place, answers, slow_states, mine, head=head, shard_tokens=60)

    write(tmp_path / "whole")
    chance, context = random.Random(0), multiprocessing.get_context("fork")
    place, stops = tmp_path / "stopped", 0
    while stops < KILLS:
        writers = [context.Process(target=write, args=(place,)) for _ in range(3)]
        for writer in writers:
            writer.start()
        time.sleep(chance.uniform(0.005, 0.05))
        for writer in chance.sample(writers, 2):
            writer.kill()  # not by its number: one that has ended may have been waited for
        stops += 2
        time.sleep(chance.uniform(0, 0.02))
        for writer in writers:
            writer.kill()
            writer.join()
        if stops == KILLS // 2:  # begin again: the first stops come early in a run
            for path in place.glob("features-*"):
                path.unlink()
    write(place)
    whole, found = content(tmp_path / "whole"), content(place)
    assert {name: data for name, data in found.items() if not name.endswith((".claim", ".part"))} == whole
    assert not damaged(place)


def test_a_url_is_refused_with_what_to_do_instead() -> None:
    """Catches a folder named s3: that is written beside the run."""
    with pytest.raises(ConfigError, match=r"feature_folder: a bucket must be mounted first"):
        config.build(Config, {"feature_folder": "s3://shop/features"})


def test_what_reading_ahead_raises_is_raised(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a reader that returns the batch before again, for ever, where a shard can't be read."""
    mine = fill(talker, tmp_path, texts())
    found = reader(talker, tmp_path, mine, texts(), batch=1)
    found.batch(0)
    found._prefetcher._next[1].result()  # type: ignore[index]
    found._folder._open.clear()
    for path in tmp_path.glob("features-*"):
        path.unlink()
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="is damaged"):
        read_all(found)


def test_packed_batches_of_a_cache_are_those_of_the_live_target(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches batches that were read ahead for another step, and states in another text's place."""
    mine = fill(talker, tmp_path, texts())
    cached = reader(talker, tmp_path, mine, texts(), batch=4, budget=48)
    live = LiveFeatures(talker, texts(), TAPS, batch=4, length=64, budget=48)
    for steps in (range(2), range(2, 4), range(1)):
        found, wanted = list(cached.packed(steps)), list(live.packed(steps))
        assert len(found) == len(wanted) > 1
        for one, other in zip(found, wanted, strict=True):
            assert torch.equal(one.tokens, other.tokens) and torch.equal(one.documents, other.documents)
            torch.testing.assert_close(one.taps, other.taps, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(one.hidden, other.hidden, rtol=1e-2, atol=1e-2)
    cached.close()
