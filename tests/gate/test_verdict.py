"""The gate stops every planted fault, stops none of its twins, and never takes what was not measured for a pass."""

import copy
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from verbs import outrider_with

from benchmarks.gate import reports
from outrider.errors import ConfigError, DataError
from outrider.gate.depths import depths_of
from outrider.gate.outcome import GateOutcome
from outrider.gate.policy import Policy, policy_of
from outrider.gate.statistics.noise import prompts_needed
from outrider.gate.verdict import gate
from outrider.report.schema import Report

Made = dict[str, Any]
QUICK = Policy(draws=2000)
TASKS = {"math": 24, "code": 24, "chat": 24}
RULES = (
    "exactness", "lossy rule", "machine", "speed", "tokens per step", "p99 TPOT", "acceptance by depth",
    "train-serve skew", "contamination", "clean figure", "left out",
)  # fmt: skip


def made(seed: int = 1, spread: float = 0.03, **settings: Any) -> tuple[Made, Made]:
    """A candidate and a baseline of the same drafter, as JSON holds them."""
    draw = np.random.default_rng(seed)
    return reports(draw, draw.normal(0, spread, (24, 2)), settings.pop("tasks", TASKS), **settings)


def twins() -> tuple[Made, Made]:
    """A baseline and its copy: no noise at all."""
    _, old = made()
    return copy.deepcopy(old), old


def judge(new: Made, old: Made, policy: Policy = QUICK, **options: Any) -> GateOutcome:
    return gate(Report.model_validate(new), Report.model_validate(old), policy, **options)


def for_prompts(report: Made, change: Callable[[Made], Any], every: int = 1) -> None:
    for row in report["rows"]:
        for prompt in row["per_prompt"][::every]:
            change(prompt)


def one_text(new: Made) -> None:
    new["rows"][1]["per_prompt"][3] |= {"exact": False, "first_difference": 7}


def one_row(new: Made) -> None:
    new["rows"][2]["exact"] = False


def lossy(new: Made) -> None:
    new["rows"][0] |= {"lossless": False, "rule": "typical 0.3", "distance": 0.04}


def slower(new: Made) -> None:
    for_prompts(new, lambda prompt: prompt.update(speedup=0.96 * prompt["speedup"]))


def more_steps(new: Made) -> None:
    for_prompts(new, lambda prompt: prompt.update(steps=math.ceil(1.08 * prompt["steps"])))


def shallow(new: Made) -> None:
    for row in new["rows"]:
        # a third of the steps that kept all of the draft keep one less
        steps = row["accepted_histogram"][-1]
        moved = steps[-1] // 3
        steps[-1] -= moved
        steps[-2] += moved


def skewed(new: Made) -> None:
    for row in new["rows"]:
        row["predicted_by_depth"] = [share + 0.2 for share in row["predicted_by_depth"]]


def known(new: Made) -> None:
    for row in new["rows"]:
        row["clean"] |= {"contaminated": [prompt["id"] for prompt in row["per_prompt"][:8]]}


def known_ones_only(new: Made) -> None:
    """As good as before on the whole: what is known got better, what is not got worse."""
    known(new)
    for row in new["rows"]:
        for place, prompt in enumerate(row["per_prompt"]):
            prompt["steps"] = max(1, math.ceil(prompt["steps"] * (0.6 if place < 8 else 1.2)))


@functools.cache
def twins_judged() -> GateOutcome:
    return judge(*twins())


FAULTS = [
    ("exactness", one_text),
    ("exactness", one_row),
    ("lossy rule", lossy),
    ("speed", slower),
    ("exactness", lambda new: new["rows"][0].update(plain_exact=False)),
    ("tokens per step", more_steps),
    ("p99 TPOT", lambda new: for_prompts(new, lambda prompt: prompt.update(tpot_ms=3 * prompt["tpot_ms"]), every=8)),
    ("acceptance by depth", shallow),
    ("train-serve skew", skewed),
    ("contamination", known),
    ("clean figure", known_ones_only),
    ("left out", lambda new: new.update(share_left_out=0.3)),
]


@pytest.mark.parametrize(("rule", "fault"), FAULTS)
def test_a_planted_fault_stops_by_its_own_rule_and_the_twin_passes(rule: str, fault: Callable[[Made], None]) -> None:
    """Catches a rule that sees nothing, or that stops what did not change."""
    new, old = twins()
    clean = twins_judged()
    assert [found.rule for found in clean.findings] == list(RULES)
    # ours but not perfect: a report and its copy have no loss, only what both lack
    assert clean.verdict == "pass" and clean.finding(rule).verdict == "pass", clean.headline
    fault(new)
    found = judge(new, old)
    assert found.verdict == "stop" and found.finding(rule).verdict == "stop"
    assert rule in found.headline
    assert len(found.finding(rule).reason.splitlines()) == 1 and len(found.finding(rule).reason) > 20
    # and it is not stopped for what it does better
    assert judge(old, new).finding(rule).verdict != "stop" or fault in (known_ones_only,)


def test_what_is_sure_alone_but_not_among_all_tests_only_warns() -> None:
    """Catches intervals that are not corrected for the number of tests: one task of three 6 % slower, noise of 12 %."""
    new, old = twins()
    draw = np.random.default_rng(2)
    noise = draw.normal(0, 1, 24)
    noise = (noise - noise.mean()) / noise.std() * 0.12
    for prompt, stray in zip(new["rows"][0]["per_prompt"], noise, strict=True):
        prompt["speedup"] *= 0.94 * math.exp(stray)
    found = judge(new, old).finding("speed")
    assert found.verdict == "warn"
    task = next(part for part in found.parts if part.where == "math")
    assert task.verdict == "warn" and task.interval and task.corrected
    assert task.corrected.low < task.interval.low < task.interval.high < 1 < task.corrected.high
    assert judge(new, old, Policy(draws=2000, warnings_stop=True)).stops
    assert not judge(new, old).stops


def test_a_small_loss_everywhere_shows_over_all_tasks_together_and_on_none_alone() -> None:
    """Catches a gate without a test over all tasks: 3 % with a noise of 8 % hides in nine tasks of 22.  No chance of a
    false alarm: the noise is the same in every run."""
    draw = np.random.default_rng(5)
    new, old = reports(draw, draw.normal(0, 0.08 / math.sqrt(2), (400, 2)), slower=0.03)
    found = judge(new, old).finding("speed")
    assert [part.where for part in found.parts if part.verdict == "stop"] == ["all tasks"]


def without(new: Made, fields: tuple[str, ...]) -> None:
    for name in fields:
        new.pop(name, None)
    for row in new["rows"]:
        for place in (row, *row["per_prompt"]):
            for name in fields:
                place.pop(name, None)


@pytest.mark.parametrize(
    ("rule", "fields"),
    [
        ("speed", ("speedup",)), ("tokens per step", ("steps",)), ("p99 TPOT", ("tpot_ms",)),
        ("acceptance by depth", ("accepted_histogram",)), ("train-serve skew", ("predicted_by_depth",)),
        ("contamination", ("clean",)), ("clean figure", ("clean", "contaminated")),
        ("left out", ("share_left_out",)), ("machine", ("fingerprint",)), ("lossy rule", ("lossless",)),
    ],
)  # fmt: skip
def test_a_missing_field_is_not_measured_and_said(rule: str, fields: tuple[str, ...]) -> None:
    """Catches None that counts as 0, as equal, or as a pass; a baseline that lacks speeds, too, is no better."""
    new, old = twins()
    without(new, fields)
    if "speedup" in fields:
        for row in new["rows"]:
            row["speedup"] = None
    if rule == "speed":
        without(old, fields)
        for row in old["rows"]:
            row.setdefault("speedup", None)
    outcome = judge(new, old)
    assert outcome.finding(rule).verdict == "not measured" and outcome.finding(rule).reason
    assert f"not measured: {rule}" in outcome.headline or f", {rule}" in outcome.headline
    assert outcome.stops == (rule in QUICK.required)
    assert outcome.as_json()["rules"][RULES.index(rule)]["verdict"] == "not measured"


def test_a_task_without_speeds_does_not_pass_behind_the_others() -> None:
    """Catches a task that crashed in the candidate and is carried by eight that did not."""
    new, old = twins()
    for_prompts(new, lambda prompt: prompt.update(speedup=None), every=3)
    third = judge(new, old).finding("speed")
    assert third.verdict == "not measured" and "16 of 24" in third.reason
    new, old = twins()
    for prompt in new["rows"][1]["per_prompt"]:
        prompt["speedup"] = None
    outcome = judge(new, old)
    assert outcome.stops and "speed is required" in outcome.headline and "code: 0 of 24 prompts" in outcome.headline
    assert judge(new, old, Policy(draws=2000, required=("exactness",))).verdict == "pass"


def test_a_task_whose_texts_were_not_compared_does_not_pass_behind_the_others() -> None:
    """Catches exactness taken for granted on one task; a row that samples is not compared by its nature."""
    new, old = twins()
    new["rows"][1] |= {"exact": None, "compared_tokens": 0}
    for prompt in new["rows"][1]["per_prompt"]:
        prompt["exact"] = None
    outcome = judge(new, old)
    assert outcome.stops and "exactness is required and was not measured" in outcome.headline
    for report in (new, old):
        report["rows"][1]["temperature"] = 1.0
    assert judge(new, old).verdict == "pass"
    for row in (*new["rows"], *old["rows"]):
        row |= {"exact": None, "temperature": 1.0}
    nowhere = judge(new, old)
    assert nowhere.finding("exactness").verdict == "not measured" and "exactness is required" in nowhere.headline


def test_one_prompt_is_too_few_and_so_it_does_not_pass() -> None:
    """Catches an interval of one value, which has no width."""
    new, old = made(tasks={"math": 1})
    outcome = judge(new, old)
    assert {outcome.finding(rule).verdict for rule in ("speed", "tokens per step", "p99 TPOT")} == {"not measured"}
    assert outcome.verdict == "underpowered" and "1 prompt is too few" in outcome.headline and outcome.exit_code == 3
    assert judge(new, old, Policy(draws=2000, required=())).exit_code == 0


def test_prompts_too_few_to_show_a_loss_of_five_percent_are_underpowered() -> None:
    """Catches a PASS of six noisy prompts, which a draft that lost a quarter of its speed would get too."""
    few = judge(*made(5, 0.1, tasks={"math": 6}))
    suite = ElementTree.fromstring(few.junit()).find("testsuite")
    assert suite is not None and (suite.get("failures"), suite.get("errors")) == ("1", "0"), "a CI server fails, too"
    assert suite.get("tests") == str(len(suite.findall("testcase")))
    assert few.exit_code == 3 and few.headline.startswith("UNDERPOWERED: 6 prompts can't show a loss")
    needed = int(few.headline.partition("about ")[2].split()[0])
    assert 40 < needed < 200
    assert judge(*made(5, 0.1, tasks={"math": needed + 40})).exit_code == 0
    assert judge(*made(5, 0.1, tasks={"math": 6}), Policy(draws=2000, detectable_loss=None)).exit_code == 0
    assert judge(*made(5, 0.1, tasks={"math": 6}), Policy(draws=2000, speed={"action": "off"})).exit_code == 0
    new, old = made(5, 0.1, tasks={"math": 6})
    new["rows"][0]["exact"] = False
    assert judge(new, old).verdict == "stop"  # what is wrong is wrong with few prompts too


def test_tasks_of_one_prompt_are_tested_together() -> None:
    """Catches strata of one prompt, which would never vary: nine prompts that differ by chance must not stop."""
    new, old = made(3, 0.1, tasks={f"task{i}": 1 for i in range(9)})
    found = judge(new, old).finding("speed")
    whole = found.parts[0]
    assert whole.where == "all tasks" and whole.prompts == 9 and whole.interval is not None
    assert whole.interval.high / whole.interval.low > 1.05
    assert sum(part.verdict == "not measured" for part in found.parts) == 9


def test_acceptance_by_depth_is_the_same_from_the_histogram_and_from_older_fields() -> None:
    """Catches an older report read as if its drafts were all of one depth.  By hand: 10 steps drafted 1 deep, 6 of them
    kept; 20 drafted 2 deep, 5 kept none, 5 kept one, 10 kept both."""
    _, old = made(tasks={"math": 5})
    row = old["rows"][0] | {"accepted_histogram": [[], [4, 6], [5, 5, 10]]}
    new = depths_of(Report.model_validate(old | {"rows": [row]}).rows[0])
    shares = {"accepted_by_depth": [21 / 30, 10 / 20], "conditional_acceptance": [21 / 30, 10 / 15]}
    older = row | shares | {"accepted_histogram": None, "rejections_by_depth": [9, 5]}
    same = depths_of(Report.model_validate(old | {"rows": [older]}).rows[0])
    assert new is not None and same is not None
    assert new.reached.tolist() == [30, 20] and new.accepted.tolist() == [21, 10]
    np.testing.assert_allclose(same, new)


def test_reports_of_other_machines_are_refused_or_judged_without_times() -> None:
    """Catches times of two machines compared, and a slower machine blamed on the draft."""
    new, old = twins()
    slower(new)
    new["fingerprint"] = {"cpu": "another", "threads": 4}
    with pytest.raises(
        DataError, match=r"cpu simulated against another.*threads unknown against 4.*allow-other-machine"
    ):
        judge(new, old)
    outcome = judge(new, old, allow_other_machine=True)
    assert outcome.verdict == "warn"
    assert {outcome.finding(rule).verdict for rule in ("speed", "p99 TPOT")} == {"not measured"}
    assert "cpu simulated against another" in outcome.finding("machine").reason
    more_steps(new)
    assert judge(new, old, allow_other_machine=True).stops


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda new: new["rows"].pop(), "lacks the baseline's row of ngram on chat"),
        (lambda new: new.update(target="another/model"), "has target another/model, the baseline demo"),
        (lambda new: [p.update(id=f"x{p['id']}") for p in new["rows"][0]["per_prompt"][:6]], "share 18 of 24 prompts"),
        (lambda new: [p.update(tokens=64) for p in new["rows"][0]["per_prompt"][:6]], "of 6 the length differs"),
        (lambda new: new["rows"].append(new["rows"][0]), "two rows of ngram on math"),
    ],
)
def test_what_can_not_be_compared_is_refused_and_why(change: Callable[[Made], Any], message: str) -> None:
    """Catches a verdict on other prompts, other lengths, other targets."""
    new, old = twins()
    change(new)
    with pytest.raises(DataError, match=message):
        judge(new, old)


def test_a_fifth_of_the_prompts_may_be_missing_and_the_order_does_not_matter() -> None:
    """Catches prompts matched by place: the candidate's are turned round."""
    new, old = made()
    straight = judge(new, old).finding("speed")
    for row in new["rows"]:
        row["per_prompt"].reverse()
    assert judge(new, old).finding("speed") == straight
    for row in new["rows"]:
        row["per_prompt"] = row["per_prompt"][4:]
    assert judge(new, old).finding("speed").lead.prompts == 60


def test_a_drafter_that_takes_anothers_place_is_compared_with_it() -> None:
    """Catches a new kind of drafter that matches nothing and so passes."""
    new, old = twins()
    for row in new["rows"]:
        row["drafter"] = "eagle3"
    slower(new)
    outcome = judge(new, old)
    assert outcome.finding("speed").verdict == "stop" and "eagle3 replaces ngram." in outcome.notes


def test_a_row_that_the_baseline_lacks_must_still_be_exact() -> None:
    """Catches exactness looked at in matched rows alone."""
    new, old = twins()
    old["rows"].pop()
    assert judge(new, old).verdict == "pass"
    new["rows"][-1]["exact"] = False
    assert judge(new, old).finding("exactness").verdict == "stop"


def test_a_policy_file_lies_over_the_built_in_one(tmp_path: Path) -> None:
    """Catches keys that are ignored in silence."""
    place = tmp_path / "gate.yaml"
    place.write_text("speed: {tolerated: 0.1}\nleft_out: {action: off}\ntokens_per_step: {action: warn}\n")
    found = policy_of(place)
    assert (found.speed.tolerated, found.left_out.action, found.p99_tpot) == (0.1, "off", Policy().p99_tpot)
    place.write_text("speed: {tolerate: 0.1}\n")
    with pytest.raises(ConfigError, match="did you mean 'tolerated'"):
        policy_of(place)
    place.write_text("exactness: {action: warn}\n")
    with pytest.raises(ConfigError, match="unknown key 'exactness'"):
        policy_of(place)
    place.write_text("score: {action: warn}\n")
    with pytest.raises(ConfigError, match="unknown key 'score'; it was removed, use `outrider lm-eval`"):
        policy_of(place)


def test_a_policy_moves_limits_and_turns_stops_into_warnings_but_never_exactness() -> None:
    """Catches an action that is not obeyed, and a way round exactness."""
    new, old = twins()
    slower(new)
    assert judge(new, old, Policy(draws=2000, speed={"tolerated": 0.1})).verdict == "pass"
    assert judge(new, old, Policy(draws=2000, speed={"action": "warn"})).verdict == "warn"
    off = judge(new, old, Policy(draws=2000, speed={"action": "off"}))
    assert off.finding("speed").verdict == "not measured" and "off, by the policy" in off.finding("speed").reason
    assert off.verdict == "pass"  # and what is off is not asked for
    one_text(new)
    assert judge(new, old, Policy(draws=2000, speed={"action": "off"})).stops


def test_a_lossy_rule_that_the_policy_allows_warns_and_its_texts_may_differ() -> None:
    """Catches a setting that the exactness rule makes void, and one that lets other rows be inexact too."""
    new, old = twins()
    lossy(new)
    new["rows"][0]["exact"] = False
    allowed = Policy(draws=2000, lossy_rule="allow")
    assert judge(new, old).finding("exactness").verdict == "stop"
    assert judge(new, old, allowed).verdict == "warn"
    one_row(new)
    assert judge(new, old, allowed).finding("exactness").verdict == "stop"
    # a run under such a rule, of which every row is lossy, may pass
    for row in new["rows"]:
        row |= {"lossless": False, "rule": "typical", "distance": 0.01, "exact": False}
    assert judge(new, old, allowed).verdict == "warn" and judge(new, old).verdict == "stop"


def test_what_could_not_be_looked_for_is_neither_found_nor_clean() -> None:
    """Catches one prompt found of one looked for told as all of them, and prompts nobody looked for taken for clean."""
    new, old = twins()
    for row in new["rows"]:
        for prompt in row["per_prompt"]:
            prompt["contaminated"] = None
        row["clean"] |= {"contaminated": [], "checked": 0}
    first = new["rows"][0]
    first["per_prompt"][0]["contaminated"] = True
    first["clean"] |= {"contaminated": [first["per_prompt"][0]["id"]], "checked": 1}
    found = judge(new, old)
    assert found.finding("contamination").verdict == "not measured"
    assert "could not be looked up" in found.finding("contamination").reason
    assert found.finding("clean figure").verdict == "not measured"
    for row in new["rows"]:
        row["clean"] |= {"contaminated": [prompt["id"] for prompt in row["per_prompt"][:12]], "checked": 12}
    assert "at least 36 of" in judge(new, old).finding("contamination").reason


def test_sampled_rows_drawn_from_other_noise_are_refused() -> None:
    """Catches a loss hidden by a baseline whose drafts shared the target's noise and so kept fewer."""
    new, old = twins()
    for report in (new, old):
        for row in report["rows"]:
            row |= {"temperature": 1.0, "exact": None, "noise": "own"}
    assert judge(new, old).finding("tokens per step").verdict == "pass"
    for row in old["rows"]:
        row["noise"] = None
    with pytest.raises(DataError, match="measure the older one again"):
        judge(new, old)


def test_a_machine_that_was_slower_as_a_whole_is_not_the_drafts_fault() -> None:
    """Catches time per token compared as it is: the target alone was a fifth slower too."""
    new, old = twins()
    for_prompts(new, lambda p: p.update(tpot_ms=1.2 * p["tpot_ms"], plain_tpot_ms=1.2 * p["plain_tpot_ms"]))
    assert judge(new, old).finding("p99 TPOT").lead.figure == pytest.approx(1)
    assert judge(new, old).verdict == "pass"
    without(new, ("plain_tpot_ms",))
    assert judge(new, old).finding("p99 TPOT").verdict == "stop"


def test_a_skew_that_the_baseline_has_as_well_only_warns() -> None:
    """Catches a candidate kept back for what ships already, and a deeper draft stopped for reaching where less is
    kept."""
    new, old = twins()
    skewed(new)
    assert judge(new, old).finding("train-serve skew").verdict == "stop"
    skewed(old)
    assert judge(new, old).finding("train-serve skew").verdict == "warn"
    shallow(new)
    for_prompts(new, lambda prompt: prompt.update(steps=math.floor(0.8 * prompt["steps"])))
    assert judge(new, old).finding("acceptance by depth").verdict == "warn"


def test_reports_of_the_same_thing_widen_the_intervals_of_times_by_their_noise() -> None:
    """Catches noise that is learnt and not used, and used where nothing is timed."""
    new, old = made(4, 0.02)
    alike = [tuple(map(Report.model_validate, made(seed, 0.1))) for seed in (5, 6)]
    before, after = judge(new, old), judge(new, old, alike=alike)
    assert before.widened == 1 and 3 < after.widened < 8 and "2 pairs of runs" in after.notes[-1]
    for rule, wider in (("speed", True), ("p99 TPOT", True), ("tokens per step", False)):
        widths = [o.finding(rule).parts[0].interval for o in (before, after)]
        assert widths[0] and widths[1]
        times = math.log(widths[1].high / widths[1].low) / math.log(widths[0].high / widths[0].low)
        assert times == pytest.approx(after.widened if wider else 1, rel=1e-6)
    quiet = judge(*made(4, 0.1), alike=[tuple(map(Report.model_validate, made(5, 0.01)))])
    assert quiet.widened == 1 and "no interval is widened" in quiet.notes[-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda report: report.update(target="another/model"), "target another/model, not demo"),
        (lambda report: report.update(fingerprint={"cpu": "another"}), "cpu simulated against another"),
        (lambda report: [row.update(drafter="eagle3") for row in report["rows"]], "two drafters, eagle3 and ngram"),
    ],
)
def test_noise_is_not_learnt_from_reports_of_something_else(change: Callable[[Made], Any], message: str) -> None:
    """Catches a noisy pair from elsewhere that lets a slow draft pass."""
    new, old = made(4, 0.02)
    slower(new)
    one, other = made(5, 0.5)
    change(one)
    if "two drafters" not in message:
        change(other)
    pair = (Report.model_validate(one), Report.model_validate(other))
    with pytest.raises(DataError, match=message):
        judge(new, old, alike=[pair])
    if "another" in str(one["fingerprint"]):
        assert judge(*made(4, 0.02), alike=[pair], allow_other_machine=True).widened > 1


def test_runs_that_lie_farther_apart_than_their_prompts_say_widen_too() -> None:
    """Catches noise between runs, which no prompt of one run can show: each of these is 2 % apart as a whole."""
    alike = []
    for seed, apart in ((5, 1.02), (6, 0.98), (7, 1.02)):
        new, old = made(seed, 0.02)
        for_prompts(new, lambda prompt, apart=apart: prompt.update(speedup=apart * prompt["speedup"]))
        alike.append((Report.model_validate(new), Report.model_validate(old)))
    assert judge(*made(4, 0.02), alike=alike).widened > 3
    assert judge(*made(4, 0.02), alike=alike[:2]).widened < 2


def test_prompts_needed_fall_with_the_square_of_the_loss_and_give_that_power() -> None:
    """Catches a formula for one side of the interval only, or without power.  2,000 trials of 80 +- 1 in 100: odds of a
    false alarm below 1e-4."""
    count = prompts_needed(0.08, 0.03, 0.025)
    assert count == math.ceil((2.8016 * 0.08 / -math.log(0.97)) ** 2) == 55
    assert prompts_needed(0.08, 0.01, 0.025) / count == pytest.approx(9, rel=0.06)
    means = np.random.default_rng(0).normal(math.log(0.97), 0.08 / math.sqrt(count), 2000)
    assert 0.76 < (means + 1.96 * 0.08 / math.sqrt(count) < 0).mean() < 0.84


@pytest.mark.slow
def test_two_runs_of_the_same_thing_are_seldom_stopped() -> None:
    """Catches intervals too narrow for few prompts or many tests.  1 in 100 by design; with 2 in 100, 8 have odds of
    1e-3."""
    stopped = 0
    for seed in range(100):
        stopped += judge(*made(seed, 0.08 / math.sqrt(2), tasks={f"t{i}": 8 for i in range(6)})).stops
    assert stopped <= 7


NASTY = 'a|b*<i>&"]]>\x00\x1b[31m\ud800 @all `x` \n new'


def test_junit_and_markdown_hold_whatever_stands_in_a_report() -> None:
    """Catches text that breaks the XML, ends a cell of the table, or calls someone."""
    new, old = twins()
    for report in (new, old):
        report["rows"][1]["task"] = NASTY
    one_text(new)
    without(new, ("share_left_out",))
    outcome = judge(new, old)
    suite = ElementTree.fromstring(outcome.junit().encode("utf-8")).find("testsuite")
    assert suite is not None
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    assert list(cases) == list(RULES)
    verdicts = [found.verdict for found in outcome.findings]
    assert [suite.get(name) for name in ("tests", "failures", "skipped", "errors")] == [
        str(len(RULES)), str(verdicts.count("stop")), str(verdicts.count("not measured")), "0",
    ]  # fmt: skip
    assert cases["exactness"].find("failure") is not None and cases["left out"].find("skipped") is not None
    assert cases["speed"].find("failure") is None and cases["speed"].find("skipped") is None
    table = [line for line in outcome.markdown().splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(RULES)
    assert all(line.replace("\\|", "").count("|") == 6 for line in table)
    assert "@all" not in outcome.markdown() and "<i>" not in outcome.markdown().replace("\\<", "")
    json.dumps(outcome.as_json(), allow_nan=False)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two reports, in which commands run."""
    new, old = twins()
    (tmp_path / "old.json").write_text(json.dumps(old))
    slower(new)
    (tmp_path / "new.json").write_text(json.dumps(new))
    monkeypatch.chdir(tmp_path)
    return tmp_path


FILES = ("--junit", "gate.xml", "--markdown", "gate.md", "--json", "gate.json")


def test_the_command_answers_with_its_exit_code_and_writes_what_was_asked(files: Path, capsys: Any) -> None:
    """Catches a stop that a CI server takes for a pass.  `runs/test_settings.py` sees that no torch is loaded."""
    assert outrider_with("gate", "old.json", "--baseline", "old.json") == 0
    assert "PASS" in capsys.readouterr().out
    assert outrider_with("gate", "new.json", "--baseline", "old.json", "--aa", "old.json,old.json", *FILES) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "STOP by speed" in said and "prompts needed to detect a loss" in said
    assert "STOP by speed" in (files / "gate.md").read_text()
    assert ElementTree.parse(files / "gate.xml").getroot().tag == "testsuites"
    assert json.loads((files / "gate.json").read_text())["verdict"] == "stop"
    assert not list(files.glob("*.part"))


def test_a_refusal_is_in_the_files_too(files: Path, capsys: Any) -> None:
    """Catches a CI server that shows yesterday's verdict, or none, since the reports could not be compared today."""
    (files / "other.json").write_text(json.dumps(twins()[1] | {"target": "another"}))
    assert outrider_with("gate", "other.json", "--baseline", "old.json", *FILES) == 2
    assert "measure both on the same target" in " ".join(capsys.readouterr().err.split())
    suite = ElementTree.parse(files / "gate.xml").getroot().find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("errors")) == ("1", "1")
    assert "measure both on the same target" in (files / "gate.xml").read_text()
    found = json.loads((files / "gate.json").read_text())
    assert found["verdict"] == "refused" and found["headline"].startswith("REFUSED: the candidate has target another")
    assert "REFUSED" in (files / "gate.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("none.json", "--baseline", "old.json"), "no report at none.json"),
        (("old.json", "--baseline", "other.json"), "schema 2"),
        (("old.json", "--baseline", "old.json", "--junit", "nowhere/gate.xml"), "no such folder"),
        (("old.json", "--baseline", "old.json", "--aa", "old.json"), "two or more"),
    ],
)
def test_wrong_use_is_exit_code_two_and_one_sentence(words, message, files, capsys) -> None:
    """Catches an unreadable file that looks like a draft that must not ship, and a traceback."""
    (files / "other.json").write_text(json.dumps({"schema": 2}))
    assert outrider_with("gate", *words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert message in said and "Traceback" not in said
    assert sorted(path.name for path in files.iterdir()) == ["new.json", "old.json", "other.json"]
