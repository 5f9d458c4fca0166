"""Is a drafter judged by texts that it was trained on, or draws from?  Prompts are looked for in the hashes its source kept.

A source that kept none is not known, which is never the same as clean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outrider.data import hash_files, ngram_hashes
from outrider.errors import DataError


class Prompt(Protocol):
    """A prompt of a task, as far as it is looked for."""

    @property
    def id(self) -> str: ...

    @property
    def turns(self) -> tuple[str, ...]: ...


class Source(NamedTuple):
    """Something that may hold prompts."""

    name: str
    path: Path
    """The folder of a checkpoint, of answers or of a corpus."""


Key = tuple[str, str]
"""Task and id of a prompt: prompts of two tasks may have one id."""


class Found(NamedTuple):
    """What was found."""

    overlapping: dict[Key, tuple[str, ...]]
    """A prompt to the names of the sources that hold a piece of it."""
    checked: int
    """Prompts that were looked for in one source at least."""
    rule: str
    unknown: dict[str, str]
    """Sources that hold, or may hold, texts whose hashes they did not keep, and why that is so."""
    places: dict[str, dict[str, int]]
    """Source to its parts (prompts, answers, documents) to how many of the prompts each holds."""

    def overlaps(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[Key, bool]:
        """Each prompt, by task and id, and whether it was found.

        Where a source is unknown, a prompt that was not found is left out: nobody knows.
        """
        sure = not self.unknown
        found = {key: key in self.overlapping for key, prompt in _keyed(prompts) if _is_text(prompt)}
        return {key: overlaps for key, overlaps in found.items() if overlaps or (sure and self.checked)}

    def line(self) -> str:
        """What to tell a reader, in one sentence."""
        told = f"{len(self.overlapping)} of {self.checked} prompts drawn overlap with what was trained on or is drafted from "
        told += f"({self.rule})"
        if not self.unknown:
            return told
        why = "; ".join(f"{name}: {reason}" for name, reason in self.unknown.items())
        return f"{told}; not known of {why}" if self.checked else f"overlap with the prompts is not known: {why}"


def check(prompts: Mapping[str, Sequence[Prompt]], sources: Sequence[Source]) -> Found:
    """Look for every user turn of these prompts, by task, in every source; a prompt overlaps where one of its turns does.

    System prompts are not looked for: all prompts share theirs.
    """
    overlapping: dict[Key, tuple[str, ...]] = {}
    unknown: dict[str, str] = {}
    places: dict[str, dict[str, int]] = {}
    samples: dict[str, int] = {}
    for source in sources:
        opened, why = _open(source)
        if why:
            unknown[source.name] = why
        if not opened:
            continue
        places[source.name] = {part: 0 for one in opened for part in one.parts}
        samples[source.name] = max(one.sampled for one in opened)
        for key, prompt in _keyed(prompts):
            parts = {part for one in opened for turn in prompt.turns for part in one.holding(turn)}
            for part in parts:
                places[source.name][part] += 1
            if parts and source.name not in overlapping.get(key, ()):  # a task may have an id twice
                overlapping[key] = (*overlapping.get(key, ()), source.name)
    checked = len({key for key, prompt in _keyed(prompts) if _is_text(prompt)}) if places else 0
    return Found(overlapping, checked, _rule(samples), unknown, places)


def _keyed(prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[tuple[Key, Prompt]]:
    return (((task, prompt.id), prompt) for task, own in prompts.items() for prompt in own)


def _is_text(prompt: Prompt) -> bool:
    """Whether there is a word to look for."""
    return any(ngram_hashes.hashes(turn).whole is not None for turn in prompt.turns)


def _rule(samples: dict[str, int]) -> str:
    kept = [f"of {name} 1 in {sampled} kept" for name, sampled in samples.items() if sampled > 1]
    return "; ".join([hash_files.RULE, *kept])


def _open(source: Source) -> tuple[list[hash_files.Grams], str | None]:
    """All hashes that a source kept, and why these are not all there is to know."""
    opened: list[hash_files.Grams] = []
    why = None
    for entry in _entries(source.path):
        if isinstance(entry, str):
            why = why or entry
            continue
        try:
            opened.append(hash_files.read(entry))
        except DataError as error:
            why = why or str(error)
            continue
        if entry.facts.get("unknown"):
            why = why or f"it kept no hashes of {entry.facts['unknown']} of its prompts"
    return opened, why


def _entries(folder: Path) -> Iterator[hash_files.Named | str]:
    """What a folder's manifest names, or why there is nothing."""
    if not folder.is_dir():
        yield "there is no such folder here, so nobody can tell what texts are behind it"
    elif (folder / "outrider.json").exists():
        for entry in _of_checkpoint(folder / "outrider.json"):
            named = isinstance(entry, dict) and isinstance(entry.get("file"), str)
            path = folder / Path(entry["file"]).name if named else folder
            yield hash_files.Named(path, entry) if named else "it kept no hashes of its training texts"
    else:
        found = [hash_files.named(folder, manifest) for manifest in ("answers.json", "corpus.json")]
        yield next((one for one in found if one is not None), "it kept no hashes of its texts, or these have changed since")


def _of_checkpoint(manifest: Path) -> list[Any]:
    """An entry for each set of texts that it was trained on, one after the other."""
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["training"]["grams"]
    except (OSError, ValueError, KeyError, TypeError):
        return [None]
    return entries if isinstance(entries, list) and entries else [None]
