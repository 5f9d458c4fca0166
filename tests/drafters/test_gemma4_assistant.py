"""Gemma 4's assistant drafts from the target's own keys and values what it drafts in transformers, and writes none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import Case, tiny_model
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import TableCache, TableTarget
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from outrider.decoding.draft import Draft
from outrider.decoding.generate import prefill
from outrider.decoding.state import DecodeState, Request
from outrider.drafters import gemma4_assistant
from outrider.errors import DrafterError
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.assistant import keyless_layers
from outrider.targets.load import load_target

KINDS = ["sliding_attention", "full_attention"]
TEXT = {
    "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 6, "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


def target_of(shared: int):
    """Four layers, of which the last `shared` reuse keys of earlier ones."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "initializer_range": 0.3}
    torch.manual_seed(2)
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    config = Gemma4TextConfig(**(TEXT | sizes | own), layer_types=KINDS * 2, num_kv_shared_layers=shared)
    model = Gemma4ForCausalLM(config).double()
    model.generation_config.eos_token_id = None
    return load_target(model)


@pytest.fixture(scope="module", params=[0, 2], ids=["keys everywhere", "two layers reuse keys"])
def target(request):
    return target_of(request.param)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "centroids"])
def folder(request, tmp_path_factory):
    """A random assistant on disk."""
    path = tmp_path_factory.mktemp("assistant")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "initializer_range": 0.3}
    torch.manual_seed(3)
    text = Gemma4TextConfig(**TEXT, **sizes, layer_types=[*KINDS, "full_attention"], num_kv_shared_layers=3)
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=request.param, num_centroids=8,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    with keyless_layers():
        model = Gemma4AssistantForCausalLM(config).double()
    if request.param:
        model.masked_embedding.token_ordering.copy_(torch.randperm(64))
    model.save_pretrained(path)
    return path


def built(target, folder, length: int = 3):
    return gemma4_assistant.build(gemma4_assistant.Config(model=str(folder), length=length), target)


def drafts_of(target, drafter, prompts, count: int, slots: int):
    """Committed text to what was drafted behind it, and the texts."""
    seen, propose = {}, drafter.propose

    def watched(memory, state, budget) -> Draft:
        draft = propose(memory, state, budget)
        for b, row in enumerate(state.rows):
            if draft.live[b] == drafter.limit:
                seen[tuple(state.tokens[row])] = draft.ids[b][: drafter.limit]
        return draft

    drafter.propose = watched
    found = generate(target, prompts, drafter, max_new_tokens=count, slots=slots)
    return seen, [generation.tokens for generation in found]


def reference(target, model, text: tuple[int, ...], length: int) -> list[int]:
    """What transformers' generator drafts behind this text, of which all but the last token was read in one pass."""
    model.generation_config.num_assistant_tokens = length
    own = SinglePositionMultiTokenCandidateGenerator(
        model, target.model.get_input_embeddings(), GenerationConfig(max_length=400)
    )
    tokens = torch.tensor([text])
    with torch.no_grad():
        read = target.model(tokens[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=True)
        ids, _ = own.get_candidates(tokens, {}, read, is_first_iteration=False, n_last_matches=0)
    return ids[0, len(text) :].tolist()


def test_it_drafts_what_it_drafts_in_transformers(target, folder, prompts, plain):
    """Catches another layer's keys, positions that move on, a window that is off by one, keys of rejected tokens and
    states of another slot.  The text is that of `generate`; slots are uneven and used again."""
    drafter = built(target, folder)
    seen, texts = drafts_of(target, drafter, prompts, 16, 3)
    assert texts == [plain(target, prompt, 16) for prompt in prompts]
    assert len(seen) > 30 and max(map(len, seen)) > 25
    if drafter.layers["full_attention"] == 3:
        return  # where all layers keep keys of their own, transformers lends none
    for text, draft in list(seen.items())[::2]:
        assert draft == reference(target, drafter.model, text, 3)


def test_it_writes_nothing_into_the_targets_cache(target, folder):
    """Catches a drafted token's key in the target's slots, or a length that moved."""
    drafter = built(target, folder)
    cache = target.allocate(1, 20)
    memory, state = drafter.allocate(cache), DecodeState(1, 64)
    state.admit(0, Request([5, 9, 2, 7, 7, 1, 3, 4, 9], 4, Sampling()))
    prefill(target, drafter, cache, memory, state, [0])
    before, lengths = [stack.clone() for stack in cache.stacks.tensors], list(cache.lengths)
    draft = drafter.propose(memory, state, torch.tensor([3]))
    assert draft.live == [3]
    assert cache.lengths == lengths
    assert all(torch.equal(now, then) for now, then in zip(cache.stacks.tensors, before, strict=True))


@pytest.mark.parametrize("fault", ["position", "window", "length"])
def test_a_planted_fault_is_seen(fault, folder, prompts, monkeypatch):
    """The first test has teeth: a position one too far, a window one too wide, keys behind a slot's own end."""
    target = target_of(2)
    drafter, own = built(target, folder), gemma4_assistant.Steps.__init__

    def spoilt(self, *given):
        own(self, *given)
        if fault == "position":
            self.positions = self.positions + 1
        else:
            self.masks["full_attention"].zero_()

    if fault == "window":
        drafter.text.sliding_window += 1
    else:
        monkeypatch.setattr(gemma4_assistant.Steps, "__init__", spoilt)
    seen, _ = drafts_of(target, drafter, prompts, 16, 3)
    drafter.text.sliding_window = TEXT["sliding_window"]
    assert any(draft != reference(target, drafter.model, text, 3) for text, draft in seen.items())


def test_all_centroids_are_the_dense_head(folder):
    """Catches tokens that are given another's logits."""
    model = gemma4_assistant_model(folder)
    if model.masked_embedding is None:
        pytest.skip("dense")
    states = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model.masked_embedding.centroid_intermediate_top_k = 8
    torch.testing.assert_close(gemma4_assistant.by_centroids(model, states), model.lm_head(states))
    model.masked_embedding.centroid_intermediate_top_k = 2
    found = gemma4_assistant.by_centroids(model, states)
    assert (found.isfinite().sum(-1) == 16).all()


def gemma4_assistant_model(folder):
    with keyless_layers():
        return Gemma4AssistantForCausalLM.from_pretrained(folder, dtype=torch.float64)


def test_another_targets_assistant_is_refused(folder, tmp_path):
    """Catches keys of other heads, or another hidden size, that fail in the middle of a draft."""
    with pytest.raises(DrafterError, match=r"does not belong .* stores none"):
        built(load_target(tiny_model(head_dim=16)), folder)
    with pytest.raises(DrafterError, match="backbone_hidden_size 32 against 64"):
        built(load_target(tiny_model(hidden_size=64)), folder)
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="is a Qwen3ForCausalLM"):
        built(load_target(tiny_model()), tmp_path)
    with pytest.raises(DrafterError, match="can't load assistant"):
        built(load_target(tiny_model()), tmp_path / "none")


# ── the distribution ──────────────────────────────────────────────────────────────────────────────────────────────────


class KeyedCache(TableCache):
    """The same keys in every slot."""

    layers = (0,)

    @property
    def lengths(self) -> list[int]:
        return [3] * self.slots

    def cached(self, layer: int, rows) -> tuple[torch.Tensor, torch.Tensor]:
        keys = torch.randn(2, 1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
        return keys[0].expand(len(rows), -1, -1, -1), keys[1].expand(len(rows), -1, -1, -1)


class KeyedTable(TableTarget):
    """A table with keys to look at."""

    def __init__(self, table: torch.Tensor):
        super().__init__(table)
        config = SimpleNamespace(num_key_value_heads=2, head_dim=8, layer_types=["full_attention"] * 4)
        config.get_text_config = lambda decoder=True: config
        self.model = SimpleNamespace(config=config, device=self.device)

    def allocate(self, slots: int, length: int) -> KeyedCache:
        return KeyedCache(slots, length)


TABLE = KeyedTable.random(5)


def unsure(workshop) -> gemma4_assistant.Gemma4Assistant:
    """The workshop's is so sure of itself that its q is all but one-hot, where any q keeps the distribution."""
    drafter = workshop.build(Case("gemma4_assistant"), TABLE)
    weight = drafter.model.lm_head.weight.data
    weight *= 1.5 / weight.abs().max()
    return drafter


def test_the_distribution_is_kept(workshop):
    """Catches a q that is not what was drawn from.  False alarm 1e-6."""
    drafter = unsure(workshop)
    assert keeps_the_distribution(TABLE, drafter, prompt=(1, 2, 3), slots=2500)
    assert keeps_the_distribution(
        TABLE, drafter, prompt=(1, 2, 3), slots=1500, sampling={"temperature": 0.7, "top_k": 4, "top_p": 0.9}
    )
    _, _, kept = emitted(TABLE, drafter, prompt=(1, 2, 3), slots=300)
    assert kept > 150


def test_a_wrong_q_is_caught(workshop):
    """Planted fault: the likeliest token is drafted and said to be drawn.  The test above has teeth."""
    drafter = unsure(workshop)
    propose = drafter.propose

    def spoilt(memory, state, budget):
        draft = propose(memory, state, budget)
        return draft if draft.q is None else replace(draft, tokens=draft.q.argmax(-1))

    drafter.propose = spoilt
    assert not keeps_the_distribution(TABLE, drafter, prompt=(1, 2, 3), slots=2500)
