"""What a config says of a model's passes, and what it must say."""

from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from benchmarks.plan import known_model
from outrider import demo
from outrider.drafters import method
from outrider.errors import ConfigError
from outrider.plan.paper import anatomy
from outrider.plan.paper.drafts import kinds_on_paper, on_paper

QWEN: dict[str, Any] = {
    "model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 512, "dtype": "bfloat16",
}  # fmt: skip


def test_the_demo_s_weights_are_counted_as_they_are() -> None:
    """Catches a count that leaves out norms or counts a tied head twice."""
    model = AutoModelForCausalLM.from_pretrained(demo.TARGET)
    found = anatomy.anatomy("demo")
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert found.head == found.vocabulary * found.hidden and found.read + found.head == found.parameters
    assert found.cache_bytes(1) == 2 * 16 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("name", "billions", "active", "cache_kib"),
    [("llama-3.3-70b", 70.6, 69.5, 320), ("qwen3-30b-a3b", 30.5, 3.0, 96), ("kimi-k2", 1026, 31.7, 68.6)],
)  # fmt: skip
def test_known_models_have_their_known_sizes(name: str, billions: float, active: float, cache_kib: float) -> None:
    """Catches experts that are counted as read by all tokens, and a latent cache counted as expanded."""
    found = known_model(name)[1]
    assert found.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert found.active / 1e9 == pytest.approx(active, rel=0.03)
    assert found.cache_bytes(1) / 1024 == pytest.approx(cache_kib, rel=0.01)


def test_a_window_bounds_what_a_layer_sees_and_a_state_has_no_cache() -> None:
    """Catches sliding layers whose cache grows with the text, and linear ones that are given one."""
    window = QWEN | {
        "model_type": "gemma3_text", "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 32,
    }  # fmt: skip
    found = anatomy.of_fields(window, "windows")
    each = 2 * 2 * 16 * 2
    assert found.cache_bytes(1000) == each * (2 * 32 + 1000)
    assert known_model("qwen3-next-80b-fp8")[1].attention[0].layers == 12


@pytest.mark.parametrize(
    ("quantised", "size"),
    [({"quant_method": "fp8"}, 1.0), ({"quant_method": "awq", "bits": 4}, 0.52),
     ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 1.0),
     ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.52),
     ({"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": {"num_bits": 4}}}}, 0.52)],
)  # fmt: skip
def test_quantised_weights_take_what_their_config_says(quantised: dict[str, Any], size: float) -> None:
    """Catches a quantised target that is planned as bfloat16."""
    found = anatomy.of_fields(QWEN | {"quantization_config": quantised}, "quantised")
    assert found.weight.bytes == pytest.approx(size, abs=0.005)
    assert found.weight_bytes < anatomy.of_fields(QWEN, "plain").weight_bytes


def test_an_unknown_way_of_storing_weights_is_asked_for() -> None:
    """Catches a guess at the size of weights."""
    fields = QWEN | {"quantization_config": {"quant_method": "runes"}}
    with pytest.raises(
        ConfigError, match=r"unknown quantization_config \(runes\); give the type of its weights with --weights"
    ):
        anatomy.of_fields(fields, "runes")
    assert anatomy.of_fields(fields, "runes", "int8").weight.bytes == 1.0
    with pytest.raises(ConfigError, match="unknown type of weights 'int5'; did you mean"):
        anatomy.of_fields(fields, "runes", "int5")


def test_every_kind_has_a_draft_model_on_paper() -> None:
    """Catches a kind whose parts are named otherwise than the planner looks for, so that it drafts for nothing."""
    sketch = anatomy.sketched(QWEN, "paper")
    for kind in {*kinds_on_paper()} - {"small_model", "cross_vocabulary"}:
        found = on_paper(kind, sketch)
        assert (found.model is None) == (method(kind).cost == "lookup"), kind
        assert found.model is None or (found.model.read > 64 * 64 and found.model.head == 512 * 64), kind


def test_a_kind_without_a_model_on_paper_is_refused_by_name() -> None:
    """Catches a method that is planned at no cost since nothing is known of it."""
    sketch = anatomy.sketched(QWEN, "paper")
    with pytest.raises(ConfigError, match="the cost of layer_skip on paper is unknown"):
        on_paper("layer_skip", sketch)
    with pytest.raises(ConfigError, match="name it with --draft-model"):
        on_paper("small_model", sketch)
    with pytest.raises(ConfigError, match="did you mean 'dflash'"):
        on_paper("dflush", sketch)


def test_a_reduced_vocabulary_makes_a_draft_s_head_smaller() -> None:
    """Catches a head that is read in full though the draft model has its own."""
    sketch = anatomy.sketched(QWEN, "paper")
    whole, reduced = on_paper("eagle3", sketch), on_paper("eagle3", sketch, vocabulary=128)
    assert whole.model is not None and reduced.model is not None
    assert reduced.model.head == 128 * 64 and reduced.model.read == whole.model.read
