"""Kernels of a decoder layer, run by Triton's interpreter where there is no GPU, against the model's own modules."""

import numpy as np
import pytest
import torch
from conftest import DEVICE
from targets.test_cuda_graphs import Tape
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from outrider.fast.gpu import cuda_graphs
from outrider.fast.gpu.kernel_pass import GpuPass
from outrider.fast.passes.compiled import TracedPass, passed
from outrider.kernels import gpu
from outrider.targets.hf.proof.selftest import tree_of
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

DTYPE, CLOSE = (torch.float32, 2e-5) if DEVICE == "cpu" else (torch.bfloat16, 0.1)
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "max_position_embeddings": 1024,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | {"hidden_size": 256})),  # which knows no head_dim
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_theta=500.0)),
}


def target_of(kind: str) -> TransformersTarget:
    """Weights of a size at which every part of a layer shows in the logits."""
    torch.manual_seed(0)
    model = MODELS[kind]().to(DEVICE, DTYPE).eval()
    for name, weight in model.named_parameters():
        with torch.no_grad():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "bias" in name:
                weight.normal_()
            elif "embed" not in name:
                weight.mul_(3)
    return load_target(model, compile=False)


@pytest.fixture(scope="module")
def qwen() -> TransformersTarget:
    return target_of("qwen3")


def given_for(target: TransformersTarget, rows: int, width: int, is_tree: bool = False) -> tuple:
    """Arguments of a pass over noise in slots of unequal length, some longer than a chunk of attention."""
    cache, text = target.step._pass(rows, width)
    tokens, tree = passed(text[:, 0], tree_of(text[:, :width]), target.spec.vocabulary) if is_tree else (text, None)
    cache.open(range(rows), tokens.shape[1])
    return target.step._arguments(tokens, cache, tree, (0, 1))


@torch.inference_mode()
def outputs(target: TransformersTarget, given: tuple) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the model's own modules and what the kernels say and store."""
    *before, buffers = given
    found = []
    for way in (TracedPass(target, range(target.spec.layers)), GpuPass(target, TracedPass(target, []))):
        own = [buffer.clone() for buffer in buffers]
        found.append([*way(*before, own), *own])
    return found[0], found[1]


PASSES = [("qwen3", 3, 6, True), ("qwen2", 1, 1, False)]
LONGER = [("llama", 1, 8, False), ("llama", 3, 6, True), ("qwen2", 5, 8, False)]


@pytest.mark.parametrize(
    ("kind", "rows", "width", "is_tree"), [*PASSES, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in LONGER)]
)
def test_a_pass_says_what_the_models_own_modules_say(kind, rows, width, is_tree):
    """Few rows, more than `gpu.FEW`, chains and trees; catches every kernel that is wrong."""
    target = target_of(kind)
    wanted, computed = outputs(target, given_for(target, rows, width, is_tree))
    for right, own in zip(wanted, computed, strict=True):
        if right.is_floating_point():
            torch.testing.assert_close(own, right, rtol=CLOSE, atol=CLOSE * float(right.abs().max()))


@pytest.mark.slow
@torch.inference_mode()
def test_logits_do_not_depend_on_the_tokens_of_a_pass(qwen, monkeypatch):
    """A chain of eight in one pass, in twos and one by one: equal to the last bit, keys and values too."""
    if gpu.IS_INTERPRETED:  # by numpy, whose library multiplies rows 6 to 11 of a tile in another order with AVX2
        multiply = lambda x, y, dtype: np.einsum("...mk,...kn->...mn", x, y, dtype=dtype)
        monkeypatch.setattr(np, "matmul", multiply)
    tokens, depths, mask, starts, columns, taps, asked, buffers = given_for(qwen, 1, 8)
    whole, way = [buffer.clone() for buffer in buffers], GpuPass(qwen, TracedPass(qwen, []))
    wanted = way(tokens, depths, mask, starts, columns, taps, asked, whole)
    for width in (1, 2):
        own, parts = [buffer.clone() for buffer in buffers], []
        for at in range(0, 8, width):
            end = len(columns) - 8 + at + width
            part = tokens[:, at : at + width], depths[:, :width], mask[:, :width, :width].contiguous(), starts + at
            parts.append(way(*part, columns[:end], taps, asked[:, :width], own))
        for number in range(4):
            assert torch.equal(torch.cat([part[number] for part in parts], 1), wanted[number])
        assert all(map(torch.equal, own, whole))


def test_other_models_are_refused():
    """Catches a layer with parts that the kernels would leave out."""
    small = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512}
    gemma = Gemma2ForCausalLM(
        Gemma2Config(**small, num_attention_heads=2, num_key_value_heads=1, head_dim=64, eos_token_id=None)
    )
    odd = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"intermediate_size": 200}))
    gpt = GPT2LMHeadModel(GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=512))
    for model in (gemma, odd, gpt):
        other = load_target(model.to(DEVICE, DTYPE), compile=False)
        with pytest.raises((TypeError, AttributeError)):
            GpuPass(other, TracedPass(other, []))


@pytest.mark.slow
def test_a_pass_runs_as_transformers_writes_it_where_kernels_are_wrong(qwen, monkeypatch):
    """Catches kernels that are taken by names, although their logits are not the model's."""
    written = TracedPass(qwen, range(qwen.spec.layers))
    monkeypatch.setattr(cuda_graphs.CudaGraphs.__init__, "__defaults__", (Tape(),))
    assert type(qwen.step._by_kernels(written).traced) is GpuPass
    own = gpu.normed
    monkeypatch.setattr(gpu, "normed", lambda x, weight, eps: own(x, weight, eps).roll(1, -1))
    assert qwen.step._by_kernels(written) is None
    monkeypatch.setattr(gpu, "normed", lambda x, weight, eps: x.no_such_thing)
    assert qwen.step._by_kernels(written) is None
    monkeypatch.undo()
    # Granite has Llama's names, and multiplies what a layer adds
    monkeypatch.setattr(cuda_graphs.CudaGraphs.__init__, "__defaults__", (Tape(),))
    torch.manual_seed(0)
    model = GraniteForCausalLM(GraniteConfig(**SIZES, residual_multiplier=0.4)).to(DEVICE, DTYPE).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.mul_(3)
    granite = load_target(model, compile=False)
    assert granite.step._by_kernels(TracedPass(granite, range(granite.spec.layers))) is None


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_target_uses_the_kernels_unasked(qwen):
    assert type(load_target(qwen.model).step.graph.traced) is GpuPass
