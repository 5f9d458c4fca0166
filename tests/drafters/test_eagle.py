"""EAGLE-3 and EAGLE: their own parts; what recurrent drafters share is tested in tests/nn/test_recurrent.py."""

import math

import pytest
import torch
from conftest import Case, batch_of
from drafters.proposals import exact

from outrider.checkpoint import save
from outrider.drafters import eagle, eagle3
from outrider.loading import load_drafter
from outrider.training.config import Config as TrainConfig
from outrider.training.step import accumulate

OPTIONS = {
    "qwen3 and 3.1": {"qk_norm": True, "fc_norm": True, "norm_output": True, "taps": (0, 1, 2, 3)},
    "gated": {"gated": True, "vocabulary": 24},
    "metaquery": {"aggregate": "metaquery", "queries": 2},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())


@pytest.fixture
def texts():
    return torch.randint(64, (4, 20), generator=torch.Generator().manual_seed(4))


def logits_of(model, batch):
    return torch.cat([draft for draft, _, _ in model.predict(batch).chunks(10**9)])


def fill(model, source) -> None:
    """Give `model` the weights of another that it has too."""
    theirs = source.state_dict()
    model.load_state_dict(
        model.state_dict() | {name: theirs[name] for name in model.state_dict().keys() & theirs.keys()}
    )


@EVERY
def test_every_option_is_exact_and_stays_exact_after_a_checkpoint(options, target, prompts, workshop, tmp_path):
    """Catches an option that training knows and serving does not, and weights that are not saved."""
    model = workshop.model(Case("eagle3", options), target)
    model.begin(torch.arange(64))
    save(tmp_path / "checkpoint", model)
    drafters_, drafts = (model.eval().drafter(), load_drafter(tmp_path / "checkpoint", target)), []
    for drafter in drafters_:
        drafts.append([one.accepted for one in exact(target, prompts[:3], drafter, max_new_tokens=8, slots=2)])
    assert drafts[0] == drafts[1]


@EVERY
def test_every_option_has_its_gradient(options, target, texts, workshop):
    """Catches a part that stands in the model and not in the loss; in bf16 too, where dtypes meet."""
    model = workshop.model(Case("eagle3", options), target).float()
    for weight in model.parameters():  # what begins as nothing lets no gradient through
        torch.nn.init.normal_(weight, std=0.3)
    batch = batch_of(target, model.taps, texts)
    with torch.autocast("cpu", torch.bfloat16):
        rows = model.predict(batch)
        found = accumulate(rows, TrainConfig(loss={"kl": 1.0})).says()
    rows.backward()
    assert math.isfinite(found["loss"])
    for name, weight in model.named_parameters():
        assert weight.grad is not None and bool(weight.grad.isfinite().all()), name
        assert float(weight.grad.abs().sum()) > 0, name


def test_taps_not_asked_for_are_low_middle_and_high():
    """Catches a default that a small target does not have."""
    wanted = {36: (1, 17, 32), 28: (1, 13, 24), 8: (1, 3, 4), 4: (0, 1), 2: (0, 1), 1: (0,)}
    assert {layers: eagle3.three(layers) for layers in wanted} == wanted


def test_learned_queries_look_at_one_token_alone(target, texts, workshop):
    """Catches attention over positions in place of taps: a later token would be seen."""
    model = workshop.model(Case("eagle3", OPTIONS["metaquery"]), target)
    torch.nn.init.normal_(model.metaquery.o_proj.weight)
    taps = batch_of(target, model.taps, texts).taps
    other = taps.clone()
    other[:, 7] += 1
    moved = (model.features(other) - model.features(taps)).abs().amax(-1)
    assert bool((moved[:, 7] > 1e-3).all())
    moved[:, 7] = 0
    assert not moved.any()


def test_an_open_gate_changes_nothing(target, texts, workshop):
    """Catches a gate that is not a factor between 0 and 1, or stands behind o_proj."""
    plain, gated = (workshop.model(Case("eagle3", options), target) for options in ({}, {"gated": True}))
    fill(gated, plain)
    batch = batch_of(target, plain.taps, texts)
    assert not torch.allclose(logits_of(plain, batch), logits_of(gated, batch))
    torch.nn.init.constant_(gated.layers[0].self_attn.gate.bias, 100.0)
    torch.testing.assert_close(logits_of(plain, batch), logits_of(gated, batch), rtol=1e-12, atol=1e-12)
    torch.nn.init.constant_(gated.layers[0].self_attn.gate.bias, -100.0)
    torch.nn.init.zeros_(plain.layers[0].self_attn.o_proj.weight)
    torch.testing.assert_close(logits_of(plain, batch), logits_of(gated, batch), rtol=1e-12, atol=1e-12)


def test_the_normed_output_is_what_the_next_step_reads(target, texts, workshop):
    """Catches a norm that is applied twice, or to the logits alone."""
    given, fed = (workshop.model(Case("eagle3", {"norm_output": fed}), target) for fed in (False, True))
    fill(fed, given)
    for model in (given, fed):
        torch.nn.init.constant_(model.norm.weight, 3.0)
    batch = batch_of(target, given.taps, texts)
    depth = given.predict(batch).depth
    one, other = logits_of(given, batch), logits_of(fed, batch)
    torch.testing.assert_close(one[depth == 0], other[depth == 0], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(one[depth == 1], other[depth == 1])


def test_the_feature_to_learn_is_the_one_the_label_was_said_from(target, texts, workshop):
    """Catches a feature shifted by one: a model that guesses right must have no loss."""
    model = workshop.model(Case("eagle", {"ttt": 3, "noise": 0.0}), target)
    batch = batch_of(target, (), texts)
    rows = model.predict(batch)
    for place in range(3):
        # row s of the rollout from i guesses feature i + 1 + s
        hits = (rows.block % 18 == 4) & (rows.depth == place)
        rows.states.data[hits] = batch.hidden[:, 5 + place]
    for draft, own, part in rows.chunks(10**9):
        feature = rows.extra(part, draft, own)["feature"]
        right = (rows.block % 18 == 4)[part]
        torch.testing.assert_close(draft[right], own[right], rtol=1e-10, atol=1e-10)
        assert not feature[right].any()
        assert bool((feature[~right] > 0).all())


def test_the_feature_loss_is_smooth_l1():
    """Catches a sum over the feature's numbers, whose scale would hang on the target's size."""
    found = eagle.distance(torch.tensor([[0.5, 3.0], [0.0, 0.0]]), torch.zeros(2, 2))
    assert found.tolist() == [(0.125 + 2.5) / 2, 0.0]


def test_features_are_noisy_in_training_alone(target, texts, workshop):
    """Catches noise while serving, and noise larger than asked for."""
    model = workshop.model(Case("eagle", {"ttt": 1, "noise": 0.1}), target)
    batch = batch_of(target, (), texts)
    seen, features = [], eagle.UnrolledRows

    def watched(model, batch, features_):
        seen.append(features_ - batch.hidden)
        return features(model, batch, features_)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle, "UnrolledRows", watched)
        model.predict(batch)
        model.eval().predict(batch)
    assert 0.09 < float(seen[0].abs().max()) <= 0.1
    assert abs(float(seen[0].mean())) < 0.01
    assert not seen[1].any()
