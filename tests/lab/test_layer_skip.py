"""Layer skip: the target drafts for itself without some sublayers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import Cutting, TableTarget
from drafters.proposals import exact

from benchmarks.families import tiny
from outrider.errors import DrafterError
from outrider.lab.drafters import layer_skip
from outrider.lab.drafters.layer_skip import Config, LayerSkip, build
from outrider.lab.sublayer_search import Search
from outrider.policies.fixed import Fixed
from outrider.targets.load import load_target
from outrider.targets.protocol import Skip, SkipsLayers


def whole(*layers: int) -> Skip:
    return Skip(frozenset(layers), frozenset(layers))


def silenced(skip: Skip) -> torch.nn.Module:
    """The tiny model with the last matrix of every sublayer of `skip` at zero: the slow twin."""
    model = tiny_model()
    with torch.no_grad():
        for layer in skip.attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in skip.mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    return model


@pytest.mark.parametrize(
    "skip",
    [Skip(), whole(2, 3), Skip(frozenset({0, 3})), Skip(mlp=frozenset({1, 2}))],
    ids=str,
)
def test_a_pass_without_sublayers_is_that_of_a_model_in_which_they_say_nothing(skip, target):
    """Catches a stand-in for another module, a residual stream that is cut, and keys at the wrong place."""
    texts = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = silenced(skip)(input_ids=texts).logits
    cache = target.allocate(2, 12)
    with target.skipping(skip, cache, [0, 1]) as read:
        found = torch.cat([read(texts[:, :4]), *(read(texts[:, n : n + 1]) for n in range(4, 9))], 1)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def modules_of(target) -> dict:
    return {name: vars(module).get("forward") for name, module in target.model.named_modules()}


def test_everything_is_what_it_was_on_every_way_out(target):
    """Catches a module that stays replaced and a length that stays raised, above all where a pass failed."""
    cache = target.allocate(2, 12)
    target.prefill(cache, [0, 1], torch.arange(8).view(2, 4), [4, 3])
    before, lengths = modules_of(target), list(cache.lengths)
    logits = target.verify(cache, [0, 1], torch.tensor([1, 2]), layer_skip.Draft.empty(2)).logits
    with target.skipping(whole(1, 2), cache, [0, 1]) as read:
        read(torch.tensor([[1], [2]]))
        assert modules_of(target) != before and cache.lengths == [5, 4]
    assert modules_of(target) == before and cache.lengths == lengths
    with pytest.raises(AssertionError), target.skipping(whole(1, 2), cache, [0, 1]) as read:
        read(torch.ones(2, 20, dtype=torch.int64))
    stopped = target.skipping(whole(1, 2), cache, [1])
    stopped.__enter__()(torch.tensor([[1]]))
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert modules_of(target) == before and cache.lengths == lengths
    assert torch.equal(target.verify(cache, [0, 1], torch.tensor([1, 2]), layer_skip.Draft.empty(2)).logits, logits)


@pytest.mark.parametrize("family", ["gpt-oss", "opt"])
def test_other_families_draft_for_themselves(family):
    """Catches a module that returns what its layer can't unpack; opt has no MLP that could be told."""
    target = load_target(tiny(family))
    drafter = build(Config(length=3, min_confidence=0), target)
    found = exact(target, [[1, 2, 3, 4, 5], [7], [9, 8, 7] * 9], drafter, max_new_tokens=16, slots=2)
    assert sum(sum(one.accepted) for one in found) > 0


class Halved(TableTarget):
    """A table that drafts for itself: its logits at half their size, and some noise."""

    def skippable(self) -> Skip:
        return whole(0)

    @contextmanager
    def skipping(self, skip, cache, rows):
        noise = torch.randn(self.table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        drafts, at = 0.5 * self.table + 0.7 * noise, [cache.before[list(rows)]]

        def read(tokens):
            logits = drafts[at[0], tokens[:, 0]][:, None]
            at[0] = tokens[:, 0]
            return logits

        yield read


TABLE = Halved.random(5)


def test_the_distribution_is_kept():
    """Catches a q that is not what was drawn from, and a draft whose end hangs on the token behind it.  False alarm
    1e-6."""
    drafter = LayerSkip(TABLE, whole(0), 3, 0.45)
    assert keeps_the_distribution(TABLE, drafter, slots=2000)
    assert keeps_the_distribution(
        TABLE, drafter, Cutting(3, 0.3), slots=1500, sampling={"temperature": 0.7, "top_k": 4}
    )
    _, _, kept = emitted(TABLE, drafter, slots=100)
    assert kept > 40


MUTE = Skip(frozenset({1, 2}), frozenset({2, 3}))
"""Sublayers that say nothing, so that leaving them out loses nothing."""


def test_texts_are_the_targets_while_sets_are_searched(prompts, monkeypatch):
    """Catches a set that leaves traces in the cache, one that is never tried, and a search of chance or of times."""
    monkeypatch.setattr(Search, "STEPS", 3)
    target, ends = load_target(silenced(MUTE)), []
    for _ in range(2):
        drafter = build(Config(skip_attention=(0, 3), skip_mlp=(0, 1), length=3, min_confidence=0, search=6), target)
        found = exact(target, prompts[:2], drafter, Fixed(3), max_new_tokens=40, slots=2)
        ends.append((drafter.search.best, drafter.search.tried, [one.steps for one in found]))
    assert ends[0] == ends[1] and len(ends[0][1]) > 3


def test_a_set_is_judged_by_what_its_own_drafts_cost_and_brought(target):
    """Catches a cost of the wrong sublayers, a race that one set runs alone, and steps of a race that is over."""
    spec, possible = target.spec, target.skippable()
    search = Search(spec, whole(1), possible, 1, lambda skip: True)
    assert search.cost(Skip()) == 1 and search.cost(whole(1)) < search.cost(Skip(mlp=frozenset({1}))) < 1
    assert search.cost(possible) == pytest.approx(search.cost(whole(1)) * 4 - 3)
    drafted = []
    while search.left or search.candidate is not None:
        drafted.append(search.next())
        search.learn(drafted[-1], 3.0 if drafted[-1] == whole(1) else 2.6, 2)
        search.learn(Skip(), 99.0, 1)
    assert search.best == whole(1) and len(set(drafted)) == 2
    assert abs(2 * drafted.count(whole(1)) - len(drafted)) <= 1
    refused = Search(spec, whole(1), possible, 5, lambda skip: False)
    assert refused.next() == whole(1) and refused.left == 0


def test_targets_that_cannot_skip_are_refused(target, monkeypatch):
    """Catches an attribute error deep in a pass; and drafts that nobody can verify."""
    assert isinstance(target, SkipsLayers) and not isinstance(TableTarget.random(3), SkipsLayers)
    with pytest.raises(DrafterError, match="table can't"):
        build(Config(), TableTarget.random(3))
    with pytest.raises(DrafterError, match="recurrent state"):
        build(Config(), load_target(tiny("mamba2")))
    with pytest.raises(DrafterError, match="changes its input"):
        build(Config(), load_target(tiny("bloom")))
    with pytest.raises(DrafterError, match="another device"):
        build(Config(), target.copy_to(torch.device("meta")))
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="off"))
    with pytest.raises(DrafterError, match="mode is off"):
        build(Config(), target)


@pytest.mark.parametrize(
    ("choices", "wanted"),
    [
        ({"skip_attention": (4,)}, "skip_attention names layer 4.*choose from 0, 1, 2, 3"),
        ({"skip_mlp": (1, 9)}, "skip_mlp names layer 9"),
        ({"exit_layer": 4}, "it was removed, name that layer and all after it"),
        ({"file": "found.json", "skip_mlp": (1,)}, "give one of them"),
    ],
    ids=str,
)
def test_layers_that_are_not_there_are_refused(choices, wanted, target):
    """Catches a set that is silently smaller than it was said."""
    with pytest.raises((DrafterError, ValueError), match=wanted):
        build(Config(**choices), target)
