"""The demo: a small target, a small language model to draft for it, and prompts from installed Python source.

The prompts are not shipped.  Neither model was trained on the `HELD_OUT` modules of the standard library, nor on any
package, so their continuations are not memorized.  Imports no torch.
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
"""Top-level modules and packages that neither model was trained on; evaluation prompts come from them."""

SKIPPED = frozenset(
    {"test", "tests", "testing", "idle_test", "turtledemo", "site-packages", "lib-dynload", "__pycache__"}
)

Split = Literal["train", "held_out"]


class Module(NamedTuple):
    """One source file."""

    name: str
    """Path relative to the library, such as `json/decoder.py`, or to the folder of packages."""
    text: str


def modules(split: Split) -> Iterator[Module]:
    """Source files of the interpreter's standard library without tests, sorted by name.

    Raises DataError if the library's source is not installed.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    is_empty = True
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library)
        if SKIPPED.intersection(name.parts):
            continue
        if (name.parts[0].removesuffix(".py") in HELD_OUT) == (split == "held_out"):
            is_empty = False
            yield Module(name.as_posix(), path.read_text(encoding="utf-8", errors="replace"))
    if is_empty:
        raise DataError(
            f"no Python source for the demo's {split} prompts under {library}; "
            "install the standard library's source, or name your own prompts: prepare.conversations=FILE.jsonl"
        )


def package_modules(names: Sequence[str]) -> Iterator[Module]:
    """Source files of installed packages without tests, sorted by name; nothing is imported.

    Raises DataError for a package that is not installed or has no source.
    """
    for name in names:
        try:
            spec = importlib.util.find_spec(name) if name.isidentifier() else None
        except (ImportError, ValueError):
            spec = None
        folders = map(Path, (spec.submodule_search_locations or ()) if spec is not None else ())
        files = [(path.relative_to(folder.parent), path) for folder in folders for path in sorted(folder.rglob("*.py"))]
        if not files:
            raise DataError(f"packages:{name} is not an installed package with Python source; name one, such as torch")
        for relative, path in files:
            if not SKIPPED.intersection(relative.parts):
                yield Module(relative.as_posix(), path.read_text(encoding="utf-8", errors="replace"))


def prompts(split: Split, count: int, seed: int = 0, characters: int = 600) -> Iterator[tuple[str, str]]:
    """`pieces` of the library's source."""
    return pieces(modules(split), count, f"{split} {seed}", characters)


def pieces(sources: Iterable[Module], count: int, seed: str, characters: int) -> Iterator[tuple[str, str]]:
    """Pieces of source that end with a line, as (id, text), in an order that depends on `seed`.

    The first pieces of all modules come before any second piece, so that a few prompts cover many modules.
    """
    order = random.Random(seed)
    ranked: list[tuple[float, str, str]] = []
    for module in sources:
        lines = module.text.splitlines(keepends=True)
        starts = list(range(0, max(1, len(lines) - 24), 12))
        order.shuffle(starts)
        for turn, start in enumerate(starts):
            text = _lines_up_to(lines[start:], characters)
            if len(text) >= characters // 2:
                ranked.append((turn + order.random(), f"{module.name}:{start + 1}", text))
    ranked.sort()
    for _, name, text in ranked[:count]:
        yield name, text


def _lines_up_to(lines: list[str], characters: int) -> str:
    text = ""
    for line in lines:
        if len(text) + len(line) > characters:
            break
        text += line
    return text
