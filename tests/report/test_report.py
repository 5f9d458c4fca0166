"""A report says what was measured, loses nothing, and never hides a text that is not the target's own."""

import io
import json
import math
import re
from typing import Any

import pytest
from rich.console import Console

from outrider.errors import DataError
from outrider.report.compare import with_losses
from outrider.report.page import render, save
from outrider.report.schema import Report
from outrider.report.summary import alarms, headline, skews
from outrider.report.tables import SummaryTable, markdown
from tests.report.examples import Parsed

NULLS = {
    "drafter": "ngram", "task": "chat", "prompts": 2, "temperature": 0, "tokens_per_step": None,
    "accepted_by_depth": [],
    "tokens_per_s": None, "plain_tokens_per_s": None, "speedup": None, "exact": None, "compared_tokens": None,
    "share": None, "ttft_ms": None, "itl_ms": None,
}  # fmt: skip


def row(**changes: Any) -> dict[str, Any]:
    """A plausible row of report.json."""
    curve = [30 + i / 4 for i in range(101)]
    prompts = [
        {"id": f"chat/{i}", "tokens": 96, "steps": 40, "tokens_per_s": 40.0, "plain_tokens_per_s": 24.0,
         "speedup": 1.2 + i / 10, "exact": True, "first_difference": None}
        for i in range(24)
    ]  # fmt: skip
    return {
        "drafter": "dspark", "task": "chat", "prompts": 24, "temperature": 0.0, "tokens_per_step": 2.61,
        "accepted_by_depth": [0.78, 0.58, 0.42, 0.28, 0.17, 0.11, 0.06], "conditional_acceptance": [0.78, 0.74, 0.72,
        None],
        "rejections_by_depth": [272, 245, 194, 158], "steps": 1180, "tokens": 2304, "seconds": 56.1,
        "plain_seconds": 96.4,
        "tokens_per_s": 41.1, "plain_tokens_per_s": 23.9, "generate_tokens_per_s": 22.4, "speedup": 1.72, "exact": True,
        "speedup_range": {"center": 1.72, "low": 1.6, "high": 1.84},
        "compared_tokens": 2304, "share": {"draft": 0.14, "verify": 0.79, "other": 0.07}, "loop_overhead": 0.041,
        "ttft_ms": {"p50": 88.1, "p95": 141.0, "p99": 160.2}, "itl_ms": {"p50": 50.0, "p95": 58.2, "p99": 66.7},
        "tpot_ms": {"p50": 24.0, "p95": 31.0, "p99": 38.0}, "plain_tpot_ms": {"p50": 41.3, "p95": 44.0, "p99": 45.0},
        "itl_curve_ms": curve, "plain_itl_curve_ms": curve,
        "dtype": "float32", "batch": 1, "device": "cpu", "invalid": 0, "per_prompt": prompts,
    } | changes  # fmt: skip


def inexact(**changes: Any) -> dict[str, Any]:
    wrong = {"id": "chat/3", "speedup": 1.3, "exact": False, "first_difference": 17}
    return row(drafter="ngram", exact=False, per_prompt=[*row()["per_prompt"][:23], wrong]) | changes


def report(*rows: dict[str, Any], **changes: Any) -> Report:
    training = {
        "dspark": {"steps": 40, "seconds": 5210.0, "tokens": 12_000, "loss_curve": [[0, 9.0], [20, 4.0], [40, 2.5]]}
    }
    values = {"schema": 1, "target": "Qwen/Qwen3-0.6B", "rows": rows, "training": training}
    values |= {"made": "2026-05-09T10:12:00Z"}
    values |= {"provenance": {"commit": "5f129c3", "machine": {"cpu": "EPYC", "threads": 2}}, "share_left_out": 0.04}
    return Report.model_validate(values | {"left_out": [{"id": "chat/31", "first_ngram_share": 0.2}]} | changes)


def printed(found: Report, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(SummaryTable(found))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_save_then_load_changes_nothing(tmp_path):
    """A field that is written under another name, or a list that comes back as something else."""
    found = report(row(), inexact(), NULLS)
    assert save(found, tmp_path / "new" / "run") == tmp_path / "new" / "run"
    assert Report.load(tmp_path / "new" / "run") == found
    assert Report.load(tmp_path / "new" / "run" / "report.json") == found
    assert {path.name for path in (tmp_path / "new" / "run").iterdir()} == {"report.json", "report.html"}


def test_fields_of_a_later_version_survive_load_and_save(tmp_path):
    """An older Outrider that opens a newer report and saves it must not drop what it can't read."""
    late = row(energy_joules=12.5, share={"draft": 0.1, "verify": 0.8, "other": 0.1, "sampling": 0.05})
    late["per_prompt"][0]["memory_bytes"] = 7
    found = report(late, cluster={"nodes": [1, 2]}, training={"dspark": {"steps": 1, "optimiser": "muon"}})
    values = json.loads((Report.load(found.save(tmp_path)).save(tmp_path) / "report.json").read_text())
    assert values["cluster"] == {"nodes": [1, 2]}
    assert values["rows"][0]["energy_joules"] == 12.5
    assert values["rows"][0]["share"]["sampling"] == 0.05
    assert values["rows"][0]["per_prompt"][0]["memory_bytes"] == 7
    assert values["training"]["dspark"]["optimiser"] == "muon"


def test_a_report_with_scores_of_an_earlier_version_is_read(tmp_path):
    """Catches a report from when answers were scored that can't be read, drawn or saved any more."""
    score = {"drafted": 0.5, "plain": 1.0, "prompts": 2, "measure": "exact match"}
    scored = row(score=score, clean={"contaminated": [], "checked": 2, "score": score})
    scored["per_prompt"][0] |= {"score": 0.0, "plain_score": 1.0}
    earlier = report(scored)
    assert "exact match" not in render(earlier)
    values = json.loads((Report.load(earlier.save(tmp_path)).save(tmp_path) / "report.json").read_text())
    assert values["rows"][0]["score"] == score and values["rows"][0]["per_prompt"][0]["plain_score"] == 1.0


def test_numbers_that_are_not_finite_become_null(tmp_path):
    """json writes NaN, which no other reader accepts; a dict that changed after validation is caught as well."""
    found = report(row(speedup=math.nan, itl_curve_ms=[1.0, math.inf], later=[{"deep": -math.inf}]))
    assert found.rows[0].speedup is None
    found.provenance["drift"] = math.nan

    def refuse(text: str) -> None:
        raise AssertionError(text)

    values = json.loads((found.save(tmp_path) / "report.json").read_text(), parse_constant=refuse)
    assert values["rows"][0]["itl_curve_ms"] == [1.0, None]
    assert values["rows"][0]["later"] == [{"deep": None}]
    assert values["provenance"]["drift"] is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no report at"),
        (b"\xff\xfe\x00", "can't read report"),
        ("[1, 2]", "schema 'none'"),
        ('{"schema": 2, "target": "x"}', "schema 2, but this Outrider reads schema 1"),
        ('{"schema": 1}', "damaged at target"),
        ('{"schema": 1, "target": "x", "rows": [{"drafter": "a"}]}', "damaged at rows.0.task"),
    ],
)
def test_a_report_that_cannot_be_read_says_why(tmp_path, text, says):
    """A traceback of pydantic's or json's own is no answer to a user."""
    if text is not None:
        (tmp_path / "report.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError) as error:
        Report.load(tmp_path)
    assert says in str(error.value)
    assert "report.json" in str(error.value)


def test_a_failed_save_leaves_the_old_report_whole(tmp_path, monkeypatch):
    """Writing in place would leave half a file where a whole one stood; an hour of measuring must not end in a
    traceback."""
    before = save(report(row()), tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="choose a folder"):
        save(report(row()), tmp_path / "file")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(DataError, match="disk full"):
        save(report(row(), row()), tmp_path / "run")
    assert len(Report.load(before).rows) == 1


def test_a_text_that_differs_is_impossible_to_miss():
    """The one failure that matters most must not drown among good numbers, even where it is not the first row."""
    found = report(row(), inexact())
    html = render(found)
    assert 'class="alarm" role="alert"' in html
    text = (
        "NOT EXACT: ngram on chat at temperature 0; 1 of 24 texts differs from the target's own: "
        "chat/3 after 17 tokens."
    )
    assert text in Parsed(html).text
    assert 'class="bar alarmed"' in html
    assert 'class="dot alarmed"' in html
    assert '<td class="bad">NOT EXACT</td>' in html
    assert "NOT EXACT: ngram" in headline(found)
    assert "| **NO** |" in markdown(found)
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    console.print(SummaryTable(found))
    assert re.search("\x1b\\[1;37;41m *NO", console.file.getvalue())  # type: ignore[attr-defined]


def test_one_differing_prompt_is_an_alarm_although_the_row_calls_itself_exact():
    """A row whose summary and prompts disagree must be read the careful way; an alarm that always shows is one that
    nobody reads."""
    assert report(inexact(exact=True)).rows[0].is_inexact
    assert alarms(report(inexact(exact=None)))
    fine = report(row(), row(temperature=0.7, exact=None, compared_tokens=None))
    assert alarms(fine) == []
    assert not re.search('class="alarm"|alarmed|NOT EXACT', render(fine).split("</style>")[1])


def test_a_lossy_rule_is_impossible_to_miss():
    """Catches a report whose page, table, README line or headline keeps the loss to itself."""
    lossy = {"rule": "typical(epsilon=0.09, delta=0.3)", "lossless": False, "distance": 0.0123}
    found = report(row(temperature=1.0, exact=None, compared_tokens=None, **lossy))
    text = "not lossless, by rule typical(epsilon=0.09, delta=0.3): 0.0123 from the exact distribution per token"
    assert text in headline(found)
    assert text in render(found)
    assert "**– lossy 0.012**" in markdown(found)
    assert "– lossy 0.012" in " ".join(printed(found, 200))
    exact = report(row(lossless=True, distance=0.0))
    for text in (headline(exact), render(exact), markdown(exact), " ".join(printed(exact, 200))):
        assert "lossless" not in text
        assert "lossy" not in text
    assert report(row()).rows[0].lossless is None


def test_the_headline_says_it_in_plain_words():
    """The sentence a manager reads; each word of it must follow from a number."""
    assert headline(report(row())) == (
        "dspark is 1.72× as fast as the target alone (95 % interval 1.60 to 1.84), 41 tokens/s beside 24; each of its "
        "24 texts is identical to the target's own."
    )
    assert "slower than the target alone, at 0.80× its speed (95 % interval 0.70 to 0.90)" in headline(
        report(row(speedup=0.8, speedup_range={"low": 0.7, "high": 0.9}))
    )
    assert "about as fast as" in headline(report(row(speedup=1.01, speedup_range=None)))
    assert "about as fast as" in headline(report(row(speedup=1.1, speedup_range={"low": 0.98, "high": 1.2})))
    assert "was not timed" in headline(report(row(speedup=None)))
    assert "has no speed-up, since passes took longer" in headline(
        report(row(speedup=None, under_load="passes took longer"))
    )
    slow = report(row()).model_copy(update={"provenance": {"slow_baseline": "compiled steps are possible here"}})
    assert headline(slow).endswith("though compiled steps are possible here: its fastest are faster.")
    assert "drawn at temperature 0.7" in headline(report(row(temperature=0.7, exact=None)))
    assert headline(report()) == "Nothing was measured: the report has no rows."


def test_a_faster_text_that_differs_does_not_lead():
    """The best number of a report must not be one that was got by writing something else."""
    found = report(
        inexact(speedup=9.0), row(speedup=1.1), row(drafter="eagle", speedup=3.0, exact=None, temperature=1.0)
    )
    assert found.lead is not None
    assert found.lead.drafter == "dspark"
    assert headline(found).startswith("On chat at temperature 0, dspark")


def test_a_speedup_under_load_is_marked_wherever_it_is_shown():
    """Catches a figure of a noisy moment that a table, a README or a manager takes for good."""
    reason = "3.1× is more than 2.45 tokens per step and its pass times allow"
    found = report(row(speedup=3.1, under_load=reason), row(drafter="eagle"))
    said = "measured under load, not to be trusted"
    assert f"3.10× as fast as the target alone (95 % interval 1.60 to 1.84), 41 tokens/s beside 24, {said}" in headline(
        found
    )
    assert said in markdown(found) and "**3.10× (1.60–1.84) !**" in markdown(found)
    assert said in "\n".join(printed(found, 80)) and "3.10× (1.60–1.84) !" in "\n".join(printed(found, 80))
    html = render(found)
    assert f"dspark · chat · T 0: {said}, because {reason}." in Parsed(html).text
    several = render(report(*[row(under_load=reason, contention=0.6)] * 3))
    assert several.count('class="alarm"') == 1 and "and 2 more rows: measured under load" in several
    assert "Other programs" not in several
    assert html.count('class="shout"') == 2 and '<div class="bad"><span>Speed-up of dspark' in html
    quiet = report(row())
    assert all(
        said not in text for text in (headline(quiet), markdown(quiet), render(quiet), "".join(printed(quiet, 80)))
    )


def test_the_first_figures_compare_like_with_like():
    """Catches a median gap beside a time per token: a drafter's gaps are longer although its text is sooner."""
    text = Parsed(render(report(row(contention=0.01)))).text
    assert "Time per token, median 24.0 ms alone 41.3 ms" in text
    assert "Speed-up of dspark 1.72× 95 % interval 1.60 to 1.84" in text
    assert "Equal texts 24 of 24 2,304 tokens compared" in text
    assert "Other programs" not in text and "does not generate the same text" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speedup_range": None, "prompts": 3}, "too few for an interval"),
        ({"contention": 0.12}, "Other programs took up to 12 % of the time"),
        ({"plain_exact": False}, "does not generate the same text as transformers' generate"),
    ],
)
def test_what_makes_a_figure_doubtful_is_said(changes, said):
    """Catches few prompts, a busy machine, or a baseline that is itself wrong, in a report that looks like any other;
    and text that was drawn called compared."""
    assert said in Parsed(render(report(row(**changes)))).text
    drawn = report(row(temperature=0.7, exact=None, compared_tokens=0))
    assert "tokens compared" not in headline(drawn) and "0 tokens compared" not in Parsed(render(drawn)).text
    assert markdown(drawn).rstrip().endswith("| – |")


def test_markdown_names_the_task_only_where_there_are_several():
    """Two rows that look the same but for their numbers, or a column that says the same word in each."""
    assert "task" not in markdown(report(row(), row(drafter="a|b")))
    assert "a\\|b\\<i\\>" in markdown(report(row(drafter="a|b<i>")))
    several = markdown(report(row(), row(task="code"))).splitlines()
    assert several[0].startswith("| drafter | task |")
    assert len({line.replace("\\|", "").count("|") for line in several}) == 1
    assert several[2].endswith("| yes |")


def skewed(**changes: Any) -> dict[str, Any]:
    """1,000 drafts of two tokens: 600 keep the first, 450 both; training expected 80 and 50 percent."""
    counts = [[0], [0, 0], [400, 150, 450]]
    values = {"accepted_by_depth": [0.6, 0.45], "predicted_by_depth": [0.8, 0.5], "accepted_histogram": counts}
    return row(**(values | changes))


def test_less_than_training_expected_is_said_at_its_worst_depth():
    """A drafter that is served on other inputs than it was trained on writes exact text, only slowly: nobody would
    look."""
    found = report(row(), skewed())
    (text,) = skews(found)
    assert text.startswith(
        "dspark on chat at temperature 0: the target accepts 60 % of the drafts to depth 1, where training measured 80 "
        "%"
    )
    assert headline(found).endswith(text)
    assert text not in headline(found, with_alarms=False)
    assert text in Parsed(render(found)).text


@pytest.mark.parametrize(
    "changes",
    [
        {"predicted_by_depth": []},
        {"predicted_by_depth": [0.64, 0.5]},
        {"predicted_by_depth": [None, 0.5]},
        {"accepted_by_depth": [None, None]},
        # ten drafts: 60 % of them is what 80 % looks like in one case of ten
        {"accepted_histogram": [[0], [0, 0], [4, 2, 4]]},
    ],
)
def test_no_skew_is_said_without_ground(changes):
    """An alarm from noise, from more than was expected, or from what nobody predicted, is one that nobody reads."""
    assert skews(report(skewed(**changes))) == []


def test_what_a_precision_lost_is_counted_turn_by_turn() -> None:
    """Catches each turn of a name held against every other: such a prompt then weighs as much as four."""
    steps = {"int8": (12, 6, 24), "bfloat16": (8, 4, 24)}
    sides = []
    for precision, own in steps.items():
        prompts = [{"id": name, "tokens": 24, "steps": count} for name, count in zip("aab", own, strict=True)]
        sides.append(report(row(precision=precision, trained_on="bfloat16", per_prompt=prompts)))
    served, there = sides
    assert with_losses(served, there).rows[0].tokens_per_step_lost == pytest.approx(72 / 36 - 72 / 42)
