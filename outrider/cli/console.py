"""Output of all verbs: text, tables, progress, JSON, and counts and sizes in short form."""

import json
import logging
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from outrider.errors import ConfigError, DataError, masked

SLOW_FACTOR = 3
"""A stage explains why it is slow if it will take this many times its usual minutes."""
LINE_EVERY_S, LINE_AFTER_S = 30.0, 1.0
"""Maximum and minimum seconds between two lines of progress in a log."""
STEADY_STEPS = 24
"""Minimum number of steps for a time estimate."""
BURST = 200
"""Minimum number of answers for a time estimate: the answers of a batch end at about the same time."""

CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, except tabs and line feeds."""


def plain(text: str) -> str:
    """Text that is safe to print: control characters and lone surrogates are escaped, passwords and keys masked."""
    return masked(_escaped(text))


def _escaped(text: str) -> str:
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape", "backslashreplace").decode(), text)


class PlainConsole(Console):
    """A console on which no printed text can control the terminal; rich's own control codes still work."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=_escaped(segment.text))


out = PlainConsole()
note = PlainConsole(stderr=True)


def written(text: str) -> str:
    """A model's text for standard output: escaped on a terminal, verbatim in a file."""
    encodable = text.encode(errors="replace").decode()
    return _escaped(encodable) if out.is_terminal else encodable


def say(line: str, style: str | None = None) -> None:
    """Print a line on standard output."""
    _print(out, line, style)


def remark(line: str, style: str | None = None) -> None:
    """Print a line that is not a result on standard error."""
    _print(note, line, style)


def _print(console: Console, line: str, style: str | None = None) -> None:
    """Print text unwrapped to a file or a pipe.  On a terminal it wraps behind the name at its start, if it has one."""
    for part in plain(line).split("\n") if console.is_terminal else [plain(line)]:
        name = re.match(r"\S*\s{2,}", part)
        if console.is_terminal and name:
            grid = Table.grid(padding=0)
            grid.add_column(width=len(name[0]))
            grid.add_row(Text(name[0]), Text(part[len(name[0]) :]), style=style)
            console.print(grid)
        else:
            console.print(part, style=style, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def present(json_to: str | None, value: Any, *shown: Table | str) -> None:
    """Print a result unless the JSON goes to standard output, and write it as JSON if `--json` is given."""
    for part in shown if json_to != "-" else ():
        say(part) if isinstance(part, str) else show(part)
    write_json(json_to, value)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


COLUMN_GAP = (0, 2, 0, 0)


class PlainTable(Table):
    """A table without lines.  Strings are text, not markup, and can't control the terminal."""

    def add_row(self, *cells: str | Text, style: str = "") -> None:  # type: ignore[override]
        super().add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in cells), style=style)


def table(*columns: str, right: Collection[str] = ()) -> PlainTable:
    """An empty table.  right: columns of numbers, which never wrap."""
    made = PlainTable(box=None, pad_edge=False, padding=COLUMN_GAP)
    for name in columns:
        is_number = name in right
        made.add_column(Text(plain(name)), justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return made


def show(table: Table) -> None:
    """Print a table without lines; cells wrap to the width of the terminal."""
    table.box = None
    table.pad_edge = False
    table.padding = COLUMN_GAP
    out.print(table, crop=False)


# ── long work ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def quiet(*, parallel_tokenizers: bool = False) -> None:
    """Silence transformers and datasets; must be called before they are imported.

    parallel_tokenizers: tokenize on several threads, for work that does not fork afterwards.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", str(parallel_tokenizers).lower())


class Forecast:
    """Time estimate and progress of a stage, from the times of its steps."""

    def __init__(
        self,
        unit: str,
        total: int,
        done: int,
        is_steady: bool,
        usual_minutes: float | None,
        why_slow: Callable[[], str] = str,
    ):
        self.unit = unit
        self.total = total
        self.done = done
        self.is_steady = is_steady
        self.usual_minutes = usual_minutes
        self.why_slow = why_slow
        self.began = self.at = self.line_at = time.monotonic()
        self.steps: list[float] = []
        """Seconds of every step of this process."""
        self.is_printed = False
        self.line_done = done
        self.reading_s = (0.0, 0.0)

    def update(self, done: int, reading_s: tuple[float, float] = (0.0, 0.0)) -> str | None:
        """The line with the total time, once the first steps are timed; None before and after.

        reading_s: seconds of one-time work besides the steps, past and remaining."""
        if self.is_steady and not self.steps:
            self.done = done - 1  # a resumed run starts where the previous one stopped
        now = time.monotonic()
        new_steps = done - self.done
        if new_steps < 1:
            return None
        step_s = now - self.at - (reading_s[0] - self.reading_s[0])
        self.steps += [step_s / new_steps] * new_steps
        self.done, self.at, self.reading_s = done, now, reading_s
        spent = now - self.began
        enough = len(self.steps) >= STEADY_STEPS or not self.is_steady
        if self.is_printed or not self.is_known or not (spent > 30 or (spent > 5 and enough)):
            return None
        self.is_printed = True
        total_s = spent + self.left_s
        count = len(self.steps) + self.total - done
        line = f"about {lasting(total_s)} for {count} {self.unit}, {lasting(self.each_s)} each"
        if self.usual_minutes is None or total_s < SLOW_FACTOR * 60 * self.usual_minutes:
            return line
        return f"{line}; {lasting(60 * self.usual_minutes)} is usual. {self.why_slow()}"

    @property
    def is_known(self) -> bool:
        """Whether enough steps were timed for an estimate; more are needed for answers, which finish in bursts."""
        count = len(self.steps)
        return self.is_steady or count >= min(0.05 * self.total, BURST) or self.at - self.began > 120

    @property
    def each_s(self) -> float:
        """Seconds per step: the median in training, whose first step is a warm-up; the mean for answers, which finish
        in bursts."""
        spent = self.at - self.began
        return statistics.median(self.steps[-STEADY_STEPS // 3 :]) if self.is_steady else spent / len(self.steps)

    @property
    def left_s(self) -> float:
        return self.each_s * max(0, self.total - self.done) + self.reading_s[1]

    def line(self, note: str) -> str | None:
        """A line of progress for a log, every `LINE_EVERY_S` seconds and every tenth of the work; None in between."""
        now = time.monotonic()
        tenth = max(1, self.total // 10)
        waited = now - self.line_at
        is_tenth = self.done // tenth > self.line_done // tenth
        if not self.steps or (waited < LINE_EVERY_S and not (is_tenth and waited >= LINE_AFTER_S)):
            return None
        self.line_at, self.line_done = now, self.done
        left = f"{lasting(self.left_s)} left" if self.is_known and self.done < self.total else ""
        return ", ".join(filter(None, (f"{self.done} of {self.total} {self.unit}", note, left)))


def lasting(seconds: float) -> str:
    """7265 as 2 h 1 min; 0.215 as 0.21 s."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


@contextmanager
def bar(
    unit: str, total: int, done: int = 0, is_steady: bool = False, usual_minutes: float | None = None,
    why_slow: Callable[[], str] = str,
) -> Iterator[Callable[..., None]]:  # fmt: skip
    """Progress of long work; yields update(done, note).  A bar on a terminal, lines in a file or pipe.

    The total time is printed after the first steps.  is_steady: steps come one by one and take about the same time.
    why_slow: called for an explanation if the work will take three times the usual minutes.
    """
    forecast = Forecast(unit, total, done, is_steady, usual_minutes, why_slow)
    columns = (
        TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with ExitStack() as stack:
        # drawn only when it moves: a refresh thread would disturb the measurement
        progress = Progress(*columns, console=note, transient=True, auto_refresh=False)
        task = progress.add_task(unit, total=total, completed=done, note="")
        if note.is_terminal:
            stack.enter_context(progress)
        is_logged = not (note.is_terminal and out.is_terminal)
        text = ""

        def update(done: int, note: str | None = None, reading_s: tuple[float, float] = (0.0, 0.0)) -> None:
            nonlocal text
            text = text if note is None else note
            if progress.live.is_started:
                progress.update(task, completed=done, refresh=True, note=text)
            lines = (forecast.update(done, reading_s), forecast.line(text) if is_logged else None)
            for line in filter(None, lines):
                say(f"          {line}")

        yield update


@contextmanager
def stopping(line: str) -> Iterator[None]:
    """Ctrl-C ends the program and prints this line."""
    try:
        yield
    except KeyboardInterrupt:
        remark(f"\nstopped; {line}")
        raise SystemExit(130) from None


@contextmanager
def restarted(what: str) -> Iterator[None]:
    """Ctrl-C ends the program and says that this work can't be resumed.  Also decorates a verb."""
    with stopping(f"this {what} is not stored; rerun the same command to start over"):
        yield


def key_of(variable: str | None) -> str | None:
    """The key in an environment variable, for `--key-from`; None without a name."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(
            f"--key-from {variable}: this environment variable is not set; set it to the key, or leave out the option"
        )
    return key


def place_of_json(to: str | None) -> None:
    """Refuse a file that can't be written before the work starts; for standard output, send all else to standard
    error."""
    if to == "-":
        out.file = sys.stderr
    elif to is not None and not Path(to).absolute().parent.is_dir():
        raise DataError(f"can't write {to}: no such folder; name a file in a folder that exists")


def write_json(to: str | None, value: Any) -> None:
    """Write a value to the file of `--json`, if it was given."""
    if to == "-":
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    elif to is not None:
        try:
            Path(to).write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise DataError(
                f"can't write {to}: {error.strerror}; name a file in a folder that exists and can be written to"
            ) from None


def counted(number: float) -> str:
    """A count in short form: 1234567 as 1.2 M."""
    units = (f"{number / size:.1f} {unit}" for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if number >= size)
    return next(units, f"{number:.0f}")


def sized(size_bytes: float) -> str:
    return f"{counted(size_bytes)}B"


def confirm(what: str) -> None:
    """Ask on the terminal whether to continue.  Raises ConfigError if not, or without a terminal."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}; add --yes to allow it, or lower prepare.count")
    if not typer.confirm(f"{what}; continue?"):
        raise ConfigError("nothing was written; lower prepare.count, or name another prepare.folder")


class LogHandler(logging.Handler):
    """Prints log lines on standard error, escaped like everything else."""

    def emit(self, record: logging.LogRecord) -> None:
        remark(self.format(record))


def fail(message: str) -> None:
    note.print(
        Text.assemble(("error", "bold red"), f" {plain(message)}"), highlight=False, soft_wrap=not note.is_terminal
    )
