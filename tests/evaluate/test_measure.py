"""What is measured is what happened: counts, shares and exactness against brute force, faults planted to be found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tiny import DRAFTER, make_folder

import outrider
from outrider import config as configs
from outrider import load_drafter
from outrider.decoding import loop
from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.parties import Drafter
from outrider.errors import ConfigError, DataError, OutriderError
from outrider.evaluate import measure
from outrider.evaluate.measure import Config, conditional, evaluate, first_difference, fresh_share, generate_once
from outrider.evaluate.report import Report, Row
from outrider.targets.transformers import TransformersTarget, load_target

PROMPTS = ["tell 1", "xyxyxy", "q", "another one"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> TransformersTarget:
    return load_target(make_folder(tmp_path_factory.mktemp("target") / "tiny"), dtype="float64")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("task") / "quiz.jsonl"
    path.write_text("".join(json.dumps({"id": f"q{i}", "prompt": prompt}) + "\n" for i, prompt in enumerate(PROMPTS)))
    return str(path)


def settings(task: str, **more: Any) -> Config:
    return Config(**({"tasks": (task,), "prompts": 3, "max_new_tokens": 16, "fresh": 0.0} | more))


@pytest.fixture(scope="module")
def drafters(talker: TransformersTarget) -> dict[str, Drafter]:
    return {
        "ngram": load_drafter("ngram", talker, shortest=1),
        "dspark": load_drafter("dspark", talker, **{key: value for key, value in DRAFTER.items() if key != "kind"}),
    }


@pytest.fixture(scope="module")
def report(talker: TransformersTarget, drafters: dict[str, Drafter], task: str) -> Report:
    return evaluate(talker, drafters, settings(task))


# ── pieces ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("mine", "theirs", "at"),
    [
        ([], [], None), ([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([5], [1, 2], 0), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2),
        ([], [1], 0), ([1, 2, 9, 4], [1, 2, 3, 5], 2),
    ],
)  # fmt: skip
def test_the_first_difference_is_found(mine: list[int], theirs: list[int], at: int | None) -> None:
    """Catches two texts that count as equal because the shorter one is a beginning of the other."""
    assert first_difference(mine, theirs) == at
    assert first_difference(tuple(theirs), mine) == at


def steps(seed: int, count: int = 40) -> list[tuple[int, int]]:
    """(accepted, reached) of random steps."""
    order = random.Random(seed)
    return [(order.randint(0, reached), reached) for reached in (order.randint(0, 5) for _ in range(count))]


@pytest.mark.parametrize("seed", range(5))
def test_conditional_acceptance_is_counted_among_drafts_that_came_so_far(seed: int) -> None:
    """Catches drafts that were too short being counted as rejections; by brute force over every step."""
    pairs = steps(seed)
    found = conditional([a for a, _ in pairs], [r for _, r in pairs])
    for k in range(5):
        came = [(a, r) for a, r in pairs if r > k and a >= k]
        assert found[k] == (pytest.approx(sum(a > k for a, _ in came) / len(came)) if came else None)


def test_conditional_acceptance_multiplies_to_acceptance_by_depth() -> None:
    """Catches one of the two being counted in another way; a law where every draft has the same length."""
    pairs = [(a, 4) for a, _ in steps(1) if a <= 4]
    found = conditional([a for a, _ in pairs], [4] * len(pairs))
    for k in range(4):
        assert np.prod(found[: k + 1]) == pytest.approx(sum(a > k for a, _ in pairs) / len(pairs))


def test_depths_that_were_never_reached_are_not_measured() -> None:
    """Catches a division by zero, and 0 in the place of nothing."""
    assert conditional([], []) == []
    assert conditional([0, 0], [0, 0]) == []
    assert conditional([0, 0], [2, 2]) == [0.0, None]


def test_a_loop_has_few_fresh_pieces() -> None:
    """Catches short texts counting as loops, and loops of any period that pass."""
    assert fresh_share(list(range(50))) == 1.0
    assert fresh_share([1] * 7) == 1.0
    assert fresh_share([]) == 1.0
    assert fresh_share([1] * 100) == pytest.approx(1 / 93)
    assert fresh_share([1, 2, 3] * 40) == pytest.approx(3 / 113)
    assert fresh_share([1, 1, 2], n=1) == pytest.approx(2 / 3)


def test_quantiles_are_numpy_s() -> None:
    """Catches another definition of a percentile."""
    order = random.Random(3)
    for count in (1, 2, 3, 10, 101):
        values = [order.expovariate(1) for _ in range(count)]
        for share in (0.0, 0.5, 0.95, 0.99, 1.0):
            assert measure._quantile(values, share) == pytest.approx(np.quantile(values, share))
    assert np.isnan(measure._quantile([], 0.5))


# ── a whole evaluation ────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_drafter_has_its_rows(report: Report) -> None:
    """Catches a drafter or a temperature that is left out: the last is measured at each, the others at the first."""
    assert [(row.drafter, row.temperature, row.task, row.prompts) for row in report.rows] == [
        ("ngram", 0.0, "quiz", 3), ("dspark", 0.0, "quiz", 3), ("dspark", 1.0, "quiz", 3),
    ]  # fmt: skip
    assert [prompt.id for prompt in report.rows[0].per_prompt] == ["q0", "q1", "q2"]


def test_greedy_text_is_exact_and_sampled_text_is_not_compared(report: Report) -> None:
    """Catches `exact` claimed for what was never compared, and denied for what is equal."""
    for row in report.rows:
        assert row.exact is (True if row.temperature == 0 else None)
        assert row.compared_tokens == (48 if row.temperature == 0 else 0)
        assert {prompt.exact for prompt in row.per_prompt} == {True if row.temperature == 0 else None}
        assert {prompt.first_difference for prompt in row.per_prompt} == {None}
        assert row.unlawful == 0


def test_tokens_per_step_is_tokens_over_steps(report: Report, talker: TransformersTarget) -> None:
    """Catches the bonus token being left out, or a mean of means."""
    for row in report.rows:
        assert row.tokens_per_step == pytest.approx(row.tokens / row.steps)
        assert row.tokens == sum(prompt.tokens for prompt in row.per_prompt) == 48
        assert row.steps == sum(prompt.steps for prompt in row.per_prompt) <= 48


def test_a_row_is_counted_from_its_runs(talker: TransformersTarget, drafters: dict[str, Drafter]) -> None:
    """Catches any of a row's numbers that is not what its steps say; two runs of steps made up, all counted by brute force."""
    pairs = [steps(1), steps(2)]
    runs = [
        measure.Run(
            tokens=list(range(sum(a + 1 for a, _ in pair))), steps=len(pair), accepted=[a for a, _ in pair],
            reached=[r for _, r in pair], seconds=2.0 + i, first_s=0.5, gaps_s=[0.01 * n for n in range(1, len(pair))],
            draft_s=0.3, verify_s=0.5, other_s=0.2, model_s=0.7, unlawful=i,
        )
        for i, pair in enumerate(pairs)
    ]  # fmt: skip
    plain = [
        measure.Run(tokens=run.tokens, steps=len(run.tokens), seconds=9.0, first_s=1.0, verify_s=8.0, model_s=6.0)
        for run in runs
    ]
    references = [runs[0].tokens, [*runs[1].tokens[:5], -1, *runs[1].tokens[6:]]]
    measured = measure.Measured(measure.Entry("n", drafters["ngram"]), "quiz", ["a", "b"], runs, plain, references, [4.0, 4.0])
    row = measure.summarise(measured, talker)
    every = [pair for part in pairs for pair in part]
    tokens = sum(a + 1 for a, _ in every)
    assert row["tokens_per_step"] == tokens / len(every)
    for k in range(5):
        came = [(a, r) for a, r in every if r > k]
        assert row["accepted_by_depth"][k] == pytest.approx(sum(a > k for a, _ in came) / len(came))
        assert row["rejections_by_depth"][k] == sum(a == k for a, r in came)
    assert len(row["accepted_by_depth"]) == 5
    assert row["tokens_per_s"] == pytest.approx(tokens / 5)
    assert row["plain_tokens_per_s"] == pytest.approx(tokens / 18)
    assert row["generate_tokens_per_s"] == pytest.approx(tokens / 8)
    assert row["speedup"] == pytest.approx(18 / 5)
    assert row["share"] == pytest.approx({"draft": 0.3, "verify": 0.5, "other": 0.2})
    assert row["loop_overhead"] == pytest.approx(0.3)
    assert row["plain_loop_overhead"] == pytest.approx(0.25)
    gaps = [1000 * gap for run in runs for gap in run.gaps_s]
    assert row["itl_ms"] == pytest.approx({f"p{p}": np.percentile(gaps, p) for p in (50, 95, 99)})
    assert row["itl_curve_ms"] == pytest.approx(list(np.percentile(gaps, range(101))))
    assert row["ttft_ms"]["p50"] == pytest.approx(500)
    assert row["tpot_ms"]["p50"] == pytest.approx(
        np.mean([1000 * (2 + i - 0.5) / (len(run.tokens) - 1) for i, run in enumerate(runs)])
    )
    assert (row["exact"], row["unlawful"], row["prompts"]) == (False, 1, 2)
    assert [(prompt["id"], prompt["exact"], prompt["first_difference"]) for prompt in row["per_prompt"]] == [
        ("a", True, None), ("b", False, 5),
    ]  # fmt: skip
    assert [prompt["speedup"] for prompt in row["per_prompt"]] == pytest.approx([9 / 2, 9 / 3])
    assert Row(**row).is_inexact


def test_shares_sum_to_one(report: Report) -> None:
    """Catches a part of the time that nobody is charged with."""
    for row in report.rows:
        assert row.share.draft + row.share.verify + row.share.other == pytest.approx(1)
        assert 0 < row.loop_overhead < 1
        assert row.seconds > 0
        assert row.speedup == pytest.approx(row.tokens_per_s / row.plain_tokens_per_s)
        assert row.ttft_ms.p50 <= row.ttft_ms.p99


def test_a_report_survives_its_file(report: Report, tmp_path: Path) -> None:
    """Catches a number that JSON can't hold."""
    report.save(tmp_path)
    assert Report.load(tmp_path).rows == report.rows
    assert "NaN" not in (tmp_path / "report.json").read_text()


def test_the_package_is_the_function(talker: TransformersTarget, task: str) -> None:
    """Catches `outrider.evaluate` as its documentation calls it, and the count that it tells of."""
    told: list[tuple[int, int, int]] = []
    found = outrider.evaluate(
        talker, {"ngram": load_drafter("ngram", talker)}, settings(task, prompts=2, temperatures=(0.0,)),
        provenance={"who": "me"}, on_prompt=lambda *counts: told.append(counts),
    )  # fmt: skip
    assert told == [(1, 2, 0), (2, 2, 0)]
    assert found.provenance == {"who": "me"}
    assert found.share_left_out == 0


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_rule_that_keeps_one_token_too_many_is_found_out(
    talker: TransformersTarget, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a measurement of exactness that can't fail; the first difference is where brute force sees it too."""
    real = loop.accept_greedy

    def generous(draft: Draft, choice: torch.Tensor, vocabulary: int) -> Kept:
        found = real(draft, choice, vocabulary)
        kept = found.accepted[0]
        if len(found.paths) > 1 or kept >= draft.live[0]:
            return found
        return Kept([list(range(kept + 1))], [int(choice[0, kept + 1])], found.unlawful)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "accept_greedy", generous)
        drafter = load_drafter("dspark", talker, **{key: value for key, value in DRAFTER.items() if key != "kind"})
        found = evaluate(talker, {"dspark": drafter}, settings(task, temperatures=(0.0,)))
        texts = outrider.generate(
            talker, [[{"role": "user", "content": p}] for p in PROMPTS[:3]], drafter, max_new_tokens=16, slots=1
        )
    (row,) = found.rows
    assert row.exact is False
    for prompt, seen, text in zip(PROMPTS, row.per_prompt, texts, strict=False):
        wanted, _ = generate_once(talker, talker.encode([{"role": "user", "content": prompt}]), 16)
        assert seen.exact is False
        assert seen.first_difference == first_difference(text.tokens, wanted) is not None


def test_a_fault_of_plain_decoding_is_not_the_drafter_s(
    talker: TransformersTarget, task: str, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches `plain_exact` being copied from the drafter's row: here only transformers' text is wrong, so neither is exact."""
    real = measure.generate_once

    def wrong(*given: Any) -> tuple[list[int], float]:
        tokens, seconds = real(*given)
        return [*tokens[:-1], tokens[-1] ^ 1], seconds

    monkeypatch.setattr(measure, "generate_once", wrong)
    found = measure.measure(talker, [measure.Entry("ngram", drafters["ngram"])], settings(task))
    assert (found.rows[0]["exact"], found.rows[0]["plain_exact"]) == (False, False)
    assert {prompt["first_difference"] for prompt in found.rows[0]["per_prompt"]} == {15}


# ── loops, and what can't be measured ─────────────────────────────────────────────────────────────────────────────────


def test_prompts_that_loop_are_left_out_and_listed(
    talker: TransformersTarget, task: str, drafters: dict[str, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a loop that flatters the drafter, or one that vanishes without a word; another prompt takes its place."""
    real, calls = measure.fresh_share, []

    def share(tokens: list[int]) -> float:
        calls.append(tokens)
        return 0.25 if len(calls) == 2 else real(tokens)

    monkeypatch.setattr(measure, "fresh_share", share)
    found = evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, fresh=0.3, temperatures=(0.0,)))
    assert [prompt.id for prompt in found.rows[0].per_prompt] == ["q0", "q2", "q3"]
    assert [(left.id, left.fresh_share) for left in found.left_out] == [("q1", 0.25)]
    assert found.share_left_out == pytest.approx(1 / 4)


def test_a_task_of_loops_alone_is_refused(talker: TransformersTarget, task: str, drafters: dict[str, Drafter]) -> None:
    """Catches a division by zero, or a report without numbers."""
    with pytest.raises(DataError, match=r"every one of 4 prompts falls into a loop; set evaluate\.fresh=0"):
        evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, fresh=1.5))


@pytest.mark.parametrize("values", [{"tasks": ()}, {"temperatures": ()}, {"prompts": 0}, {"temperatures": (-1.0,)}])
def test_settings_that_measure_nothing_are_refused(values: dict[str, Any]) -> None:
    """Catches a ZeroDivisionError, or a ValueError of Python's, after the models were loaded."""
    with pytest.raises(ValidationError):
        Config(**values)


def test_an_evaluation_of_no_drafter_is_refused(talker: TransformersTarget, task: str) -> None:
    """Catches a ZeroDivisionError in the middle of the first prompt."""
    with pytest.raises(OutriderError, match="drafter"):
        evaluate(talker, {}, settings(task))


def test_an_answer_longer_than_the_context_is_refused(
    talker: TransformersTarget, task: str, drafters: dict[str, Drafter]
) -> None:
    """Catches a prompt cut from the wrong end, and `generate` running beyond the context: a false alarm of inexactness."""
    for count in (255, 256, 300):
        with pytest.raises(OutriderError, match="max_new_tokens"):
            evaluate(talker, {"ngram": drafters["ngram"]}, settings(task, prompts=1, max_new_tokens=count, temperatures=(0.0,)))


def test_a_prompt_too_long_for_the_context_loses_its_beginning(
    talker: TransformersTarget, drafters: dict[str, Drafter], tmp_path: Path
) -> None:
    """Catches a crash on one long prompt of a task, and a cut that leaves no room for the answer."""
    path = tmp_path / "long.txt"
    path.write_text("".join(random.Random(1).choices("abcdefgh", k=500)) + "\n")
    (row,) = evaluate(talker, {"ngram": drafters["ngram"]}, settings(str(path), prompts=1, temperatures=(0.0,))).rows
    assert (row.tokens, row.exact) == (16, True)


# ── lossy rules ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_lossy_rule_is_said_in_every_row(
    talker: TransformersTarget, drafters: dict[str, Drafter], task: str, report: Report
) -> None:
    """Catches a rule that is not used, or is used and not told; a greedy text stays the target's own, at distance 0."""
    config = settings(task, rule="typical", allow_lossy=True, temperatures=(0.0, 1.0))
    found = evaluate(talker, drafters, config)
    assert {row.rule for row in found.rows} == {"typical(epsilon=0.09, delta=0.3)"}
    assert {row.lossless for row in found.rows} == {False}
    for row in found.rows:
        if row.temperature == 0:
            assert (row.exact, row.distance) == (True, 0.0)
        else:
            assert 0 < row.distance < 1
    for row in report.rows:
        assert (row.rule, row.lossless, row.distance) == (None, True, 0.0)


def test_a_rows_distance_is_that_of_its_tokens(talker: TransformersTarget, drafters: dict[str, Drafter], task: str) -> None:
    """Catches a mean over steps or prompts in the place of tokens."""
    runs = [measure.Run([1] * 4, 2, [1, 1], [1, 1], 1.0, strayed=1.0), measure.Run([1], 1, [0], [1], 1.0, strayed=0.5)]
    for run in runs:
        run.verify_s = 1.0
    measured = measure.Measured(
        measure.Entry("n", drafters["ngram"], 1.0), "quiz", ["a", "b"], runs, runs, [[1] * 4, [1]], [1.0, 1.0], rule="r"
    )
    row = measure.summarise(measured, talker)
    assert (row["rule"], row["lossless"], row["distance"]) == ("r", False, 0.3)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rule": "typical"}, "evaluate.allow_lossy: rule 'typical' changes .* set allow_lossy: true"),
        ({"rule": "typical", "allow_lossy": False}, "evaluate.allow_lossy: .* set allow_lossy: true"),
        ({"rule": "tipical", "allow_lossy": True}, "evaluate.rule: unknown lossy rule .* did you mean 'typical'"),
    ],
)
def test_a_lossy_rule_needs_consent(values: dict[str, Any], said: str) -> None:
    """Catches a recipe that loses exactness by one word, and an error without its key."""
    with pytest.raises(ConfigError, match=said):
        configs.build(Config, values, "evaluate")


def test_consent_to_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a setting without effect that is ignored in silence."""
    assert Config(allow_lossy=True).rule is None
    assert "allow_lossy has no effect" in caplog.text


def test_hooks_are_gone_after_a_run(talker: TransformersTarget, report: Report) -> None:
    """Catches a clock that is left in the model and slows every later pass."""

    def hooks() -> Iterator[int]:
        for module in (talker.model, talker.model.base_model):
            yield len(module._forward_pre_hooks) + len(module._forward_hooks)

    assert list(hooks()) == [0, 0]


def test_what_a_report_says_of_training_is_what_the_checkpoint_says(report: Report) -> None:
    """Catches two names for one fact, so that the report says nothing."""
    found = measure.training_of(
        {"training": {"step": 40, "seconds": 2.5, "tokens": 900}}, [{"step": 20, "loss": 0.5}, {"step": 40}]
    )
    shown = Report(target="t", training={"dspark": found}).training["dspark"]
    assert (shown.steps, shown.seconds, shown.tokens, shown.loss_curve) == (40, 2.5, 900, ((20.0, 0.5),))
