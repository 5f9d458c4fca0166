"""Slots are as long as their memory allows, and that is known at the start."""

from __future__ import annotations

import pytest

from outrider.errors import ConfigError
from outrider.serve.engine import Engine
from outrider.serve.memory import slot_length, token_bytes
from outrider.targets.transformers import TransformersTarget

TOKEN = 4 * 2 * 2 * 8 * 8
"""Of the tiny target: layers, keys and values, heads, head size, float64."""


def test_a_token_takes_what_the_buffers_have(target: TransformersTarget) -> None:
    assert token_bytes(target) == TOKEN
    with Engine(target, slots=3, length=50) as engine:
        engine.stop()
    stored = sum(stack.nbytes for stack in engine.cache._stacks)
    assert stored == 3 * engine.cache.length * TOKEN


def test_the_length_is_the_context_or_what_the_budget_allows(target: TransformersTarget) -> None:
    context = target.spec.context
    assert slot_length(target, 4, None, None) == context
    assert slot_length(target, 4, None, 4 * 100 * TOKEN) == 100
    assert slot_length(target, 4, 60, 4 * 100 * TOKEN) == 60
    assert slot_length(target, 4, 10 * context, None) == context
    with pytest.raises(ConfigError, match=r"4 slots of 200 tokens take .* shorter ones \(100 tokens\)"):
        slot_length(target, 4, 200, 4 * 100 * TOKEN)
    with pytest.raises(ConfigError, match="fewer slots"):
        slot_length(target, 4, None, 4 * TOKEN)
    with pytest.raises(ConfigError, match="at least 2 tokens"):
        slot_length(target, 4, 1, None)
