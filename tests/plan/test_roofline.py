"""A pass on paper: what it reads, what it multiplies, and that neither ever falls with more work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.plan import known_model
from outrider.errors import ConfigError
from outrider.plan.paper import hardware
from outrider.plan.paper.roofline import experts_touched, pass_of, prefill_seconds, saturation_rows, weights_read


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
    """Catches a term that falls with rows, batch or context, as a wrong sign or an inverted ratio would."""
    place, model = hardware.place("h100", 8), MODELS[name]
    own = pass_of(model, place, batch, rows, context).seconds
    assert own <= pass_of(model, place, batch, rows + 1, context).seconds
    assert own <= pass_of(model, place, batch + 1, rows, context).seconds
    assert own <= pass_of(model, place, batch, rows, context + 1).seconds
    assert own >= pass_of(model, hardware.place("h200", 8), batch, rows, context).seconds


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
    assert edge == pytest.approx(295 * 0.6 / 0.8, rel=0.01)
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
