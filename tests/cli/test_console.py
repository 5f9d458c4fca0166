"""What every verb prints: tables at any width, progress in a log, text with brackets."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from outrider.cli import console, doctor, drafters, exchange, parity, replay, report, tasks, tune, watch
from outrider.engines import tune as tuning
from outrider.engines.tune import Arm, Point
from outrider.gate.outcome import Finding, Outcome, Part
from outrider.gate.parity import Comparison, Margin, Pair
from outrider.gate.policy import Limit
from outrider.report.bootstrap import Interval
from outrider.report.schema import Report
from outrider.traffic.counters import Acceptance
from outrider.traffic.latencies import Endpoint
from outrider.traffic.replayed import Replayed, ServerComparison
from outrider.traffic.watch import Window

PATH = "/a/very/long/path/without/any/space/that/a/terminal/of/sixty/columns/can/not/show.safetensors"


def printed(say: Callable[[], object], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `say` prints on a terminal of so many columns."""
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(width=width, file=file))
    monkeypatch.setattr(console, "note", Console(width=width, file=io.StringIO()))
    say()
    return file.getvalue()


def words(text: str) -> set[str]:
    return {word for word in text.split() if any(letter.isalnum() for letter in word)}


def gate_table() -> None:
    reason = "stdlib at T 0: speed -5.8 % (-22.0 % to +11.0 %), 1 % tolerated, which may be noise and may be not"
    part = Part("stdlib", "stop", reason, 0.942, Interval(0.942, 0.78, 1.11))
    found = Finding("acceptance by depth", "measures", "new/old", Limit(), (part, Part("depth 2", "warn", reason, 0.9)))
    console.show(Outcome("stop", (found,), "STOP").table())


def parity_table() -> None:
    margin = Margin(3, (1, 2), (0.1, 0.5), None, 0.01, "bug")
    pairs = (Pair(PATH, 64, 3, 0.2, margin, "bug"), Pair("stdlib 2", 64, 64, 0.1, None, "equal"))
    parity._say_greedy(Comparison(pairs, "bfloat16"))


def replay_table() -> None:
    ends = tuple(Endpoint(f"http://127.0.0.1:800{i}", "a/model", {"ttft_s": 0.5}) for i in range(2))
    compared = (ServerComparison(ends[1].url, {}, None),)
    ends[0].failed["no connection: Connection refused"] = 3
    result = Replayed("log", "raw", "2 callers", "now", 5, 0, {}, 0, True, 1.0, None, ends, compared, {}, {}, ())
    replay.report(result)


def tune_table() -> None:
    points = [Point(Arm(k), load, turn, 100.0 + k) for k in range(5) for load in (1, 8) for turn in range(2)]
    tune._report(points, tuning.choose(points, 0.02, 64))


def watch_table() -> None:
    window = Window(60.0, Acceptance(drafts=10, drafted=40, accepted=20, by_position=(9, 7, 4)))
    console.show(watch._table([("1 min", window), ("10 min", window), ("since start", window)], None))


def compare_table() -> None:
    row = {
        "drafter": "dspark of another run", "task": "spec-bench-summarization", "prompts": 12, "temperature": 0,
        "tokens_per_step": 2.1, "tokens_per_s": 90, "plain_tokens_per_s": 50, "speedup": 1.8, "exact": True,
        "share": {},
        "accepted_by_depth": [0.6], "compared_tokens": 1152,
        "ttft_ms": {}, "itl_ms": {}, "per_prompt": [{"id": f"{i}", "tokens": 96, "steps": 40 + i} for i in range(12)],
    }  # fmt: skip
    found = Report.model_validate({"schema": 1, "target": "demo", "rows": [row]})
    report._comparison(Path("comparison.html"), [("old", found), ("new", found)], None)


TABLES = {
    "doctor": lambda: doctor.doctor(), "drafters": lambda: drafters.drafters(), "formats": lambda: exchange.formats(),
    "tasks": lambda: tasks.tasks(), "gate": gate_table, "parity": parity_table, "replay": replay_table,
    "tune": tune_table, "watch": watch_table, "compare": compare_table,
}  # fmt: skip


HEADS = {"task", "rule", "prompt", "row", "kind"}
"""Of first columns, which blocks do without."""


@pytest.mark.parametrize("verb", TABLES)
def test_no_word_of_a_table_is_broken_at_60_80_and_100_columns(
    verb: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a cell cut within a word, or with an ellipsis, as rich does where a table is too wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)  # its third column is there on every machine
    wide = words(printed(TABLES[verb], 400, monkeypatch))
    for width in (60, 80, 100):
        narrow = printed(TABLES[verb], width, monkeypatch)
        assert wide - words(narrow) <= HEADS, f"{width} columns: {sorted(wide - words(narrow))[:5]}"
        assert "…" not in narrow.replace(" … ", " ")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_long_line_is_broken_between_words_on_a_terminal_alone(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a sentence that a terminal breaks within a word, a line of a log that is cut in two, and a path
    that can't be pasted."""
    sentence = f"export    the drafter was written to {PATH} and every weight of it reads back equal"
    for say, indent in ((console.say, 10), (console.remark, 10), (console.fail, 6)):
        broken, whole = io.StringIO(), io.StringIO()
        for is_terminal, file in ((True, broken), (False, whole)):
            made = Console(width=width, file=file, force_terminal=is_terminal, color_system=None)
            monkeypatch.setattr(console, "out", made)
            monkeypatch.setattr(console, "note", made)
            say(sentence)
        first, *rest = broken.getvalue().splitlines()
        assert all(len(line) <= width or line.split() == [PATH] for line in (first, *rest))
        assert rest and all(line[:indent] == " " * indent and line[indent] != " " for line in rest)
        assert broken.getvalue().split() == whole.getvalue().split()
        assert len(whole.getvalue().splitlines()) == 1


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_a_table_takes_the_width_there_is(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches lines beyond the edge; only a word that is longer than a line may reach over it."""
    sentence = "a cell of many words that has to wrap somewhere between two of them " * 2

    def say() -> None:
        table = console.table("name", "count", "what it is", right=["count"])
        table.add_row("short", "1,234,567", sentence)
        table.add_row(PATH, "8", "[all] and 'outrider[gguf]'", style="red")
        console.show(table)

    text = printed(say, width, monkeypatch)
    assert words(sentence) | {PATH, "1,234,567", "'outrider[gguf]'", "[all]"} <= words(text)
    for line in text.splitlines():
        assert len(line.rstrip()) <= width or any(len(word) > width // 2 for word in line.split())


def test_a_table_that_has_room_is_a_table_and_one_that_has_not_is_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches blocks on a wide terminal, and columns of three letters on a narrow one."""
    table = console.table("name", "speed", "notes", right=["speed"])
    table.add_row("dspark", "1.93", "block of five")
    wide = printed(lambda: console.show(table), 80, monkeypatch).splitlines()
    assert [line.split() for line in wide] == [["name", "speed", "notes"], ["dspark", "1.93", "block", "of", "five"]]
    narrow = printed(lambda: console.show(table), 16, monkeypatch).splitlines()
    assert narrow[:3] == ["dspark", "  speed  1.93", "  notes  block"]


def test_a_table_of_rich_keeps_its_rows_and_styles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table of another room that loses rows or columns on its way through."""
    given = Table("a", "b")
    given.add_row("1", "2", style="bold")
    given.add_row("3")
    made = console.fitted(given)
    assert [([cell.plain for cell in cells], style) for cells, style in made.rows] == [
        (["1", "2"], "bold"), (["3", ""], "")
    ]  # fmt: skip


def test_brackets_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rich taking an extra's name for markup: pip install 'outrider' would not bring what is missing."""
    for say in (
        lambda: console.say("pip install 'outrider[tensorboard]'"),
        lambda: console.present(None, 0, "pip install 'outrider[tensorboard]'"),
    ):
        assert "'outrider[tensorboard]'" in printed(say, 80, monkeypatch)
    file = io.StringIO()
    monkeypatch.setattr(console, "note", Console(file=file, width=80))
    console.fail("needs lm-eval: pip install 'outrider[eval]' in C:\\[x]")
    assert file.getvalue() == "error needs lm-eval: pip install 'outrider[eval]' in C:\\[x]\n"


def test_the_doctor_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches the bracket lost in the doctor's table."""
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)
    assert "'outrider[tensorboard]'" in words(printed(doctor.doctor, 80, monkeypatch))


# ── progress ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """Seconds that only pass when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


def test_a_log_gets_a_line_every_tenth_of_the_work_and_every_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a log of Slurm or nohup that is silent for hours, or has a line for every step."""
    clock = Clock(monkeypatch)

    def work(seconds: float) -> list[str]:
        def say() -> None:
            with console.bar("steps", 1000, is_steady=True) as update:
                for step in range(1, 1001):
                    clock.now += seconds
                    update(step, f"loss {step / 1000:.3f}")

        return [line for line in printed(say, 80, monkeypatch).splitlines() if " of 1000 steps" in line]

    lines = work(0.25)  # a tenth takes 25 s
    assert [line.split()[0] for line in lines] == [str(step) for step in range(100, 1001, 100)]
    assert lines[0].strip() == "100 of 1000 steps, loss 0.100, 4 min left"
    assert lines[-1].strip() == "1000 of 1000 steps, loss 1.000"
    slow = work(3.0)  # 30 s are ten steps
    assert 95 <= len(slow) <= 105
    assert not work(0.0001), "work of a tenth of a second needs no lines"


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches lines that push the bar up, and a log that gets the bar's control codes."""
    clock = Clock(monkeypatch)
    for is_terminal in (True, False):
        out, note = io.StringIO(), io.StringIO()
        monkeypatch.setattr(console, "out", Console(file=out, width=80, force_terminal=is_terminal))
        monkeypatch.setattr(console, "note", Console(file=note, width=80, force_terminal=is_terminal))
        with console.bar("steps", 10) as update:
            for step in range(1, 11):
                clock.now += 2
                update(step)
        assert (" of 10 steps" in out.getvalue()) != is_terminal
        assert ("10/10" in note.getvalue()) == is_terminal
