"""Truncates prompts that leave no room for an answer (at the front), and reports which ones.  Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAMED = 5


class Cuts:
    """Which prompts were truncated, and how many tokens each lost."""

    def __init__(self) -> None:
        self.lost: dict[str, int] = {}

    def fit(self, tokens: Sequence[int], room: int, name: str) -> list[int]:
        """The last `room` tokens of a prompt, or all of a shorter one."""
        if len(tokens) > room:
            self.lost[name] = max(self.lost.get(name, 0), len(tokens) - room)
        return list(tokens[-room:])


def sentence(lost: Mapping[str, int]) -> str:
    """One line about the prompts that were truncated; empty if none was."""
    if not lost:
        return ""
    named = ", ".join(f"{name} (by {count:,} tokens)" for name, count in list(lost.items())[:NAMED])
    more = f" and {len(lost) - NAMED} more" if len(lost) > NAMED else ""
    verb = "prompt was" if len(lost) == 1 else "prompts were"
    return f"{len(lost)} {verb} cut at the front, since prompt and answer must fit into the context: {named}{more}"
