"""What every verb prints: tables at any width, progress in a log, text with brackets."""

import functools
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from outrider.cli import console, doctor, drafters, exchange, report, tasks, watch
from outrider.report.schema import Report
from outrider.traffic.counters import SpeculationStats
from outrider.traffic.watch import Window


def printed(say: Callable[[], object], width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What `say` prints on a terminal of so many columns."""
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(width=width, file=file))
    monkeypatch.setattr(console, "note", Console(width=width, file=io.StringIO()))
    say()
    return file.getvalue()


def watch_table() -> None:
    window = Window(60.0, SpeculationStats(drafts=10, drafted=40, accepted=20, by_position=(9, 7, 4)))
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
    "tasks": lambda: tasks.tasks(), "watch": watch_table, "compare": compare_table,
}  # fmt: skip


def test_a_narrow_terminal_loses_nothing_of_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a cell that is cut off, or ends in an ellipsis, as rich does by default if a table is too wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "find_spec", lambda module: None)  # its third column is not empty on any machine
    monkeypatch.setattr(doctor, "examine", functools.cache(doctor.examine))
    for verb, table in TABLES.items():
        wide, narrow = (Counter("".join(printed(table, width, monkeypatch).split())) for width in (400, 60))
        assert verb != "doctor" or wide["["] >= 6, "the extras that are missing"
        assert wide == narrow, f"{verb}: {wide - narrow}, {narrow - wide}"


def test_long_lines_wrap_behind_their_name_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line that is cut off, or wraps to the first column below the names."""
    file = io.StringIO()
    monkeypatch.setattr(console, "out", Console(width=30, file=file, force_terminal=True, color_system=None))
    console.say("drafter   suffix [x]: at most 4 tokens\nper step")
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines == ["drafter   suffix [x]: at most", "          4 tokens", "per step"]


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


def test_a_log_gets_a_line_every_tenth_of_the_work_and_every_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a log of Slurm or nohup that is silent for hours, or has a line for every step."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(console.time, "monotonic", lambda: clock.now)

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
