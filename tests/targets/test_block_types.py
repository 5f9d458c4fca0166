"""Targets and drafters that are rounded to the blocks of GGUF files as they load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, Workshop, first, tiny_model
from gguf_targets import make_target
from torch import nn

from outrider import checkpoint, generate, load_drafter, load_target
from outrider.errors import ConfigError
from outrider.export.target import export_target
from outrider.kernels import blocks, rounding
from outrider.kernels.quantized import QuantizedEmbedding, QuantizedLinear
from outrider.plan.paper.weights import NAMED

MODES = pytest.mark.parametrize("mode", rounding.MODES)
LARGEST = {"q8_0": 0.006, "q4_0": 0.09, "q4_k": 0.072}
"""Relative error of normal numbers."""


def loaded(mode: str, **options: Any) -> Any:
    return load_target(tiny_model(), quantize=mode, **options)


@MODES
def test_rounding_loses_what_its_type_must(mode: str) -> None:
    """Catches scales that are not the best ones, and minima of the wrong sign: numbers all above 0, all below, equal,
    and in both signs."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for weight in (x, x.abs(), -x.abs() - 1, x * 0.01):
        there = blocks.dequantized(mode.upper(), rounding.rounded(mode.upper(), weight), 512)
        assert (there - weight).norm() <= LARGEST[mode] * weight.norm()
    for value in (0.0, 1.0, -1.0):
        whole = torch.full((3, 256), value)
        there = blocks.dequantized(mode.upper(), rounding.rounded(mode.upper(), whole), 256)
        torch.testing.assert_close(there, whole, rtol=1e-3, atol=0)


@MODES
def test_weights_that_are_rounded_already_stay(mode: str) -> None:
    """Catches a rounding that drifts: a model loaded, written and loaded again is the same."""
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    once = blocks.dequantized(mode.upper(), rounding.rounded(mode.upper(), weight), 256)
    twice = blocks.dequantized(mode.upper(), rounding.rounded(mode.upper(), once), 256)
    assert (twice - once).norm() <= (0.02 if mode == "q4_k" else 1e-3) * once.norm()


def test_rows_that_no_block_fits_take_a_smaller_type() -> None:
    """Catches a row that is cut, and a layer that is left out in silence."""
    kinds = [rounding.kind_of("q4_k", False, columns) for columns in (512, 96, 40)]
    assert kinds == ["Q4_K", "Q5_0", None]
    assert rounding.kind_of("q4_0", True, 64) == "Q8_0"
    for mode in rounding.MODES:
        block = blocks.BLOCKS[mode.upper()]
        assert NAMED[mode].bytes == block.bytes / block.values, "what a plan counts"


@MODES
def test_a_target_says_what_it_is(mode: str) -> None:
    """Catches layers that stay as they were, a tied embedding that is there twice, and a forgotten base."""
    target, plain = loaded(mode), load_target(tiny_model().float())
    linear = [part for part in target.model.modules() if isinstance(part, nn.Linear | QuantizedLinear)]
    assert all(isinstance(part, QuantizedLinear) for part in linear)
    assert isinstance(target.model.get_input_embeddings(), QuantizedEmbedding)
    kind = "q5_0" if mode == "q4_k" else mode  # rows of 32 and 64
    assert (target.spec.quantised, target.spec.dtype, target.spec.mode) == (kind, "float32", "tree")
    assert target.spec.base_hash == plain.spec.weights_hash != target.spec.weights_hash
    assert target.model.lm_head.kind == "Q8_0"
    twin = copy.deepcopy(tiny_model()).float()
    for name, part in target.model.named_modules():
        if isinstance(part, QuantizedLinear | QuantizedEmbedding):
            twin.get_submodule(name).weight.data = part.dequantized()
    tokens = torch.randint(64, (1, 40), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(target.model(tokens).logits, twin(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activations", ["float32", "int8"])
@MODES
def test_a_drafter_changes_no_token(mode: str, activations: str, prompts: list[list[int]]) -> None:
    """Catches a pass of several rows whose logits are not those of single rows, and activations that are ignored."""
    target = loaded(mode, activations=activations)
    assert target.spec.precision.endswith("int8 activations") == (activations == "int8")
    plain = [one.tokens for one in generate(target, prompts, None, max_new_tokens=24, slots=3)]
    drafter = load_drafter("ngram", target, shortest=1)
    assert [one.tokens for one in generate(target, prompts, drafter, max_new_tokens=24, slots=3)] == plain


@pytest.mark.parametrize("mode", ["q8_0", "q4_0"])
def test_a_file_in_this_precision_is_the_same_target(mode: str, tmp_path: Path) -> None:
    """Catches a file whose weights, ends or order of rows are not those that `quantize` gives."""
    bpe = make_target(tmp_path / "bpe")
    export_target(bpe, tmp_path / "there", mode)
    there, here = load_target(tmp_path / "there"), load_target(bpe.spec.name, quantize=mode)
    tokens = torch.tensor([bpe.tokenizer.encode("then the inner one read a line")])
    torch.testing.assert_close(there.model(tokens).logits, here.model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert there.spec.precision == here.spec.precision == mode


@pytest.mark.parametrize("kind", first(["dspark", "dflash2", "eagle3", "medusa", "mtp", "peagle", "domino"]))
def test_a_rounded_draft_changes_no_text(
    kind: str, workshop: Workshop, prompts: list[list[int]], tmp_path: Path
) -> None:
    """Catches a draft model that reads the weights of a layer that has none any more."""
    target = load_target(tiny_model().float())
    checkpoint.save(tmp_path / "saved", workshop.model(Case(kind), target))
    plain = [one.tokens for one in generate(target, prompts, None, max_new_tokens=16, slots=3)]
    drafter: Any = load_drafter(tmp_path / "saved", target, quantize="q8_0")
    assert any(isinstance(part, QuantizedLinear) for part in drafter.model.modules())
    assert [one.tokens for one in generate(target, prompts, drafter, max_new_tokens=16, slots=3)] == plain


def test_a_drafter_of_the_unrounded_weights_serves(workshop: Workshop, tmp_path: Path) -> None:
    """Catches a drafter that is refused beside its own target in blocks, or taken beside another's."""
    checkpoint.save(tmp_path / "saved", workshop.model(Case("dspark"), load_target(tiny_model().float())))
    assert load_drafter(tmp_path / "saved", loaded("q4_0")).limit > 0


def test_a_small_model_is_rounded() -> None:
    """Catches a setting of an untrained drafter that is dropped."""
    target = load_target("demo")
    drafter: Any = load_drafter("small_model", target, model="demo", quantize="q4_0")
    kinds = {part.kind for part in drafter.model.model.modules() if isinstance(part, QuantizedLinear)}
    assert kinds == {"Q4_0", "Q8_0"}
    text = target.encode("def f(x):")
    assert len(generate(target, [text], drafter, max_new_tokens=6)[0].tokens) == 6


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"device": "cuda"}, {"device_map": "auto"},
                                     {"tensor_parallel": 2}])  # fmt: skip
def test_options_that_do_not_go_with_blocks_are_refused(options: dict[str, Any]) -> None:
    """Catches an option that is ignored in silence."""
    with pytest.raises(ConfigError, match=f"{next(iter(options))} .* can't be used with quantize 'q4_0'"):
        load_target("demo", quantize="q4_0", **options)
    with pytest.raises(ConfigError, match="is for weights in blocks"):
        load_target(tiny_model(), activations="int8")
