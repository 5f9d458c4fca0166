"""ConFu: what training reads behind a text is what the verified pass says there, and no logit of the target's moves."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import Case, batch_of, tiny_model, train
from contracts.chances import keeps_the_distribution
from contracts.parties import TableTarget

from benchmarks.families import tiny
from outrider.decoding.draft import Draft
from outrider.drafters import confu
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

CASE = Case("confu")


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


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2", "llama4-chunks"])
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
    """Catches a row of the text that sees a contemplate row.  Product shapes are the same in all passes; with the
    planted fault, a mask one column too far open, the logits move."""
    target = load_target(tiny_model().to(dtype))
    draft = Draft.chain(torch.tensor([[7, 8, 9], [1, 2, 3]]), torch.tensor([3, 3]))

    def logits(by: float) -> torch.Tensor:
        model = model_of(target)
        with torch.no_grad():
            model.prompt.mul_(by)
        cache = target.allocate(2, 60)
        target.prefill(cache, [0, 1], torch.tensor([[5, 6, 7, 8], [4, 3, 2, 1]]), [4, 3])
        return target.verify(cache, [0, 1], torch.tensor([5, 9]), draft, (), model.rows(*draft.rows())).logits

    silent = logits(0.0)
    assert all(torch.equal(logits(by), silent) for by in (1.0, -3.0, 1e3))
    pad = torch.nn.functional.pad
    monkeypatch.setattr(torch.nn.functional, "pad", lambda given, by, **more: pad(given, by, **{"value": True, **more}))
    assert not torch.allclose(logits(1e3), logits(0.0))


def test_logits_without_the_rows_are_the_same_in_float64(target):
    """Catches rows that move a position or a key; product shapes differ, so the last bits may."""
    draft = Draft.chain(torch.tensor([[7, 8, 9]]), torch.tensor([3]))
    found = []
    for probe in (None, model_of(target).rows(*draft.rows())):
        cache = target.allocate(1, 40)
        target.prefill(cache, [0], torch.tensor([[5, 6, 7, 8]]), [4])
        found.append(target.verify(cache, [0], torch.tensor([5]), draft, (), probe).logits)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_the_gradient_reaches_the_rows_through_the_frozen_target(target):
    """Catches a pass without a gradient, or one that ends at the keys of the rows before: beside finite differences."""
    model = model_of(target)
    batch, at = batch_of(target, model.taps, torch.arange(20)[None]), torch.tensor([[3, 9, 17]])
    weights = torch.randn(3, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (model.guide(batch, at)[0] * weights).sum().backward()
    assert all(weight.grad is None for weight in target.model.parameters())
    way, step = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64), 1e-4
    assert bool((model.prompt.grad.abs().sum(-1) > 0).all())
    slope, found = float((model.prompt.grad * way).sum()), []
    with torch.no_grad():
        for by in (step, -2 * step):
            model.prompt += by * way
            found.append(float((model.guide(batch, at)[0] * weights).sum()))
    assert slope == pytest.approx((found[0] - found[1]) / (2 * step), rel=2e-3)


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


def test_a_trained_head_drafts_by_the_future(target, prompts, plain):
    """Catches an f that is drawn and not used: with it set to another the drafts are others, and the text the same."""
    model = model_of(target)
    texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts])
    train(model, batch_of(target, model.taps, texts), 120)
    kept = []
    for factor in (1.0, -1.0):
        drafter = model.eval().drafter()
        observe = drafter.observe

        def turned(memory, *rest, factor=factor, observe=observe):
            observe(memory, *rest)
            memory.guide *= factor

        drafter.observe = turned
        found = generate(target, prompts, drafter, max_new_tokens=30)
        assert [one.tokens for one in found] == [plain(target, prompt, 30) for prompt in prompts]
        kept.append(sum(sum(one.accepted) for one in found))
    assert kept[0] > 1.2 * kept[1]


def test_sampled_texts_of_slots_are_those_of_one_slot(target, prompts, drafter_of):
    """Catches an f of another slot, and noise that depends on the rows of a pass."""
    drafter = drafter_of(CASE)
    alone = [generate(target, prompt, drafter, max_new_tokens=16, sampling=Sampling(1.0, seed=3)) for prompt in prompts]
    beside = generate(target, prompts, drafter, max_new_tokens=16, sampling=Sampling(1.0, seed=3), slots=4)
    assert [one.tokens for (one,) in alone][0] == beside[0].tokens
    assert sum(sum(one.accepted) for one in beside) > 0


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}], ids=str)
def test_a_trained_drafter_keeps_the_distribution(sampling, workshop):
    """Catches a q that is true of random weights alone.  False alarm 1e-6."""
    table = TableTarget.random(5)
    model = workshop.model(CASE, table)
    texts = torch.randint(5, (8, 24), generator=torch.Generator().manual_seed(4))
    train(model, batch_of(table, model.taps, texts), 60)
    prompt = [0, 1, 2, 0, 1, 3]
    assert keeps_the_distribution(table, model.eval().drafter(), prompt=prompt, slots=2500, sampling=sampling)


def test_a_target_that_can_run_no_probe_is_refused_before_training():
    """Catches a training that would find out after its features were read."""
    with pytest.raises(TargetError, match="can't run a probe"):
        model_of(load_target(tiny("mamba2")))
