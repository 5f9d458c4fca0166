"""Checkpoints as they are published quantised: those that can be exact load and are, the others are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, quantize_

from outrider import generate, load_drafter
from outrider.errors import TargetError
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

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
        settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        wanted = target.model.generate(text, attention_mask=torch.ones_like(text), **settings)
        (found,) = generate(target, [prompt], ngram, max_new_tokens=24)
        assert found.tokens == wanted[0, len(prompt) :].tolist()


def check_sampled(target: Any) -> None:
    """Seeded texts above temperature 0 are the same, drafted and not, by drafters that look up and that draw."""
    accepted, prompts = 0, [[1, 2, 3, 4, 5], [7], [9, 8, 3, 3, 3, 2]]
    for kind, choices in (("recycle", {}), ("layer_skip", {"min_confidence": 0.0})):
        drafter = load_drafter(kind, target, **choices)
        for sampling in (Sampling(0.5, seed=1), Sampling(0.8, seed=3, top_p=0.9)):
            settings = {"max_new_tokens": 32, "sampling": sampling, "policy": "fixed"}
            wanted, results = (generate(target, prompts, own, **settings) for own in (None, drafter))
            assert [one.tokens for one in results] == [one.tokens for one in wanted], kind
            accepted += sum(sum(one.accepted) for one in results)
    assert accepted > 10, "hardly anything drafted was accepted, so nothing was compared"


def stored_as(name: str, folder: Path) -> Any:
    """Write the tiny model as it is published in this way; returns a model of the values that the weights stand for."""
    quantization, store = PUBLISHED[name]
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
    """Catches rounded activations, by which a verified token is not the decoded one, scales that are left out."""
    twin = stored_as(name, tmp_path)
    target = load_target(tmp_path, dtype="float64")
    assert (target.spec.precision, target.spec.mode) == ("float64", "tree")
    assert {weight.dtype for weight in target.model.parameters()} == {torch.float64}
    check_exact(target, twin.double())
    if name == "fp8":  # by a seed every probability counts
        check_sampled(target)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "int5"}, r"quantised with 'int5', which transformers does not know.*or torchao"),
        ({"quant_method": "nvfp4"}, "quantises activations"), ({"quant_method": "fbgemm_fp8"}, "quantises activations"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantises activations"),
        ({"quant_method": "gptq", "bits": 4}, r"with 'gptq', which can't be read here: .*; install what it names"),
        ({"quant_method": "awq", "bits": 4}, r"quantised with 'awq', .*requires gptqmodel"),
    ],
    ids=lambda value: value.get("quant_method") if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_can_t_be_exact_is_refused_before_its_weights_load(quantization, said, tmp_path):
    """Catches stored numbers that are taken for weights, an hour of loading."""
    tiny_model().config.save_pretrained(tmp_path)  # no weight is there: nobody can have looked for one
    configure(tmp_path, quantization)
    with pytest.raises(TargetError, match=said):
        load_target(tmp_path)


def test_activations_are_not_rounded_by_asking_for_it() -> None:
    """Catches compressed-tensors' own way, whose pass of several tokens is not that of single ones."""
    model: Any = tiny_model()
    model.config.quantization_config = PUBLISHED["compressed w8a8"][0]
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)
    model = tiny_model().float()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_granularity=PerAxis(0)))
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)
