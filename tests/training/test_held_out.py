"""Acceptance on held-out answers: counted as training counts it, and unlike it not flattered by what was learnt."""

import pytest
import torch

from outrider.data.answers.store import hash_number, hold_out
from outrider.data.features.live import LiveFeatures
from outrider.data.sources.duplicates import content_hash
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.progress.held_out import acceptance
from outrider.training.step import accumulate
from training.bench import TAPS, make_answers, make_model


def source_of(target: TransformersTarget, answers: list, batch: int = 2) -> LiveFeatures:
    return LiveFeatures(target, answers, TAPS, batch=batch, length=64)


@pytest.mark.parametrize("kind", ["dflash", "rnn"])
def test_acceptance_is_counted_as_in_training(kind: str, talker: TransformersTarget) -> None:
    """Catches depths that are mixed up, rows that are not learnt, and p and q at another temperature."""
    model, source = make_model(talker, kind), source_of(talker, make_answers(4), batch=4)
    before = torch.get_rng_state()
    found = acceptance(model, source, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    rows = model.predict(source.batch(0))
    wanted = accumulate(rows, Config(loss={"tv": 1.0}), is_counted=True).says()
    assert found["overlap"] == pytest.approx(wanted["acceptance"], abs=2e-4)
    draft, target, part = next(rows.chunks(10**6))
    first = (rows.depth[part] == 0) & (rows.weight[part] > 0)
    assert found["agreement"][0] == pytest.approx(
        float((draft.argmax(-1) == target.argmax(-1))[first].double().mean()), abs=1e-4
    )


@pytest.mark.parametrize("position", [{}, {"dpace": 0.5}, {"power": 0.6}])
def test_the_loss_is_that_of_training(position: dict[str, float], talker: TransformersTarget) -> None:
    """Catches rows that weigh otherwise than in training, so that the two losses can't be compared."""
    model, source = make_model(talker), source_of(talker, make_answers(4), batch=4)
    config = Config(loss={"kl": 0.7, "tv": 1.0}, position=position)
    found = acceptance(model, source, seed=3, config=config)
    torch.manual_seed(3)
    wanted = accumulate(model.predict(source.batch(0)), config, is_counted=True).says()
    if "dpace" not in position:  # training divides by the number of its rows
        assert found["divergence"] == pytest.approx(wanted["divergence"], abs=1e-3)
    assert found["divergence"] > 0


def test_runners_up_are_counted_where_the_drafter_drafts_them(talker: TransformersTarget) -> None:
    """Catches a promise of the chain alone for a draft that is a tree, and runners-up at a depth that has none."""
    source = source_of(talker, make_answers(4), batch=4)
    chain = acceptance(make_model(talker), source)
    beside = acceptance(make_model(talker, siblings=[3, 0, 260]), source)
    assert "with_siblings" not in chain
    assert {key: beside[key] for key in chain} == chain
    assert beside["with_siblings"][0] > chain["agreement"][0]
    assert beside["with_siblings"][1] == chain["agreement"][1]
    assert beside["with_siblings"][2] == 1.0, "all tokens but one stand beside it"


def test_held_out_answers_do_not_train_and_stay_the_same_when_more_come() -> None:
    """Catches an answer in both parts, none in either."""
    answers = make_answers(64)
    learnt, held_out = hold_out(answers, 3)
    assert [one.id for one in answers if one in held_out or one in learnt] == [one.id for one in answers]
    assert (len(learnt), len(held_out)) == (61, 3)
    assert len(hold_out(answers, 32)[1]) == 4  # at most one in 16
    assert hold_out(answers[:15], 32)[1] == hold_out(answers, 0)[1] == []
    chosen = [hash_number(content_hash(one.id)) for one in answers[10:12]]
    assert [one.id for one in hold_out(answers, 0, chosen=chosen)[1]] == [one.id for one in answers[10:12]]
    before = {one.id for one in hold_out(answers[:48], 3)[1]}
    assert len(before & {one.id for one in held_out}) >= 2
