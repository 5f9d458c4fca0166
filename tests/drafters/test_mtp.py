"""Modules that predict one token further: the target's own, as transformers drives them, and ones of our own."""

import re
from dataclasses import dataclass

import pytest
import torch
from conftest import batch_of, train
from nn.test_recurrent import is_served_as_trained
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from benchmarks.families import BASE, DELTA
from outrider.checkpoint import save
from outrider.drafters import mtp
from outrider.drafters.mtp import heads as shipped
from outrider.errors import DrafterError
from outrider.generation import generate
from outrider.loading import load_drafter
from outrider.nn.drafting import recurrent
from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

LAYERS = 2
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 4, "n_shared_experts": 1, "head_dim": 8,
}  # fmt: skip
MELLUM = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "sliding_window": 6,
    "layer_types": ["full_attention", "sliding_attention"],
}  # fmt: skip
MIMO = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "v_head_dim": 8,
    "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
"""Heads whose values are shorter than their keys, and a sink in windows."""
QWEN = DELTA | {"layer_types": ["linear_attention", "full_attention"]}
SILENT = ("qwen3.5", "mimo-2")
"""Families whose config says nothing of the modules in its checkpoint."""


@dataclass(frozen=True)
class Family:
    kind: str
    modules: int
    sizes: dict


FAMILIES = {
    "deepseek": Family("deepseek_v3", 3, DEEPSEEK),
    "mellum": Family("mellum", 1, MELLUM),
    "qwen3.5": Family("qwen3_5_text", 1, QWEN),
    "mimo-2": Family("mimo_v2_flash", 2, MIMO),
}
EVERY = pytest.mark.parametrize("name", FAMILIES)
NOISE = {"rtol": 1e-5, "atol": 5e-6}
"""Routers and some norms of these families work in float32, whose rounding hangs on how many rows pass together."""


def released(name: str) -> list[tuple[str, str]]:
    """From the names of an MtpModel to those under which checkpoints hold them, as (pattern, replacement)."""
    if name == "mimo-2":
        return [
            (r"\.mtp_block", ""), ("post_attention_layernorm", "pre_mlp_layernorm"), ("post_norm", "final_layernorm"),
            ("sinks", "attention_sink_bias"), (r"^layers\.", "model.mtp.layers."),
        ]  # fmt: skip
    if name in ("mellum", *SILENT):
        return [
            (r"^layers\.0\.eh_proj", "mtp.fc"), (r"^layers\.0\.enorm", "mtp.pre_fc_norm_embedding"),
            (r"^layers\.0\.hnorm", "mtp.pre_fc_norm_hidden"), (r"^layers\.0\.post_norm", "mtp.norm"),
            (r"^layers\.0\.mtp_block\.", "mtp.layers.0."),
        ]  # fmt: skip
    block = [(rf"^layers\.{k}\.(mtp_block\.)?", f"model.layers.{LAYERS + k}.") for k in range(3)]
    return [(r"\.post_norm\.", ".shared_head.norm."), *block]


def stored(name: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """An MtpModel's weights as a released checkpoint has them: names of the release, experts one by one."""
    found = {}
    for key, weight in weights.items():
        if not key.startswith(("layers.", "shared_post_norm")):
            continue
        for pattern, replacement in released(name):
            key = re.sub(pattern, replacement, key)
        if key.endswith("experts.gate_up_proj"):
            for n, one in enumerate(weight):
                gate, up = one.chunk(2)
                found[key.replace("gate_up_proj", f"{n}.gate_proj.weight")] = gate.contiguous()
                found[key.replace("gate_up_proj", f"{n}.up_proj.weight")] = up.contiguous()
        elif key.endswith("experts.down_proj"):
            for n, one in enumerate(weight):
                found[key.replace("down_proj", f"{n}.down_proj.weight")] = one.contiguous()
        else:
            found[key] = weight.contiguous()
    return found


@pytest.fixture(scope="module", autouse=True)
def tiny_layer_numbers():
    """transformers looks for layer 61 of DeepSeek's checkpoints, the number of the released model."""
    numbers = [rf"model\.layers\.{LAYERS + k}\." for k in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", numbers)
        yield


@pytest.fixture(scope="module")
def shipping(tmp_path_factory, tiny_layer_numbers):
    """(name of a family) to a target whose checkpoint holds modules, and the weights that these were saved from."""
    made: dict[str, tuple[TransformersTarget, dict[str, torch.Tensor]]] = {}

    def load(name: str) -> tuple[TransformersTarget, dict[str, torch.Tensor]]:
        if name not in made:
            family, folder = FAMILIES[name], tmp_path_factory.mktemp(name)
            sizes = BASE | {"num_hidden_layers": LAYERS, "vocab_size": 64}
            if name not in SILENT:
                sizes |= {"num_mtp_layers": family.modules}
            torch.manual_seed(5)
            config = AutoConfig.for_model(family.kind, **(sizes | family.sizes))
            whole = AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
            with shipped.filled_in(whole.config, family.modules):
                own = MtpModel(whole, family.modules).double()
            noise = torch.Generator().manual_seed(6)
            with torch.no_grad():
                for key, weight in whole.named_parameters():
                    if weight.dim() > 1 and "embed" not in key:
                        weight *= 4.0
                for weight in own.layers.parameters():
                    drawn = 0.15 * torch.randn(weight.shape, dtype=weight.dtype, generator=noise)
                    # routers are loaded in float32 whatever is asked for
                    weight.copy_((drawn + (weight.dim() == 1)).float())
            weights = {key: weight.clone() for key, weight in own.state_dict().items()}
            whole.save_pretrained(folder)
            file = folder / "model.safetensors"
            save_file(load_file(file) | stored(name, weights), file, metadata={"format": "pt"})
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
            model.generation_config.eos_token_id = None
            made[name] = load_target(model), weights
        return made[name]

    return load


def native(target, **choices):
    return mtp.Model(mtp.Config(native=True, **choices), target).double().eval()


def reference(target, weights, name, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """What transformers' MtpModel guesses behind each text, one logits [V] a module, its own greedy tokens read on."""
    count = FAMILIES[name].modules
    with shipped.filled_in(target.model.config, count):
        own = MtpModel(target.model, count).double().eval()
    own.load_state_dict(weights)
    found = []
    for text in texts:
        tokens = torch.tensor([text])
        hidden, _ = target.read(tokens[:, :-1])
        positions, cache = torch.arange(1, len(text))[None], MtpCache(config=own.config)
        with torch.no_grad():
            _, logits, _ = own(tokens[:, 1:], hidden, None, positions, cache)
        found.append(list(logits[0]))
    return found


def drafted(target, drafter, prompts, count, **options):
    """Every committed text that was drafted behind, with the logits of every depth; and the text that came out."""
    seen: dict[tuple[int, ...], list[torch.Tensor]] = {}
    chain = recurrent.serving.chain

    def told(first, read_one, budget, state):
        logits = [first]

        def reading(tokens):
            logits.append(read_one(tokens))
            return logits[-1]

        draft = chain(first, reading, budget, state)
        for b, row in enumerate(state.rows):
            seen[tuple(state.tokens[row])] = [said[b] for said in logits[: int(budget[b])]]
        return draft

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent.serving, "chain", told)
        texts = [found.tokens for found in generate(target, prompts, drafter, max_new_tokens=count, **options)]
    return seen, texts


@EVERY
def test_native_modules_draft_what_transformers_drafts(name, shipping, prompts, plain):
    """Catches weights that are renamed to another place, positions, masks, windows, states of the wrong module, keys of
    rejected tokens that stay, and a target's config that is changed for good."""
    target, weights = shipping(name)
    depths, before = FAMILIES[name].modules, target.model.config.to_dict()
    model = native(target, length=depths)
    assert model.num_modules == depths
    assert target.model.config.to_dict() == before
    seen, texts = drafted(target, model.drafter(), prompts[:4], 10, slots=2)
    assert texts == [plain(target, prompt, 10) for prompt in prompts[:4]]
    whole = [text for text, logits in seen.items() if len(logits) == depths and len(text) > depths]
    assert len(whole) > 15
    for text, wanted in zip(whole, reference(target, weights, name, [list(text) for text in whole]), strict=True):
        for said, own in zip(seen[text], wanted, strict=True):
            torch.testing.assert_close(said, own, **NOISE)


def test_native_modules_are_tuned_as_they_are_served(shipping, prompts, plain, monkeypatch):
    """Catches a module, a window or a step that training sees otherwise; drafts go two steps beyond the last module."""
    target, _ = shipping("mimo-2")
    model = native(target, length=5, ttt=5)
    texts = [(prompt[:5] + plain(target, prompt[:5], 24))[:24] for prompt in prompts if len(prompt) >= 5][:3]
    is_served_as_trained(model, model.drafter(), target, texts, monkeypatch, slots=2, **NOISE)


def test_native_modules_can_be_tuned_and_saved(shipping, prompts, plain, tmp_path):
    """Catches modules that are frozen, and a checkpoint that gives back the released weights in place of the tuned
    ones."""
    target, weights = shipping("deepseek")
    model = native(target)
    texts = torch.tensor([(prompt + plain(target, prompt, 16))[:16] for prompt in prompts])
    losses = train(model.train(), batch_of(target, (), texts), 6, lr=2e-3)
    assert losses[-1] < losses[0]
    model.float().double()  # routers are loaded in float32 whatever is asked for
    save(tmp_path / "tuned", model.eval())
    again = load_drafter(tmp_path / "tuned", target).model
    moved = 0
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], weight, rtol=0, atol=0)
        moved += not torch.equal(weight, weights[key])
    assert moved > 10


def test_a_target_without_modules_is_refused(target):
    """Catches random heads in place of the native ones that were asked for."""
    with pytest.raises(DrafterError, match=r"num_mtp_layers.*set native to no"):
        mtp.Model(mtp.Config(native=True), target)
    assert mtp.Model(mtp.Config(), target).native is False


def test_a_checkpoint_without_their_weights_is_refused(tmp_path, shipping, caplog):
    """Catches a module whose weights are missing and would be random; unless they are asked for, that is said.  And a
    target whose modules can't be loaded any more once it was saved."""
    target, weights = shipping("deepseek")
    target.model.save_pretrained(tmp_path)
    assert native(target).native
    file = tmp_path / "model.safetensors"
    some = {key: weight for key, weight in stored("deepseek", weights).items() if "hnorm" not in key}
    save_file(load_file(file) | some, file, metadata={"format": "pt"})
    bare = load_target(
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, experts_implementation="eager")
    )
    with pytest.raises(DrafterError, match=r"layers\\.2.*hnorm"):
        mtp.Model(mtp.Config(native=True), bare)
    assert not mtp.Model(mtp.Config(), bare).native
    assert "untrained modules are used" in caplog.text


def test_recurrent_modules_are_refused():
    """Catches a state that a rejected token would stay in."""

    class Given:
        model_type = "new"
        layer_types = ("full_attention", "linear_attention")

    with pytest.raises(DrafterError, match="layers of linear_attention"):
        shipped.limits_of(Given(), 2)
    Given.layer_types, Given.sliding_window = ("full_attention", "sliding_attention"), 5
    assert shipped.limits_of(Given(), 2) == (None, AttentionLimit("window", 5))
