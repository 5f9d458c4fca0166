"""Which rows count, and how much: weights by depth by hand, and AdaSPEC's selection against a sort in Python."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import build
from outrider.errors import ConfigError
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training import losses, rows
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.step import accumulate, optimise
from outrider.training.trainer import train
from training.bench import fit, make_model, make_source


@dataclass
class Fixed:
    """Predictions whose logits are given: two blocks of three and one of two."""

    draft: Tensor
    target: Tensor
    labels: Tensor
    weight: Tensor
    depth: Tensor
    block: Tensor
    vocabulary: int = 5

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
        for start, end in ((0, 3), (3, 8)) if size < 8 else ((0, 8),):
            yield self.draft[start:end], self.target[start:end], slice(start, end)

    def extra(self, part: slice, draft: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {}

    def backward(self) -> None: ...


@pytest.fixture
def fixed() -> Fixed:
    noise = torch.Generator().manual_seed(3)
    draft, target = torch.randn(2, 8, 5, generator=noise)
    labels, weight = torch.randint(5, (8,), generator=noise), torch.tensor([1.0, 0.9, 0, 1, 0.9, 0.8, 1, 0.9])
    return Fixed(
        draft.requires_grad_(), target, labels, weight,
        torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), torch.tensor([4, 4, 4, 5, 5, 5, 9, 9]),
    )  # fmt: skip


def test_weights_by_depth_take_the_place_of_the_methods_own(fixed: Fixed) -> None:
    """Catches weights that multiply the method's, and a row that is not to be learnt but gets one."""
    whole = slice(0, 8)
    torch.testing.assert_close(rows.weights({}, fixed, whole), fixed.weight)
    wanted = torch.tensor([math.exp(-k / 4) for k in fixed.depth.tolist()]) * (fixed.weight > 0)
    torch.testing.assert_close(rows.weights({"exp": 4.0}, fixed, whole), wanted)
    wanted = torch.tensor([0.8**k for k in fixed.depth.tolist()]) * (fixed.weight > 0)
    torch.testing.assert_close(rows.weights({"power": 0.8}, fixed, whole), wanted)


def test_dpace_weighs_a_row_by_how_far_its_block_reaches(fixed: Fixed) -> None:
    """Catches prefix and suffix taken for each other, a sum that runs into the next block."""
    found = rows.weights({"dpace": 0.5}, fixed, slice(0, 8), fixed.draft)
    q = fixed.draft.detach().softmax(-1).gather(-1, fixed.labels[:, None])[:, 0].tolist()
    wanted = []
    for block in ([0, 1], [3, 4, 5], [6, 7]):
        s = [0.5 * q[row] + 0.5 for row in block]
        reached = [math.prod(s[: k + 1]) for k in range(len(s))]
        wanted += [sum(reached[k:]) for k in range(len(s))]
    wanted.insert(2, 0.0)
    torch.testing.assert_close(found, torch.tensor(wanted))
    assert not found.requires_grad
    torch.testing.assert_close(rows.weights({"dpace": 0.5}, fixed, slice(3, 8), fixed.draft[3:]), found[3:])
    deeper = replace(fixed, depth=fixed.depth + torch.tensor([0, 0, 0, 2, 2, 2, 1, 1]))  # blocks that go on from others
    torch.testing.assert_close(rows.weights({"dpace": 0.5}, deeper, slice(0, 8), fixed.draft), found)


@pytest.mark.parametrize("position", [{}, {"exp": 4.0}, {"power": 0.8}, {"dpace": 0.5}])
def test_the_loss_hangs_not_on_the_size_of_the_chunks(fixed, position, monkeypatch) -> None:
    """Catches a normalisation by chunk."""
    config = Config(loss={"kl": 1.0}, position=position)
    found = []
    for elements in (10, 10**6):
        monkeypatch.setattr("outrider.training.step.CHUNK_ELEMENTS", {"cpu": elements})
        monkeypatch.setattr("outrider.training.step.CHUNK_ROWS", 1)
        fixed.draft.grad = None
        found.append((accumulate(fixed, config).says()["loss"], fixed.draft.grad.clone()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("position", "said"),
    [
        ({"powr": 0.8}, "unknown position weight 'powr'; did you mean 'power'?"),
        ({"power": 1.2}, "power: 1.2 must be above 0 and at most 1"),
        ({"exp": 0.0}, "exp: 0.0 must be above 0"),
        ({"exp": 4.0, "power": 0.8}, "must have one weight, got 2 (exp, power); choose one"),
    ],
)
def test_a_wrong_weight_is_refused(position: dict[str, float], said: str) -> None:
    """Catches a typing error that trains with other weights."""
    with pytest.raises(ConfigError) as caught:
        build(Config, {"position": position})
    assert said in str(caught.value)


def test_the_most_learnable_rows_are_taken(fixed: Fixed) -> None:
    """Catches the sign turned, rows that are not learnt among them, and a share of the chunk in place of the batch."""
    reference = replace(fixed, draft=fixed.draft.detach().roll(1, 0))
    gap = losses.kl(fixed.draft, fixed.target, fixed.labels) - losses.kl(reference.draft, fixed.target, fixed.labels)
    learnt = [row for row in range(8) if fixed.weight[row] > 0]
    best = sorted(learnt, key=lambda row: -float(gap[row]))[:3]
    for size in (3, 100):
        found = rows.most_learnable(fixed, reference, 0.4, losses.kl, size)
        assert sorted(best) == [row for row in range(8) if found[row]]
    assert rows.most_learnable(fixed, reference, 1.0, losses.kl, 100).tolist() == (fixed.weight > 0).tolist()
    # where nothing differs, nothing is told apart
    assert rows.most_learnable(fixed, fixed, 0.4, losses.kl, 100).tolist() == (fixed.weight > 0).tolist()
    with pytest.raises(ConfigError, match="predicts rows other than the drafter"):
        rows.most_learnable(fixed, replace(fixed, labels=fixed.labels.flip(0)), 0.4, losses.kl, 100)


def test_only_the_selected_rows_train(fixed: Fixed) -> None:
    """Catches a selection that is counted and not used."""
    chosen = torch.tensor([False, True, False, False, True, False, False, False])
    accumulate(fixed, Config(loss={"kl": 1.0}), chosen=chosen)
    assert (fixed.draft.grad.abs().sum(-1) > 0).tolist() == chosen.tolist()


def test_the_reference_sees_the_same_rows_and_is_not_trained(talker: TransformersTarget) -> None:
    """Catches anchors drawn anew for the reference, and a random state that the reference moves on."""
    model, reference = make_model(talker), make_model(talker, seed=2)
    config = Config(loss={"kl": 1.0}, select=0.4, reference="elsewhere", batch=2, dtype="float32")
    batch = make_source(talker).batch(0)
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    after = []
    for of in (reference, None):
        torch.manual_seed(5)
        optimise(make_model(talker), Optimizers(model, "adamw", 261, 0.0), [batch], config, 0, False, of)
        after.append(torch.rand(3))
    torch.testing.assert_close(after[0], after[1])
    assert all(
        torch.equal(weight, before[name]) and weight.grad is None for name, weight in reference.named_parameters()
    )


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"select": 0.4}, "train.select 0.4 needs a reference"),
        ({"reference": "runs/x/checkpoint"}, "train.reference runs/x/checkpoint has no effect with train.select 1.0"),
    ],
)
def test_a_selection_and_its_reference_belong_together(settings: dict[str, Any], wrong: str) -> None:
    """Catches a setting that has no effect."""
    with pytest.raises(ConfigError, match=wrong):
        build(Config, settings)


def test_a_selection_without_its_model_is_refused_before_training(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a run that trains on all rows although it was asked for a share."""
    with pytest.raises(ConfigError, match="needs the reference elsewhere"):
        fit(tmp_path, talker, select=0.4, reference="elsewhere")
    assert not (tmp_path / "checkpoint").exists()


def test_a_reference_that_sees_other_layers_is_refused(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a reference that is fed the taps of the drafter in place of its own: it would judge by nonsense."""
    other = make_model(talker, taps=(0,))
    with pytest.raises(ConfigError, match=r"with taps \(0,\).*same kind and taps"):
        train(
            make_model(talker),
            make_source(talker),
            Config(select=0.4, reference="x", steps=1),
            tmp_path,
            reference=other,
        )
