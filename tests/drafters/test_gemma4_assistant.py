"""Gemma 4's assistant drafts from the target's own keys and values what it drafts in transformers, and writes none."""

import functools

import pytest
import torch
from conftest import tiny_model
from drafters.proposals import by_text, exact, watch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
)
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from outrider.drafters import gemma4_assistant
from outrider.drafters.gemma4_assistant.model import keyless_layers
from outrider.errors import DrafterError
from outrider.targets.load import load_target

KINDS = ["sliding_attention", "full_attention"]
TEXT = {
    "vocab_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
    "sliding_window": 6, "vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip


@functools.cache
def target_of(shared: int):
    """Four layers, of which the last `shared` reuse keys of earlier ones."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "initializer_range": 0.3}
    torch.manual_seed(2)
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    config = Gemma4TextConfig(**(TEXT | sizes | own), layer_types=KINDS * 2, num_kv_shared_layers=shared)
    model = Gemma4ForCausalLM(config).double()
    model.generation_config.eos_token_id = None
    return load_target(model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Random assistants on disk: with a dense head, and with centroids."""
    return {head: assistant(tmp_path_factory.mktemp(head), head == "centroids") for head in ("dense", "centroids")}


def assistant(path, has_centroids: bool):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "initializer_range": 0.3}
    torch.manual_seed(3)
    text = Gemma4TextConfig(**TEXT, **sizes, layer_types=[*KINDS, "full_attention"], num_kv_shared_layers=3)
    config = Gemma4AssistantConfig(
        text_config=text, backbone_hidden_size=32, use_ordered_embeddings=has_centroids, num_centroids=8,
        centroid_intermediate_top_k=3,
    )  # fmt: skip
    with keyless_layers():
        model = Gemma4AssistantForCausalLM(config).double()
    if has_centroids:
        model.masked_embedding.token_ordering.copy_(torch.randperm(64))
    model.save_pretrained(path)
    return path


def built(target, folder, length: int = 3):
    return gemma4_assistant.build(gemma4_assistant.Config(model=str(folder), length=length), target)


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


@pytest.mark.parametrize(("shared", "head"), [(0, "dense"), (2, "centroids")])
def test_it_drafts_what_it_drafts_in_transformers(shared, head, folders, prompts):
    """Catches another layer's keys, positions that move on, a window that is off by one, keys of rejected tokens and
    states of another slot.  The text is that of `generate`; slots are uneven and used again.  Where all layers
    keep keys of their own, transformers lends none."""
    target = target_of(shared)
    drafter = built(target, folders[head])
    proposals = watch(drafter)
    exact(target, prompts[:5], drafter, max_new_tokens=14, slots=3)
    seen = {text: draft for text, draft in by_text(proposals).items() if len(draft) == 3}
    assert len(seen) > 25 and max(map(len, seen)) > 25
    assert (drafter.layers["full_attention"] == 3) == (shared == 0)
    for text, draft in list(seen.items())[::3] if shared else ():
        assert draft == reference(target, drafter.model, text, 3)


def test_another_targets_assistant_is_refused(folders, tmp_path):
    """Catches keys of other heads, or another hidden size, that fail in the middle of a draft."""
    with pytest.raises(DrafterError, match=r"does not belong .* the target does not store"):
        built(load_target(tiny_model(head_dim=16)), folders["dense"])
    with pytest.raises(DrafterError, match="backbone_hidden_size 32 against 64"):
        built(load_target(tiny_model(hidden_size=64)), folders["dense"])
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(DrafterError, match="is a Qwen3ForCausalLM"):
        built(load_target(tiny_model()), tmp_path)
    with pytest.raises(DrafterError, match="can't load assistant"):
        built(load_target(tiny_model()), tmp_path / "none")
