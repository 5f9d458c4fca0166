"""What every verb says and how: two consoles, a progress bar, JSON, sizes in words, arguments that several verbs
take."""

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, OverflowMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from outrider.errors import ConfigError, DataError

FAR = 3
"""Times what is usual, from which on a stage says why it takes so long."""

STEADY_STEPS = 24
"""Steps of a kind after which their time is known."""

out = Console()
note = Console(stderr=True)

Recipe = Annotated[Path, typer.Argument(help="Run file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.path=value, such as train.lr=3e-4", show_default=False)
]
JsonTo = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON; - is standard output.")
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Count rows that can't be read instead of stopping at the first.")
]


def say(line: str, style: str | None = None) -> None:
    """Print a line as it is, however long."""
    out.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def remark(line: str, style: str | None = None) -> None:
    """The same on standard error: what is no result."""
    note.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def table(*columns: str, right: Collection[str] = (), overflow: OverflowMethod = "ellipsis") -> Table:
    """An empty table without lines.  right: the columns that hold numbers."""
    made = (Column(name, justify="right" if name in right else "left", overflow=overflow) for name in columns)
    return Table(*made, box=None, pad_edge=False)


def present(json_to: str | None, value: Any, *shown: Table | str) -> None:
    """Print a result, unless JSON goes to standard output, and write it as JSON where `--json` asks for that."""
    for each in shown if json_to != "-" else ():
        say(each) if isinstance(each, str) else out.print(each)
    write_json(json_to, value)


def quiet(*, parallel_tokenizers: bool = False) -> None:
    """transformers and datasets talk less, if this is called before they load; what the user must know we say
    ourselves.

    parallel_tokenizers: many texts are read at once, and no process is forked after.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", str(parallel_tokenizers).lower())
    # transformers loads torchao where it is installed, which warns of every extension for another machine
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Forecast:
    """How long a stage will take, said once, as soon as its first steps tell."""

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
        self.began = self.at = time.monotonic()
        self.steps: list[float] = []
        """Seconds of every step that was seen."""
        self.is_printed = False

    def update(self, done: int) -> str | None:
        """The line to say now, None where it is too early or was said."""
        if self.is_steady and not self.steps:
            self.done = done - 1  # where an earlier run stopped is known to the one that goes on
        now, new_steps = time.monotonic(), done - self.done
        if self.is_printed or new_steps < 1:
            return None
        self.steps += [(now - self.at) / new_steps] * new_steps
        self.done, self.at = done, now
        spent, count = now - self.began, len(self.steps)
        if not (
            spent > 30 or (spent > 5 and (count >= STEADY_STEPS if self.is_steady else count >= 0.05 * self.total))
        ):
            return None
        self.is_printed = True
        # a training's first steps read features too; answers written side by side end in bursts
        each = statistics.median(self.steps[-STEADY_STEPS // 3 :]) if self.is_steady else spent / count
        whole = spent + each * (self.total - done)
        line = f"about {lasting(whole)} for {count + self.total - done} {self.unit}, {lasting(each)} each"
        if self.usual_minutes is None or whole < FAR * 60 * self.usual_minutes:
            return line
        return f"{line}; {lasting(60 * self.usual_minutes)} are usual. {self.why_slow()}"


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
    """A progress bar on standard error; gives update(done, note).  It goes when its work is done.

    What the whole will take is printed after the first steps.  is_steady: steps come one by one and take alike.
    why_slow: asked for the reason where it will take three times the usual minutes.
    """
    forecast = Forecast(unit, total, done, is_steady, usual_minutes, why_slow)
    columns = (
        TextColumn("          {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    # drawn when it moves and at no other time: a thread that draws would slow down what is being measured
    with Progress(*columns, console=note, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(unit, total=total, completed=done, note="")

        def update(done: int, note: str | None = None) -> None:
            fields: dict[str, Any] = {} if note is None else {"note": note}
            progress.update(task, completed=done, refresh=True, **fields)
            if (line := forecast.update(done)) is not None:
                say(f"          {line}")

        yield update


@contextmanager
def stopping(line: str) -> Iterator[None]:
    """Ctrl-C within ends the program with this line."""
    try:
        yield
    except KeyboardInterrupt:
        remark(f"\nstopped; {line}")
        raise SystemExit(130) from None


@contextmanager
def restarted(what: str) -> Iterator[None]:
    """Ctrl-C within says what is true of one interleaved measurement: it can't go on later.  Also decorates a verb."""
    with stopping(f"of this {what} nothing is kept, the same command starts it anew"):
        yield


def key_of(variable: str | None) -> str | None:
    """The key that an environment variable holds, for `--key-from`; None where none is named."""
    key = None if variable is None else os.environ.get(variable)
    if variable is not None and not key:
        raise ConfigError(
            f"--key-from {variable}: no such environment variable; set it to the key, or leave the option out"
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
            raise DataError(f"can't write {to}: {error.strerror}; name a file in a folder that exists") from None


def counted(number: float) -> str:
    """1234567 as 1.2 M."""
    units = (f"{number / size:.1f} {unit}" for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)) if number >= size)
    return next(units, f"{number:.0f}")


def sized(size_bytes: float) -> str:
    return f"{counted(size_bytes)}B"


def fail(message: str) -> None:
    note.print("[bold red]error[/] " + message.replace("[", "\\["), highlight=False, soft_wrap=True)
