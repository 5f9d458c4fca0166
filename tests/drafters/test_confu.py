"""ConFu: what training reads behind a text is what the verified pass says there, and no logit of the target's moves."""

import dataclasses

import pytest
import torch
from conftest import batch_of, tiny_model
from contracts.parties import Proposer

from benchmarks.families import tiny
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.drafters import confu
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.targets.load import load_target


def model_of(target, **settings) -> confu.Model:
    torch.manual_seed(1)
    sizes = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    config = confu.Config(length=3, ttt=3, partial_rotary_factor=1.0, **sizes, **settings)
    return confu.Model(config, target).to(getattr(torch, target.spec.dtype))


def futures(model, target, prompt, count) -> tuple[list[int], dict[int, torch.Tensor]]:
    """The text, and f as serving saw it behind each position at which a step began."""
    drafter, seen = model.drafter(), {}
    observe = drafter.observe

    def watched(memory, state, draft, accepted, scores):
        observe(memory, state, draft, accepted, scores)
        ended = accepted.next_tokens[0] >= 0
        seen[len(state.tokens[0]) - 1 - ended] = memory.guide[0].clone()

    drafter.observe = watched
    (found,) = generate(target, prompt, drafter, max_new_tokens=count)
    return prompt + found.tokens, seen


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "llama4-chunks"])
def test_training_reads_the_future_that_serving_sees(family):
    """Catches a mask, a position, a window or a scale that differs between `read_probe` and the verified pass."""
    target = load_target(tiny(family, "sdpa"))
    model = model_of(target, rows=3)
    text, seen = futures(model, target, [3, 9, 4, 1, 7], 40)
    assert len(seen) >= 10
    batch, at = batch_of(target, model.taps, torch.tensor([text])), torch.tensor([sorted(seen)])
    read = model.guide(batch, at)[0]
    within = 1e-5 if family == "llama4-chunks" else 1e-9  # its router computes in float32
    torch.testing.assert_close(read, torch.stack([seen[place] for place in sorted(seen)]), rtol=within, atol=within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logits_are_bit_identical_whatever_the_rows_hold(dtype, monkeypatch):
    """Catches a row of the text that sees a contemplate row, and rows that move a position or a key.

    Product shapes are the same in all passes but the one without rows.  With the planted fault, a mask one column too
    far open, the logits move."""
    target = load_target(tiny_model().to(dtype))
    draft = Draft.chain(torch.tensor([[7, 8, 9], [1, 2, 3]]), torch.tensor([3, 3]))

    def logits(by: float | None) -> torch.Tensor:
        model = model_of(target)
        with torch.no_grad():
            model.prompt.mul_(by or 0)
        cache = target.allocate(2, 60)
        target.prefill(cache, [0, 1], torch.tensor([[5, 6, 7, 8], [4, 3, 2, 1]]), [4, 3])
        probe = None if by is None else model.rows(*draft.rows())
        return target.verify(cache, [0, 1], torch.tensor([5, 9]), draft, (), probe).logits

    silent = logits(0.0)
    assert all(torch.equal(logits(by), silent) for by in (1.0, 1e3))
    if dtype == torch.float64:
        torch.testing.assert_close(logits(None), silent, rtol=1e-12, atol=1e-12)
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda given, by, **more: pad(given, by, **{"value": True, **more}))
    assert not torch.allclose(logits(1e3), logits(0.0))


def test_no_future_sees_another_text_or_a_later_token(target):
    """Catches contemplate rows in training that see what serving has not read."""
    model = model_of(target)
    tokens = torch.arange(20).expand(2, -1).clone()
    tokens[1, 12:] += 20  # behind the position, and of another text
    batch = batch_of(target, model.taps, tokens)
    documents = torch.ones(2, 20, dtype=torch.int64)
    documents[:, 15:] = 2
    at = torch.tensor([[4, 11, 12]]).expand(2, -1)
    near = model.guide(dataclasses.replace(batch, documents=documents), at)
    torch.testing.assert_close(near[0, :2], near[1, :2], rtol=0, atol=0)
    assert not torch.allclose(near[0, 2], near[1, 2])
    tokens = tokens[:1].repeat(2, 1)
    tokens[1, :15] += 20  # of the text before
    later = dataclasses.replace(batch_of(target, model.taps, tokens), documents=documents)
    found = model.guide(later, torch.tensor([[17]]).expand(2, -1))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


class Probing(Proposer):
    """One row behind every pass's first."""

    probe_rows = 1

    def probe(self, memory, state, draft):
        ones = torch.ones(1, 1, dtype=torch.int64)
        return Probe(torch.zeros(1, 1, 64, dtype=torch.float64), ones[..., None].expand(1, 1, 2) > 0, ones)


def test_a_target_that_can_run_no_probe_is_refused_before_training():
    """Catches a training that would find out after its features were read, and a recurrent state that takes rows in."""
    recurrent = load_target(tiny("mamba2"))
    with pytest.raises(TargetError, match="can't run a probe"):
        model_of(recurrent)
    with pytest.raises(TargetError, match="can't run a probe"):
        generate(recurrent, [[1, 2, 3]], Probing(), max_new_tokens=4)
