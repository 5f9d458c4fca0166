"""Checks whether a drafter is measured on texts that it was trained on or drafts from, using the hashes of its sources.

A source without hashes counts as unknown, not as clean.
"""

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
from outrider.storage.json_text import parse_json


class TextSource(NamedTuple):
    """A source that may contain prompts."""

    name: str
    path: Path
    """The folder of a checkpoint, of answers or of a corpus."""


PromptKey = tuple[str, str]
"""Task and id of a prompt: prompts of two tasks may have the same id."""


class OverlapReport(NamedTuple):
    """Overlaps of prompts with sources."""

    overlapping: dict[PromptKey, tuple[str, ...]]
    """The names of the sources that contain each prompt."""
    checked: int
    """Number of prompts that were looked up in at least one source."""
    rule: str
    unknown: dict[str, str]
    """Sources that may contain texts without hashes, and why."""
    counts: dict[str, dict[str, int]]
    """Number of prompts in each part (prompts, answers, documents) of each source."""

    def overlaps(self, prompts: Mapping[str, Sequence[Prompt]]) -> dict[PromptKey, bool]:
        """Whether each prompt overlaps, by task and id.

        If a source is unknown, prompts without an overlap are left out.
        """
        is_complete = not self.unknown
        overlaps = {key: key in self.overlapping for key, prompt in _keyed(prompts) if _is_text(prompt)}
        return {key: value for key, value in overlaps.items() if value or (is_complete and self.checked)}

    def line(self) -> str:
        """The result in one sentence."""
        text = (
            f"{len(self.overlapping)} of {self.checked} sampled prompts overlap with what was trained on or is drafted "
            f"from ({self.rule})"
        )
        if not self.unknown:
            return text
        why = "; ".join(f"{name}: {reason}" for name, reason in self.unknown.items())
        return f"{text}; unknown for {why}" if self.checked else f"overlap with the prompts is unknown: {why}"


def sources_of(choice: str | Mapping[str, Any]) -> list[TextSource]:
    """The text sources of a drafter: of its checkpoint, its corpora and its parts; empty if it only reads the request.

    choice: a kind, a kind with settings, or a checkpoint, as in a run file.  The target's own training texts are
    ignored.
    """
    if isinstance(choice, str):
        if choice not in kinds():
            return [TextSource(choice, Path(choice))]
        choice = {"kind": choice}
    settings = build(find(choice["kind"]).Config, dict(choice), "drafter").model_dump(mode="json")
    sources = [TextSource(f"corpus {name}", corpora.folder_of(name)) for name in settings.get("corpora", ())]
    model = settings.get("model")
    if model and not settings.get("new"):
        sources.append(TextSource(model, Path(model)))
    for part in (*map(settings.get, ("base", "retriever", "head")), *settings.get("members", ())):
        sources += sources_of(part) if part else []
    return list(dict.fromkeys(sources))


def check(prompts: Mapping[str, Sequence[Prompt]], sources: Sequence[TextSource]) -> OverlapReport:
    """Look up the questions of these prompts, by task, in every source; a prompt overlaps if one of its turns does.

    System prompts are not looked up, since all prompts share them.
    """
    report, rule = OverlapReport({}, 0, RULE, {}, {}), [RULE]
    questions = Questions(prompts)
    for name, path in sources:
        files, why = _open(path)
        if why:
            report.unknown[name] = why
        if not files:
            continue
        if (sampled := max(hashes.sampled for hashes in files)) > 1:
            rule.append(f"1 in {sampled} hashes of {name}")
        parts = dict.fromkeys((part for hashes in files for part in hashes.parts), frozenset[int]())
        for hashes in files:
            parts |= {part: parts[part] | hashes.questions_in(part, questions) for part in hashes.parts}
        report.counts[name] = {part: len(numbers) for part, numbers in parts.items()}
        for key in dict.fromkeys(questions.keys[number] for number in sorted(set().union(*parts.values()))):
            report.overlapping[key] = (*report.overlapping.get(key, ()), name)
    is_checked = zip(questions.keys, questions.has_text, strict=True)
    checked = len({key for key, has_text in is_checked if has_text}) if report.counts else 0
    return report._replace(checked=checked, rule="; ".join(rule))


def _keyed(prompts: Mapping[str, Sequence[Prompt]]) -> Iterator[tuple[PromptKey, Prompt]]:
    return (((task, prompt.id), prompt) for task, of_task in prompts.items() for prompt in of_task)


def _is_text(prompt: Prompt) -> bool:
    """Whether it has any word to look up."""
    return any(bare(question) for question in prompt.questions)


def _open(folder: Path) -> tuple[list[hash_files.NgramHashes], str | None]:
    """All hashes of a source, and why some are missing."""
    files, reasons = list[hash_files.NgramHashes](), list[str]()
    for entry in _entries(folder):
        try:
            if isinstance(entry, str):
                raise DataError(entry)
            files.append(hash_files.read(entry))
            if unknown := entry.facts.get("unknown"):
                raise DataError(f"it has no hashes of {unknown} of its prompts")
        except DataError as error:
            reasons.append(str(error))
    return files, reasons[0] if reasons else None


def _entries(folder: Path) -> Iterator[hash_files.HashFile | str]:
    """The hash files that a folder's manifest names, one for each set of texts of a checkpoint; or why it has none."""
    if not folder.is_dir():
        yield "the folder does not exist, so its texts are unknown"
    elif (folder / "outrider.json").exists():
        try:
            entries = parse_json((folder / "outrider.json").read_text(encoding="utf-8"))["training"]["ngram_hashes"]
        except (OSError, ValueError, KeyError, TypeError):
            entries = None
        for entry in entries if isinstance(entries, list) and entries else [None]:
            if isinstance(entry, dict) and isinstance(file := entry.get("file"), str):
                yield hash_files.HashFile(folder / Path(file).name, entry)
            else:
                yield "it has no hashes of its training texts"
    else:
        files = [hash_files.named(folder, manifest) for manifest in ("answers.json", "corpus.json")]
        yield next(
            (file for file in files if file is not None),
            "it has no hashes of its texts, or the texts have changed since",
        )
