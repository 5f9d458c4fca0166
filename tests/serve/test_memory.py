"""Slots are as long as their memory allows, and that is known at the start."""

import pytest

from outrider.errors import ConfigError
from outrider.generation import generate
from outrider.serve.engine import Engine
from outrider.targets.cache import capacity as cache_capacity
from outrider.targets.cache.capacity import capacity, token_bytes

TOKEN = 4 * 2 * 2 * 8 * 8
"""Of the tiny target: layers, keys and values, heads, head size, float64."""


def test_a_token_takes_what_the_buffers_have(target):
    assert token_bytes(target) == TOKEN
    with Engine(target, slots=3, length=50) as engine:
        engine.stop()
    buffers = engine.scheduler.cache.stacks.tensors
    assert sum(each.nbytes for each in buffers) == 3 * engine.scheduler.cache.length * TOKEN


@pytest.fixture
def whole(monkeypatch):
    """A device whose slots are as long as the longest text."""
    monkeypatch.setattr(cache_capacity.lazy_memory, "comes_by_page", lambda device: False)


def test_the_length_is_the_context_or_what_the_budget_allows(target, whole):
    context = target.spec.context
    assert capacity(target, 4, None, None) == (context, None)
    assert capacity(target, 4, None, 4 * 100 * TOKEN) == (100, None)
    assert capacity(target, 4, 60, 4 * 100 * TOKEN) == (60, None)
    assert capacity(target, 4, 10 * context, None) == (context, None)
    assert capacity(target, 4, None, 4 * 100 * TOKEN, more=9) == (91, None)
    with pytest.raises(ConfigError, match=r"4 slots of 200 tokens take .* 4 slots of 100 tokens fit, or 2 of 200"):
        capacity(target, 4, 200, 4 * 100 * TOKEN)
    with pytest.raises(ConfigError, match="fewer slots"):
        capacity(target, 4, None, 4 * TOKEN)
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        capacity(target, 4, 1, None)


def test_a_length_that_does_not_fit_into_free_memory_is_refused(target, whole, monkeypatch):
    """Catches slots that fail in the middle of a text, hours after the start; and a budget that is not believed."""
    monkeypatch.setattr(cache_capacity.machine, "free_memory", lambda device: 4 * 100 * TOKEN)
    assert capacity(target, 4, 100, None).length == 100
    assert capacity(target, 4, None, None).length == 50
    with pytest.raises(ConfigError, match=r"are free for them; 4 slots of 91 tokens fit, or 3 of 110"):
        capacity(target, 4, 110, None, more=9)
    assert capacity(target, 4, 110, 5 * 100 * TOKEN).length == 110


def test_where_memory_follows_tokens_texts_share_a_budget(target, monkeypatch):
    """Catches slots that are all as short as a shared budget would make them, and a budget that no text keeps to."""
    monkeypatch.setattr(cache_capacity.lazy_memory, "comes_by_page", lambda device: True)
    context = target.spec.context
    assert capacity(target, 4, None, 400 * TOKEN, more=9) == (min(context, 391), 400)
    assert capacity(target, 4, 60, 400 * TOKEN, more=9) == (60, None)
    assert capacity(target, 4, 200, 400 * TOKEN, more=9) == (200, 400)
    with pytest.raises(ConfigError, match=r"a text of 200 tokens takes .* memory_gb allows; one of 91 tokens fits"):
        capacity(target, 4, 200, 100 * TOKEN, more=9)
    monkeypatch.setattr(cache_capacity.machine, "free_memory", lambda device: 2 * 100 * TOKEN)
    assert capacity(target, 4, None, None) == (min(context, 100), 100)


def test_generating_within_a_budget(target):
    """Catches a budget that is checked after the cache was allocated, or for another length or number of slots; and
    a prompt that waits for good."""
    prompts, each = [[1, 2, 3], [4, 5]], TOKEN * (3 + 8 + 2)
    plain = generate(target, prompts, max_new_tokens=8)
    for budget in (2 * each, 2 * each - 1, each):
        assert generate(target, prompts, max_new_tokens=8, memory_gb=budget / 1e9) == plain
    with pytest.raises(ConfigError, match=r"a text of 11 tokens takes .* one of 10 tokens fits"):
        generate(target, prompts, max_new_tokens=8, memory_gb=(each - 1) / 1e9)
    with pytest.raises(ConfigError, match="above 0"):
        generate(target, prompts, max_new_tokens=8, memory_gb=0)


def test_generating_where_slots_are_whole(target, whole):
    prompts, each = [[1, 2, 3], [4, 5]], TOKEN * (3 + 8 + 2)
    with pytest.raises(ConfigError, match=r"2 slots of 11 tokens take up to .* or 1 of 11"):
        generate(target, prompts, max_new_tokens=8, memory_gb=(2 * each - 1) / 1e9)
    assert generate(target, prompts, max_new_tokens=8, memory_gb=each / 1e9, slots=1)
