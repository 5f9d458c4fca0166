"""Checkpoints as they are published quantised: those that can be exact load and are, the others are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import first, tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

from outrider import generate, load_drafter
from outrider.errors import TargetError
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BY_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


class Stored(NamedTuple):
    """One weight as a checkpoint has it."""

    tensors: dict[str, Tensor]
    """By what is added to the module's name."""
    values: Tensor
    """What they stand for."""


def fp8_blocks(weight: Tensor, size: int = 16) -> Stored:
    """FP8 with a scale for every block, as DeepSeek and Qwen publish it."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // size, size, columns // size, size)
    scales = blocks.abs().amax((1, 3)) / 448
    rounded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (rounded.float() * scales[:, None, :, None]).reshape(rows, columns)
    return Stored({".weight": rounded.reshape(rows, columns), ".weight_scale_inv": scales}, values)


def fp8_rows(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 448
    rounded = (weight / scales).to(torch.float8_e4m3fn)
    return Stored({".weight": rounded, ".weight_scale": scales}, rounded.float() * scales)


def int8_rows(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scales).round().to(torch.int8)
    return Stored({".weight": rounded, ".weight_scale": scales}, rounded * scales)


def int4_groups(weight: Tensor, size: int = 16) -> Stored:
    """Eight values of 4 bits in an int32, the first in its lowest bits."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // size, size)
    scales = groups.abs().amax(2) / 7
    rounded = (groups / scales[..., None]).round().reshape(rows, columns // 8, 8)
    packed = ((rounded.long() + 8) << (4 * torch.arange(8))).sum(2).to(torch.int32)
    values = (rounded.reshape(rows, columns // size, size) * scales[..., None]).reshape(rows, columns)
    return Stored(
        {".weight_packed": packed, ".weight_scale": scales, ".weight_shape": torch.tensor([rows, columns])}, values
    )


def compressed(
    form: str, bits: int, kind: str, strategy: str, activations: dict[str, Any] | None = None
) -> dict[str, Any]:
    """compressed-tensors' config, as llm-compressor writes it."""
    weights = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy}
    weights |= {"group_size": 16} if strategy == "group" else {}
    rounded = None if activations is None else activations | {"type": kind}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": rounded}}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": groups,
    }  # fmt: skip


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
PUBLISHED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8": (FP8, fp8_blocks),
    "compressed w8a8": (compressed("int-quantized", 8, "int", "channel", BY_TOKEN), int8_rows),
    "compressed fp8": (compressed("float-quantized", 8, "float", "channel", BY_TOKEN), fp8_rows),
    "compressed w4a16": (compressed("pack-quantized", 4, "int", "group"), int4_groups),
}


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def check_exact(target: Any, model: Any) -> None:
    """Its logits are those of these values, and its texts, drafted, are its own `generate`'s."""
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(target.model(tokens).logits, model(tokens).logits)
    ngram = load_drafter("ngram", target, shortest=1)
    for prompt in ([1, 2, 3, 4, 5], [7], [9, 8, 3, 3, 3, 2]):
        text = torch.tensor([prompt])
        wanted = target.model.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        (found,) = generate(target, [prompt], ngram, max_new_tokens=24)
        assert found.tokens == wanted[0, len(prompt) :].tolist()


def check_sampled(target: Any) -> None:
    """Seeded texts above temperature 0 are the same, drafted and not, by drafters that look up and that draw."""
    accepted, settings = 0, [Sampling(0.5, seed=1), Sampling(1.0, seed=2), Sampling(0.8, seed=3, top_p=0.9)]
    for kind, choices in (("ngram", {"shortest": 1}), ("recycle", {}), ("layer_skip", {"min_confidence": 0.0})):
        drafter = load_drafter(kind, target, **choices)
        for sampling in settings:
            wanted, found = (
                generate(target, [[1, 2, 3, 4, 5], [7], [9, 8, 3, 3, 3, 2]], own, max_new_tokens=32, sampling=sampling,
                         policy="fixed")
                for own in (None, drafter)
            )  # fmt: skip
            assert [one.tokens for one in found] == [one.tokens for one in wanted], kind
            accepted += sum(sum(one.accepted) for one in found)
    assert accepted > 20, "hardly anything drafted was accepted, so nothing was compared"


def stored_as(name: str, folder: Path) -> Any:
    """Write the tiny model as it is published in this way; returns a model of the values that the weights stand for."""
    quantization, store = PUBLISHED[name]
    pytest.importorskip("compressed_tensors" if "compressed" in name else "accelerate", reason="package")
    twin: Any = tiny_model().float()
    twin.save_pretrained(folder)
    tensors, values = {}, {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if "_proj.weight" in key:
            stored = store(weight)
            tensors |= {
                key.removesuffix(".weight") + end: tensor.contiguous() for end, tensor in stored.tensors.items()
            }
            values[key] = stored.values
        else:
            tensors[key] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    configure(folder, quantization)
    twin.load_state_dict(values, strict=False)
    return twin


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_checkpoint_is_exact(name: str, tmp_path: Path) -> None:
    """Catches rounded activations, by which a verified token is not the decoded one, scales that are left out, and
    weights that stay in the type of their scales."""
    twin = stored_as(name, tmp_path)
    target = load_target(tmp_path, dtype="float64")
    assert (target.spec.precision, target.spec.mode) == ("float64", "tree")
    assert {weight.dtype for weight in target.model.parameters()} == {torch.float64}
    check_exact(target, twin.double())


@pytest.mark.parametrize("name", ["fp8", "compressed fp8"])
def test_a_sampled_text_of_an_fp8_checkpoint_is_the_targets_own(name: str, tmp_path: Path) -> None:
    """Catches an FP8 target that is exact by its likeliest tokens alone: by a seed every probability counts."""
    stored_as(name, tmp_path)
    check_sampled(load_target(tmp_path, dtype="float64"))


def test_activations_rounded_by_a_pass_of_several_tokens_are_seen(tmp_path: Path) -> None:
    """Planted fault: activations in FP8 with one scale for all tokens of a pass, as dynamic schemes have it."""
    stored_as("fp8", tmp_path)
    target = load_target(tmp_path, dtype="float64")

    def rounded(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        scale = args[0].abs().amax() / 448
        return ((args[0] / scale).to(torch.float8_e4m3fn).to(args[0]) * scale,)

    for layer in target.model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(rounded)
    with pytest.raises(AssertionError, match="ngram|recycle|layer_skip"):
        check_sampled(target)


def test_experts_in_mxfp4_are_exact(tmp_path: Path) -> None:
    """Catches gpt-oss as it is published, its halves of bytes in the wrong order or its exponents off by one."""
    pytest.importorskip("accelerate", reason="package")
    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=256, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    twin: Any = GptOssForCausalLM(config).float().eval()
    twin.save_pretrained(tmp_path)
    tensors, values = {}, {}
    for key, weight in load_file(tmp_path / "model.safetensors").items():
        if not key.endswith(("gate_up_proj", "down_proj")):
            tensors[key] = weight
            continue
        groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, out, in / 32, 32]
        exponents = groups.abs().amax(-1).log2().floor() - 2
        codes = (groups / 2 ** exponents[..., None])[..., None].sub(FP4).abs().argmin(-1)
        tensors[f"{key}_blocks"] = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
        values[key] = (FP4[codes] * 2 ** exponents[..., None]).flatten(2).transpose(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    configure(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    twin.load_state_dict(values, strict=False)
    check_exact(load_target(tmp_path), twin)


# ── what is refused ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "int5"}, r"quantised with 'int5', which transformers does not know.*or torchao"),
        ({"quant_method": "bitnet"}, "quantises activations"),
        ({"quant_method": "nvfp4"}, "quantises activations"),
        ({"quant_method": "fbgemm_fp8"}, "quantises activations"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantises activations"),
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantised with 'gptq', which can't be read here: .*; install what it names",
        ),
        ({"quant_method": "awq", "bits": 4}, r"quantised with 'awq', .*requires gptqmodel"),
        ({"quant_method": "eetq"}, "quantised with 'eetq', which can't be read here"),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)
def test_what_can_t_be_exact_is_refused_before_its_weights_load(
    quantization: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Catches stored numbers that are taken for weights, an hour of loading, and a message without the method's
    name."""
    tiny_model().config.save_pretrained(tmp_path)  # no weight is there: nobody can have looked for one
    configure(tmp_path, quantization)
    with pytest.raises(TargetError, match=said):
        load_target(tmp_path)


@pytest.mark.parametrize("name", ["compressed w8a8", "compressed fp8"])
def test_activations_are_not_rounded_by_asking_for_it(name: str, tmp_path: Path) -> None:
    """Catches compressed-tensors' own way, whose pass of several tokens is not that of single ones."""
    model: Any = tiny_model()
    model.config.quantization_config = PUBLISHED[name][0]
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)


@pytest.mark.parametrize("name", first(["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"]))
def test_weights_that_torchao_rounds_are_exact(name: str, tmp_path: Path) -> None:
    """Catches a kind of weight that is read in another way by passes of one row."""
    api = pytest.importorskip("torchao.quantization", reason="package")
    tiny_model().float().save_pretrained(tmp_path)
    from transformers import TorchAoConfig

    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(getattr(api, name)()))
    check_exact(load_target(model), model)
    check_sampled(load_target(model))


@pytest.mark.parametrize("name", ["Int8DynamicActivationIntxWeightConfig", "Float8DynamicActivationFloat8WeightConfig"])
def test_activations_that_torchao_rounds_are_refused(name: str) -> None:
    """Catches a tensor that keeps how activations are rounded under another name."""
    api = pytest.importorskip("torchao.quantization", reason="package")
    model = tiny_model().float()
    settings = {"weight_granularity": api.PerAxis(0)} if "Intx" in name else {}
    try:
        api.quantize_(model, getattr(api, name)(**settings))
    except (AssertionError, RuntimeError, NotImplementedError):
        pytest.skip("processor")
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)
