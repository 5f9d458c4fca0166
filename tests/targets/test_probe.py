"""Probe rows ride in the verified pass: nobody sees them, and nothing of them is kept."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import CAUSAL, built, tiny
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import TargetError
from outrider.nn.drafting import trees
from outrider.targets.hf import hooks
from outrider.targets.hf.proof.miniature import enlivened
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

V = 128
TAPS = (0, 2)
LENGTHS = [9, 30, 4]
"""Of three slots' texts; one is longer than the windows and chunks of small families."""
PARENTS = [-1, -1, 0, 2, 1]
FAMILIES = pytest.mark.parametrize(
    ("family", "shape"),
    [("qwen3", "nothing"), ("gemma3", "tree"), ("granite", "chain"), ("gpt2", "tree"), ("llama4-chunks", "tree")],
)
"""Windows, chunks and learnt positions; the embedding scales itself, or its family does so after it."""
ROWS = [0, 1, 2]


@functools.cache
def target_of(family: str) -> TransformersTarget:
    return load_target(tiny(family, "sdpa"))


def tokens_of(seed: int, *shape: int) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def begun(target: TransformersTarget, rows: list[int]) -> Any:
    """A cache that holds these slots' texts."""
    cache = target.allocate(3, 60)
    target.prefill(cache, rows, tokens_of(1, 3, max(LENGTHS))[rows], [LENGTHS[row] for row in rows])
    return cache


def draft_of(shape: str, slots: int) -> Draft:
    if shape == "nothing":
        return Draft.empty(slots)
    tokens, sizes = tokens_of(2, slots, 5), torch.full((slots,), 5)
    return Draft.chain(tokens, sizes) if shape == "chain" else Draft.fixed(tokens, PARENTS, sizes)


def probe_of(target: TransformersTarget, draft: Draft, tokens: Tensor, behind: int = -1) -> Probe:
    """These tokens [B, P] as rows of a probe: one after the other behind a node, which is the anchor for -1."""
    own, depths = draft.rows()
    path = own[:, behind + 1, :, None].expand(-1, -1, tokens.shape[1]).mT
    order = torch.arange(tokens.shape[1])
    among = (order[:, None] >= order).expand(len(tokens), -1, -1)
    places = depths[:, behind + 1, None] + 1 + order
    return Probe(target.embed(tokens), torch.cat([path, among], 2), places.expand(len(tokens), -1))


def verified(target: TransformersTarget, rows: list[int], draft: Draft, probe: Probe | None = None) -> Scores:
    return target.verify(begun(target, rows), rows, tokens_of(3, 3)[rows], draft, TAPS, probe)


def near(one: Tensor, other: Tensor, family: str = "") -> None:
    # the router of Llama 4 computes in float32, whatever its type
    within = 1e-5 if family == "llama4-chunks" else 1e-10
    torch.testing.assert_close(one, other, rtol=within, atol=within)


@FAMILIES
def test_drafted_rows_are_what_they_are_without_a_probe(family, shape):
    """Catches a drafted row that sees the probe, loses its place to it, or its embedding."""
    target, draft, paths = target_of(family), draft_of(shape, 3), [[1, 4], [], [0, 2]]
    if shape != "tree":
        paths = [[0, 1, 2], [], [0]] if shape == "chain" else [[], [], []]
    probe, caches = probe_of(target, draft, tokens_of(4, 3, 3)), [begun(target, ROWS) for _ in range(2)]
    for turn in range(2):
        anchor = tokens_of(6 + turn, 3)
        alone, beside = (
            target.verify(cache, ROWS, anchor, draft, TAPS, own)
            for cache, own in zip(caches, (None, probe), strict=True)
        )
        assert alone.probe is None and beside.probe.shape == (3, 3, target.spec.hidden)
        near(beside.logits, alone.logits, family)
        near(beside.hidden, alone.hidden, family)
        near(beside.taps, alone.taps, family)
        for cache in caches:
            cache.keep(paths)
        assert caches[0].lengths == caches[1].lengths


@FAMILIES
def test_a_probe_of_real_tokens_is_a_chain_of_them(family, shape):
    """Catches a scale that is applied twice, positions by order, a look at the nodes between, and a probe after a node
    that sees all nodes or none: it must be the chain of the path and its own tokens."""
    target, draft, tokens = target_of(family), draft_of(shape, 3), tokens_of(4, 3, 3)
    for node, path in ((-1, []), (3, [0, 2, 3]), (4, [1, 4])) if shape == "tree" else ((-1, []),):
        beside = verified(target, ROWS, draft, probe_of(target, draft, tokens, node))
        whole = torch.cat([draft.tokens[:, path], tokens], 1)
        plain = verified(target, ROWS, Draft.chain(whole, torch.full((3,), whole.shape[1])))
        near(beside.probe, plain.hidden[:, 1 + len(path) :], family)


def test_probes_of_unlike_slots_are_each_their_own():
    """Catches masks or depths of the first slot that are taken for all."""
    target, draft, rows, tokens = target_of("qwen3"), draft_of("tree", 3), [0, 1, 2], tokens_of(4, 3, 3)
    each = [probe_of(target, draft, tokens, node) for node in (-1, 3, 1)]
    pick = lambda field: torch.stack([getattr(probe, field)[b] for b, probe in enumerate(each)])
    mixed = verified(target, rows, draft, Probe(pick("embeddings"), pick("mask"), pick("depths")))
    for b, probe in enumerate(each):
        near(mixed.probe[b], verified(target, rows, draft, probe).probe[b])
        assert not torch.allclose(mixed.probe[b], verified(target, rows, draft, each[b - 1]).probe[b])


def test_another_thread_s_pass_has_its_own_embeddings():
    """Catches rows that are replaced in whatever pass the embedding is called by."""
    target, tokens = target_of("qwen3"), tokens_of(7, 1, 9)
    before, _ = target.read(tokens)
    with ThreadPoolExecutor(1) as pool, hooks.replacing(target._embedding, torch.zeros(1, 4, target.spec.hidden)):
        there, _ = pool.submit(target.read, tokens).result()
        here, _ = target.read(tokens)
    assert torch.equal(there, before)
    assert torch.equal(here[:, :5], before[:, :5]) and not torch.allclose(here[:, 5:], before[:, 5:])
    assert torch.equal(target.read(tokens)[0], before)


def long_rope() -> Any:
    """Rotary factors that look at the length of the text."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [1.0 + 2.0 * n for n in range(8)]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    sizes = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": None}  # fmt: skip
    torch.manual_seed(1)
    config = AutoConfig.for_model("llama", **sizes, max_position_embeddings=128, rope_parameters=rope)
    return enlivened(AutoModelForCausalLM.from_config(config)).double().eval()


MADE = {
    "a recurrent state": lambda: tiny("lfm2"), "no positions": lambda: tiny("bloom"),
    "a cache of its own": lambda: built("rwkv", CAUSAL), "factors by length": long_rope,
}  # fmt: skip


@pytest.mark.parametrize("why", MADE)
def test_a_family_that_can_not_hide_rows_takes_no_probe(why):
    """Catches a probe that is read as text there; without one the pass goes on as before."""
    target = load_target(MADE[why]())
    cache, anchor, draft = target.allocate(1, 20), torch.tensor([5]), trees.of_lists([[3, 4]], [[-1, 0]])
    target.prefill(cache, [0], torch.tensor([[7, 8, 9]]), [3])
    probe = probe_of(target, draft, torch.tensor([[1, 2]]))
    before = target.verify(cache, [0], anchor, draft).logits
    with pytest.raises(TargetError, match=r"can't run a probe: .*; draft without one"):
        target.verify(cache, [0], anchor, draft, (), probe)
    assert torch.equal(target.verify(cache, [0], anchor, draft).logits, before)
