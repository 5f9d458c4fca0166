"""Our arithmetic loses no more than transformers' own, also on activations as real checkpoints have them."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider import kernels, machine
from outrider.kernels import prepacked
from outrider.targets import accuracy
from outrider.targets.accuracy import Loss, Tolerance
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

MASSIVE = (3, 11)
"""Channels of the residual stream that hold some 10^4, as those of real models do."""
needs_kernels = pytest.mark.skipif(kernels.library() is None, reason="needs a C++ compiler")


def massive_model(seed: int = 2) -> PreTrainedModel:
    """A Llama whose weights are bfloat16's and whose states reach 10^4; its norms take those channels back."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
        )
    )  # fmt: skip
    with torch.no_grad():
        layers = model.model.layers
        layers[0].mlp.down_proj.weight[list(MASSIVE)] *= 3e4
        norms = [norm for each in layers[1:] for norm in (each.input_layernorm, each.post_attention_layernorm)]
        for norm in [*norms, model.model.norm]:
            norm.weight[:] = 300.0
            norm.weight[list(MASSIVE)] = 0.5
        for weight in model.parameters():
            weight.copy_(weight.bfloat16().float())
    return model


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> TransformersTarget:
    """With its layers in panels, whatever is fastest here."""
    monkeypatch.setattr(prepacked, "_fastest", lambda layers: "panels")
    machine.forget()
    return load_target(massive_model(), compile=False)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).square().mean().sqrt())


@needs_kernels
@pytest.mark.parametrize("rows", [1, 8])
def test_a_product_loses_no_more_than_torchs(rows):
    """Catches one long sum an output, which lost twice what transformers loses on SmolLM2.

    Seeded, so no false alarm; on 2 cores of Zen 5 ours is 0.6 to 0.9 of torch's.
    """
    noise = torch.Generator().manual_seed(4)
    x = torch.randn(rows, 1536, generator=noise)
    x[:, MASSIVE[0]] *= 1e4
    weight = torch.randn(256, 1536, generator=noise).bfloat16().float()
    wanted = x.double() @ weight.double().T
    ours = error(torch.ops.outrider.multiply(x, kernels.panels(weight), 256), wanted)
    assert ours <= 1.5 * error(F.linear(x, weight), wanted)


@needs_kernels
def test_attention_over_a_long_text_loses_no_more_than_torchs():
    """Catches values that are added one by one to a sum over thousands of keys."""
    noise = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, count, 64, generator=noise) for heads, count in ((6, 4), (2, 4000), (2, 4000)))
    mask = torch.zeros(1, 1, 4, 4000)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask.double(), enable_gqa=True)
    plain = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    assert error(torch.ops.outrider.attend(q, k, v, mask, 0.125), exact) <= 1.5 * error(plain, exact)


@needs_kernels
def test_a_pass_with_massive_activations_is_as_near_to_float64_as_transformers(target):
    """Catches a kernel that is right on toys, whose states are small, and wrong on real checkpoints.

    Of one such model either side may lose ten times what the other does, by chance; so it is the middle of seven.
    """
    states = target.model.model(torch.arange(40)[None], output_hidden_states=True).hidden_states
    assert max(float(each.abs().max()) for each in states[1:-1]) > 1e4
    ratios = []
    for seed in range(2, 9):
        machine.forget()
        model = load_target(massive_model(seed), compile=False)
        exact = list(accuracy.logits(accuracy.converted(model, torch.float64)))
        ours = Loss.between(zip(accuracy.logits(model), exact, strict=True))
        with prepacked.disabled():
            theirs = Loss.between(zip(accuracy.logits(model), exact, strict=True))
        assert theirs.rms > 0
        ratios.append((ours.rms / theirs.rms, ours.largest / theirs.largest))
    rms, largest = (sorted(each)[3] for each in zip(*ratios, strict=True))
    assert rms <= 1.5 and largest <= 3


@needs_kernels
def test_the_allowance_is_what_transformers_loses_and_not_what_we_lose(target, monkeypatch):
    """Catches an allowance measured with our own products: a kernel that is wrong would allow itself to be."""
    allowed = accuracy.allowance(target)
    product = prepacked.product
    monkeypatch.setattr(prepacked, "product", lambda *given: product(*given) * (1 + 1e-3))
    machine.forget()
    assert accuracy.allowance(target) == allowed
    exact = list(accuracy.logits(accuracy.converted(target, torch.float64)))
    assert allowed.exceeded(Loss.between(zip(accuracy.logits(target), exact, strict=True)))


def test_both_the_mean_and_the_largest_difference_are_held():
    """Catches a single logit that is off, which a mean hides, and a small shift of all, which a largest hides."""
    allowed = Tolerance(rms=1.0, largest=10.0)
    assert allowed.exceeded(Loss(1.0, 10.0)) == ""
    assert "root mean square" in allowed.exceeded(Loss(1.1, 2.0))
    assert "largest" in allowed.exceeded(Loss(0.1, 11.0))
    assert allowed.exceeded(Loss(float("nan"), 1.0))
