"""Heads on drafted blocks: the way of training is the way of serving."""

import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import SHAPE
from drafters.proposals import watch

from outrider import load_drafter
from outrider.errors import DrafterError
from outrider.generation import generate
from outrider.nn.blocks import ContextLayer
from outrider.nn.draft_vocabulary import DraftVocabulary
from outrider.nn.heads import ConfidenceHead, MarkovHead, MarkovKind, ReducedHead
from outrider.nn.shape import copy_layers, resolve_taps
from outrider.nn.top_logprobs import TopLogprobs
from outrider.sampling.settings import Sampling
from outrider.training import losses

KINDS = typing.get_args(MarkovKind)


def random_head(kind: str) -> MarkovHead:
    torch.manual_seed(0)
    head = MarkovHead(kind, 11, 6, 4).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight)
    return head


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_block_is_its_slots_one_by_one(kind):
    """Catches a head that trains on another state than it serves with or looks ahead."""
    head = random_head(kind)
    for shape in ((5,), (3, 5), (2, 3, 1)):
        previous, hidden = torch.randint(11, shape), torch.randn(*shape, 6).double()
        state, biases = head.start(hidden[..., 0, :]), []
        for k in range(shape[-1]):
            bias, state = head(previous[..., k], hidden[..., k, :], state)
            biases.append(bias)
        torch.testing.assert_close(head.along(previous, hidden), torch.stack(biases, -2), rtol=1e-12, atol=1e-12)
        assert bool(torch.stack(biases).any())
        assert not MarkovHead(kind, 11, 6, 4).double().along(previous, hidden).any()
    assert ConfidenceHead(7, 3)(torch.randn(2, 3, 7)).shape == (2, 3)


def counted(target, size: int, **counts: int) -> ReducedHead:
    head = ReducedHead(target, size).double()
    given = torch.zeros(target.spec.vocabulary)
    for name, count in counts.items():
        given[int(name[1:])] = count
    head.begin(given)
    return head


def test_the_most_frequent_tokens_are_taken_and_of_equals_the_lower(target):
    """Catches ids in the order of their counts, a choice between equals that another machine makes otherwise."""
    head = counted(target, 5, t40=9, t7=3, t63=3, t12=3)
    assert head.ids.tolist() == [0, 7, 12, 40, 63]
    assert head.ids.dtype == torch.int64
    assert head.d2t.tolist() == [0, 6, 10, 37, 59]
    assert head.t2d.dtype == torch.bool and head.t2d.nonzero()[:, 0].tolist() == [0, 7, 12, 40, 63]
    assert set(head.state_dict()) == {"lm_head.weight", "d2t", "t2d"}


def test_a_reduced_head_begins_as_the_targets_own_rows(target):
    """Catches rows of other tokens, and a head that shares memory with the target's."""
    head = counted(target, 4, t40=9, t7=3, t63=3, t12=3)
    hidden = torch.randn(2, 3, target.spec.hidden, dtype=torch.float64)
    logits, whole = head(hidden), target.head(hidden)
    assert logits.shape == whole.shape
    torch.testing.assert_close(logits[..., head.ids], whole[..., head.ids], rtol=1e-12, atol=1e-12)
    outside = torch.ones(64, dtype=torch.bool)
    outside[head.ids] = False
    assert bool((logits[..., outside] == -torch.inf).all())
    logits[..., head.ids].sum().backward()
    assert head.lm_head.weight.grad is not None and bool(head.lm_head.weight.grad.isfinite().all())
    with torch.no_grad():
        head.lm_head.weight += 1
    torch.testing.assert_close(target.head(hidden), whole)


def vocabulary_of(target, ids: list[int]) -> DraftVocabulary:
    vocabulary, counts = DraftVocabulary(target, len(ids)), torch.zeros(target.spec.vocabulary)
    counts[ids] = 1
    vocabulary.begin(counts)
    return vocabulary


@pytest.mark.parametrize("name", sorted(losses.DIVERGENCES))
def test_losses_over_a_draft_vocabulary_are_those_over_all_tokens(name, target):
    """Catches a target's distribution that is renormalised over what can be drafted, a label in another column, and
    the mass of the others lost where the target's likeliest tokens are stored."""
    torch.manual_seed(1)
    vocabulary = vocabulary_of(target, [3, 5, 8, 20, 21, 40, 63])
    theirs, drafted = 3 * torch.randn(50, 64), torch.randn(50, 7)
    labels = torch.randint(64, (50,))
    top = TopLogprobs.of(theirs, 6)
    for own, reduced in (
        (theirs, vocabulary.reduced(theirs)),
        (top.logits(slice(None), 64), vocabulary.reduced_top(top, torch.arange(50))),
    ):
        whole, few = (drafted.clone().requires_grad_() for _ in range(2))
        expected = losses.combine({name: 1.0}, vocabulary.whole(whole), own, labels)
        found = losses.combine({name: 1.0}, vocabulary.with_others(few), reduced, vocabulary.labels(labels))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        expected.sum().backward()
        found.sum().backward()
        torch.testing.assert_close(few.grad, whole.grad, rtol=1e-4, atol=1e-5)


def test_a_draft_vocabulary_has_the_targets_own_logits(target):
    """Catches rows of other tokens, those of the ids before a checkpoint was loaded, and a head that is saved."""
    vocabulary, other = vocabulary_of(target, [3, 40, 63]), vocabulary_of(target, [1, 2, 9])
    hidden = torch.randn(2, target.spec.hidden, dtype=torch.float64)
    other(hidden)
    other.load_state_dict(vocabulary.state_dict())
    torch.testing.assert_close(other(hidden), target.head(hidden)[..., [3, 40, 63]], rtol=1e-12, atol=1e-12)
    assert set(vocabulary.state_dict()) == {"ids"}
    assert not list(vocabulary.parameters())


@pytest.mark.parametrize("options", [{}, {"siblings": (2,)}], ids=["chain", "tree"])
def test_only_tokens_of_the_draft_vocabulary_are_drafted(options, target):
    """Catches columns of logits that are taken for tokens of the target, greedy or drawn."""
    torch.manual_seed(2)
    drafter = load_drafter("dspark", target, layers=1, vocabulary=5, **options)
    counts = torch.zeros(target.spec.vocabulary)
    counts[[20, 31, 40, 50, 63]] = 1
    drafter.model.begin(counts)
    seen = watch(drafter)
    for sampling in (None, Sampling(temperature=1.0, seed=1)):
        generate(target, [3, 4], drafter, max_new_tokens=12, sampling=sampling)
    drafted = {token for proposal in seen for tokens in proposal.tokens for token in tokens}
    assert drafted and drafted <= {20, 31, 40, 50, 63}


def test_a_hash_tells_two_vocabularies_apart(target):
    """Catches a hash of the size alone, or of the weights, which training moves."""
    one, same, other = counted(target, 3, t5=1), counted(target, 3, t5=7), counted(target, 3, t6=1)
    assert one.content_hash == same.content_hash != other.content_hash
    torch.nn.init.normal_(one.lm_head.weight)
    assert one.content_hash == same.content_hash


@pytest.mark.parametrize("lacks", [(), ("self_attn.q_norm.weight", "self_attn.k_norm.weight")], ids=["qwen3", "llama"])
def test_a_copied_layer_is_the_targets(lacks, target, monkeypatch):
    """Catches layers in another order, a copy that shares memory with the target, and a family without query norms."""
    shape = replace(SHAPE, heads=4, kv_heads=2, head_dim=8, intermediate=64)
    layers = [ContextLayer(target.spec.hidden, shape).double() for _ in range(2)]
    theirs = [dict(target.layer(i).state_dict()) for i in (3, 1)]
    for weights in theirs:
        for name in lacks:
            del weights[name]
    monkeypatch.setattr(
        target, "layer", lambda i: SimpleNamespace(state_dict=lambda: theirs[(3, 1).index(i)]), raising=False
    )
    before = {name: weight.clone() for name, weight in layers[0].state_dict().items()}
    copy_layers(layers, (3, 1), target)
    for layer, weights in zip(layers, theirs, strict=True):
        mine = layer.state_dict()
        assert mine.keys() == weights.keys() | set(lacks)
        assert all(torch.equal(mine[name], weights[name]) for name in weights)
        assert all(mine[name].data_ptr() != weights[name].data_ptr() for name in weights)
    assert all(torch.equal(layers[0].state_dict()[name], before[name]) for name in lacks)


def test_taps_not_asked_for_are_spread_within_the_target(target):
    """Catches a default that a small target does not have, a negative layer that counts from the end."""
    for layers in (1, 2, 3, 4, 5, 8, 12, 36):
        spec = replace(target.spec, layers=layers)
        taps = resolve_taps(None, spec)
        assert list(taps) == sorted(set(taps))
        assert 1 <= len(taps) <= 5
        assert 0 <= taps[0] <= taps[-1] < layers
        assert resolve_taps(taps, spec) == taps
    assert taps == (1, 9, 17, 25, 33)
    for wrong, said in (((1, 4), "4 layers"), ((-1, 2), "4 layers"), ((2, 1), "ascending"), ((1, 1), "ascending")):
        with pytest.raises(DrafterError, match=said):
            resolve_taps(wrong, target.spec)
