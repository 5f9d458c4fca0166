"""A plan takes what fits, says what it costs, and refuses what can't fit."""

from pathlib import Path

import pytest
import torch

from outrider.data.answers.store import Answer
from outrider.drafters import find
from outrider.errors import ConfigError
from outrider.runs import stages
from outrider.runs.forecast import training_plan
from outrider.runs.forecast.training_plan import Costs, Measured, planned
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config

COSTS = Costs(100, Measured(2, 50, 3.0), Measured(4, 70, 5.0))


def test_the_largest_budget_that_fits_is_taken() -> None:
    """Catches a budget that does not fit, one that leaves room and makes more batches than needed, and a plan of no
    rows."""
    for free, tokens, batches, peak in ((1000, 1000, 1, 130), (100, 500, 2, 80), (60, 200, 5, 50)):
        found = planned(COSTS, 1000, free)
        assert (found.tokens, found.batches, found.peak_bytes, found.seconds) == (tokens, batches, peak, 11.0)
        assert found.peak_bytes <= 0.9 * free
    with pytest.raises(ConfigError, match=r"one text of 100 tokens takes .* set a lower prepare\.length"):
        planned(COSTS, 1000, 40)


def test_measuring_changes_no_weight(talker: TransformersTarget) -> None:
    """Catches a plan that trains the model it is given, and rows without anything to learn."""
    module = find("dflash")
    model = module.Model(module.Config(layers=1, block=3, taps=(1,), anchors=16), talker).float()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    answers = [Answer("a", list(range(20)), [(6, 20)])]
    found = training_plan.costs(model, Config(steps=10, dtype="float32"), answers, 48)
    assert found.first.seconds > 0 and (found.first.rows, found.second.rows) == training_plan.ROWS
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    batch = training_plan.random_batch(model, answers, 48, 2)
    assert batch.per_row == int(batch.documents.max()) == 2 and int(batch.loss_mask.sum()) == 2 * 2 * 14


def test_the_measured_rows_are_spread_over_all_answers() -> None:
    """Catches a plan of the first answers at hand, which may have less to learn than all others."""
    answers = [Answer(str(n), list(range(40)), [(0, 1 + n)]) for n in range(32)]
    assert [answer.learn[0][1] for answer in training_plan.spread(answers, 4)] == [5, 13, 21, 29]
    assert len(training_plan.spread(answers[:2], 5)) == 5


@pytest.mark.slow
def test_a_run_file_can_be_measured_before_there_are_answers(tmp_path: Path) -> None:
    """Catches a stand-in for the target that lacks what a method asks of it."""
    given = [f"prepare.folder={tmp_path / 'answers'}", "prepare.length=48", "train.batch=2", "drafter.anchors=8"]
    lines = stages.plan("recipes/demo.yaml", given, stages=["prepare", "train"], measure=True)
    found = {line.what: line.value for line in lines}
    assert found["fits here"] == "train.tokens=96, 1 batches per step"
    assert float(found["measured: a step, without the target's passes"]) > 0


def test_layers_are_recomputed_where_a_batch_does_not_fit_otherwise(talker, monkeypatch):
    """Catches a plan that recomputes layers where there is room, or does not where there is none; and one that measures
    other settings than it names."""
    module, measured = find("dflash"), []

    def costs(model, config, *_):
        measured.append(config.recompute)
        return Costs(100, Measured(2, 50, 3.0), Measured(4, 70, 5.0))

    monkeypatch.setattr(training_plan, "costs", costs)
    model = module.Model(module.Config(layers=1, block=3, taps=(1,), anchors=16), talker)
    for config, free, wanted in (
        (Config(batch=4), 100, [False]), (Config(batch=5), 80, [False, True]),
        (Config(batch=5, tokens=200), 80, [False]), (Config(batch=5, recompute=True), 80, [True]),
    ):  # fmt: skip
        measured.clear()
        _, chosen = training_plan.fitting(model, config, [], 100, free)
        assert measured == wanted and chosen.recompute == wanted[-1]
