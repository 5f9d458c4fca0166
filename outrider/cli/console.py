"""What all verbs share: two consoles, tables, progress, JSON, sizes in words, common arguments."""

import json
import os
import re
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from outrider.errors import ConfigError, DataError

FAR = 3
"""Times what is usual, from which on a stage says why it takes so long."""
LINE_EVERY_S, LINE_AFTER_S = 30.0, 1.0
"""Seconds between two lines of progress in a log: at most, and at least."""

STEADY_STEPS = 24
"""Steps of a kind after which their time is known."""
BURST = 200
"""Answers after which the time of one is known: those of a batch end at about the same time."""

out = Console()
note = Console(stderr=True)
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that do something to a terminal, but for tabs and line feeds."""
PASSWORD = re.compile(r"(?<=://)[^/\s@\"']+@")


def plain(text: str) -> str:
    """Text that shows what it is and does nothing: control characters are written out, which could drive a terminal or
    turn its letters around, halves of surrogates can be encoded, and a password in an address is left out."""
    shown = CONTROL.sub(lambda match: match[0].encode("unicode_escape", "backslashreplace").decode(), text)
    return PASSWORD.sub("***@", shown)


def written(text: str) -> str:
    """A model's text as standard output may have it: plain in a terminal, as it came in a file."""
    whole = text.encode(errors="replace").decode()
    return plain(whole) if out.is_terminal else whole


def say(line: str, style: str | None = None) -> None:
    """Print a line: as it is, however long, into a file or a pipe; between words and indented on a terminal."""
    out.print(_wrapped(line, out), style=style, highlight=False, markup=False, soft_wrap=True)


def remark(line: str, style: str | None = None) -> None:
    """Print a line on standard error, for what is not a result."""
    note.print(_wrapped(line, note), style=style, highlight=False, markup=False, soft_wrap=True)


def _wrapped(text: str, console: Console, indent: int | None = None) -> str:
    """Text whose lines fit a terminal, but for words that are longer; as it is for a file or a pipe.

    indent: of the lines that a line is broken into; as far as its words after the verb's name unless given.
    """
    text = plain(text)
    if not console.is_terminal:
        return text
    lines = []
    for line in text.split("\n"):
        head = re.match(r"\S*\s{2,}", line)
        after = " " * (indent if indent is not None else len(head[0]) if head else 0)
        is_long = cell_len(line) > console.width
        lines.append(textwrap.fill(line, console.width, subsequent_indent=after, **_WHOLE_WORDS) if is_long else line)
    return "\n".join(lines)


def present(json_to: str | None, value: Any, *shown: "FittedTable | Table | str") -> None:
    """Print a result, unless JSON goes to standard output, and write it as JSON where `--json` asks for that."""
    for each in shown if json_to != "-" else ():
        say(each) if isinstance(each, str) else show(each)
    write_json(json_to, value)


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class FittedTable:
    """A table as wide as the terminal: cells wrap between words; where a word has no room, rows are blocks of lines.

    Cells are text, not markup.
    """

    def __init__(self, columns: Sequence[Column]):
        self.columns = columns
        self.rows: list[tuple[list[Text], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        self.rows.append(([_text(cell) for cell in cells[: len(self.columns)]], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        texts = [[_text(column.header), *cells] for column, cells in zip(self.columns, self._cells(), strict=True)]
        full = [max(_longest(text.plain.split("\n")) for text in own) for own in texts]
        narrowest = [
            max(_longest(own[0].plain.split()), *(_longest(_pieces(text, column.no_wrap)) for text in own))
            for column, own in zip(self.columns, texts, strict=True)
        ]
        gap = 2 if sum(full) + 2 * (len(full) - 1) <= width else 1
        room = width - gap * (len(full) - 1)
        if sum(narrowest) > room or _is_tall(widths := _widths(narrowest, full, room), texts):
            yield from self._blocks(width)
            return
        made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        for column, own, size in zip(self.columns, texts, widths, strict=True):
            made.add_column(own[0], justify=column.justify, width=size, overflow="fold")
        for cells, style in self.rows:
            made.add_row(*cells, style=style)
        yield made

    def _cells(self) -> list[list[Text]]:
        """The cells of every column; a row may be shorter than the table."""
        blank = Text()
        return [[row[i] if i < len(row) else blank for row, _ in self.rows] for i in range(len(self.columns))]

    def _blocks(self, width: int) -> RenderResult:
        """Every row as its first cell, and below it a line for each other cell that has a value."""
        names = [" ".join(_text(column.header).plain.split()) for column in self.columns]
        indent = min(_longest(names[1:]), width // 3) + 4
        for cells, style in self.rows:
            lines = [] if not cells[0].plain.strip() else textwrap.wrap(cells[0].plain, width, **_WHOLE_WORDS)
            for name, cell in zip(names[1:], cells[1:], strict=False):
                if cell.plain.strip(" -–"):
                    first = f"  {name}".ljust(indent - 1) + " "
                    value = " ".join(cell.plain.split())
                    lines += textwrap.wrap(
                        value, width, initial_indent=first, subsequent_indent=" " * indent, **_WHOLE_WORDS
                    )
            yield Text("\n".join(lines), style, no_wrap=True, overflow="ignore")


_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
TALLEST = 6
"""Lines of a cell: where one needs more, rows are blocks."""


def table(*columns: str, right: Collection[str] = ()) -> FittedTable:
    """An empty table without lines.  right: the columns that hold numbers, which never wrap."""
    return FittedTable(
        [Column(name, justify="right" if name in right else "left", no_wrap=name in right) for name in columns]
    )


def fitted(given: Table) -> FittedTable:
    """A table of rich as one that fits; its lines and its own widths are left out."""
    made = FittedTable(given.columns)
    for row, *cells in zip(given.rows, *(column.cells for column in given.columns), strict=True):
        made.add_row(*map(_text, cells), style=str(row.style or ""))
    return made


def show(given: FittedTable | Table) -> None:
    """Print a table in the width there is."""
    out.print(fitted(given) if isinstance(given, Table) else given, crop=False)


def _text(given: Any) -> Text:
    return given if isinstance(given, Text) else Text(plain(str(given)))


def _longest(words: Sequence[str]) -> int:
    return max(map(cell_len, words), default=0)


def _pieces(text: Text, whole_lines: bool) -> list[str]:
    return text.plain.split("\n") if whole_lines else text.plain.split()


def _widths(narrowest: Sequence[int], full: Sequence[int], room: int) -> list[int]:
    """Widths between `narrowest` and `full` of every column that together take at most `room`, shared evenly."""
    widths, spare = list(narrowest), room - sum(narrowest)
    while spare > 0 and (narrow := [i for i, width in enumerate(widths) if width < full[i]]):
        each = max(1, spare // len(narrow))
        for i in narrow[:spare]:
            more = min(each, full[i] - widths[i])
            widths[i], spare = widths[i] + more, spare - more
    return widths


def _is_tall(widths: Sequence[int], texts: Sequence[Sequence[Text]]) -> bool:
    return any(
        len(textwrap.wrap(text.plain, max(1, width), **_WHOLE_WORDS)) > TALLEST
        for width, own in zip(widths, texts, strict=True) for text in own
    )  # fmt: skip


# ── long work ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def quiet(*, parallel_tokenizers: bool = False) -> None:
    """transformers and datasets talk less, if this is called before they load; what the user must know we say
    ourselves.

    parallel_tokenizers: many texts are read at once, and no process is forked after.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", str(parallel_tokenizers).lower())


class Forecast:
    """How long a stage will take, and where it is, from the times of its steps."""

    def __init__(
        self,
        unit: str,
        total: int,
        done: int,
        is_steady: bool,
        usual_minutes: float | None,
        why_slow: Callable[[], str] = str,
    ):
        self.unit, self.total, self.done, self.is_steady, self.usual_minutes = (
            unit,
            total,
            done,
            is_steady,
            usual_minutes,
        )
        self.why_slow = why_slow
        self.began = self.at = self.line_at = time.monotonic()
        self.steps: list[float] = []
        """Seconds of every step of this process."""
        self.is_printed = False
        self.line_done = done
        self.reading_s = (0.0, 0.0)

    def update(self, done: int, reading_s: tuple[float, float] = (0.0, 0.0)) -> str | None:
        """The line about the whole, once its first steps are timed; None before and after.

        reading_s: seconds of what is done once, beside the steps, so far and still to come."""
        if self.is_steady and not self.steps:
            self.done = done - 1  # where an earlier run stopped is known to the one that goes on
        now, new_steps = time.monotonic(), done - self.done
        if new_steps < 1:
            return None
        own = now - self.at - (reading_s[0] - self.reading_s[0])
        self.steps += [own / new_steps] * new_steps
        self.done, self.at, self.reading_s = done, now, reading_s
        spent, enough = now - self.began, len(self.steps) >= STEADY_STEPS or not self.is_steady
        if self.is_printed or not self.is_known or not (spent > 30 or (spent > 5 and enough)):
            return None
        self.is_printed = True
        whole = spent + self.left_s
        count = len(self.steps) + self.total - done
        line = f"about {lasting(whole)} for {count} {self.unit}, {lasting(self.each_s)} each"
        if self.usual_minutes is None or whole < FAR * 60 * self.usual_minutes:
            return line
        return f"{line}; {lasting(60 * self.usual_minutes)} are usual. {self.why_slow()}"

    @property
    def is_known(self) -> bool:
        """Enough was timed to tell the rest from: of a batch, whose answers end in bursts, more than its first ones."""
        count = len(self.steps)
        return self.is_steady or count >= min(0.05 * self.total, BURST) or self.at - self.began > 120

    @property
    def each_s(self) -> float:
        """Seconds that a step takes.  The first step of a training warms up; answers of a batch end in bursts."""
        spent = self.at - self.began
        return statistics.median(self.steps[-STEADY_STEPS // 3 :]) if self.is_steady else spent / len(self.steps)

    @property
    def left_s(self) -> float:
        return self.each_s * max(0, self.total - self.done) + self.reading_s[1]

    def line(self, note: str) -> str | None:
        """Progress in one line for a log: every `LINE_EVERY_S` seconds and every tenth of the work; None in between."""
        now, tenth = time.monotonic(), max(1, self.total // 10)
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
    """Progress of long work; gives update(done, note).  A bar on a terminal; lines where output goes to a file or pipe.

    The time of the whole is printed after the first steps.  is_steady: steps come one by one and take equally long.
    why_slow: asked for the reason where it will take three times the usual minutes.
    """
    forecast = Forecast(unit, total, done, is_steady, usual_minutes, why_slow)
    columns = (
        TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with ExitStack() as stack:
        # drawn when it moves and at no other time: a thread that draws would slow down what is being measured
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
    """Within it, Ctrl-C ends the program with this line."""
    try:
        yield
    except KeyboardInterrupt:
        remark(f"\nstopped; {line}")
        raise SystemExit(130) from None


@contextmanager
def restarted(what: str) -> Iterator[None]:
    """Within it, Ctrl-C says that this work can't be resumed.  Also decorates a verb."""
    with stopping(f"nothing of this {what} is stored, the same command starts it again"):
        yield


def key_of(variable: str | None) -> str | None:
    """The key that an environment variable holds, for `--key-from`; None where none is named."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(
            f"--key-from {variable}: there is no such environment variable; set it to the key, or leave out the option"
        )
    return key


def place_of_json(to: str | None) -> None:
    """Refuse a place that can't be written before the work; where it is standard output, all else goes to standard
    error."""
    if to == "-":
        out.file = sys.stderr
    elif to is not None and not Path(to).absolute().parent.is_dir():
        raise DataError(f"can't write {to}: no such folder; name a file in a folder that exists")


def write_json(to: str | None, value: Any) -> None:
    """Write a value where `--json` says; nothing where it was not given."""
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
    """Go on if somebody at a terminal says so.  Raises ConfigError where they don't, or where nobody is there."""
    if not sys.stdin.isatty():
        raise ConfigError(f"{what}; add --yes if that is meant, or lower prepare.count")
    if not typer.confirm(f"{what}; go on?"):
        raise ConfigError("nothing is written; lower prepare.count, or name another prepare.folder")


def fail(message: str) -> None:
    text = Text(_wrapped(f"error {message}", note, indent=6))
    text.stylize("bold red", 0, len("error"))
    note.print(text, highlight=False, soft_wrap=True)
