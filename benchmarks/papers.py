"""The table of pages/papers.md: what was published, where it is in the code, and what was measured here.

`papers.yaml` has one entry per paper; it refers to figures by name wherever a result file contains them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

PAPERS = Path(__file__).with_name("papers.yaml")


def papers(found: Mapping[str, Any]) -> str:
    """A Markdown table.  found: the results by file name.

    Raises KeyError for a figure that none of them has.
    """
    heads = ("paper", "where", "its claim", "here", "holds", "why")
    lines = ["| " + " | ".join(heads) + " |", "| --- " * len(heads) + "|"]
    for number, paper in enumerate(yaml.safe_load(PAPERS.read_text()), 1):
        name = f"{number}. {paper['name']} ({paper['source']})"
        where = ", ".join(f"`{place}`" for place in paper["lives"])
        here = "; ".join(figure(one, found) for one in paper["found"])
        here += f" ([{paper['page']}]({paper['page']}.md))" if paper["page"] else ""
        lines.append(f"| {name} | {where} | {paper['claim']} | {here} | **{paper['holds']}** | {paper['why']} |")
    return "\n".join(lines)


def figure(one: str | Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """The `found` entry of a paper, with its number filled in if it only names one."""
    if isinstance(one, str):
        return one
    if "order" in one:
        return order(found["methods"]["orders"], *one["order"])
    file, begin = one["promise"]
    promises = found[file]["promises"]
    held = next((each for each in promises if each["promise"].startswith(begin)), None)
    if held is None:
        raise KeyError(f"papers.yaml: no promise of {file}.json begins with {begin!r}")
    return f"{held['promise']}: {held['found']:.3g}"


def order(orders: list[dict[str, Any]], better: str, worse: str, column: str, temperature: float) -> str:
    """Tokens per step of one method over another's."""
    wanted = {"better": better, "worse": worse, "column": column, "temperature": temperature}
    held = next((each for each in orders if all(each[name] == value for name, value in wanted.items())), None)
    if held is None:
        raise KeyError(f"papers.yaml: methods.json has no order of {better} over {worse}, {column}, T = {temperature}")
    low, high = held["interval"]
    return (
        f"tokens per step of {better} over {worse}, equal {column}, T = {temperature:g}: "
        f"{held['ratio']:.3f} ({low:.3f} to {high:.3f}), {held['seeds']} seeds"
    )
