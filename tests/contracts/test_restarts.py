"""A drafter's state after rejections is that of its committed text: begun again on the same text, it has as much
accepted.

No test here is random.
"""

import functools
import itertools

import pytest
import torch
from conftest import FEW, cases, fast, first

from benchmarks.families import tiny
from outrider.decoding.state import Request
from outrider.drafters.small_model import Config, SmallModel
from outrider.generation import Generation, generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

LEARNING = {"graft", "jacobi", "mix", "recycle", "suffix"}
"""What these propose hangs on earlier steps too, of which a text says nothing."""
CASES = fast((case for case in cases() if case.kind not in LEARNING and "shared" not in case.choices), FEW)
FAMILIES = first(["qwen3.5", "mamba2", "lfm2", "falcon-h1", "jamba"])
TOKENS = 13


def restarted(target, drafter, prompt: list[int], found: Generation) -> list[int]:
    """Drafted tokens accepted in the first step behind each text that a step of `found` began with."""
    accepted, done = [], 0
    for step in found.accepted:
        text = prompt + found.tokens[:done]
        if not drafter.probe_rows:
            request = Request(text, TOKENS - done, Sampling())
            accepted.append(next(serve(target, [request], drafter)).accepted)
        else:  # a probe answers from the first pass on, which here reads up to the last token and emits it
            request = Request(text[:-1], TOKENS - done + 1, Sampling())
            _, second = itertools.islice(serve(target, [request], drafter), 2)
            accepted.append(second.accepted if done else 0)
        done += step + 1
    return accepted


@pytest.mark.parametrize("case", CASES)
def test_every_drafter_begun_again_has_as_much_accepted(case, target, prompts, drafter_of):
    """Catches features, keys and states of rejected tokens that stay, and of accepted ones that are lost."""
    drafter = drafter_of(case)
    prompt = prompts[-1]
    (found,) = generate(target, prompt, drafter, max_new_tokens=TOKENS)
    assert restarted(target, drafter, prompt, found) == found.accepted


@functools.cache
def pair_of(family: str) -> tuple[TransformersTarget, TransformersTarget]:
    """A recurrent target, and a model that often agrees with it."""
    near, noise = tiny(family), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in near.parameters():
            weight += 0.04 * weight.std(correction=0) * torch.randn(weight.shape, dtype=weight.dtype, generator=noise)
    return load_target(tiny(family)), load_target(near)


TEXTS = [[5, 9, 17, 3, 40, 11], [3, 9, 4] * 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recurrent_small_model_begun_again_has_as_much_accepted(family):
    """Catches states that stay advanced over rejected tokens, after which hardly a token is accepted any more."""
    target, near = pair_of(family)
    drafter = SmallModel(near, Config(length=3))
    batch = generate(target, TEXTS, drafter, max_new_tokens=TOKENS, slots=2)
    for prompt, found in zip(TEXTS, batch, strict=True):
        assert restarted(target, drafter, prompt, found) == found.accepted
    steps = [step for found in batch for step in found.accepted[:-1]]
    assert 0 < sum(steps) < 3 * len(steps)


def test_a_slot_goes_back_to_the_states_it_had():
    """Catches a state put back of another place, another slot, or a request that is over."""
    target = pair_of("qwen3.5")[0]
    cache: SlotCache = target.allocate(2, 32, undo=2)
    text = torch.arange(1, 21).view(2, 10)
    target.prefill(cache, [0, 1], text[:, :4], [4, 3])
    target.prefill(cache, [0, 1], text[:, 4:], [6, 6])
    whole = target.prefill(cache, [0], text[:1, :1], [1]).logits
    cache.cut(0, 10)
    assert cache.lengths == [10, 9]
    assert torch.equal(target.prefill(cache, [0], text[:1, :1], [1]).logits, whole)
    cache.cut(0, 9)
    assert cache.lengths == [9, 9]
    other = fresh(target, text)
    again, wanted = (target.prefill(own, [0], text[:1, 9:], [1]).logits for own in (cache, other))
    assert torch.equal(again, wanted)
    cache.cut(1, 5)
    assert cache.lengths[1] == 0, "its states are noted no longer"
    cache.free([0])
    target.prefill(cache, [0], text[:1, :3], [3])
    cache.cut(0, 2)
    assert cache.lengths[0] == 0, "states of the request before"


def fresh(target: TransformersTarget, text: torch.Tensor) -> SlotCache:
    cache = target.allocate(1, 32)
    target.prefill(cache, [0], text[:1, :4], [4])
    target.prefill(cache, [0], text[:1, 4:9], [5])
    return cache
