"""`outrider plan`: what it writes, what it refuses; times that are kept; published points."""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import folder as folder
from verbs import outrider_with

from benchmarks import plan as benchmark
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.drafters import find
from outrider.generation import batch, stored_costs
from outrider.loading import load_drafter
from outrider.machine import measurements
from outrider.plan.measured import timings
from outrider.plan.measured.allowance import Allowance
from outrider.plan.measured.timed import TimedCosts
from outrider.plan.measured.timings import Cell, Timings
from outrider.plan.predict import StepCost
from outrider.plan.schema import Plan
from outrider.targets.hf.transformers import TransformersTarget as Target

TRAFFIC = ("--prompt-tokens", "200", "--new-tokens", "200", "--concurrency", "1")


def planned(path: Path, *words: str) -> Plan:
    assert outrider_with("plan", *words, "--json", str(path)) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    assert {"decision", "because", "rows"} <= found.keys()
    return Plan.model_validate(found)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a plan says that can't be made."""
    assert outrider_with("plan", *words) in (1, 2)
    return " ".join(capsys.readouterr().err.split())


def test_a_plan_on_paper_has_rows_for_every_method_depth_and_load(tmp_path: Path) -> None:
    """Catches a table that leaves out what lost."""
    found = planned(tmp_path / "plan.json", "--target", "demo", "--hardware", "h100", *TRAFFIC)
    assert found.decision == "ENABLE" and found.method in ("dflash", "dspark") and found.depth
    assert {row.method for row in found.rows} == {"ngram", "suffix", "eagle3", "dflash", "dspark"}
    assert {row.concurrency for row in found.rows if row.method == "dflash"} == {1, 4, 16, 64}
    chosen = next(r for r in found.rows if (r.method, r.depth, r.concurrency) == (found.method, found.depth, 1))
    assert f"{chosen.speedup.center:.2f} [{chosen.speedup.low:.2f}, {chosen.speedup.high:.2f}]" in found.because
    assert all(source.startswith("published: ") for source in found.acceptance.values())
    assert any("was published for other targets" in note for note in found.notes)


def test_a_drafter_elsewhere_leaves_memory_and_takes_longer(tmp_path: Path) -> None:
    """Catches a placement whose drafter is counted on the target's device too, or whose features travel for nothing."""
    found = planned(tmp_path / "plan.json", "--target", "demo", "--hardware", "h100", *TRAFFIC)
    by_place = {(each.method, each.where): each for each in found.placements}
    assert len(by_place) == 3 * len({"eagle3", "dflash", "dspark"})  # lookups have no place
    for name in ("eagle3", "dflash", "dspark"):
        beside, own, cpu = (by_place[name, where] for where in ("same device", "own device", "cpu"))
        row = next(r for r in found.rows if (r.method, r.depth, r.concurrency) == (name, beside.depth, 1))
        assert (beside.speedup, beside.draft_s, beside.slots) == (row.speedup, row.draft_s, row.slots)
        assert own.devices == 2 and beside.devices == cpu.devices == 1
        assert own.slots is not None and cpu.slots == own.slots > (beside.slots or 0)
        assert cpu.draft_s > own.draft_s > beside.draft_s and own.drafter_bytes > beside.drafter_bytes
        assert (beside.speedup.center or 0) > (own.speedup.center or 0) > (cpu.speedup.center or 0)


def test_without_traffic_there_are_break_even_points_and_no_decision(tmp_path: Path) -> None:
    """Catches lengths that are made up."""
    found = planned(tmp_path / "plan.json", "--target", "demo", "--hardware", "l4", "--new-tokens", "100")
    assert found.decision == "NEED DATA" and not found.rows and found.break_even
    assert "--prompt-tokens, --concurrency or --rate are missing" in found.because and found.demand is None


def test_more_traffic_than_the_machine_can_do_asks_for_batches(tmp_path: Path) -> None:
    """Catches a rate that is quietly taken for another."""
    words = ("--prompt-tokens", "900", "--new-tokens", "900", "--rate", "100000")
    found = planned(tmp_path / "plan.json", "--target", "demo", "--hardware", "l4", *words)
    assert found.decision == "BATCH INSTEAD" and "100000 requests per second need more than" in found.because


def test_costs_are_shown_at_half_all_and_twice_the_traffic(tmp_path: Path) -> None:
    """Catches money that does not follow the price, and hours that do not follow the answers."""
    words = ("--target", "demo", "--hardware", "h100", "--method", "dflash", "--prompt-tokens", "800", "--new-tokens",
             "300", "--rate", "20", "--train-answers", "1000", "--price-per-gb-month", "0.02")  # fmt: skip
    one = planned(tmp_path / "one.json", *words, "--price-per-hour", "2")
    two = planned(tmp_path / "two.json", *words, "--price-per-hour", "4", "--epochs", "20")
    assert [cost.traffic for cost in one.costs] == [0.5, 1, 2]
    assert one.once is not None and two.once is not None
    for a, b in zip(one.costs, two.costs, strict=True):
        assert a.saved_per_day and b.saved_per_day == pytest.approx(2 * a.saved_per_day)
        hours = 24 * (1 - 1 / (a.speedup or 1))
        assert a.device_hours_saved_per_day == pytest.approx(hours)
        assert a.spent_per_day == pytest.approx(2 * 24) and b.spent_per_day == pytest.approx(4 * 24)
        assert a.memory_bytes and a.pays_back_after_days == pytest.approx((one.once.money or 0) / a.saved_per_day)
    parts = [one.once.data_money, one.once.training_money, one.once.storage_money]
    assert one.once.data_hours and parts[0] == pytest.approx(2 * one.once.data_hours)
    assert one.once.storage_bytes and parts[2] == pytest.approx(12 * 0.02 * one.once.storage_bytes / 1e9)
    assert one.once.money == pytest.approx(sum(part or 0 for part in parts))
    assert one.once.training_hours and two.once.training_hours and two.once.training_hours > one.once.training_hours
    assert one.once.data_hours == two.once.data_hours and one.once.storage_bytes == two.once.storage_bytes
    # features that are stored are read once from the target, whatever the number of epochs
    three = planned(tmp_path / "three.json", *words, "--epochs", "40")
    assert three.once is not None and three.once.training_hours
    for_20 = three.once.training_hours - two.once.training_hours
    assert two.once.training_hours > 1.01 * for_20


def test_bad_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a number that is made up where something is missing."""
    assert "no hardware was given; name it with --hardware (a100-40gb" in refused(capsys, *TRAFFIC)
    assert "--prompt-tokens must be above 0, got -3" in refused(capsys, "--hardware", "h100", "--prompt-tokens", "-3")
    assert "eagle4" in refused(capsys, "--hardware", "h100", "--method", "eagle4")
    assert "--again has no effect without --measure" in refused(capsys, "--hardware", "h100", "--again")
    assert "choose one" in refused(capsys, "--hardware", "h100", "--rate", "1", "--concurrency", "2")
    assert "no report at" in refused(capsys, "--hardware", "h100", "--report", str(tmp_path / "none.json"))


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 300,
}  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--price-per-hour", "-3", "--rate", "1"), "--price-per-hour must be above 0, got -3"),
        (("--price-per-gb-month", "nan", "--train-answers", "5"), "--price-per-gb-month must be above 0, got nan"),
        (("--price-per-hour", "3"), "--price-per-hour has no effect without --rate, a --log or --train-answers"),
        (("--train-answers", "5", "--epochs", "0"), "--epochs must be above 0, got 0"),
        (("--slo", "speed=3"), "--slo speed is not a limit that a plan can predict; give tpot in ms"),
        (("--slo", "tpot=-3"), "--slo tpot must be above 0 ms, got -3"),
    ],
)
def test_numbers_that_are_none_are_refused(words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches nonsense that ends in a plan with figures, or an option that is ignored in silence."""
    assert said in refused(capsys, "--hardware", "h100", *words)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_attention_heads": 3}, "is not a valid model: The hidden size (64) is not a multiple"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({}, "texts of 200 and 200 tokens are longer than the context of"),
    ],
)
def test_a_config_that_is_no_model_is_refused(change, said, tmp_path, capsys) -> None:
    """Catches a trace of the library's own check, and a size that is taken from the library's default."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    assert said in refused(capsys, "--target", str(tmp_path), "--hardware", "h100", *TRAFFIC)


def test_a_context_that_a_config_does_not_name_is_not_made_up(tmp_path: Path) -> None:
    """Catches the library's default for it: Llama's 2,048."""
    fields = {key: value for key, value in LLAMA.items() if key != "max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    words = ("--prompt-tokens", "9000", "--new-tokens", "200", "--concurrency", "1", "--method", "ngram")
    planned(tmp_path / "plan.json", "--target", str(tmp_path), "--hardware", "h100", *words)


def test_what_a_day_costs_is_not_known_without_a_rate(tmp_path: Path) -> None:
    """Catches a price that is taken and has no effect."""
    words = ("--target", "demo", "--hardware", "h100", *TRAFFIC, "--price-per-hour", "3", "--train-answers", "9")
    found = planned(tmp_path / "plan.json", *words)
    assert not found.costs and found.once is not None and found.once.storage_money is None
    assert "the cost of a day is unknown without requests per second; give --rate" in found.notes


def test_a_target_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a plan for weights that the hardware can't hold."""
    fields = benchmark.yaml.safe_load(benchmark.POINTS.read_text())["models"]["llama-3.3-70b"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    said = refused(capsys, "--target", str(tmp_path), "--hardware", "h100", *TRAFFIC)
    assert "take 141 GB, but 1 h100 have 80 GB; give more --devices, or --weights int4" in said
    assert outrider_with("plan", "--target", str(tmp_path), "--hardware", "h100", "--weights", "int4", *TRAFFIC) == 0


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own for times, and a machine that is not busy."""
    monkeypatch.setattr(timings, "folder", lambda: tmp_path / "times")
    monkeypatch.setattr(measurements, "is_busy", lambda: False)
    return tmp_path / "times"


def test_times_are_kept_and_not_taken_again(target: Target, quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches times that are lost, or measured again by every plan."""
    monkeypatch.setattr(timings, "ROWS", (1, 2))
    first = timings.measure(target, ["ngram"], [1, 2], [1, 2], 16, timings.load_timings(target))
    assert {key[:2] for key in first.passes} == {(1, 1), (1, 2), (2, 1), (2, 2)} and len(first.plain) == 2
    assert timings.save_timings(target, first) == timings.place(target)
    again = timings.load_timings(target)
    assert (again.passes, again.plain, again.drafts) == (first.passes, first.plain, first.drafts)
    monkeypatch.setattr(timings, "timed", lambda *_, **__: pytest.fail("timed again"))
    monkeypatch.setattr(timings, "steps", lambda *_, **__: pytest.fail("timed again"))
    timings.measure(target, ["ngram"], [1, 2], [1, 2], 16, again)
    known = stored_costs(target, load_drafter("ngram", target)).read()["plain"]  # what a policy begins with
    assert set(known.passes) == {(slots, rows) for slots in (1, 2) for rows in (1, 2, 3)}
    assert set(known.drafts) == {(slots, depth) for slots in (1, 2) for depth in (1, 2)}


class Clock:
    """Moved by what is timed."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A machine on which a token takes a millisecond, whatever is done with it."""
    clock = Clock()

    def steps(_: object, drafter: object, state: DecodeState, depths: Sequence[int], context: int) -> Any:
        clock.now += 1e-3 * len(state.tokens) * (context + sum(depths))
        return [(0 if drafter is None else depth, Cell(0.0, 1.0, 0.0, 1.0)) for depth in depths]

    monkeypatch.setattr(timings, "steps", steps)
    monkeypatch.setattr(timings, "timed", lambda _target, _drafter, sizes, **_: dict.fromkeys(sizes, 1.0))
    return clock


def test_measuring_keeps_to_its_seconds_and_bytes(target: Target, paced: Clock) -> None:
    """Catches a plan for 1,024 texts at once that takes 16 minutes and 14 GB, one that says nothing of what it left
    out, and one that spends all of its time on the smallest batch."""
    said: list[str] = []
    for seconds, gigabytes, largest, why in (
        (30.0, 1e3, 16, "s are left for it"),
        (1e4, 0.1, 64, "free memory is 0.1 GB"),
    ):
        paced.now, found, batches = 0.0, Timings(prompt_s=1e-3), [256, 1, 1024]
        allowed = Allowance(seconds, 1e9 * gigabytes, paced)
        timings.measure(target, ["ngram"], batches, [1, 4], 200, found, lambda _: Drafter(), said.append, allowed)
        assert {key[0] for key in found.plain} == {key[0] for key in found.passes} == {1, largest}
        assert paced.now < seconds and [line.split(" texts")[0] for line in allowed.left_out] == ["256", "1024"]
        assert all(why in line for line in allowed.left_out) and said[-1] == allowed.left_out[-1]
    assert said[0].startswith("measuring takes about") and "the limit is 30 s and 1e+03 GB" in said[0]


def test_a_slow_machine_learns_what_it_takes(target: Target, paced: Clock) -> None:
    """Catches an allowance that trusts what it expected: a token takes ten times as long as a prompt said."""
    found, allowed = Timings(prompt_s=1e-4), Allowance(24.0, math.inf, paced)
    timings.measure(target, ["ngram"], [1, 4, 64], [1, 4], 200, found, lambda _: Drafter(), allowance=allowed)
    assert {key[0] for key in found.plain} == {1, 4} and paced.now < 24 and len(allowed.left_out) == 1


def test_a_batch_that_was_not_timed_costs_what_the_last_ones_say() -> None:
    """Catches a load beyond all timed ones that is as cheap as the largest of them."""
    found = Timings({}, {(1, 0, 64): Cell(0, 1.0, 0.5), (4, 0, 64): Cell(0, 4.0, 0.25)})
    assert TimedCosts(found, {}).plain(8, 64) == pytest.approx(8.25)


def test_drafts_are_timed_beside_plain_steps(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches speed-ups that a machine made, which was slower when plain steps were timed than when drafts were."""
    pace = [1.0]

    def steps(_: object, drafter: object, *rest: object) -> Iterator[tuple[int, Cell]]:
        for _ in range(6):
            if drafter is None:
                pace[0] *= 1.5
            draft_s = 0.0 if drafter is None else 0.5 * pace[0]
            yield 0 if drafter is None else 2, Cell(draft_s, pace[0], 0.0, 1.0)

    monkeypatch.setattr(timings, "steps", steps)
    monkeypatch.setattr(timings, "timed", lambda *_, **__: {(1, 1): 1.0})
    found = Timings()
    for name in ("ngram", "suffix"):
        timings.measure(target, [name], [1], [2], 16, found)
    plain = found.plain[1, 0, 16].seconds
    for cells in found.drafts.values():
        assert cells[1, 2, 16].seconds == pytest.approx(1.5 * plain) and cells[1, 2, 16].spread < 1e-6
    assert len(found.drafts) == 3  # random chains beside them


def test_texts_of_a_batch_are_of_unequal_lengths() -> None:
    """Catches a batch that is read faster than a served one, since all its texts are of one length."""
    assert timings.ragged(100, 1) == [100] and timings.ragged(100, 3) == pytest.approx([75.8, 100, 124.2], abs=0.1)


def test_times_of_a_busy_machine_are_not_kept(target: Target, quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that is wrong for good; and a damaged file that stops every plan."""
    monkeypatch.setattr(measurements, "is_busy", lambda: True)
    assert timings.save_timings(target, Timings(prompt_s=1.0)) is None and timings.load_timings(target) == Timings()
    timings.place(target).parent.mkdir(parents=True)
    timings.place(target).write_text('{"passes": 3}')
    assert timings.load_timings(target) == Timings()


def test_depths_are_timed_in_turn(target: Target) -> None:
    """Catches steps that are counted for another depth than they drafted."""
    drafter = find("recycle").build(find("recycle").Config(), target)
    state = batch(target, 2, ends=frozenset())
    found = list(timings.steps(target, drafter, state, [1, 3], 40))
    assert [depth for depth, _ in found] == [1, 3] * timings.STEPS
    assert all(cell.verify_s > 0 and cell.drafted <= depth for depth, cell in found)
    assert state.read_tokens > 0


def test_timed_costs_are_straight_lines_between_what_was_timed() -> None:
    """Catches a depth or a batch that is read from the wrong neighbour."""
    cell = lambda seconds, nodes: Cell(seconds, 10 * seconds, 0.0, nodes)
    found = Timings(
        {},
        {(1, 0, 64): Cell(0, 1.0, 0.5), (4, 0, 64): Cell(0, 4.0, 0.5)},
        {"deep": {(1, 1, 64): cell(1, 1), (1, 3, 64): cell(3, 3), (4, 1, 64): cell(2, 1), (4, 3, 64): cell(6, 3)},
         "found": {(1, 3, 64): cell(1, 0)},
         timings.CHAINS: {(slots, n, 64): Cell(0, slots * (1.0 + n), 0) for slots in (1, 4) for n in (1, 3)}},
        0.5, {"deep": 0.1},
    )  # fmt: skip
    costs = TimedCosts(found, {"dflash": "deep", "ngram": "found"})
    assert (costs.plain(1, 70), costs.plain(2.5, 70)) == (1.5, 3.0)
    assert costs.drafted("dflash", 1, 2, (), 64) == StepCost(2, 20, 0)
    assert costs.drafted("dflash", 2.5, 1, (), 64) == StepCost(1.5, 15, 0)
    # a lookup that drafts one node in half of its steps reads one row or two
    assert costs.drafted("ngram", 1, 3, (0.5, 0.0, 0.0), 64).verify_s == pytest.approx(1.5)
    assert costs.drafted("ngram", 4, 3, (0.5, 0.0, 0.0), 64).verify_s == pytest.approx(4 + 4 * (1 - 0.5**4))
    assert costs.prompt_of("dflash", 10) == pytest.approx(1) and costs.prompt_of("ngram", 10) == 0


def test_a_measured_plan_writes_its_decision(folder, quiet, tmp_path, monkeypatch) -> None:
    """Catches a measured plan that needs more than it times.  No time is asserted."""
    monkeypatch.setattr("outrider.plan.measured.costs.MULTIPLES", (1,))
    monkeypatch.setattr("outrider.plan.measured.costs.TIMED_DEPTHS", (1, 4))
    monkeypatch.setattr(timings, "ROWS", (1, 4))
    monkeypatch.setattr(timings, "ROUNDS", 1)
    monkeypatch.setattr(timings, "STEPS", 2)
    words = ("--target", str(folder), "--measure", "--method", "ngram", "--method", "dflash", "--prompt-tokens", "40",
             "--new-tokens", "40", "--concurrency", "1")  # fmt: skip
    found = planned(tmp_path / "plan.json", *words)
    assert found.measured and {(row.method, row.depth) for row in found.rows} == {
        (name, depth) for name in ("ngram", "dflash") for depth in (1, 4)
    }
    assert found.decision in ("ENABLE", "BATCH INSTEAD", "NEED DATA") and found.because
    assert len(list(quiet.glob("*.json"))) == 1


def test_published_results_are_reproduced_from_configs() -> None:
    """Catches a model of costs that no longer gives what engines reached, all with one set of constants."""
    found = benchmark.points()
    assert found["hits"] == found["of"] == 22 and found["median_error"] < 0.08
    for point in found["points"]:
        assert point["hit"] == (abs(point["error"]) <= 0.2) and ("lacks" in point) == (not point["hit"])
        assert len(point["source"]) > 10
    assert all(len(each["lacks"]) > 20 for each in found["lacking"])


@pytest.mark.gpu
def test_a_gpu_is_timed_as_a_cpu_is(quiet: Path) -> None:
    """Catches a timing that does not wait for the device: a pass then takes microseconds."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    from outrider import load_target

    target = load_target("demo", device="cuda")
    found = timings.measure(target, [], [1], [1], 64, Timings())
    assert found.passes[1, 1, 64] > 1e-4
