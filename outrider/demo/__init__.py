"""The demo: a small target of our own, a small drafter beside it, and prompts read from installed Python source.

Nothing of that text is shipped.  Of the standard library, modules named in `HELD_OUT` were seen by neither model in
training, and of packages none: what the target writes after them is no recital.  Knows no torch.
"""

import importlib.util
import random
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
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

SKIPPED = frozenset(
    {"test", "tests", "testing", "idle_test", "turtledemo", "site-packages", "lib-dynload", "__pycache__"}
)

Split = Literal["train", "held_out"]


class Module(NamedTuple):
    """One source file."""

    name: str
    """Path below the library, such as `json/decoder.py`, or below where packages are."""
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


def package_modules(names: Sequence[str]) -> Iterator[Module]:
    """Source files of installed packages, in the order of their names, without importing any; tests are left out.

    Raises DataError for a package that is not installed, or has no source.
    """
    for name in names:
        try:
            found = importlib.util.find_spec(name) if name.isidentifier() else None
        except (ImportError, ValueError):
            found = None
        files = [
            (path.relative_to(Path(place).parent), path)
            for place in (found.submodule_search_locations or () if found is not None else ())
            for path in sorted(Path(place).rglob("*.py"))
        ]
        if not files:
            raise DataError(f"packages:{name} is no installed package with Python source; name some, such as torch")
        for short, path in files:
            if not SKIPPED.intersection(short.parts):
                yield Module(short.as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def prompts(split: Split, count: int, seed: int = 0, characters: int = 600) -> Iterator[tuple[str, str]]:
    """`pieces` of the library's source."""
    return pieces(modules(split), count, f"{split} {seed}", characters)


def pieces(sources: Iterable[Module], count: int, seed: str, characters: int) -> Iterator[tuple[str, str]]:
    """Pieces of source ending at the end of a line, as (id, text), in an order that `seed` decides.

    The first piece of every module comes before the second of any, so that a few prompts already cover many modules.
    """
    order = random.Random(seed)
    found: list[tuple[float, str, str]] = []
    for module in sources:
        lines = module.text.splitlines(keepends=True)
        starts = list(range(0, max(1, len(lines) - 24), 12))
        order.shuffle(starts)
        for turn, start in enumerate(starts):
            text = _lines_up_to(lines[start:], characters)
            if len(text) >= characters // 2:
                found.append((turn + order.random(), f"{module.name}:{start + 1}", text))
    found.sort()
    for _, name, text in found[:count]:
        yield name, text


def _lines_up_to(lines: list[str], characters: int) -> str:
    text = ""
    for line in lines:
        if len(text) + len(line) > characters:
            break
        text += line
    return text
