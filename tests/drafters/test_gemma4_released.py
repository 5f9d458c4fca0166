"""Gemma 4's assistants in the layout of their release, rebuilt small: names, shapes and config keys of the folders of
E2B (centroids) and 26B-A4B (dense tied head, keys that are values), over targets in four bits."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from outrider import generation
from outrider.decoding.state import Request
from outrider.drafters import gemma4_assistant
from outrider.errors import DrafterError
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

VOCABULARY, WIDE, NARROW, HEAD, GLOBAL_HEAD = 128, 64, 32, 16, 32
KINDS = [*["sliding_attention"] * 3, "full_attention"]
ROPE = {
    "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
}
RELEASES = {
    "e2b": {"attention_k_eq_v": False, "num_key_value_heads": 1, "num_global_key_value_heads": None},
    "26b": {"attention_k_eq_v": True, "num_key_value_heads": 2, "num_global_key_value_heads": 1},
}
"""What the two kinds of release differ in, in the text configs of target and assistant."""
TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 2, "dtype": "bfloat16",
    "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": None, "global_head_dim": GLOBAL_HEAD,
    "head_dim": HEAD, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.3,
    "max_position_embeddings": 256, "model_type": "gemma4_text", "moe_intermediate_size": None,
    "num_attention_heads": 4, "num_experts": None, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_parameters": ROPE,
    "sliding_window": 8, "tie_word_embeddings": True, "top_k_experts": None, "use_bidirectional_attention": None,
    "use_cache": True, "use_double_wide_mlp": False, "vocab_size": VOCABULARY,
}  # fmt: skip


def write_assistant(folder, release: str):
    """The folder of a release with random weights: config.json, and model.safetensors in bfloat16."""
    text = TEXT | RELEASES[release] | {
        "hidden_size": NARROW, "intermediate_size": 64, "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        "layer_types": KINDS, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "bfloat16",
        "audio_token_id": 90, "image_token_id": 91, "boa_token_id": 92, "boi_token_id": 93, "eoa_token_id": 94,
        "eoi_token_id": 95, "backbone_hidden_size": WIDE, "num_centroids": 16, "centroid_intermediate_top_k": 3,
        "use_ordered_embeddings": release == "e2b", "tie_word_embeddings": True,
        "transformers_version": "5.7.0.dev0", "text_config": text,
    }  # fmt: skip
    shapes = {
        "pre_projection.weight": (NARROW, 2 * WIDE), "post_projection.weight": (WIDE, NARROW),
        "model.embed_tokens.weight": (VOCABULARY, NARROW), "model.norm.weight": (NARROW,),
    }  # fmt: skip
    for layer, kind in enumerate(KINDS):
        head = GLOBAL_HEAD if kind == "full_attention" else HEAD
        own = {
            "self_attn.q_proj.weight": (4 * head, NARROW), "self_attn.q_norm.weight": (head,),
            "self_attn.o_proj.weight": (NARROW, 4 * head), "mlp.gate_proj.weight": (64, NARROW),
            "mlp.up_proj.weight": (64, NARROW), "mlp.down_proj.weight": (NARROW, 64), "layer_scalar": (1,),
            "input_layernorm.weight": (NARROW,), "post_attention_layernorm.weight": (NARROW,),
            "pre_feedforward_layernorm.weight": (NARROW,), "post_feedforward_layernorm.weight": (NARROW,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    torch.manual_seed(6)
    if release == "e2b":
        shapes["masked_embedding.centroids.weight"] = (16, NARROW)
    tensors = {
        name: (torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * 0.3).bfloat16()
        for name, shape in shapes.items()
    }
    if release == "e2b":
        tensors["masked_embedding.token_ordering"] = torch.randperm(VOCABULARY)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module", params=list(RELEASES))
def pair(request, tmp_path_factory):
    """A target in four bits with the same target in float32, and the folder of its assistant."""
    place = tmp_path_factory.mktemp(request.param)
    per_layer = 8 if request.param == "e2b" else 0
    own = {
        "hidden_size": WIDE, "intermediate_size": 96, "num_hidden_layers": 8, "layer_types": KINDS * 2,
        "num_kv_shared_layers": 4 if request.param == "e2b" else 0, "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": VOCABULARY,
    }  # fmt: skip
    torch.manual_seed(12)  # 5: its self-test refuses drafts, for rounding just above what it allows
    model = Gemma4ForCausalLM(
        Gemma4TextConfig(**(TEXT | RELEASES[request.param] | own | {"eos_token_id": None}))
    ).float()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        model.model.embed_tokens.weight *= 0.1  # tied: large embeddings repeat the last token for ever
    model.save_pretrained(place / "target")
    targets = [load_target(place / "target", dtype="float32", compile=False, quantize=mode) for mode in ("q4_0", None)]
    return (*targets, write_assistant(place / "assistant", request.param))


def built(target, folder, length: int = 4):
    return gemma4_assistant.build(gemma4_assistant.Config(model=str(folder), length=length), target)


def test_every_tensor_of_a_release_is_loaded(pair):
    """Catches a name that is not read, so that its weight stays random: the state of the model is the file's."""
    target, _, folder = pair
    model = built(target, folder).model
    state = model.state_dict()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 4 * 11 + (6 if model.masked_embedding is not None else 4)
        for name in file.keys():  # noqa: SIM118
            torch.testing.assert_close(state[name].double(), file.get_tensor(name).double(), rtol=0, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied: the head is not in the file


def test_drafts_do_not_change_the_text_of_a_target_in_four_bits(pair, prompts):
    """The text is that of the quantised target, not of the one it was made from; catches keys or an embedding that the
    drafter reads from other weights than those that are served."""
    target, whole, folder = pair
    asked = [[token % VOCABULARY for token in prompt] for prompt in prompts[:4]]
    plain = generation.generate(target, asked, max_new_tokens=24, sampling=Sampling())
    drafted = generation.generate(target, asked, built(target, folder), max_new_tokens=24, policy="fixed")
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    assert target.spec.quantised is not None
    other = generation.generate(whole, asked, max_new_tokens=24, sampling=Sampling())
    assert [one.tokens for one in other] != [one.tokens for one in plain]


def test_q_is_the_distribution_of_the_assistants_own_head(pair, prompts, monkeypatch):
    """At temperature 1 q is a softmax over the tokens that the head can draft: those of the chosen centroids, or all.
    Catches a q with mass on tokens that are never drawn, which would make their acceptance too rare."""
    target, _, folder = pair
    drafter, drafts = built(target, folder), []
    propose = drafter.propose

    def watched(memory, state, budget):
        drafts.append(propose(memory, state, budget))
        return drafts[-1]

    monkeypatch.setattr(drafter, "propose", watched)
    requests = [Request([token % VOCABULARY for token in prompts[0]], 20, Sampling(1.0, 0, 1.0, seed=3))]
    for _ in generation.serve(target, requests, drafter, policy="fixed", slots=1):
        pass
    drawn = [(draft.q[0, n], int(draft.tokens[0, n])) for draft in drafts for n in range(int(draft.sizes[0]))]
    support = 3 * VOCABULARY // 16 if drafter.model.masked_embedding is not None else VOCABULARY
    assert len(drawn) > 8
    for q, token in drawn:
        assert int((q > 0).sum()) == support and q[token] > 0
        assert float(q.sum()) == pytest.approx(1, abs=1e-5)


def test_weights_that_the_config_does_not_describe_are_refused(pair, tmp_path):
    """Catches random weights in place of packed ones, and sizes of the target's config in the assistant's."""
    target, _, folder = pair
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with safe_open(folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    packed = tensors | {"model.layers.1.self_attn.q_proj.weight_packed": tensors["model.norm.weight"].clone()}
    del packed["model.layers.1.self_attn.q_proj.weight"]
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DrafterError, match=r"no model.layers.1.self_attn.q_proj.weight, and has .*weight_packed; its"):
        built(target, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config["text_config"]["intermediate_size"] = 96
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DrafterError, match=r"can't load assistant .*size"):
        built(target, tmp_path)
