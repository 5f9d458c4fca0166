"""Is a drafter measured on texts that it was trained on, or drafts from?  Prompts are looked up in its sources' hashes.

A source without hashes is unknown, which is not the same as clean.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import build
from outrider.data.overlap import hash_files
from outrider.data.overlap.questions import RULE, Prompt, Questions
from outrider.data.overlap.units import bare
from outrider.drafters import find, kinds
from outrider.errors import DataError
from outrider.retrieval.corpus import corpora


class TextSource(NamedTuple):
    """Something that may hold prompts."""

    name: str
    path: Path
    """The folder of a checkpoint, of answers or of a corpus."""


PromptKey = tuple[str, str]
"""Task and id of a prompt: prompts of two tasks may have one id."""


class OverlapReport(NamedTuple):
    """Overlaps of prompts with sources."""

    overlapping: dict[PromptKey, tuple[str, ...]]
    """Prompt to the names of the sources that hold a piece of it."""
    checked: int
    """Prompts that were looked up in at least one source."""
    rule: str
    unknown: dict[str, str]
    """Sources that may hold texts without hashes, and why."""
    counts: dict[str, dict[str, int]]
    """Source to its parts (prompts, answers, documents) to how many of the prompts each holds."""

    def overlaps(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[PromptKey, bool]:
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


def sources_of(choice: str | Mapping[str, Any]) -> list[TextSource]:
    """The texts of a drafter: its checkpoint's, its corpora's, and those of its parts.

    choice: as a run file names one, a kind, a kind with its settings, or a checkpoint.  Empty for a drafter that only
    reads the request.  The target's own training texts are not looked at.
    """
    if isinstance(choice, str):
        if choice not in kinds():
            return [TextSource(choice, Path(choice))]
        choice = {"kind": choice}
    settings = build(find(choice["kind"]).Config, dict(choice), "drafter").model_dump(mode="json")
    found = [TextSource(f"corpus {name}", corpora.folder_of(name)) for name in settings.get("corpora", ())]
    model = settings.get("model")
    if model and not settings.get("new"):
        found.append(TextSource(model, Path(model)))
    for part in (settings.get("base"), settings.get("retriever"), *settings.get("members", ())):
        found += sources_of(part) if part else []
    return list(dict.fromkeys(found))


def check(prompts: Mapping[str, Sequence[Prompt]], sources: Sequence[TextSource]) -> OverlapReport:
    """Look for the questions of these prompts, by task, in every source; a prompt overlaps where one of its turns does.

    System prompts are not looked for: all prompts share theirs.
    """
    result, rule = OverlapReport({}, 0, RULE, {}, {}), [RULE]
    questions = Questions(prompts)
    for name, path in sources:
        opened, why = _open(path)
        if why:
            result.unknown[name] = why
        if not opened:
            continue
        if (sampled := max(one.sampled for one in opened)) > 1:
            rule.append(f"1 in {sampled} hashes of {name}")
        parts = dict.fromkeys((part for one in opened for part in one.parts), frozenset[int]())
        for one in opened:
            parts |= {part: parts[part] | one.questions_in(part, questions) for part in one.parts}
        result.counts[name] = {part: len(numbers) for part, numbers in parts.items()}
        for key in dict.fromkeys(questions.keys[number] for number in sorted(set().union(*parts.values()))):
            result.overlapping[key] = (*result.overlapping.get(key, ()), name)
    is_checked = zip(questions.keys, questions.has_text, strict=True)
    checked = len({key for key, has_text in is_checked if has_text}) if result.counts else 0
    return result._replace(checked=checked, rule="; ".join(rule))


def _keyed(prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[tuple[PromptKey, Prompt]]:
    return (((task, prompt.id), prompt) for task, own in prompts.items() for prompt in own)


def _is_text(prompt: Prompt) -> bool:
    """Whether there is a word to look for."""
    return any(bare(question) for question in prompt.questions)


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


def _entries(folder: Path) -> Iterator[hash_files.HashFile | str]:
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
                yield hash_files.HashFile(folder / Path(file).name, entry)
            else:
                yield "it has no hashes of its training texts"
    else:
        found = [hash_files.named(folder, manifest) for manifest in ("answers.json", "corpus.json")]
        yield next(
            (one for one in found if one is not None), "it has no hashes of its texts, or the texts have changed since"
        )
