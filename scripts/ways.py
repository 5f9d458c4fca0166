"""Write into docs/architecture.md the lists of files that a prompt, a training example and a served request pass
through.

    python scripts/ways.py

Each list is traced: a file counts if one of its functions is called, in the order of the first call.  A test compares.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import outrider

ROOT = Path(outrider.__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- way: {} -->", "<!-- /way -->"
sys.path.append(str(ROOT.parent / "tests"))


class Trace:
    """Files of the package whose functions are called while it is active, in this thread or any started meanwhile."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.is_on = False

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        if self.is_on and event == "call" and frame.f_code.co_name != "<module>":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                self.files.setdefault(path.relative_to(ROOT).as_posix())

    @contextmanager
    def traced(self) -> Iterator[None]:
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False


@contextmanager
def tracing() -> Iterator[Trace]:
    trace, before = Trace(), sys.getprofile()
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def prompt(trace: Trace) -> None:
    target = outrider.load_target("demo", compile=False)
    drafter = outrider.load_drafter("ngram", target)
    for _ in range(2):  # the first pass does one-time work, which is not part of the path
        trace.files.clear()
        with trace.traced():
            outrider.generate(target, "def read(path):", drafter, max_new_tokens=16, policy="fixed")


def training(trace: Trace) -> None:
    from outrider.data.answers.store import Answer
    from outrider.data.features.live import LiveFeatures
    from outrider.drafters import find
    from outrider.training.config import Config
    from outrider.training.trainer import train

    target, module = outrider.load_target("demo", compile=False), find("dspark")
    model = module.Model(module.Config(layers=1, block=4, anchors=4), target)
    ids = target.encode("def read(path):\n    with open(path) as file:\n        return file.read()\n")
    source = LiveFeatures(target, [Answer("one", ids, [(4, len(ids))])], model.taps, batch=1, length=64)
    with tempfile.TemporaryDirectory() as folder, trace.traced():
        train(model, source, Config(steps=2, batch=1, dtype="float32"), folder)


def served(trace: Trace) -> None:
    from serve.running import running

    target = outrider.load_target("demo", compile=False)
    with running(target, outrider.load_drafter("ngram", target)) as server:
        client = server.client()
        for _ in range(2):
            trace.files.clear()
            with trace.traced():
                client.completions.create(model="tiny", prompt="def read(path):", max_tokens=16, temperature=0)


WAYS: Mapping[str, Callable[[Trace], None]] = {"prompt": prompt, "training": training, "served": served}


def way(name: str) -> list[str]:
    """The files, in the order of their first call."""
    with tracing() as trace:
        WAYS[name](trace)
    return list(trace.files)


def table(files: list[str]) -> str:
    lines = ["| | file | what it is |", "|---|---|---|"]
    return "\n".join(lines + [f"| {n} | `{file}` | {purpose(file)} |" for n, file in enumerate(files, 1)])


def purpose(file: str) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    sentence = re.split(r"(?<=[.:])\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    return sentence.rstrip(".:").replace("|", "\\|")


def listed(page: str, name: str) -> list[str]:
    """The files listed on the page."""
    text = page.split(BEGIN.format(name))[1].split(END)[0]
    return re.findall(r"^\| \d+ \| `([^`]+)`", text, re.MULTILINE)


def main() -> None:
    os.environ.setdefault("OUTRIDER_COMPILE", "off")
    page = PAGE.read_text(encoding="utf-8")
    for name in WAYS:
        before, rest = page.split(BEGIN.format(name))
        files = way(name)
        page = f"{before}{BEGIN.format(name)}\n{table(files)}\n{END}{rest.split(END, 1)[1]}"
        print(f"{name}: {len(files)} files")
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
