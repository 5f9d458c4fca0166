"""Beside int8 weights all is exact as beside float ones, checkpoints that come quantised load where they can be exact,
and what would not be is refused."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Case, Plain, Workshop, batch_of, first, tiny_model, train
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchao import quantization as torchao
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerAxis, quantize_
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TorchAoConfig

from outrider import checkpoint, fast, generate, load_drafter
from outrider.errors import CheckpointError, ConfigError, TargetError
from outrider.report.compare import with_losses
from outrider.report.schema import Report
from outrider.report.summary import headline
from outrider.runs.file import TargetConfig
from outrider.sampling.settings import Sampling
from outrider.targets import quantised
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target


@pytest.fixture(scope="module")
def int8() -> TransformersTarget:
    """The tiny target in int8, its activations in float64."""
    return load_target(tiny_model(), quantize="int8")


@pytest.fixture(scope="module")
def trained(target: TransformersTarget, workshop: Workshop, prompts: list[list[int]], plain: Plain) -> Any:
    """A dspark model that learnt the float target's texts."""
    model = workshop.model(Case("dspark"), target)
    texts = torch.tensor([(prompt + plain(target, prompt, 48))[:40] for prompt in prompts])
    train(model, batch_of(target, model.taps, texts), 60)
    return model.eval()


@pytest.fixture
def saved(trained: Any, tmp_path: Path) -> Path:
    checkpoint.save(tmp_path / "c", trained)
    return tmp_path / "c"


def texts_of(target: Any, prompts: list[list[int]], drafter: Any, **settings: Any) -> tuple[list[list[int]], int]:
    found = generate(target, prompts, drafter, max_new_tokens=24, slots=3, **settings)
    return [one.tokens for one in found], sum(one.steps for one in found)


def test_a_quantised_target_says_what_it_is(int8, target):
    """Catches a hash that is the float model's, a base that is forgotten, and ends that were rounded too."""
    assert (int8.spec.precision, int8.spec.dtype, int8.spec.mode) == ("int8", "float64", "tree")
    assert (target.spec.precision, target.spec.base_hash) == ("float64", None)
    assert int8.spec.base_hash == target.spec.weights_hash != int8.spec.weights_hash
    assert load_target(tiny_model(), quantize="int8").spec == int8.spec
    assert load_target(tiny_model(seed=1), quantize="int8").spec.weights_hash != int8.spec.weights_hash
    rounded = {name for name, weight in int8.model.named_parameters() if quantised.is_quantised(weight)}
    assert rounded == {
        f"{name}.weight" for name, part in int8.model.named_modules() if type(part) is torch.nn.Linear
    } - {"lm_head.weight"}
    tokens = torch.arange(8)
    assert torch.equal(int8.embed(tokens), target.embed(tokens))
    assert torch.equal(int8.head_rows(tokens), target.head_rows(tokens))


def test_its_distribution_is_that_of_the_rounded_weights(int8, target):
    """Catches scales of the wrong side, and weights for reading that are not those in use."""
    twin = copy.deepcopy(tiny_model())
    for index, layer in enumerate(twin.model.layers):
        layer.load_state_dict(int8.layer(index).state_dict())
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    mine, wanted, unrounded = (model(tokens).logits for model in (int8.model, twin, target.model))
    assert (mine - wanted).abs().max() < 1e-5 < 1e-2 < (mine - unrounded).abs().max()


@pytest.mark.parametrize("kind", first(["layer_skip", "dspark", "recycle", "small_model"]))
def test_a_drafter_changes_no_token_of_a_quantised_target(kind, int8, target, workshop, prompts, plain: Plain):
    """Catches a path that reads the float weights: the text must be `model.generate`'s with the weights in int8."""
    wanted = [plain(int8, prompt, 24) for prompt in prompts]
    assert texts_of(int8, prompts, workshop.build(Case(kind), int8))[0] == wanted
    assert wanted != [plain(target, prompt, 24) for prompt in prompts]


def test_a_quantised_target_is_neither_compiled_nor_packed(int8):
    """Catches a package or a packed copy that would hold the weights in full."""
    with pytest.raises(fast.NotCompiled, match="quantised"):
        int8.compile()
    model, tokens = tiny_model().float(), torch.tensor([[1, 2, 3]])
    before = load_target(model).model(tokens).logits  # packed where this processor gains by it
    after = load_target(model, quantize="int8")
    hidden = after.read(tokens)[0]
    assert (after.head(hidden) - before).abs().max() > 1e-3
    torch.testing.assert_close(hidden, load_target(tiny_model().float(), quantize="int8").read(tokens)[0])


def test_modes_that_there_are_not_are_refused_before_anything_loads(saved, target, monkeypatch):
    """Catches a mode that is dropped, rounded activations, and a traceback where torchao is missing."""
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    with pytest.raises(ConfigError, match="no effect on GPT2LMHeadModel"):  # whose layers are no nn.Linear
        load_target(GPT2LMHeadModel(GPT2Config(**sizes)), quantize="int8")
    with pytest.raises(ConfigError, match="choose 'int8'"):
        load_drafter(saved, target, quantize="int4")
    with pytest.raises(ConfigError, match="quantize"):
        load_drafter("ngram", target, quantize="int8")
    for mode, said in (("int8-dynamic", "rounded activations"), ("int3", "not known; choose 'int8'")):
        with pytest.raises(ConfigError, match=said):
            load_target("nowhere", quantize=mode)
    with pytest.raises(ValueError, match="int8"):
        TargetConfig(name="demo", quantize="int3")
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(TargetError, match=r"pip install 'outrider\[quantize\]'"):
        load_target("nowhere", quantize="int8")


@pytest.mark.parametrize("place", ["folder", "scheme", "activations"])
def test_quantised_keys_and_values_are_refused(place, tmp_path):
    """Catches a cache from which a rejected token can't be taken back: it was rounded together with its neighbours."""
    model: Any = tiny_model()
    if place == "activations":  # a single step is not its pass
        model.float().save_pretrained(tmp_path)
        dynamic = TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig())
        with pytest.raises(TargetError, match="quantises activations"):
            load_target(tmp_path, quantization=dynamic)
        return
    if place == "scheme":
        model.config.quantization_config = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    else:
        model.generation_config.cache_implementation = "quantized"
        model.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="set to quantise keys and values"):
        load_target(tmp_path if place == "folder" else model)


def test_a_checkpoint_that_comes_quantised_loads_as_it_is(tmp_path, saved, trained):
    """Catches weights that are dropped at load, which transformers replaces by random ones."""
    tiny_model().float().save_pretrained(tmp_path / "whole")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", quantization_config=config)
    model.save_pretrained(tmp_path / "int8")
    target = load_target(tmp_path / "int8")
    assert (target.spec.precision, target.spec.base_hash) == ("int8", None)
    tokens = torch.arange(12)[None]
    assert torch.equal(target.model(tokens).logits, model(tokens).logits)
    with pytest.raises(TargetError, match="already int8"):
        load_target(tmp_path / "int8", quantize="int8")
    with pytest.raises(CheckpointError, match="it was already quantised"):
        load_drafter(saved, target)


def test_a_checkpoint_without_some_of_its_weights_is_refused(tmp_path):
    """Catches a target of random weights, which passes every test of exactness."""
    tiny_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 of its weights, such as model\.layers\.1\.mlp\.up_proj"):
        load_target(tmp_path)


def test_a_quantised_draft_changes_no_text(saved, target, prompts, plain: Plain):
    """Catches a setting that is dropped, a target that is rounded with its draft."""
    drafter: Any = load_drafter(saved, target, quantize="int8")
    whole: Any = load_drafter(saved, target)
    rounded = [quantised.is_quantised(part.weight) for part in drafter.model.modules() if type(part) is torch.nn.Linear]
    assert rounded and all(rounded)
    assert not any(map(quantised.is_quantised, [*whole.model.parameters(), *target.model.parameters()]))
    wanted = [plain(target, prompt, 24) for prompt in prompts]
    texts, steps = texts_of(target, prompts, drafter)
    assert texts == wanted
    assert steps < sum(map(len, wanted)), "nothing that was drafted was kept"
    assert texts_of(target, prompts, whole)[0] == wanted
    drawn, _ = texts_of(target, prompts, drafter, sampling=Sampling(1.0, seed=3))
    assert all(len(text) == 24 for text in drawn)


def test_a_drafter_serves_the_weights_that_its_targets_were_quantised_to(saved, int8, target, prompts, plain, caplog):
    """Catches a drafter that is refused beside its own target in int8, that says nothing of it."""
    with caplog.at_level(logging.INFO, "outrider.checkpoint"):
        assert load_drafter(saved, target).limit > 0
        assert caplog.text == ""
        drafter = load_drafter(saved, int8)
    assert "trained on float64, served on int8" in caplog.text
    wanted = [plain(int8, prompt, 24) for prompt in prompts]
    texts, steps = texts_of(int8, prompts, drafter)
    assert texts == wanted
    assert steps < sum(map(len, wanted)), "nothing that was drafted was kept"
    with pytest.raises(CheckpointError, match="weights_hash"):
        load_drafter(saved, load_target(tiny_model(seed=1), quantize="int8"))
    with pytest.raises(CheckpointError, match="weights_hash"):  # a training goes on beside the very same weights
        checkpoint.check_binding(checkpoint.manifest_of(saved), int8, saved)


def test_a_drafter_trained_in_int8_serves_the_float_target(saved, int8, target, trained):
    """Catches a base that is looked for on one side only; and copies of layers whose weights are int8."""
    model = copy.copy(trained)
    model.target = int8
    checkpoint.save(saved, model)
    assert checkpoint.trained_on(checkpoint.manifest_of(saved), target) == "int8"
    assert load_drafter(saved, target).limit == load_drafter(saved, int8).limit
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64, "layers": 1, "init_from_layers": (2,)}
    copied: Any = load_drafter("dflash", int8, **sizes)
    weight = copied.model.state_dict()["backbone.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, int8.layer(2).state_dict()["mlp.up_proj.weight"])


def test_an_older_checkpoint_is_known_by_its_weights(saved, int8, target):
    """Catches a checkpoint without a precision in its manifest that is refused."""
    manifest = checkpoint.manifest_of(saved)
    del manifest["target"]["precision"], manifest["target"]["base_hash"]
    (saved / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint.trained_on(manifest, target) is None
    assert checkpoint.trained_on(manifest, int8) == "unquantised weights"
    assert load_drafter(saved, int8).limit == load_drafter(saved, target).limit


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


def int8_rows(weight: Tensor) -> Stored:
    scales = weight.abs().amax(1, keepdim=True) / 127
    rounded = (weight / scales).round().to(torch.int8)
    return Stored({".weight": rounded, ".weight_scale": scales}, rounded * scales)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
W8A8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"], "config_groups": {"group_0": GROUP},
}  # fmt: skip
"""compressed-tensors' config, as llm-compressor writes it."""
PUBLISHED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8": (FP8, fp8_blocks), "compressed w8a8": (W8A8, int8_rows),
}  # fmt: skip


def configure(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))


def check_exact(target: Any, model: Any) -> None:
    """Its logits are those of these values, and its text, drafted, is its own `generate`'s."""
    tokens = torch.randint(64, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(target.model(tokens).logits, model(tokens).logits)
    text = torch.tensor([[9, 8, 3, 3, 3, 2]])
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = target.model.generate(text, attention_mask=torch.ones_like(text), **settings)
    (found,) = generate(target, text.tolist(), load_drafter("ngram", target, shortest=1), max_new_tokens=24)
    assert found.tokens == wanted[0, 6:].tolist()


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


def test_what_can_t_be_exact_is_refused_before_its_weights_load(tmp_path):
    """Catches stored numbers that are taken for weights, an hour of loading."""
    tiny_model().config.save_pretrained(tmp_path)  # no weight is there: nobody can have looked for one
    for quantization, said in (
        ({"quant_method": "int5"}, r"quantised with 'int5', which transformers does not know.*or torchao"),
        ({"quant_method": "nvfp4"}, "quantises activations"), ({"quant_method": "fbgemm_fp8"}, "quantises activations"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "quantises activations"),
        ({"quant_method": "gptq", "bits": 4}, r"with 'gptq', which can't be read here: .*; install what it names"),
    ):  # fmt: skip
        configure(tmp_path, quantization)
        with pytest.raises(TargetError, match=said):
            load_target(tmp_path)


def test_activations_are_not_rounded_by_asking_for_it() -> None:
    """Catches compressed-tensors' own way, whose pass of several tokens is not that of single ones."""
    model: Any = tiny_model()
    model.config.quantization_config = W8A8
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)
    model = tiny_model().float()
    quantize_(model, Int8DynamicActivationIntxWeightConfig(weight_granularity=PerAxis(0)))
    with pytest.raises(TargetError, match="quantises activations"):
        load_target(model)


def report(precision: str, trained_on: str | None, steps: dict[str, int], **changes: Any) -> Report:
    empty = dict.fromkeys(("accepted_by_depth", "tokens_per_s", "plain_tokens_per_s", "share", "ttft_ms", "itl_ms"))
    row = empty | {
        "drafter": "dspark", "task": "t", "prompts": len(steps), "temperature": 0.0, "precision": precision,
        "tokens_per_step": 9.0, "speedup": 2.0, "exact": True, "compared_tokens": 24, "trained_on": trained_on,
        "per_prompt": [{"id": name, "tokens": 24, "steps": count} for name, count in steps.items()],
    } | changes  # fmt: skip
    return Report.model_validate({"target": "x", "rows": [row]})


def test_a_report_says_what_another_precision_lost():
    """Catches a loss over prompts that only one side has, of the wrong sign, or of a row that is something else."""
    served = report("int8", "float32", {"a": 12, "b": 12, "c": 1})
    there = report("float32", "float32", {"a": 8, "b": 8, "d": 24})
    (row,) = with_losses(served, there).rows
    assert row.tokens_per_step_lost == pytest.approx(3 - 2)
    expected = "(trained on float32, served on int8, 1.00 tokens per step fewer by it) "
    assert expected in headline(with_losses(served, there))
    assert "trained on" not in headline(there)
    others = [
        report("float32", None, {"z": 8}), report("float32", None, {"a": 8}, temperature=1.0),
        report("int8", None, {"a": 8}), report("bfloat16", "float32", {"a": 8}),
    ]  # fmt: skip
    for other in others:
        assert with_losses(served, other).rows[0].tokens_per_step_lost is None
