"""A training on many GPUs on paper: `benchmarks/sizing.py` counts what is known, and its table is the page's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import sizing
from benchmarks.sizing import GRADIENT, WEIGHT, Run, steps, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "many_devices.md"
FLOPS = 4e14


@pytest.fixture(scope="module")
def run() -> Run:
    return sizing.known("qwen3-8b", "dspark", 512, 768, 8)


def test_the_page_has_the_table_that_the_script_computes(run: Run) -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, _, rest = text.partition("<!-- sizing -->\n")
    assert rest.partition("\n<!-- /sizing -->")[0] == table(run, [1, 8, 32], "h100")
    assert "## Computed, not measured" in text


def test_weights_are_those_that_deepspec_publishes(run: Run) -> None:
    """1,126 M weights train of its DSpark for Qwen3-8B: another number is another model."""
    assert round(run.drafter.parameters / 1e6) == 1126
    assert run.state_bytes == 6 * 4096 * 2


def test_bytes_over_the_wire(run: Run) -> None:
    """A ring's sum passes each number twice but for a part; shards are gathered twice and shared out once a batch."""
    weights = run.drafter.parameters
    [alone] = steps(run, 1, FLOPS)
    assert (alone.wire_bytes, alone.wire_s) == (0, 0)
    ddp, fsdp, apart = steps(run, 8, FLOPS)
    assert ddp.wire_bytes == pytest.approx(2 * 7 / 8 * weights * GRADIENT)
    assert fsdp.wire_bytes == pytest.approx(7 / 8 * weights * (2 * WEIGHT + GRADIENT) * 8)
    trainers = 8 - apart.readers
    states = run.texts * run.tokens * run.state_bytes / trainers
    assert apart.wire_bytes == pytest.approx(states + 2 * (trainers - 1) / trainers * weights * GRADIENT)
    assert steps(run._replace(batch=4), 8, FLOPS)[1].wire_bytes == pytest.approx(2 * fsdp.wire_bytes)


def test_more_gpus_are_faster_and_less_than_in_proportion(run: Run) -> None:
    pace = [steps(run, count, FLOPS)[0].steps_per_s for count in (1, 2, 8, 16, 32)]
    assert pace == sorted(pace)
    assert pace[2] < 8 * pace[0] and pace[4] < 32 * pace[0]
