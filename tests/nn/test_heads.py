"""Heads on drafted blocks: the way of training is the way of serving."""

from __future__ import annotations

import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import SHAPE

from outrider.errors import DrafterError
from outrider.nn.blocks import ContextLayer
from outrider.nn.draft_model import binding, copy_layers, resolve_taps
from outrider.nn.heads import ConfidenceHead, MarkovHead, MarkovKind, ReducedHead

KINDS = typing.get_args(MarkovKind)


def random_head(kind: str) -> MarkovHead:
    torch.manual_seed(0)
    head = MarkovHead(kind, 11, 6, 4).double()
    for weight in head.parameters():
        torch.nn.init.normal_(weight)
    return head


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 1)], ids=str)
def test_a_whole_block_is_its_slots_one_by_one(kind, shape):
    """Catches a head that trains on another state than it serves with."""
    head = random_head(kind)
    previous, hidden = torch.randint(11, shape), torch.randn(*shape, 6).double()
    state, biases = head.start(hidden[..., 0, :]), []
    for k in range(shape[-1]):
        bias, state = head(previous[..., k], hidden[..., k, :], state)
        biases.append(bias)
    torch.testing.assert_close(head.along(previous, hidden), torch.stack(biases, -2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_token_moves_no_earlier_slot(kind):
    """Catches a head that looks right."""
    head = random_head(kind)
    previous, hidden = torch.randint(11, (2, 6)), torch.randn(2, 6, 6).double()
    other, changed = previous.clone(), hidden.clone()
    other[:, 3:], changed[:, 3:] = (other[:, 3:] + 1) % 11, changed[:, 3:] + 1
    before, after = head.along(previous, hidden), head.along(other, changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.allclose(before[:, 3:], after[:, 3:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_head_corrects_nothing(kind):
    """Catches a start that spoils the backbone's logits before anything is learnt."""
    head = MarkovHead(kind, 11, 6, 4)
    assert not head.along(torch.randint(11, (2, 5)), torch.randn(2, 5, 6)).any()


def test_a_confidence_is_one_number_a_slot():
    """Catches a trailing axis that would broadcast."""
    assert ConfidenceHead(7, 3)(torch.randn(2, 3, 7)).shape == (2, 3)


# ── a vocabulary of fewer tokens ──────────────────────────────────────────────────────────────────────────────────────


def counted(target, size: int, **counts: int) -> ReducedHead:
    head = ReducedHead(target, size).double()
    given = torch.zeros(target.spec.vocabulary)
    for name, count in counts.items():
        given[int(name[1:])] = count
    head.begin(given)
    return head


def test_the_most_frequent_tokens_are_taken_and_of_equals_the_lower(target):
    """Catches ids in the order of their counts, and a choice between equals that another machine makes otherwise."""
    head = counted(target, 5, t40=9, t7=3, t63=3, t12=3)
    assert head.ids.tolist() == [0, 7, 12, 40, 63]
    assert head.ids.dtype == torch.int64


def test_ids_are_kept_as_offsets_and_as_a_mask(target):
    """Catches the other convention, under which d2t holds the ids: released checkpoints would draft other tokens."""
    head = counted(target, 4, t40=9, t7=3, t63=3, t12=3)
    assert head.d2t.tolist() == [7, 11, 38, 60]
    assert head.t2d.dtype == torch.bool and head.t2d.nonzero()[:, 0].tolist() == [7, 12, 40, 63]
    assert set(head.state_dict()) == {"lm_head.weight", "d2t", "t2d"}


def test_a_reduced_head_begins_as_the_targets_own_rows(target):
    """Catches rows of other tokens, and a head that shares memory with the target's."""
    head, hidden = (
        counted(target, 4, t40=9, t7=3, t63=3, t12=3),
        torch.randn(2, 3, target.spec.hidden, dtype=torch.float64),
    )
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


def test_a_hash_tells_two_vocabularies_apart(target):
    """Catches a hash of the size alone, or of the weights, which training moves."""
    one, same, other = counted(target, 3, t5=1), counted(target, 3, t5=7), counted(target, 3, t6=1)
    assert one.content_hash == same.content_hash != other.content_hash
    torch.nn.init.normal_(one.lm_head.weight)
    assert one.content_hash == same.content_hash


@pytest.mark.parametrize("size", [0, 65])
def test_a_vocabulary_that_does_not_fit_is_refused(size, target):
    """Catches a shape error where the head is filled."""
    with pytest.raises(DrafterError, match=f"vocabulary of {size}.*64"):
        ReducedHead(target, size)


# ── copied layers ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


# ── taps ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 8, 12, 36])
def test_taps_not_asked_for_are_spread_within_the_target(layers, target):
    """Catches a default that a small target does not have."""
    spec = replace(target.spec, layers=layers)
    taps = resolve_taps(None, spec)
    assert list(taps) == sorted(set(taps))
    assert 1 <= len(taps) <= 5
    assert 0 <= taps[0] <= taps[-1] < layers
    assert resolve_taps(taps, spec) == taps
    if layers == 36:
        assert taps == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("taps", "said"), [((1, 4), "4 layers"), ((-1, 2), "4 layers"), ((2, 1), "ascending"), ((1, 1), "ascending")]
)
def test_taps_that_cannot_be_are_refused(taps, said, target):
    """Catches a negative layer that counts from the end, and an order that the checkpoint would not keep."""
    with pytest.raises(DrafterError, match=said):
        resolve_taps(taps, target.spec)


def test_a_binding_tells_two_targets_apart(target):
    """Catches a checkpoint that loads on other weights, or does not load from another folder."""
    from conftest import tiny_model

    from outrider.targets.load import load_target

    again, other = load_target(tiny_model()), load_target(tiny_model(seed=1))
    assert binding(again) == binding(target)
    assert binding(other) != binding(target)
