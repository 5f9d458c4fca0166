"""The conversations of a run: from several sources, filtered, chosen by weight and seed, and read as often as needed.

The first reading keeps 40 bytes per conversation: hashes of its questions, its id, both together and its opening, and
its sizes.  They decide which conversations are used and which answers belong to them; a second reading returns their
texts, mixed.  Texts are never kept: two million conversations take hardly more memory than two thousand.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from outrider.data.config import Config, Source
from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.sources.choosing import (
    ScannedSource,
    choose,
    keep,
    leave_out_duplicates,
    leave_out_held_out,
    split_by_source,
)
from outrider.data.sources.conversations import Conversation, available, from_source, nothing_in, warn_of_unread
from outrider.data.sources.duplicates import Signatures, content_hash, content_key, repeated
from outrider.data.sources.readers import Skipped
from outrider.errors import DataError

WINDOW_CHARACTERS, WINDOW = 1 << 25, 1 << 14
"""Maximum characters and conversations of the window from which the next one is drawn when sources are shuffled."""
COLUMNS = {"keys": "Q", "ids": "Q", "openings": "Q", "prompts": "Q", "characters": "I", "num_questions": "H"}
"""What is kept of each conversation, with its array type."""
SAMPLE, SAMPLE_CHARACTERS = 32, 4096
"""Number of texts per source, and characters of each, that are kept to estimate the number of tokens."""
EXAMPLES = 1000
"""Maximum number of contaminated conversations that the report names."""


class NothingLeft(DataError):
    """All conversations were left out."""


@dataclass(eq=False)
class Selection:
    """The conversations that a run uses.  Iterating reads them again, in the same order each time."""

    config: Config = field(default_factory=Config)
    parts: Sequence[ScannedSource] = ()
    contaminated: list[dict[str, Any]] = field(default_factory=list)
    """The first conversations left out because an evaluation asks the same question, and what they share with it."""
    evaluated: int = 0
    """Number of evaluation prompts that were looked up."""

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    def __iter__(self) -> Iterator[Conversation]:
        """Raises DataError if a source has changed since it was read."""
        mixed = self._mixed()
        return shuffled(mixed, self.config.seed) if self.config.sources else mixed

    @property
    def left_out(self) -> Counter[str]:
        """Number of conversations left out, by reason."""
        return sum((part.left_out for part in self.parts), Counter())

    @property
    def available(self) -> int | None:
        """Number of rows of the sources, used or not.

        None if one is a data set on the hub or `packages:…`, which are not read to the end.
        """
        if any((part.source.path or "packages:").startswith("packages:") for part in self.parts):
            return None
        library = [part.source for part in self.parts if part.is_library]
        in_files = sum(len(part.keys) + part.unreadable for part in self.parts if not part.is_library)
        return in_files + sum(
            available(self.config.model_copy(update={"sources": (source,)})) or 0 for source in library
        )

    @property
    def characters(self) -> int:
        """Number of characters of the used conversations."""
        return sum(int(part.characters[part.is_used].sum(dtype=np.int64)) for part in self.parts)

    @property
    def most_tokens(self) -> int:
        """Maximum number of tokens of the answers, of which every turn of the user has one."""
        config, tokens = self.config, 0
        for part in self.parts:
            turns = part.num_questions[part.is_used].astype(np.int64)
            if config.regenerate:
                tokens += int(np.minimum(turns * config.max_new_tokens, config.length).sum())
            else:
                tokens += len(turns) * config.length
        return tokens

    @functools.cached_property
    def prompt_hashes(self) -> np.ndarray:
        """[n] uint64: the hashes under which answers to the used conversations are stored, source by source.

        A source is read again only if it has repeated ids.
        """
        hashes = np.concatenate([np.empty(0, np.uint64), *(_prompts(part, self.config) for part in self.parts)])
        _, group, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        repetitions = Counter[int]()
        for at in np.flatnonzero(counts[group] > 1):
            content = int(hashes[at])
            repetitions[content] += 1
            hashes[at] = int(hash_of_repeat(f"{content:016x}", repetitions[content]), 16)
        return hashes

    @property
    def openings(self) -> np.ndarray:
        """[n] uint64: hashes of the openings of the used conversations, in the order of `prompt_hashes`."""
        return np.concatenate([np.empty(0, np.uint64), *(part.openings[part.is_used] for part in self.parts)])

    @property
    def held_out_hashes(self) -> frozenset[int]:
        """`prompt_hashes` of the held-out source; empty without one."""
        is_held_out = np.repeat([part.is_held_out for part in self.parts], [part.count for part in self.parts])
        return frozenset(self.prompt_hashes[is_held_out.astype(bool)].tolist())

    def _mixed(self) -> Iterator[Conversation]:
        """The conversations of all sources; those of each source are spread evenly."""
        counts = [part.count for part in self.parts]
        readers, taken = [_again(part, self.config) for part in self.parts], [0] * len(counts)
        for _ in range(sum(counts)):
            # the share of each source that is consumed by its next conversation
            shares = [(done + 0.5) / count if done < count else 2.0 for done, count in zip(taken, counts, strict=True)]
            at = shares.index(min(shares))
            taken[at] += 1
            yield next(readers[at])


def _prompts(part: ScannedSource, config: Config) -> np.ndarray:
    """[n] uint64: `ScannedSource.prompts` of the used conversations, with repeated ids numbered."""
    hashes, is_numbered = part.prompts[part.is_used], part.is_numbered[part.is_used]
    if is_numbered.any():
        for at, conversation in enumerate(_again(part, config)):
            if is_numbered[at]:
                hashes[at] = int(conversation.prompt_hash(answered=not config.regenerate), 16)
    return hashes


def hash_of_repeat(content: str, number: int) -> str:
    """The hash under which the answer to the first, second, … prompt with this content is stored."""
    return content if number == 1 else content_hash([content, number])


def _again(part: ScannedSource, config: Config) -> Iterator[Conversation]:
    """The used conversations of a source, from a second reading."""
    changed = DataError(f"{part.label} has changed since it was read; run again, on a copy that nothing writes to")
    numbers = np.flatnonzero(part.is_used)
    at = 0
    for number, conversation in enumerate(from_source(part.source, config, Skipped())):
        if at == len(numbers):
            return
        if number < numbers[at]:
            continue
        if _key(conversation, config) != part.keys[number]:
            raise changed
        at += 1
        yield conversation.numbered if part.is_numbered[number] else conversation
    if at < len(numbers):
        raise changed


def shuffled(conversations: Iterator[Conversation], seed: int) -> Iterator[Conversation]:
    """The conversations, each drawn from a window of the next ones."""
    draw, window, characters = random.Random(seed), list[Conversation](), 0
    for conversation in conversations:
        window.append(conversation)
        characters += conversation.characters
        while characters > WINDOW_CHARACTERS or len(window) > WINDOW:
            at = draw.randrange(len(window))
            window[at], window[-1] = window[-1], window[at]
            characters -= window[-1].characters
            yield window.pop()
    draw.shuffle(window)
    yield from window


# ── the first reading ─────────────────────────────────────────────────────────────────────────────────────────────────


def select(config: Config, skipped: Skipped | None = None, evaluated: EvaluationPrompts | None = None) -> Selection:
    """Read all sources once and choose the conversations of a run.

    skipped: with `config.skip_bad`, collects the rows that can't be read.
    evaluated: conversations with questions of the evaluation are left out.
    Raises DataError with file and line for a row that can't be read, and if nothing is left.
    """
    skipped = Skipped() if skipped is None else skipped
    selection = Selection(config, evaluated=0 if evaluated is None else len(evaluated))
    signatures = Signatures() if config.deduplicate == "near" else None
    training = [
        _read(_limited(source, config), config, skipped, evaluated, signatures, selection.contaminated)
        for source in config.training_sources
    ]
    if not sum(len(part.keys) for part in training):
        raise nothing_in(config)
    selection.parts = [*training, *_held_out(config, skipped)]
    warn_of_unread(skipped, config)
    is_repeated = repeated(np.concatenate([part.ids for part in selection.parts]))
    for part, is_numbered in zip(selection.parts, split_by_source(selection.parts, is_repeated), strict=True):
        part.is_numbered = is_numbered
    if config.deduplicate != "off":
        leave_out_duplicates(training, signatures)
    for part in selection.parts[len(training) :]:
        leave_out_held_out(training, part)
    choose(training, config)
    if not sum(part.count for part in training):
        why = ", ".join(f"{count:,} {reason}" for reason, count in selection.left_out.most_common())
        raise NothingLeft(
            f"no conversations are left in {config.label}: {why}; give other sources, or change prepare's filters"
        )
    return selection


def _held_out(config: Config, skipped: Skipped) -> list[ScannedSource]:
    """The held-out source, if there is one.  It is never trained on, so it may share questions with an evaluation."""
    source = config.held_out
    if source is None:
        return []
    part = _read(source, config, skipped, None, None, [])
    part.is_held_out = True
    if source.count is not None:
        keep(part, source.count, config.seed)
    if not part.count:
        raise DataError(f"prepare.held_out {part.label} has no conversation; give other prompts, or leave it out")
    return [part]


def _limited(source: Source, config: Config) -> Source:
    """Read no more of a data set than is used, since it may be large."""
    if source.count is None and (source.name is not None or source.is_built_in):
        return source.model_copy(update={"count": config.count})
    return source


def _read(
    source: Source, config: Config, skipped: Skipped, evaluated: EvaluationPrompts | None,
    signatures: Signatures | None, contaminated: list[dict[str, Any]],
) -> ScannedSource:  # fmt: skip
    columns = {name: array(code) for name, code in COLUMNS.items()}
    used, sample = bytearray(), list[str]()
    left_out = Counter[str]()
    num_skipped, num_used = len(skipped.reasons), 0
    is_endless = source.name is not None
    for conversation in from_source(source, config, skipped):
        columns["keys"].append(_key(conversation, config))
        columns["ids"].append(content_key(conversation.id))
        columns["openings"].append(content_key(opening(conversation)))
        columns["prompts"].append(int(conversation.prompt_hash(answered=not config.regenerate), 16))
        columns["characters"].append(min(conversation.characters, 2**32 - 1))
        columns["num_questions"].append(min(len(conversation.questions), 2**16 - 1))
        if len(sample) < SAMPLE:
            sample.append("".join(message["content"] for message in conversation.messages)[:SAMPLE_CHARACTERS])
        why = _refused(conversation, config)
        if not why and evaluated is not None:
            overlap = evaluated.overlap(conversation.questions)
            if overlap is not None:
                why = "contaminated"
                if len(contaminated) < EXAMPLES:
                    contaminated.append({"id": conversation.id, "place": conversation.place, **overlap._asdict()})
        if why:
            left_out[why] += 1
        elif signatures is not None:
            signatures.add("\n".join(compared_texts(conversation, config)))
        used.append(not why)
        num_used += not why
        if is_endless and num_used == source.count:
            break
    is_used = np.array(used, np.bool_)
    return ScannedSource(
        source, **{name: np.array(column, column.typecode) for name, column in columns.items()}, is_used=is_used,
        is_numbered=np.zeros(len(is_used), bool), left_out=left_out, unreadable=len(skipped.reasons) - num_skipped,
        sample=sample,
    )  # fmt: skip


def _refused(conversation: Conversation, config: Config) -> str:
    """Why a conversation is left out by its length; empty if it is not."""
    if config.min_characters and sum(map(len, conversation.questions)) < config.min_characters:
        return "too short"
    if config.max_characters is not None and conversation.characters > config.max_characters:
        return "too long"
    return ""


def _key(conversation: Conversation, config: Config) -> int:
    """Hash of the questions and, if the source's own answers are trained on, of the answers."""
    return content_key(conversation.content(answered=not config.regenerate))


def compared_texts(conversation: Conversation, config: Config) -> list[str]:
    """The texts by which near duplicates are recognised."""
    roles = ("user",) if config.regenerate else ("user", "assistant")
    return [message["content"] for message in conversation.messages if message["role"] in roles]


def opening(conversation: Conversation) -> list[Any]:
    """The messages up to the first turn of the user, and the tools: equal for all prefixes of a conversation."""
    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == "user")
    return replace(conversation, messages=conversation.messages[: first + 1]).content(answered=True)
