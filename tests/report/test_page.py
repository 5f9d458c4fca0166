"""The page holds every figure a report has, says so where there is none, and lets no string of the data become
markup."""

import functools
import hashlib
import json
import math
import re
from base64 import b64encode
from html import unescape
from typing import Any

import pytest
import typer

from outrider.cli.report import report as verb
from outrider.errors import DataError
from outrider.report.bootstrap import MIN_PROMPTS
from outrider.report.compare import Comparison
from outrider.report.page import render, render_comparison
from outrider.report.page.cost import cost_lines, costs, texts
from outrider.report.schema import Report
from tests.report.examples import HOSTILE, Parsed, full_report, hostile_report, null_report, row

FIGURES = {
    "speedup", "acceptance", "predicted", "text", "rejections", "patterns", "histogram", "latency", "time", "prompts",
    "clean", "cost", "training", "table", "scope", "fingerprint", "provenance", "words",
}  # fmt: skip


def part(html: str, name: str) -> str:
    """One figure's markup."""
    found = re.search(
        rf'<(figure|section)[^>]* id="{name}".*?</\1>|<(figure|section) class="part" id="{name}".*?</\2>',
        html,
        re.DOTALL,
    )
    assert found is not None
    return found[0]


@functools.cache
def whole() -> str:
    """The page of the full report."""
    return render(full_report())


def test_every_figure_of_a_full_report_is_drawn():
    """Catches a field that is in the file and that no reader of the page ever sees."""
    parsed = Parsed(whole())
    assert parsed.ids >= FIGURES
    assert 'class="empty"' not in whole()
    figures = ("2.45× (2.31 to 2.59)", "2.39×", "2.52×", "10.52 GiB", "0.5 to 1")
    for text in (*figures, "one 13-gram", "NVIDIA H200"):
        assert text in parsed.text


def test_what_was_not_measured_says_so_in_one_line():
    """An old report, or one whose every new field is null: no figure of it may show a zero or a chart of nothing."""
    html = render(null_report())
    parsed = Parsed(html)
    for name in ("predicted", "text", "patterns", "histogram", "latency", "prompts", "clean", "cost"):
        figure = part(html, name)
        assert "not measured" in figure
        assert not re.search(r"\d", re.sub(r"<[^>]*>", "", figure))
    for wrong in ("None", "nan", "inf"):
        assert not re.search(rf"\b{wrong}\b", parsed.text)


@pytest.mark.parametrize("found", [null_report(), hostile_report()])
def test_one_style_and_one_script_each_with_its_hash(found):
    """Catches a policy that lets all inline script in, and a script that its own policy refuses."""
    html = render(found)
    parsed = Parsed(html)
    assert parsed.tags.count("script") == parsed.tags.count("style") == 1
    policy = next(value for name, value in parsed.attributes if name == "content" and "default-src" in value)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("style", "script"):
        text = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)[1]
        assert f"{tag}-src 'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert not {"src", "srcset", "style", "xlink:href"} & {name for name, _ in parsed.attributes}
    assert all(value.startswith("#") and value[1:] in parsed.ids for name, value in parsed.attributes if name == "href")
    assert not any(name.startswith("on") for name, _ in parsed.attributes)


def test_strings_that_would_be_markup_are_shown_as_they_are():
    """Prompts and ids come from anywhere, also `</script>`, emojis and marks that turn the direction of writing."""
    parsed = Parsed(render(hostile_report()))
    assert "img" not in parsed.tags
    assert HOSTILE in parsed.text
    tips = [value for name, value in parsed.attributes if name == "title"]
    assert any(HOSTILE in tip for tip in tips)
    compared = Comparison.of([(HOSTILE, hostile_report()), (HOSTILE + "2", hostile_report())])
    assert "img" not in Parsed(render_comparison(compared)).tags


def test_the_text_reads_as_it_was_written():
    """Catches a token that is dropped, doubled or trimmed: the text of the page is the text of the output; accepted,
    rejected and not drafted are three things, and sum to all tokens."""
    found = full_report()
    html = part(whole(), "text")
    shown = re.findall(r'<div class="tokens"[^>]*>(.*?)</div>', html, re.DOTALL)
    bare = [unescape(re.sub(r"<[^>]*>", "", re.sub(r'<s>.*?</s>|<i class="nl">.</i>', "", text))) for text in shown]
    wanted = ["".join(token.text for token in line.traced[0].tokens) for line in found.rows]
    assert sorted(bare) == sorted(wanted)
    for line in found.rows:
        tokens = line.traced[0].tokens
        accepted, bare = sum(t.accepted for t in tokens), sum(t.drafted is None for t in tokens)
        rejected = len(tokens) - accepted - bare
        counts = f"{len(tokens)} tokens: {accepted} drafted and accepted, {rejected} rejected, {bare} not drafted"
        assert counts in html


def test_a_turned_down_token_tells_every_number_known_of_it():
    """Catches a tip that swaps p and q, or says 0 where a deterministic drafter has no q."""
    token = {"text": "b", "drafted": "a", "depth": 2, "p": 0.004, "q": 0.75, "rank": 12, "entropy": 1.5, "kind": "word"}
    one = row("dspark", "chat") | {"traced": [{"id": "x", "tokens": [token, token | {"q": None}]}]}
    html = render(full_report(rows=[one]))
    assert (
        "rejected “a” at depth 2\np 4.0e-03 target · q 0.75 drafter\nrank 12 · target&#39;s entropy 1.50 nats · word"
        in html
    )
    assert "q – deterministic" in html


def test_costs_fall_as_speed_rises_and_pay_back_when_saved():
    """The decision's own sums, against ones done by hand."""
    found = costs(plain=25, fast=50, trained_s=7200, price=3.6, tokens=5, other=12.8)
    assert found.before == pytest.approx(40)  # $3.6 an hour is $0.001 a second, 40,000 seconds a million tokens
    assert found.after == pytest.approx(20)
    assert found.saved == pytest.approx(100)
    assert found.built == pytest.approx(20)
    assert found.payback == pytest.approx(0.2)
    assert texts(found)["payback"] == "4.8 hours"
    assert costs(25, 20, None, 1, 1, 0).payback == math.inf  # slower: never
    assert costs(25, 50, None, 1, 1, 0).payback is None  # what it cost to build is not known
    assert costs(25, 50, None, 1, 1, 5).built == 5


def test_a_drafter_without_training_costs_nothing_to_build():
    """Catches `not measured` where the answer is known, and a chart of a training that never was."""
    free = {"suffix": {"steps": 0, "seconds": 0.0, "tokens": 0}}
    found = full_report(training=free)
    lines = {line.name: line.texts for line in cost_lines(found)}
    assert lines["suffix · chat · T 0"]["built"] == "$0.00"
    assert lines["suffix · chat · T 0"]["payback"] == "at once"
    assert lines["eagle3 · chat · T 0"]["built"] == "not measured"
    assert 'id="training"' not in render(found)


def changed(factor: float, noise: float = 0.02) -> Report:
    """Three rows of the full report with every prompt faster, or slower, by a factor that wobbles."""
    rows = []
    for line in full_report().rows[::4]:
        values: dict[str, Any] = line.model_dump()
        for i, prompt in enumerate(values["per_prompt"]):
            by = factor * (1 + noise * (-1) ** i)
            prompt["speedup"] *= by
            prompt["tokens_per_s"] *= by
            prompt["tpot_ms"] /= by
            prompt["steps"] = prompt["steps"] / by if factor != 1 else prompt["steps"]
            prompt["steps"] = round(prompt["steps"])
        rows.append(values)
    return full_report(rows=rows)


def outcomes(comparison: Comparison) -> set[str]:
    return {pair.changes[1].outcome for other in comparison.others for pair in other.pairs}


def test_a_report_against_itself_differs_in_nothing():
    """Every ratio is 1 and every interval holds it: catches pairs of unlike rows, or of prompts by their place; and two
    prompts that, resampled, look certain."""
    same = full_report(rows=[row("dspark", "chat"), row("suffix", "chat"), row("dspark", "code")])
    turned = [line.model_dump() | {"per_prompt": line.model_dump()["per_prompt"][::-1]} for line in same.rows]
    for other in (same, full_report(rows=turned)):
        comparison = Comparison.of([("a", same), ("b", other)])
        assert outcomes(comparison) == {"unclear"}
        assert {change.ratio for pair in comparison.others[0].pairs for change in pair.changes} == {1.0}
        assert comparison.warnings() == []
    few = full_report(rows=[row("dspark", "chat", MIN_PROMPTS - 1)])
    change = Comparison.of([("a", few), ("b", few)]).others[0].pairs[0].changes[1]
    assert (change.low, change.outcome, change.ratio) == (None, "too few prompts", 1.0)


def test_faster_is_better_and_slower_is_worse_also_when_the_names_are_swapped():
    """Catches a ratio upside down; fewer milliseconds are better, more tokens are."""
    fast, slow = changed(1.1), changed(1.0)
    for base, other, wanted in ((slow, fast, "better"), (fast, slow, "worse")):
        found = Comparison.of([("a", base), ("b", other)])
        assert outcomes(found) == {wanted}
        assert {pair.changes[3].outcome for pair in found.others[0].pairs} == {wanted}
    there = Comparison.of([("a", slow), ("b", fast)]).others[0].pairs[0].changes[1].ratio
    back = Comparison.of([("a", fast), ("b", slow)]).others[0].pairs[0].changes[1].ratio
    assert there * back == pytest.approx(1)


def test_prompts_of_one_name_are_paired_turn_by_turn():
    """Catches every turn held against the last of its name: a report then differs from itself."""
    rows = [row("dspark", "chat")]
    for prompt in rows[0]["per_prompt"][:8]:
        prompt["id"] = "same"
    compared = Comparison.of([("a", full_report(rows=rows)), ("b", full_report(rows=rows))])
    changes = compared.others[0].pairs[0].changes
    assert {change.ratio for change in changes} == {1.0} and outcomes(compared) == {"unclear"}
    assert {value for change in changes for value in (change.low, change.high)} == {1.0}


def test_a_drafter_under_a_new_name_is_still_compared():
    """Version two of a drafter has another name; alone on its task, it is the one that is meant."""
    old, new = (
        full_report(rows=[row("dspark", "chat")]),
        full_report(rows=[row("dspark", "chat") | {"drafter": "dspark-2"}]),
    )
    assert Comparison.of([("a", old), ("b", new)]).others[0].pairs[0].name == "dspark · chat · T 0 against dspark-2"


def test_fingerprints_that_differ_and_rows_without_a_twin_are_said():
    """Two machines' tokens per second side by side without a word."""
    other = full_report(rows=[row("dspark", "chat")], fingerprint=full_report().fingerprint | {"torch": "2.14.0"})
    found = Comparison.of([("monday", full_report()), ("tuesday", other)])
    text = " ".join(found.warnings())
    assert "torch 2.13.0 / 2.14.0" in text
    assert "suffix · math · T 0" in text
    page = Parsed(render_comparison(found)).text
    assert "torch 2.13.0 / 2.14.0" in page
    assert "≠ torch" in page


def test_sampled_rows_drawn_from_other_noise_are_said():
    """A report of shared noise beside one of noise of its own, which keeps more for nothing."""
    hot = row("dspark", "chat", temperature=1.0, exact=None)
    found = [full_report(rows=[hot | {"noise": noise}]) for noise in (None, "own")]
    assert "can't be compared there" in " ".join(Comparison.of([("a", found[0]), ("b", found[1])]).warnings())
    assert Comparison.of([("a", found[1]), ("b", found[1])]).warnings() == []


def test_reports_with_nothing_in_common_are_refused():
    """An empty table that reads as `no change`."""
    with pytest.raises(DataError, match="no row in common"):
        Comparison.of(
            [("a", full_report(rows=[row("dspark", "chat")])), ("b", full_report(rows=[row("suffix", "code")]))]
        )
    with pytest.raises(DataError, match="two or more"):
        Comparison.of([("a", full_report())])


@pytest.fixture
def command(tmp_path, monkeypatch):
    """The verb as a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(verb)

    def run(*words: str) -> Any:
        return app([*words], standalone_mode=False)

    return run


def test_the_verb_writes_a_page_again_and_leaves_the_numbers_alone(command, tmp_path):
    """Catches a re-rendering that also rewrites report.json, which others read."""
    full_report().save(tmp_path / "run")
    before = (tmp_path / "run" / "report.json").read_bytes()
    (tmp_path / "run" / "report.html").write_text("old")
    command("run")
    assert (tmp_path / "run" / "report.html").read_text(encoding="utf-8") == whole()
    assert (tmp_path / "run" / "report.json").read_bytes() == before
    command("run/report.json", "--out", "other.html")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other.html"}


def test_the_verb_compares_and_writes_json(command, tmp_path):
    """Catches a name that is the same for both, or a page left half-written."""
    changed(1).save(tmp_path / "before")
    changed(1.1).save(tmp_path / "after")
    command("before", "after/report.json", "--json", "c.json")
    values = json.loads((tmp_path / "c.json").read_text())
    assert values["base"] == "before"
    assert values["others"][0]["name"] == "after"
    assert {change["outcome"] for line in values["others"][0]["rows"] for change in line["changes"][1:2]} == {"better"}
    assert "Of 3 rows, after against before: 3 better." in Parsed((tmp_path / "comparison.html").read_text()).text
    assert not list(tmp_path.glob("*.part"))


def test_a_place_that_can_not_be_written_is_said_before_the_work(command, tmp_path):
    """A traceback in place of a sentence."""
    full_report().save(tmp_path / "run")
    for words in (["run", "--out", "no/where.html"], ["run", "--json", "no/where.json"], ["nothing"]):
        with pytest.raises(DataError):
            command(*words)


def test_a_text_that_differs_alarms_in_a_comparison_too():
    """A faster report whose output is wrong must not win in silence."""
    wrong = row("dspark", "chat", exact=False)
    found = Comparison.of([("a", full_report(rows=[row("dspark", "chat")])), ("b", full_report(rows=[wrong]))])
    assert 'class="alarm" role="alert"' in render_comparison(found)
    assert "b: NOT EXACT: dspark on chat" in Parsed(render_comparison(found)).text
