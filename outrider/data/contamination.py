"""Is a drafter measured on texts that it was trained on, or drafts from?  Prompts are looked up in its sources' hashes.

A source without hashes is unknown, which is not the same as clean.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from outrider.config import build
from outrider.data import hash_files, ngram_hashes
from outrider.drafters import find, kinds
from outrider.errors import DataError
from outrider.retrieval import corpora


class Prompt(Protocol):
    """The parts of a task's prompt that are compared."""

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
    """Overlaps of prompts with sources."""

    overlapping: dict[Key, tuple[str, ...]]
    """Prompt to the names of the sources that hold a piece of it."""
    checked: int
    """Prompts that were looked up in at least one source."""
    rule: str
    unknown: dict[str, str]
    """Sources that may hold texts without hashes, and why."""
    counts: dict[str, dict[str, int]]
    """Source to its parts (prompts, answers, documents) to how many of the prompts each holds."""

    def overlaps(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[Key, bool]:
        """Each prompt, by task and id, and whether it was found.

        Where a source is unknown, a prompt that was not found is left out.
        """
        sure = not self.unknown
        found = {key: key in self.overlapping for key, prompt in _keyed(prompts) if _is_text(prompt)}
        return {key: overlaps for key, overlaps in found.items() if overlaps or (sure and self.checked)}

    def line(self) -> str:
        """The result in one sentence."""
        found = f"{len(self.overlapping)} of {self.checked} prompts drawn overlap"
        text = f"{found} with what was trained on or is drafted from ({self.rule})"
        if not self.unknown:
            return text
        why = "; ".join(f"{name}: {reason}" for name, reason in self.unknown.items())
        return f"{text}; unknown for {why}" if self.checked else f"overlap with the prompts is unknown: {why}"


def sources_of(choice: str | Mapping[str, Any]) -> list[Source]:
    """The texts of a drafter: its checkpoint's, its corpora's, and those of its parts.

    choice: as a run file names one, a kind, a kind with its settings, or a checkpoint.  Empty for a drafter that only
    reads the request.  The target's own training texts are not looked at.
    """
    if isinstance(choice, str):
        if choice not in kinds():
            return [Source(choice, Path(choice))]
        choice = {"kind": choice}
    settings = build(find(choice["kind"]).Config, dict(choice), "drafter").model_dump(mode="json")
    found = [Source(f"corpus {name}", corpora.folder_of(name)) for name in settings.get("corpora", ())]
    model = settings.get("model")
    if model and not settings.get("new"):
        found.append(Source(model, Path(model)))
    for part in (settings.get("base"), settings.get("retriever"), *settings.get("members", ())):
        found += sources_of(part) if part else []
    return list(dict.fromkeys(found))


def check(prompts: Mapping[str, Sequence[Prompt]], sources: Sequence[Source]) -> Found:
    """Look for every user turn of these prompts, by task, in every source; a prompt overlaps where one of its turns
    does.

    System prompts are not looked for: all prompts share theirs.
    """
    found, rule = Found({}, 0, hash_files.RULE, {}, {}), [hash_files.RULE]
    for name, path in sources:
        opened, why = _open(path)
        if why:
            found.unknown[name] = why
        if not opened:
            continue
        found.counts[name] = {part: 0 for one in opened for part in one.parts}
        if (sampled := max(one.sampled for one in opened)) > 1:
            rule.append(f"1 in {sampled} hashes of {name}")
        for key, prompt in _keyed(prompts):
            parts = {part for one in opened for turn in prompt.turns for part in one.holding(turn)}
            for part in parts:
                found.counts[name][part] += 1
            if parts and name not in found.overlapping.get(key, ()):  # a task may have an id twice
                found.overlapping[key] = (*found.overlapping.get(key, ()), name)
    checked = len({key for key, prompt in _keyed(prompts) if _is_text(prompt)}) if found.counts else 0
    return found._replace(checked=checked, rule="; ".join(rule))


def _keyed(prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[tuple[Key, Prompt]]:
    return (((task, prompt.id), prompt) for task, own in prompts.items() for prompt in own)


def _is_text(prompt: Prompt) -> bool:
    """Whether there is a word to look for."""
    return any(ngram_hashes.hashes(turn).whole is not None for turn in prompt.turns)


def _open(folder: Path) -> tuple[list[hash_files.NgramHashes], str | None]:
    """All hashes of a source, and why some are missing."""
    opened, reasons = list[hash_files.NgramHashes](), list[str]()
    for entry in _entries(folder):
        try:
            if isinstance(entry, str):
                raise DataError(entry)
            opened.append(hash_files.read(entry))
            if unknown := entry.facts.get("unknown"):
                raise DataError(f"it has no hashes of {unknown} of its prompts")
        except DataError as error:
            reasons.append(str(error))
    return opened, reasons[0] if reasons else None


def _entries(folder: Path) -> Iterator[hash_files.Named | str]:
    """The hash files that a folder's manifest names, or why there are none; a checkpoint has one for each set of
    texts."""
    if not folder.is_dir():
        yield "there is no such folder here, so its texts are unknown"
    elif (folder / "outrider.json").exists():
        try:
            entries = json.loads((folder / "outrider.json").read_text(encoding="utf-8"))["training"]["ngram_hashes"]
        except (OSError, ValueError, KeyError, TypeError):
            entries = None
        for entry in entries if isinstance(entries, list) and entries else [None]:
            if isinstance(entry, dict) and isinstance(file := entry.get("file"), str):
                yield hash_files.Named(folder / Path(file).name, entry)
            else:
                yield "it has no hashes of its training texts"
    else:
        found = [hash_files.named(folder, manifest) for manifest in ("answers.json", "corpus.json")]
        yield next(
            (one for one in found if one is not None), "it has no hashes of its texts, or the texts have changed since"
        )
