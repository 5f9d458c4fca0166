"""A pass on paper: what it reads, what it multiplies, and that it takes as long as one that was timed."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan import known_model
from outrider.errors import ConfigError
from outrider.plan.paper import drafts, hardware
from outrider.plan.paper.anatomy import Anatomy, of_sketch, sketched
from outrider.plan.paper.roofline import (
    FEW_ROWS,
    MATRIX_TEXTS,
    experts_touched,
    pass_of,
    prefill_seconds,
    saturation_rows,
    weights_read,
)
from outrider.plan.paper.weights import stored
from outrider.plan.placement import eager
from outrider.plan.predict import PaperCosts
from outrider.targets.sketch import Sketch


def test_experts_that_rows_touch_are_the_published_expectation() -> None:
    """Catches an expectation that counts an expert twice, or takes all of them at once."""
    found = [round(experts_touched(128, 8, rows)) for rows in (1, 5, 8, 32)]
    assert found == [8, 35, 52, 112]
    assert experts_touched(128, 8, 1e6) == pytest.approx(128)
    assert experts_touched(0, 0, 5) == 0


@given(
    st.sampled_from(["qwen3-8b", "qwen3-30b-a3b", "kimi-k2"]),
    st.integers(1, 256),
    st.integers(1, 64),
    st.integers(1, 65_536),
)
def test_more_work_never_takes_less_time(name: str, batch: int, rows: int, context: int) -> None:
    """Catches a term that falls with rows, batch or context, as a wrong sign or an inverted ratio would.  Kernels are
    chosen by size, and the next kernel may be faster."""
    place, model = hardware.place("h100", 8), MODELS[name]
    kernels = lambda batch, rows: (batch * rows <= FEW_ROWS, rows == 1, batch <= MATRIX_TEXTS)
    own = pass_of(model, place, batch, rows, context).seconds
    for more in ((batch, rows + 1), (batch + 1, rows)):
        if kernels(*more) == kernels(batch, rows):
            assert own <= pass_of(model, place, *more, context).seconds
    assert own <= pass_of(model, place, batch, rows, context + 1).seconds
    assert own >= pass_of(model, hardware.place("h200", 8), batch, rows, context).seconds


RECORDED = json.loads((Path(__file__).parents[2] / "benchmarks/results/gpu.json").read_text())["rows"]
QWEN = {
    "model_type": "qwen3", "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "dtype": "bfloat16",
}  # fmt: skip
SIZES = {
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072,
             "tie_word_embeddings": True},
}  # fmt: skip


def recorded_model(name: str) -> tuple[Sketch, Anatomy]:
    fields: dict[str, Any] = QWEN | SIZES[name]
    sketch = sketched(fields, name)
    return sketch, of_sketch(sketch, stored(fields, None, name))


@pytest.mark.parametrize(("name", "within"), [("8b", 0.1), ("0.6b", 0.2)])
def test_a_pass_takes_as_long_as_it_was_timed(name: str, within: float) -> None:
    """Catches a model of costs that hides products behind reading: verify of 16 texts was planned at 5.7 ms and took
    8.7.  The constants were fit to these passes, so this can't fail by chance."""
    place, (_, model) = hardware.place("h200"), recorded_model(name)
    timed = [point for point in RECORDED[f"passes-{name}"]["points"] if point["way"] == "kernels" and point.get("ms")]
    timed = [point for point in timed if point["batch"] * point["width"] <= 1024]
    assert len(timed) == 34
    for point in timed:
        planned = pass_of(model, place, point["batch"], point["width"], point["context"]).seconds
        assert 1e3 * planned == pytest.approx(point["ms"], rel=within), point


def test_a_step_takes_as_long_as_it_was_served() -> None:
    """Catches costs of drafts or of the loop that promise what no served step reaches.  Nothing was fit to these
    steps."""
    place, (sketch, model) = hardware.place("h200"), recorded_model("8b")
    nodes = {"dspark": 7, "eagle3": 5, "mtp": 3, "medusa": 16}
    costs = PaperCosts(model, place, {kind: drafts.on_paper(kind, sketch) for kind in nodes})
    served = [point for point in RECORDED["step-8b"]["points"] if point["temperature"] == 0]
    assert {point["drafter"] for point in served} == nodes.keys()
    for point in served:
        kind = point["drafter"]
        planned = costs.drafted(kind, point["batch"], nodes[kind], (), context=112).seconds
        assert 1e3 * planned == pytest.approx(point["whole_ms"], rel=0.1), point


def test_a_draft_with_python_between_its_layers_takes_as_long_as_it_was_timed() -> None:
    """Catches a drafter on another device, which is not captured, that is planned as if it were."""
    place, (sketch, model) = hardware.place("h200"), recorded_model("8b")
    nodes = {"dspark": 7, "eagle3": 5, "mtp": 3, "medusa": 16}
    costs = PaperCosts(model, place, {kind: drafts.on_paper(kind, sketch) for kind in nodes})
    for point in (each for each in RECORDED["step-8b"]["points"] if each["temperature"] == 0):
        kind, batch = point["drafter"], point["batch"]
        step = costs.drafted(kind, batch, nodes[kind], (), 112)
        draft = costs.drafts[kind].seconds(eager(place), batch, nodes[kind], 112)
        assert 1e3 * (step.verify_s + step.other_s + draft) == pytest.approx(point["seams_ms"], rel=0.3), point


def test_a_text_s_cache_is_read_once_whatever_its_rows() -> None:
    """Catches a cache that is counted for every row: long contexts then look as if speculation could not pay."""
    place, model = hardware.place("h100"), MODELS["qwen3-8b"]
    one, eight = (pass_of(model, place, 4, rows, 8192) for rows in (1, 8))
    assert one.read_bytes == eight.read_bytes == weights_read(model, 4) + 4 * 8192 * model.cache_bytes(1)
    assert eight.flops == pytest.approx(8 * one.flops)


def test_rows_beyond_saturation_compute() -> None:
    """Catches products and bandwidth that change points_at; the figures are those of the sheets."""
    own = hardware.find("h100")
    assert own.flops["bf16"] / own.bandwidth == pytest.approx(295, abs=1)
    place, model = hardware.place("h100"), MODELS["qwen3-8b"]
    edge = saturation_rows(model, place)
    assert edge == pytest.approx(295 * 0.566 / 0.955, rel=0.01)
    assert pass_of(model, place, 1, edge / 2, 0).bound == "memory"
    assert pass_of(model, place, 1, edge * 2, 0).bound == "compute"


def test_an_int4_target_saturates_at_about_a_quarter_of_the_rows() -> None:
    """Catches weights that are quantised in memory and not in what a pass reads."""
    from benchmarks import plan as benchmark
    from outrider.plan.paper.anatomy import of_fields

    fields = benchmark.yaml.safe_load(benchmark.POINTS.read_text())["models"]["qwen3-8b"]
    place, model = hardware.place("h100"), of_fields(fields, "quantised", "int4")
    ratio = saturation_rows(model, place) / saturation_rows(MODELS["qwen3-8b"], place)
    assert 0.25 < ratio < 0.27
    assert pass_of(model, place, 1, 1, 0).seconds < pass_of(MODELS["qwen3-8b"], place, 1, 1, 0).seconds / 2


def test_a_prompt_takes_longer_the_longer_it_is_and_none_takes_nothing() -> None:
    """Catches a prompt that is taken for one row."""
    place, model = hardware.place("h100"), MODELS["qwen3-8b"]
    assert prefill_seconds(model, place, 0) == 0
    assert prefill_seconds(model, place, 8000) > 3 * prefill_seconds(model, place, 2000)


def test_nonsense_hardware_is_refused_with_what_there_is() -> None:
    """Catches a planner that takes the nearest name for the one that was given."""
    with pytest.raises(ConfigError, match="unknown hardware 'h101'; did you mean 'h100'"):
        hardware.place("h101")
    with pytest.raises(ConfigError, match="known: a100"):
        hardware.find("abacus 9000 with beads")
    with pytest.raises(ConfigError, match="--devices must be at least 1, got 0"):
        hardware.place("h100", 0)


MODELS = {name: known_model(name)[1] for name in ("qwen3-8b", "qwen3-30b-a3b", "kimi-k2")}
