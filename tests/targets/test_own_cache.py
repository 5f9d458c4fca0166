"""Families that store what slots can't hold: their own cache is copied for every pass."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from conftest import first
from transformers import PreTrainedModel

from benchmarks.families import CAUSAL, NESTED, built, continued
from benchmarks.replay import Replay
from outrider.decoding.draft import Draft
from outrider.generation import generate
from outrider.targets.cache import own as own_cache
from outrider.targets.cache.own import OwnCache
from outrider.targets.load import load_target

PROMPTS = [list(range(2, 12)), [(7 * n) % 60 + 2 for n in range(60)], [9, 3, 5]]
COUNT = 40
FAMILIES = {"rwkv": CAUSAL, "minimax": CAUSAL, "mllama": NESTED, "deepseek_v4": CAUSAL}
"""A state that is a list, a class that refuses any other, keys of images beside those of text, blocks that are
compressed."""


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    return built(kind, FAMILIES[kind])


@functools.cache
def texts_of(kind: str) -> list[list[int]]:
    return [continued(model_of(kind), prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("kind", first(FAMILIES))
def test_plain_and_drafted_text_is_the_models_own(kind):
    """Catches a past that a rejected token has entered, and tokens that are kept and never read."""
    target = load_target(model_of(kind))
    assert (target.spec.mode, target.family.past is not None) == ("chain", True)
    target.ends = frozenset()
    for right in (0.0, 0.7):
        drafter = Replay(texts_of(kind), target.spec.vocabulary, right=right, eldest=True)
        found = generate(target, PROMPTS, drafter, max_new_tokens=COUNT, slots=3)
        assert [prompt + one.tokens for prompt, one in zip(PROMPTS, found, strict=True)] == texts_of(kind)


def filled(kind: str = "rwkv") -> tuple[OwnCache, object]:
    target = load_target(model_of(kind))
    cache = target.allocate(2, 40)
    target.prefill(cache, [0], torch.tensor([PROMPTS[0][:-1]]), [9])
    return cache, target


def logits(target, cache, row: int, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    return target.verify(cache, [row], ids[:, 0], Draft.chain(ids[:, 1:], torch.tensor([len(tokens) - 1]))).logits[0]


def test_what_is_not_kept_never_happened(monkeypatch):
    """Catches a pass that writes into the past itself; without the copy it does."""
    for copied, is_seen in ((copy.deepcopy, False), (lambda past: past, True)):
        monkeypatch.setattr(own_cache, "copy", SimpleNamespace(deepcopy=copied))
        cache, target = filled()
        first = logits(target, cache, 0, [4, 5, 6])
        assert torch.equal(logits(target, cache, 0, [4, 5, 6]), first) != is_seen
        monkeypatch.undo()


def test_a_slot_is_cut_and_used_again():
    cache, target = filled()
    cache.free([1])
    target.prefill(cache, [1], torch.tensor([PROMPTS[0][:-1]]), [9])
    wanted = logits(target, cache, 0, [4, 5, 6])
    cache.keep([[0]])
    assert cache.lengths == [11, 9]
    torch.testing.assert_close(logits(target, cache, 0, [6])[0], wanted[2])
    assert torch.equal(logits(target, cache, 1, [4, 5, 6]), wanted)
    cache.cut(0, 10)
    assert cache.lengths[0] == 0, "what it can't take back is read again"
    cache.free([1])
    target.prefill(cache, [1], torch.tensor([PROMPTS[0][:-1]]), [9])
    assert torch.equal(logits(target, cache, 1, [4, 5, 6]), wanted)
