"""Masks and rotary positions of draft models, against brute force and against transformers."""

from dataclasses import replace

import pytest
import torch
from conftest import SHAPE
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

from outrider.nn import blocks
from outrider.nn.blocks import Attention, attending, block_mask, rotary, rotate
from outrider.nn.shape import LayerConfig


@st.composite
def layouts(draw):
    texts, length, block, count = (draw(st.integers(1, most)) for most in (2, 7, 3, 3))
    row = lambda low, high, size: st.lists(st.integers(low, high), min_size=size, max_size=size)
    anchors = [draw(row(0, length - 1, count)) for _ in range(texts)]
    documents = [sorted(draw(row(0, 2, length))) for _ in range(texts)]
    live = [[bool(x) for x in draw(row(0, 1, count))] for _ in range(texts)]
    return anchors, length, block, documents, live


@given(layouts())
def test_a_block_sees_its_own_texts_past_and_itself(layout):
    """Catches a block that sees its anchor's state, another block or another text."""
    anchors, length, block, documents, live = layout
    mask = block_mask(torch.tensor(anchors), length, block, torch.tensor(documents), torch.tensor(live))
    count = len(anchors[0])
    assert mask.shape == (len(anchors), 1, count * block, length + count * block)
    for b, row in enumerate(anchors):
        for q in range(count * block):
            anchor = row[q // block]
            wanted = [
                column < anchor and documents[b][column] == documents[b][anchor] and live[b][q // block]
                for column in range(length)
            ] + [other // block == q // block for other in range(count * block)]
            assert mask[b, 0, q].tolist() == wanted


SCALED = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_rotation_is_transformers_own(kind):
    """Catches another pairing of dimensions or order of frequencies."""
    parameters = {"rope_theta": 5000.0, **(SCALED[kind] or {"rope_type": kind})}
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=2, head_dim=16, rope_parameters=parameters, max_position_embeddings=256
    )
    x = torch.randn(2, 2, 5, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 5, 70, 250]]).expand(2, -1)
    wanted, _ = apply_rotary_pos_emb(x, x, *Qwen3RotaryEmbedding(config)(x, positions))
    plain = replace(SHAPE, head_dim=16, rope_theta=5000.0)
    turned = rotate(x, rotary(positions, replace(plain, rope_scaling=SCALED[kind])))
    torch.testing.assert_close(turned, wanted, rtol=1e-4, atol=1e-4)
    if SCALED[kind]:
        assert not torch.allclose(rotate(x, rotary(positions, plain)), wanted, rtol=1e-2, atol=1e-2)


def test_what_does_not_turn_stays_and_the_rest_is_a_smaller_heads():
    """Catches a partial rotary factor that is lost, or frequencies of the whole head on a part of it."""
    x = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 3, 50, 900]])
    turned = rotate(x, rotary(positions, replace(SHAPE, head_dim=16, partial_rotary_factor=0.5)))
    torch.testing.assert_close(turned[..., 8:], x[..., 8:], rtol=0, atol=0)
    torch.testing.assert_close(turned[..., :8], rotate(x[..., :8], rotary(positions, SHAPE)))


def test_a_stretch_says_what_context_it_stretches_and_its_factor_is_a_float():
    """Catches a number that transformers would guess one way and engines another."""
    with pytest.raises(ValueError, match="yarn needs original_max_position_embeddings"):
        LayerConfig(rope_scaling={"rope_type": "yarn", "factor": 4})
    with pytest.raises(ValueError, match="dynamic"):
        LayerConfig(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert type(LayerConfig(rope_scaling={"rope_type": "linear", "factor": 4}).rope_scaling["factor"]) is float


def test_grouped_heads_are_repeated_heads():
    """Catches kv heads that are given to the wrong queries: against the same layer with every kv head written out."""
    torch.manual_seed(0)
    grouped = Attention(16, replace(SHAPE, heads=4, kv_heads=2, head_dim=8)).double()
    full = Attention(16, replace(SHAPE, heads=4, kv_heads=4, head_dim=8)).double()
    weights = grouped.state_dict()
    for name in ("k_proj.weight", "v_proj.weight"):
        weights[name] = weights[name].unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(weights)
    x, rows = torch.randn(2, 3, 16).double(), torch.randn(2, 5, 16).double()
    at = [rotary(torch.arange(n).expand(2, -1), SHAPE) for n in (3, 5)]
    asked = (x, at[0], attending(None), 0, rows, at[1])
    torch.testing.assert_close(grouped(*asked), full(*asked))


@given(layouts(), st.integers(1, 4))
def test_blocks_attended_a_few_at_a_time_are_those_of_one_mask(layout, rows):
    """Catches a group that lacks context or its own keys, or whose gradient goes to another's.  float64."""
    anchors, length, block, documents, live = layout
    at, live = torch.tensor(anchors).sort(1).values, torch.tensor(live)
    noise = torch.Generator().manual_seed(0)
    count = at.shape[1] * block
    q = torch.randn(len(at), 4, count, 6, dtype=torch.float64, generator=noise, requires_grad=True)
    k, v = (
        torch.randn(len(at), 2, length + count, 6, dtype=torch.float64, generator=noise, requires_grad=True)
        for _ in range(2)
    )
    mask = block_mask(at, length, block, torch.tensor(documents), live)
    way = torch.randn(q.shape, dtype=torch.float64, generator=noise)
    wanted = attending(mask)(q, k, v, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_ROWS", {"cpu": rows})
        attend = blocks.BlockAttention(at, block, torch.tensor(documents), live)
        found = [attend(q, k, v, layer) for layer in range(2)]
    for one in found:
        torch.testing.assert_close(one, wanted, rtol=0, atol=1e-12)
        grads = zip(torch.autograd.grad((one * way).sum(), (q, k, v)),
                    torch.autograd.grad((wanted * way).sum(), (q, k, v), retain_graph=True), strict=True)  # fmt: skip
        for mine, theirs in grads:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("has_sinks", [False, True])
def test_keys_copied_to_each_head_attend_as_shared_ones_do(has_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a GPU's training in which a head reads another group's keys."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2))
    mask, sinks = torch.rand(2, 1, 5, 5) < 0.7, torch.randn(6, dtype=torch.float64) if has_sinks else None
    mask |= torch.eye(5, dtype=torch.bool)
    found = []
    for are_stored in (False, True):
        monkeypatch.setattr(blocks, "stores_scores", lambda q, are_stored=are_stored: are_stored)
        out = blocks.attention(q, k, v, mask, sinks)
        found.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v))])
    for shared, copied in zip(*found, strict=True):
        torch.testing.assert_close(copied, shared, rtol=1e-12, atol=1e-12)
