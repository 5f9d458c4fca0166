"""The benchmarks of exactness find what they are for: planted faults are mismatches, and only near logits are a tie."""

from __future__ import annotations

import torch

from benchmarks import families, replay, soak
from outrider.decoding.state import Request
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target


def test_only_logits_that_are_near_are_a_tie(monkeypatch):
    """Catches an audit that calls everything a tie, at temperature 0, above it, and where a tail is cut."""
    case = soak.Case(0, "qwen3", "float32", [], 1, 1, 64, frozenset(), {}, "whole")
    logits = torch.full((128,), -3.0)
    logits[5], logits[9], logits[20] = 1.0, 1.0 - 3e-6, 0.0
    monkeypatch.setattr(soak, "spread", lambda *_: (logits, 1e-6))
    greedy = Request([1, 2], 8, Sampling())
    assert soak.audit(case, greedy, [3], 5, 9)["drawn"] == [5, 9]
    assert soak.audit(case, greedy, [3], 5, 20) is None
    cold = Request([1, 2], 8, Sampling(1.0, seed=0, top_k=1))
    assert soak.audit(case, cold, [3], 5, 9)["drawn"] == [5, 9]
    assert soak.audit(case, Request([1, 2], 8, Sampling(1.0, seed=0, top_k=3)), [3], 5, 77) is None


def test_the_families_benchmark_sees_a_text_that_is_not_the_models():
    """Catches a comparison of a text with itself; behind the fault the text is compared again."""
    target = load_target(families.tiny("qwen3", "sdpa"))
    texts = families.written(target.model, [12] * 20)
    assert families.compared(target, texts, replay.Replay(texts, 128)) == ([], [])
    texts[2][-4] = (texts[2][-4] + 1) % 128
    mismatches, ties = families.compared(target, texts, replay.Replay(texts, 128))
    assert (mismatches[0]["text"], mismatches[0]["at"], ties) == (2, 8, [])
    one, difference = replay.spread(target, texts[0][:20], 3)
    torch.testing.assert_close(
        one, target.model(torch.tensor([texts[0][:20]])).logits[0, -1].detach(), rtol=1e-9, atol=1e-9
    )
    assert difference < 1e-12
