"""Query heads as rows: transformers' own attention without its copies."""

from types import SimpleNamespace

import pytest
import torch
from conftest import tiny_model
from contracts.parties import Oracle
from targets.test_step import Guesses, V, prompts_of, written
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outrider.targets.hf import gpu_attention
from outrider.targets.load import load_target


@pytest.fixture(autouse=True)
def copies(monkeypatch):
    """transformers as on a GPU."""
    monkeypatch.setenv("TRANSFORMERS_SDPA_FORCE_GQA", "0")
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})


def given(width: int, groups: int, heads_of_mask: int, rows: int = 3):
    noise = torch.Generator().manual_seed(width)
    heads, shape = 2 * groups, (rows, 2, 29, 8)
    query = torch.randn(rows, width, heads, 8, dtype=torch.float64, generator=noise).transpose(1, 2)
    key, value = (torch.randn(shape, dtype=torch.float64, generator=noise) for _ in range(2))
    mask = torch.randn(rows, heads_of_mask, width, 29, dtype=torch.float64, generator=noise)
    mask[..., -2:] = -torch.inf
    return SimpleNamespace(num_key_value_groups=groups, training=False), query, key, value, mask


@pytest.mark.parametrize(
    ("width", "groups", "masked"), [(1, 4, 1), (2, 4, 1), (8, 1, 1), (8, 3, 1), (8, 3, 6), (70, 2, 1)]
)
def test_it_is_what_transformers_computes(width, groups, masked, monkeypatch):
    """Catches heads that meet another group's keys, masks of another row, and scores without their scale."""
    arguments = given(width, groups, masked)
    wanted, _ = sdpa_attention_forward(*arguments, scaling=0.3)
    for most in (0, 99):
        monkeypatch.setattr(gpu_attention, "FEW_HEADS", most)
        found, _ = gpu_attention.attend(*arguments, scaling=0.3)
        assert found.shape == wanted.shape
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def test_texts_are_equal(monkeypatch):
    """Catches drafts that are accepted by other logits than the model's own."""
    target = load_target(tiny_model(num_key_value_heads=1), compile=False)
    said = written(target, None, 1)
    known = [prompt + text for prompt, text in zip(prompts_of(V), said, strict=True)]
    gpu_attention.install()
    for most, way in ((0, "scaled_dot_product_attention"), (99, "by_matmuls")):
        calls, real = [], getattr(gpu_attention, way)
        monkeypatch.setattr(
            gpu_attention, way, lambda *a, calls=calls, real=real, **more: calls.append(1) or real(*a, **more)
        )
        monkeypatch.setattr(gpu_attention, "FEW_HEADS", most)
        assert written(target, Guesses(V, True), 1) == written(target, Oracle(known, V), 3) == said
        assert calls


def test_single_rows_of_a_capture_ask_for_shared_keys(monkeypatch):
    """Catches another group's keys, and grouped rows where cuDNN divides the columns better."""
    module, *tensors = given(1, 4, 1)
    tensors = [tensor.bfloat16() for tensor in tensors]
    wanted, _ = gpu_attention.attend(module, *tensors, scaling=0.3)
    asked, real = [], gpu_attention.scaled_dot_product_attention
    monkeypatch.setattr(
        gpu_attention, "scaled_dot_product_attention", lambda *a, **more: asked.append(more) or real(*a, **more)
    )
    with gpu_attention.sizes_are_few():
        found, _ = gpu_attention.attend(module, *tensors, scaling=0.3)
    assert [more["enable_gqa"] for more in asked] == [True]
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)
