"""The site's page for each kind of drafter, generated from its file's docstring, its settings and the results.

Only reads text: no drafter is imported, so the site can be built without torch.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.papers import PAPERS, figure

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS, RECIPES = ROOT / "benchmarks", ROOT / "recipes"
RETRIEVAL = (("new", "new text"), ("seen", "text like earlier text"), ("edit", "edits"))
LEGEND = re.compile(r"[A-Z] (live )?(slots|drafted)")
"""Starts the paragraph of a docstring that defines the letters of shapes."""


class Method(NamedTuple):
    """The contents of the docstring of a drafter's file."""

    kind: str
    idea: str
    body: list[str]
    differs: str
    """How it differs from the paper; may be empty."""
    take: str
    """When to use it."""


@cache
def places() -> dict[str, str]:
    """Where each drafter's code is in the package, by kind; the site is built without the package's dependencies."""
    root, found = ROOT / "outrider", {}
    for file in [*root.glob("drafters/*"), *root.glob("lab/drafters/*")]:
        own = file / "__init__.py" if file.is_dir() else file
        if own.is_file() and not file.name.startswith("__"):
            found[file.stem] = own.relative_to(root).as_posix()
    return found


def kinds() -> list[str]:
    return sorted(places())


def method(kind: str) -> Method:
    """Parse a docstring.  Raises ValueError if it does not say when to use the drafter."""
    text = ast.get_docstring(ast.parse((ROOT / "outrider" / places()[kind]).read_text(encoding="utf-8"))) or ""
    idea, *rest = [part for part in text.split("\n\n") if not LEGEND.match(part)]
    body, differs, take = [], "", ""
    for part in rest:
        before, word, after = part.partition("Differs from ")
        if part.startswith("Use it "):
            take = part
        elif word:
            differs = word + after
        if not part.startswith("Use it ") and before.strip():
            body.append(before)
    if not take:
        raise ValueError(f"outrider/{places()[kind]} must have a paragraph 'Use it if …' in its docstring")
    return Method(kind, idea, body, differs, take)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pages() -> dict[str, str]:
    """The Markdown of each page by its path in the site."""
    found = [method(kind) for kind in kinds()]
    return {"methods/index.md": overview(found)} | {f"methods/{one.kind}.md": page(one) for one in found}


def overview(found: Sequence[Method]) -> str:
    """All kinds, in one table of those that train, one of those that do not, and one of those measured separately."""
    learnt, untrained, others = [], [], []
    for one in found:
        after, plain = [own_row(one.kind, column) for column in ("minutes", "steps")], untrained_rows(one.kind)
        name, when = f"[`{one.kind}`]({one.kind}.md)", inline(one.take.removeprefix("Use it "))
        if any(after):
            cold = [row and row["temperature_0"]["tokens_per_step"] for row in after]
            learnt.append([name, *(f"{value:.2f}" if value else "–" for value in cold), when])
        elif one.kind in plain:
            new = plain[one.kind]["new"]
            untrained.append([name, f"{new['tokens_per_step']:.2f}", f"{new['speedup']:.2f}", when])
        else:
            others.append([name, when])
    for rows in (learnt, untrained):
        rows.sort(key=lambda row: row[1].replace("–", "0"), reverse=True)
    when = "take it"
    minutes, steps = result("methods")["training_minutes_of_one_core"], result("methods")["training_steps"]
    return "\n\n".join([
        "# Methods",
        f"A method is one file, and each of the {len(found)} has a page that is written from it. Figures are of the "
        "demo target at temperature 0, a speed-up over the target alone on two cores. Another target and machine "
        "have others: `outrider plan` says which may pay on yours, and `outrider evaluate` which does.",
        "## Kinds that train",
        f"Tokens per step after {minutes:g} minutes of one core, and after {steps} steps.",
        table(["kind", f"{minutes:g} minutes", f"{steps} steps", when], learnt),
        "## Kinds that need no training",
        "On new text; on edits and on text like earlier text they reach more.",
        table(["kind", "tokens per step", "speed-up", when], untrained),
        "## Measured otherwise, or not",
        "Their pages say with what, and name the results.",
        table(["kind", when], others),
        "All figures: [kinds that train](../results/methods.md), [without training](../results/retrieval.md), "
        "[what papers claim](../results/papers.md).",
    ])  # fmt: skip


def page(one: Method) -> str:
    parts = [f"# {one.kind}", inline(one.idea), "## When to take it", inline(one.take)]
    if one.body:
        parts += ["## How it drafts", *map(inline, one.body)]
    if one.differs:
        parts += ["## What differs from the paper", inline(one.differs)]
    parts += ["## In our tables", *(measured(one.kind) or ["It is in no table of the demo target."])]
    parts += papers_of(one.kind)
    if seen := mentioned(one.kind):
        links = ", ".join(f"[{name}](../results/{name}.md)" for name in seen)
        parts.append(f"Pages of results that name it: {links}.")
    return "\n\n".join([*parts, "## Settings", settings(one.kind)])


def inline(text: str) -> str:
    """A paragraph of a docstring as Markdown: papers are linked, and code is the only other markup."""
    text = " ".join(text.split())
    parts = re.split(r"(`[^`]*`)", text)
    for at in range(0, len(parts), 2):
        plain = parts[at].replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
        plain = plain.replace("[", "\\[").replace("]", "\\]")
        parts[at] = re.sub(r"\b(\d{4}\.\d{4,5})\b", r"[\1](https://arxiv.org/abs/\1)", plain)
    return "".join(parts)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def settings(kind: str) -> str:
    """The section of a kind on the settings page, without its heading."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    found = re.search(rf"^## drafter {re.escape(kind)}\n+(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"docs/settings.md has no drafter {kind}; run `python scripts/settings.py`")
    lines = found[1].strip().splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith("|")), 0)
    return "\n".join(lines[start:]) + "\n\n`outrider drafters " + kind + "` prints the same."


# ── results ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def result(name: str) -> Any:
    return json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))


@cache
def benchmarked() -> dict[str, str]:
    """The kind of each method of benchmarks/methods.py, from the recipe it names."""
    tree = ast.parse((BENCHMARKS / "methods.py").read_text(encoding="utf-8"))
    [told] = [
        node.value for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "METHODS"
    ]  # fmt: skip
    assert isinstance(told, ast.Dict)
    found = {}
    for name, call in zip(told.keys, told.values, strict=True):
        assert isinstance(name, ast.Constant) and isinstance(call, ast.Call)
        recipe = ast.literal_eval(call.args[0])
        found[name.value] = yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8"))["drafter"]["kind"]
    return found


def kind_of(row: dict[str, Any]) -> str | None:
    """The kind of a row's method; those of SmolLM2 are named after it."""
    return row["method"].split(",")[0] if row["column"].startswith("smollm2") else benchmarked().get(row["method"])


def trained_rows(kind: str) -> list[dict[str, Any]]:
    """Rows of a kind, most tokens per step first."""
    rows = [row for row in result("methods")["rows"] if kind_of(row) == kind]
    return sorted(rows, key=lambda row: (row["column"], -row["temperature_0"]["tokens_per_step"]))


def untrained_rows(kind: str) -> dict[str, dict[str, Any]]:
    """Rows of benchmarks/retrieval.py for a kind: by name, then by task."""
    found: dict[str, dict[str, Any]] = {}
    for row in result("retrieval")["rows"]:
        if re.match(rf"{re.escape(kind)}(?![\w])", row["name"]) and kind not in benchmarked().values():
            found.setdefault(row["name"], {})[row["task"]] = row
    return found


def own_row(kind: str, column: str) -> dict[str, Any] | None:
    """The row named after the kind itself."""
    return next((row for row in trained_rows(kind) if (row["method"], row["column"]) == (kind, column)), None)


def measured(kind: str) -> list[str]:
    return [*_trained(kind), *_untrained(kind)]


def _trained(kind: str) -> Iterator[str]:
    found, rows = result("methods"), trained_rows(kind)
    if not rows:
        return
    minutes, steps = found["training_minutes_of_one_core"], found["training_steps"]
    after = {"minutes": f"{minutes:g} minutes of one core", "steps": f"{steps} steps"}
    heads = ["as", "trained for", "tokens per step, T = 0", "T = 1", "seeds"]
    lines = []
    for row in rows:
        cold, hot = row["temperature_0"], row["temperature_1"]
        sampled = f"{hot['tokens_per_step']:.2f}" if hot else "–"
        trained_for = after.get(row["column"], row["column"])
        lines.append([row["method"], trained_for, f"{cold['tokens_per_step']:.2f}", sampled, str(row["seeds"])])
    yield table(heads, lines)
    yield "All kinds side by side: [methods](../results/methods.md)."


def _untrained(kind: str) -> Iterator[str]:
    rows = untrained_rows(kind)
    if not rows:
        return
    heads = ["as", *(f"{said}: {what}" for _, said in RETRIEVAL for what in ("tokens per step", "speed-up"))]
    lines = [
        [name, *(f"{tasks[task][of]:.2f}" for task, _ in RETRIEVAL for of in ("tokens_per_step", "speedup"))]
        for name, tasks in rows.items()
    ]
    yield table(heads, lines)
    yield "At temperature 0, without training; all of them: [retrieval](../results/retrieval.md)."


def papers_of(kind: str) -> list[str]:
    """What papers claim about a kind, and what was measured here."""
    said = []
    for paper in yaml.safe_load(PAPERS.read_text(encoding="utf-8")):
        if any(place.split(" ")[0] == places()[kind] for place in paper["lives"]):
            here = "; ".join(figure(one, _Results()) for one in paper["found"])
            said.append(
                f"**{paper['name']}** ({inline(paper['source'])}) claims: {inline(paper['claim'])}. "
                f"Here: {inline(here)}. Holds: **{paper['holds']}**; {inline(paper['why'])}."
            )
    return said


class _Results(dict[str, Any]):
    """Results by file name, each loaded on first use."""

    def __missing__(self, name: str) -> Any:
        return result(name)


def mentioned(kind: str) -> list[str]:
    """Result pages that mention a kind as code or as a link; pages about all kinds are listed elsewhere."""
    pages = sorted((BENCHMARKS / "pages").glob("*.md"))
    return [
        path.stem for path in pages
        if path.stem == kind or (path.stem not in ("papers", "methods", "retrieval", "every_family", "families")
                                 and f"`{kind}`" in path.read_text(encoding="utf-8"))
    ]  # fmt: skip
