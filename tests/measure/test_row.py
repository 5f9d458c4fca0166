"""Every figure of a row from two runs made by hand: the right value is worked out here, and its likely mistakes are
planted."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from tiny import folder, talker

from outrider import load_drafter
from outrider.measure import row as summary
from outrider.measure.record import Entry, Measured, Overlaps, Run, Sample
from outrider.measure.row import difference, training_of
from outrider.measure.tasks.names import Prompt
from outrider.report.schema import Report
from outrider.targets.hf.transformers import TransformersTarget

__all__ = ["folder", "talker"]
STEPS = {"a": [(2, 3, 3), (0, 3, 3), (3, 3, 3), (1, 1, 1)], "b": [(0, 0, 0), (1, 2, 4), (2, 2, 4)]}
"""Of every step what was kept, how deep its draft was, how many tokens it had on all branches; b drafts trees."""


def run_of(steps: list[tuple[int, int, int]], prompt: int = 0, **more: Any) -> Run:
    accepted, reached, nodes = (list(column) for column in zip(*steps, strict=True))
    written = [a + 1 for a in accepted]
    positions = [prompt + sum(written[:n]) for n in range(len(steps))]
    tokens, more = list(range(sum(written))), {"nodes": nodes, "positions": positions, "committed": written} | more
    return Run(tokens, len(steps), accepted, reached, **more)


def hand_made(target: TransformersTarget, **more: Any) -> Measured:
    """Two prompts: a writes 10 tokens in 4 steps, b 6 in 3; alone they take 6 and 4.5 seconds, drafted 2 and 3."""
    runs = [
        run_of(STEPS["a"], 1020, seconds=2.0, first_s=0.5, gaps_s=[0.3, 0.5, 0.7], draft_s=0.3, verify_s=1.2,
               other_s=0.5, model_s=1.6, memory_peak_bytes=100, invalid=1),
        run_of(STEPS["b"], seconds=3.0, first_s=0.4, gaps_s=[0.6, 2.0], draft_s=0.7, verify_s=1.8, other_s=0.5,
        model_s=2.4,
               memory_peak_bytes=300, invalid=2),
    ]  # fmt: skip
    plain = [
        Run(run.tokens, len(run.tokens), seconds=seconds, first_s=1.0, gaps_s=[0.5], verify_s=4.0, model_s=3.0)
        for run, seconds in zip(runs, (6.0, 4.5), strict=True)
    ]
    samples = [
        Sample(Prompt(name, ("?",), group=group), run, alone, [run.tokens], 5.0)
        for name, group, run, alone in zip("ab", ("ru", "en"), runs, plain, strict=True)
    ]
    values: dict[str, Any] = {
        "entry": Entry("n", load_drafter("ngram", target), predicted=(0.8, 0.4)), "task": "quiz", "samples": samples,
        "overlap": [0.5, 1.0, 0.75],
    }  # fmt: skip
    return Measured(**(values | more))


RIGHT: dict[str, Any] = {
    "tokens_per_step": 16 / 7,
    # of two prompts drawn twice: a a is 10/4, b b is 6/3
    "tokens_per_step_range": {"center": 16 / 7, "low": 2.0, "high": 2.5},
    "accepted_by_depth": [5 / 6, 3 / 5, 1 / 3],
    "conditional_acceptance": [5 / 6, 3 / 4, 1 / 2],
    "rejections_by_depth": [1, 1, 1],
    # 9 kept; judged 3 + 1 + 3 + 1 + 0 + 2 + 2
    "token_acceptance": 9 / 12,
    "draft_acceptance": 9 / 14,
    "expected_acceptance": 0.75,
    "accepted_histogram": [[1], [0, 1], [0, 1, 1], [1, 0, 1, 1]],
    # 18 verified on all branches
    "wasted": 9 / 18,
    "predicted_by_depth": [0.8, 0.4],
    "tokens_per_s": 16 / 5,
    "plain_tokens_per_s": 16 / 10.5,
    "generate_tokens_per_s": 16 / 10,
    "speedup": 2.1,
    # their own are 3 and 1.5
    "speedup_geomean": {"center": math.sqrt(4.5), "low": 1.5, "high": 3.0},
    # (5 + 2) / (10/6 + 6/4.5)
    "speedup_of_means": 7 / 3,
    "share": {"draft": 0.2, "verify": 0.6, "other": 0.2},
    "loop_overhead": 0.2,
    "plain_loop_overhead": 0.25,
    "ttft_ms": {"p50": 450.0, "p95": 495.0, "p99": 499.0},
    "itl_ms": {"p50": 600.0, "p95": 1740.0, "p99": 1948.0},
    # 1.5 s over 9 tokens, 2.6 s over 5
    "tpot_ms": {f"p{p}": 1500 / 9 + p / 100 * (520 - 1500 / 9) for p in (50, 95, 99)},
    "memory_peak_bytes": 300,
    "invalid": 3,
    "by_group": [
        {"name": "en", "prompts": 1, "tokens": 6, "steps": 3, "judged": 4, "accepted": 3, "tokens_per_step": 2.0,
         "token_acceptance": 3 / 4, "speedup": 1.5},
        {"name": "ru", "prompts": 1, "tokens": 10, "steps": 4, "judged": 8, "accepted": 6, "tokens_per_step": 2.5,
         "token_acceptance": 6 / 8, "speedup": 3.0},
    ],
    # a's steps begin at 1020, 1023, 1024 and 1028, all of b's before
    "by_position": [
        {"begin": 0, "end": 1024, "steps": 5, "tokens": 10, "judged": 8, "accepted": 5, "tokens_per_step": 2.0,
         "token_acceptance": 5 / 8},
        {"begin": 1024, "end": 4096, "steps": 2, "tokens": 6, "judged": 4, "accepted": 4, "tokens_per_step": 3.0,
         "token_acceptance": 1.0},
    ],
    "compared_tokens": 16,
    "exact": True,
    "plain_exact": True,
}  # fmt: skip


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(same(a, b) for a, b in zip(found, wanted, strict=True))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return found == pytest.approx(wanted)


def test_figures_are_what_was_worked_out_by_hand(talker: TransformersTarget) -> None:
    """Catches another definition under the same name."""
    found = summary.summarise(hand_made(talker), talker).model_dump(mode="json")
    assert {name: found[name] for name in RIGHT if not same(found[name], RIGHT[name])} == {}


def test_every_figure_has_its_place_in_the_report(talker: TransformersTarget) -> None:
    """Catches a figure that the report keeps as an unknown field, or drops, because its name is another there."""
    row = summary.summarise(hand_made(talker), talker, Overlaps({("quiz", "a"): True}, "a rule"))
    assert not row.model_extra
    assert json.loads(row.model_dump_json())["speedup_geomean"]["high"] == pytest.approx(3.0)
    assert (len(row.tpot_curve_ms), len(row.itl_curve_ms), row.itl_curve_ms[50]) == (101, 101, pytest.approx(600))
    assert (row.tpot_curve_ms[0], row.tpot_curve_ms[100]) == (pytest.approx(1500 / 9), pytest.approx(520))
    assert [prompt.tpot_ms for prompt in row.per_prompt] == pytest.approx([1500 / 9, 520])
    assert [prompt.plain_tpot_ms for prompt in row.per_prompt] == pytest.approx([5000 / 9, 3500 / 5])


def test_turns_add_up(talker: TransformersTarget) -> None:
    """Catches a count or a time of a later turn that is dropped, and a first token counted as one of the later ones."""
    whole = [sample.run for sample in hand_made(talker).samples]
    joined = whole[0].joined(whole[1])
    assert joined.turns == [10, 6]
    assert (joined.steps, len(joined.tokens), joined.seconds, joined.memory_peak_bytes) == (7, 16, 5.0, 300)
    assert joined.accepted == whole[0].accepted + whole[1].accepted
    assert joined.nodes == whole[0].nodes + whole[1].nodes
    assert joined.joined(whole[0]).turns == [10, 6, 10]
    sample = Sample(Prompt("c", ("?", "!")), joined, joined, [joined.tokens[:10], joined.tokens[10:]], 1.0)
    measured = hand_made(talker, samples=[sample])
    row = summary.summarise(measured, talker)
    assert row.ttft_ms.p50 == pytest.approx(450)
    assert row.tpot_ms.p50 == pytest.approx(1000 * (5.0 - 0.9) / 14)
    assert row.tokens_per_step == pytest.approx(16 / 7)


@pytest.mark.parametrize(
    ("mine", "theirs", "at"),
    [
        ([[1, 2], [3, 4]], [[1, 2], [3, 4]], None),
        # as one text they would be equal
        ([[1, 2], [3, 4]], [[1, 2, 3], [4]], 2),
        ([[1, 2, 3], [4]], [[1, 2], [3, 4]], 2),
        ([[1, 2], [3, 5]], [[1, 2], [3, 4]], 3),
        ([[1], [3]], [[1], [3, 4]], 2),
        ([[]], [[1]], 0),
    ],
)
def test_turns_are_compared_one_by_one(mine: list[list[int]], theirs: list[list[int]], at: int | None) -> None:
    """Catches two conversations that are equal only when their turns are strung together."""
    run = Run([token for turn in mine for token in turn], turns=[len(turn) for turn in mine])
    assert difference(run, theirs) == at


def test_the_clean_row_leaves_out_what_was_trained_on(talker: TransformersTarget) -> None:
    """Catches an overlapping prompt that still counts, and one that was not looked for taken for clean."""
    measured = hand_made(talker)
    found = summary.summarise(
        measured, talker, Overlaps({("quiz", "a"): True, ("quiz", "b"): False}, "one 13-gram")
    ).clean
    assert found is not None and found.model_dump(mode="json") == {
        "contaminated": ["a"], "checked": 2, "rule": "one 13-gram", "tokens_per_step": 2.0,
        "speedup": pytest.approx(1.5),
    }  # fmt: skip
    unknown = summary.summarise(measured, talker, Overlaps({("quiz", "a"): True}))
    assert [prompt.contaminated for prompt in unknown.per_prompt] == [True, None]
    assert (unknown.clean.checked, unknown.clean.tokens_per_step, unknown.clean.speedup) == (1, None, None)
    assert summary.summarise(measured, talker).clean is None
    assert summary.summarise(measured, talker, Overlaps({}, "one 13-gram")).clean is None


def test_groups_add_up_to_the_row(talker: TransformersTarget) -> None:
    """Catches a prompt that is in two groups or in none, such as one whose row names none; and groups where none are
    named."""
    measured = hand_made(talker)
    measured.samples += [replace(measured.samples[0], prompt=Prompt("c", ("?",)))]
    row = summary.summarise(measured, talker)
    assert [group.name for group in row.by_group] == ["", "en", "ru"]
    sums = {name: sum(getattr(group, name) for group in row.by_group) for name in ("prompts", "tokens", "steps")}
    assert sums == {"prompts": row.prompts, "tokens": row.tokens, "steps": row.steps}
    judged, accepted = (sum(getattr(group, name) for group in row.by_group) for name in ("judged", "accepted"))
    assert row.token_acceptance == pytest.approx(accepted / judged)
    unnamed = [replace(sample, prompt=Prompt(sample.prompt.id, ("?",))) for sample in measured.samples]
    assert summary.summarise(hand_made(talker, samples=unnamed), talker).by_group == ()


def test_training_is_known_by_its_held_out_answers() -> None:
    """Catches acceptance of texts that were learnt, which promises too much, and a comparison with texts that are
    hotter."""
    held_out = {"answers": 32, "temperature": 0.6, "overlap": [0.6, 0.5], "agreement": [0.5, 0.4]}
    lines = [{"step": 1, "loss": 1.0, "acceptance": [0.9, 0.9]}, {"step": 1, "held_out": held_out}]
    found = training_of({}, lines)
    assert (found.held_out, found.acceptance, found.agreement, found.temperature) == (32, (0.6, 0.5), (0.5, 0.4), 0.6)
    assert found.accepted_by_depth(0) == pytest.approx((0.5, 0.2))
    assert found.accepted_by_depth(0.6) == pytest.approx((0.6, 0.3))
    assert found.accepted_by_depth(1.0) == ()
    assert training_of({}, lines[:1]).accepted_by_depth(0) == ()
    known = training_of(
        {"training": {"step": 40, "seconds": 2.5, "tokens": 900}}, [{"step": 20, "loss": 0.5}, {"step": 40}]
    )
    shown = Report(target="t", training={"dspark": known}).training["dspark"]
    assert (shown.steps, shown.seconds, shown.tokens, shown.loss_curve) == (40, 2.5, 900, ((20.0, 0.5),))
    lines[1]["held_out"] = held_out | {"with_siblings": [0.7, 0.4]}
    beside = training_of({}, lines)
    assert beside.accepted_by_depth(0) == pytest.approx((0.7, 0.2)), "nothing is drafted behind a runner-up"
    assert beside.accepted_by_depth(0.6) == found.accepted_by_depth(0.6)


def test_prompts_that_were_served_together_count_as_one(talker: TransformersTarget) -> None:
    """Catches eight prompts of two batches taken for eight independent ones: two are too few for an interval."""
    two = hand_made(talker).samples
    batched = [replace(two[n % 2], group=n // 4) for n in range(8)]
    assert summary.summarise(hand_made(talker, samples=batched), talker).speedup_range is None
    alone = [replace(sample, group=None) for sample in batched]
    assert summary.summarise(hand_made(talker, samples=alone), talker).speedup_range is not None
