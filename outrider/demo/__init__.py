"""The demo: a small target of our own, a small drafter beside it, and prompts read from the running interpreter's
library.

Nothing of the standard library's text is shipped.  Modules named in `HELD_OUT` were seen by neither model in training.
Knows no torch.
"""

import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from outrider.errors import DataError

TARGET = Path(__file__).parent / "target"
SMALL_MODEL = Path(__file__).parent / "small_model"

HELD_OUT = frozenset({
    "argparse", "calendar", "configparser", "csv", "dataclasses", "filecmp", "fractions", "heapq", "json", "mailbox",
    "queue",
    "sched", "selectors", "shlex", "smtplib", "socketserver", "statistics", "textwrap", "threading", "timeit",
    "traceback",
    "wave", "weakref",
})  # fmt: skip
"""Top-level modules and packages that no model here was trained on; prompts for measuring come from them."""

SKIPPED = frozenset({"test", "tests", "idle_test", "turtledemo", "site-packages", "lib-dynload", "__pycache__"})

Split = Literal["train", "held_out"]


class Module(NamedTuple):
    """One source file of the standard library."""

    name: str
    """Path below the library, such as `json/decoder.py`."""
    text: str


def modules(split: Split) -> Iterator[Module]:
    """Source files of the running interpreter's library, in the order of their names; tests are left out.

    Raises DataError where the interpreter came without its library's source.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    found = False
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if SKIPPED.intersection(name.parts):
            continue
        if (name.parts[0].removesuffix(".py") in HELD_OUT) == (split == "held_out"):
            found = True
            yield Module(name.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
    if not found:
        raise DataError(
            f"no Python source for the demo's {split} prompts under {library}; "
            "install the standard library's source, or name your own prompts: prepare.conversations=FILE.jsonl"
        )


def prompts(split: Split, count: int, seed: int = 0, characters: int = 600) -> Iterator[tuple[str, str]]:
    """Pieces of library source ending at the end of a line, as (id, text), in an order that `seed` decides.

    The first piece of every module comes before the second of any, so that a few prompts already cover many modules.
    """
    order = random.Random(f"{split} {seed}")
    pieces: list[tuple[float, str, str]] = []
    for module in modules(split):
        lines = module.text.splitlines(keepends=True)
        starts = list(range(0, max(1, len(lines) - 24), 12))
        order.shuffle(starts)
        for turn, start in enumerate(starts):
            text = _lines_up_to(lines[start:], characters)
            if len(text) >= characters // 2:
                pieces.append((turn + order.random(), f"{module.name}:{start + 1}", text))
    pieces.sort()
    for _, name, text in pieces[:count]:
        yield name, text


def _lines_up_to(lines: list[str], characters: int) -> str:
    text = ""
    for line in lines:
        if len(text) + len(line) > characters:
            break
        text += line
    return text
