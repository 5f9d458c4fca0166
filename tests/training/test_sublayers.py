"""The search for sublayers that can be spared: by what decoding finds, from measured seconds, saved for one target."""

import pytest
import torch
from lab.test_layer_skip import silenced, whole

from outrider.errors import CheckpointError
from outrider.generation import generate
from outrider.lab.drafters.layer_skip import Config, LayerSkip, build
from outrider.targets.load import load_target
from outrider.targets.protocol import Skip
from outrider.training.fitting import sublayers
from outrider.training.fitting.sublayers import search


@pytest.fixture(scope="module")
def idle():
    """A target whose layer 2 and whose first MLP say nothing: it loses nothing without them."""
    model = silenced(Skip(frozenset({2}), frozenset({0, 2})))
    return load_target(model)


@pytest.fixture
def steady(monkeypatch):
    """Equal seconds in every run: a drafting pass costs a tenth, and nine tenths by its sublayers."""
    monkeypatch.setattr(sublayers, "_verify_s", lambda target, texts, nodes: 1.0 + 0.02 * nodes)
    cost = lambda able, texts, skip: 0.1 + 0.9 * (1 - (len(skip.attention) + len(skip.mlp)) / 8)
    monkeypatch.setattr(sublayers, "_draft_s", cost)


def test_a_search_finds_what_can_be_spared(idle, prompts, steady):
    """Catches agreement measured on other keys than the text's, a score without costs, and luck."""
    found = search(idle, prompts, tokens=24, tries=24, length=4, seed=1)
    best = found[0]
    assert {2} <= set(best.skip_attention) and {0, 2} & set(best.skip_mlp)
    assert best.speedup == max(one.speedup for one in found)
    assert 15 <= len(found) <= 24 and len({one.skip for one in found}) == len(found)
    free = next((one for one in found if one.skip == Skip(frozenset({2}), frozenset({2}))), None)
    assert free is None or free.agreement == 1.0


def test_agreement_is_what_decoding_finds(idle, target, prompts, steady):
    """Catches drafts that begin at the wrong token, and copies that are not made anew for the next set."""
    texts = sublayers._Texts(idle, prompts, 24, 4)
    leads, sure = texts.drafted(idle, Skip(frozenset({2}), frozenset({0, 2})))
    assert leads.tolist() == [4] * 6 * len(prompts) and sure.shape == (48, 4)
    texts = sublayers._Texts(target, prompts[:1], 24, 4)
    for skip in (whole(1), whole(3)):
        leads, _ = texts.drafted(target, skip)
        again, _ = texts.drafted(target, skip)
        assert torch.equal(leads, again)
        own = []
        for at in range(20, -1, -4):  # from the last to the first
            drafter = LayerSkip(target, skip, 4, 0.0)
            text = texts.texts[0][: len(prompts[0]) + at]
            (one,) = generate(target, [text], drafter, max_new_tokens=5)
            own.append(one.accepted[0])
        assert leads.tolist() == own


def test_what_was_found_is_saved_and_refused_on_another_target(idle, target, prompts, steady, tmp_path):
    """Catches a set that is used on weights it was not found on."""
    (found, *_), again = (search(idle, prompts[:2], tokens=12, tries=8, length=3) for _ in range(2))
    assert again[0] == found
    found.save(tmp_path / "set.json")
    drafter = build(Config(file=str(tmp_path / "set.json")), idle)
    assert (drafter.skip, drafter.limit, drafter.min_confidence) == (found.skip, found.length, found.min_confidence)
    assert build(Config(file=str(tmp_path / "set.json"), length=7, min_confidence=0.5), idle).limit == 7
    with pytest.raises(CheckpointError, match="search again"):
        build(Config(file=str(tmp_path / "set.json")), target)
    (tmp_path / "set.json").write_text("{")
    for name in ("set.json", "none.json"):
        with pytest.raises(CheckpointError, match="can't read"):
            build(Config(file=str(tmp_path / name)), idle)
