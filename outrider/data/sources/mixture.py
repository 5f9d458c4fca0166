"""The conversations of a run: of several sources, filtered, chosen by weight and seed, and read as often as needed.

All sources are read once, and of each conversation 40 bytes are held: hashes of what it asks, of its id, of both and of
how it begins, and its sizes.  From these follows which are used, and which answers are theirs; a second reading gives
their texts, mixed.  Texts are never held: two million conversations take hardly more memory than two thousand.
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
from outrider.data.overlap.decontaminate import Evaluated
from outrider.data.sources.choosing import Part, choose, keep, leave_out_duplicates, leave_out_held_out, shared_out
from outrider.data.sources.conversations import Conversation, available, from_source, nothing_in, warn_of_unread
from outrider.data.sources.duplicates import Signatures, content_hash, content_key, repeated
from outrider.data.sources.readers import Skipped
from outrider.errors import DataError

WINDOW_CHARACTERS, WINDOW = 1 << 25, 1 << 14
"""Characters, and conversations, among which the next one is drawn where sources are shuffled."""
COLUMNS = {"keys": "Q", "ids": "Q", "openings": "Q", "prompts": "Q", "characters": "I", "num_questions": "H"}
"""What is held of each conversation, and as what."""
SAMPLE, SAMPLE_CHARACTERS = 32, 4096
"""Texts of a source, and characters of each, that are held to estimate tokens by."""
EXAMPLES = 1000
"""Conversations left out for contamination that are named in the report."""


class NothingLeft(DataError):
    """All conversations were left out."""


@dataclass(eq=False)
class Selection:
    """The conversations that a run uses.  Iterating reads them again, in the same order each time."""

    config: Config = field(default_factory=Config)
    parts: Sequence[Part] = ()
    contaminated: list[dict[str, Any]] = field(default_factory=list)
    """The first that were left out because an evaluation asks the same, and what they share with it."""
    evaluated: int = 0
    """Prompts of the evaluation that were looked for."""

    def __len__(self) -> int:
        return sum(part.count for part in self.parts)

    def __iter__(self) -> Iterator[Conversation]:
        """Raises DataError where a source has changed since it was read."""
        mixed = self._mixed()
        return shuffled(mixed, self.config.seed) if self.config.sources else mixed

    @property
    def left_out(self) -> Counter[str]:
        """How many conversations were left out, by reason."""
        return sum((part.left_out for part in self.parts), Counter())

    @property
    def available(self) -> int | None:
        """Rows of the sources, used or not; None where one is a data set of the hub or of packages, which are not read
        to their end."""
        if any((part.source.path or "packages:").startswith("packages:") for part in self.parts):
            return None
        library = [part.source for part in self.parts if part.is_library]
        of_files = (len(part.keys) + part.unreadable for part in self.parts if not part.is_library)
        return sum(of_files) + sum(
            available(self.config.model_copy(update={"sources": (one,)})) or 0 for one in library
        )

    @property
    def characters(self) -> int:
        """Of all texts of the used conversations."""
        return sum(int(part.characters[part.is_used].sum(dtype=np.int64)) for part in self.parts)

    @property
    def most_tokens(self) -> int:
        """Tokens that the answers have at most: every turn of the user is answered."""
        config, found = self.config, 0
        for part in self.parts:
            turns = part.num_questions[part.is_used].astype(np.int64)
            most = (
                np.minimum(turns * config.max_new_tokens, config.length)
                if config.regenerate
                else turns * 0 + config.length
            )
            found += int(most.sum())
        return found

    @functools.cached_property
    def prompt_hashes(self) -> np.ndarray:
        """[n] uint64, the hashes that answers to the used conversations are stored under, source by source.  Sources
        are read again only where ids come twice."""
        found = np.concatenate([np.empty(0, np.uint64), *(_prompts(part, self.config) for part in self.parts)])
        _, group, counts = np.unique(found, return_inverse=True, return_counts=True)
        done = Counter[int]()
        for at in np.flatnonzero(counts[group] > 1):
            content = int(found[at])
            done[content] += 1
            found[at] = int(hash_of_repeat(f"{content:016x}", done[content]), 16)
        return found

    @property
    def openings(self) -> np.ndarray:
        """[n] uint64, how the used conversations begin, in the order of `prompt_hashes`."""
        return np.concatenate([np.empty(0, np.uint64), *(part.openings[part.is_used] for part in self.parts)])

    @property
    def held_out_hashes(self) -> frozenset[int]:
        """`prompt_hashes` of the held-out source; none where there is no such source."""
        own = np.repeat([part.is_held_out for part in self.parts], [part.count for part in self.parts])
        return frozenset(self.prompt_hashes[own.astype(bool)].tolist())

    def _mixed(self) -> Iterator[Conversation]:
        """The sources' conversations, each source's spread evenly over the whole."""
        counts = [part.count for part in self.parts]
        readers, taken = [_again(part, self.config) for part in self.parts], [0] * len(counts)
        for _ in range(sum(counts)):
            # the share of each that is given out by its next one
            shares = [(done + 0.5) / count if done < count else 2.0 for done, count in zip(taken, counts, strict=True)]
            at = shares.index(min(shares))
            taken[at] += 1
            yield next(readers[at])


def _prompts(part: Part, config: Config) -> np.ndarray:
    """[n] uint64: `Part.prompts` of the used conversations, with the ids that they are numbered to."""
    found, is_numbered = part.prompts[part.is_used], part.is_numbered[part.is_used]
    if is_numbered.any():
        for at, conversation in enumerate(_again(part, config)):
            if is_numbered[at]:
                found[at] = int(conversation.prompt_hash(answered=not config.regenerate), 16)
    return found


def hash_of_repeat(content: str, number: int) -> str:
    """The hash that the answer to the first, second, … prompt of one content is stored under."""
    return content if number == 1 else content_hash([content, number])


def _again(part: Part, config: Config) -> Iterator[Conversation]:
    """The used conversations of a source, from a second reading."""
    changed = DataError(f"{part.label} has changed since it was read; run again, on a copy that nothing writes to")
    wanted = np.flatnonzero(part.is_used)
    at = 0
    for number, conversation in enumerate(from_source(part.source, config, Skipped())):
        if at == len(wanted):
            return
        if number < wanted[at]:
            continue
        if _key(conversation, config) != part.keys[number]:
            raise changed
        at += 1
        yield conversation.numbered if part.is_numbered[number] else conversation
    if at < len(wanted):
        raise changed


def shuffled(conversations: Iterator[Conversation], seed: int) -> Iterator[Conversation]:
    """The conversations, each drawn from a window of those that come next."""
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


def select(config: Config, skipped: Skipped | None = None, evaluated: Evaluated | None = None) -> Selection:
    """Read all sources once, and choose.

    skipped: gets the rows that can't be read, with `config.skip_bad`.  evaluated: conversations that ask the same are
    left out.
    Raises DataError with file and line for a row that can't be read, and where nothing is left.
    """
    skipped = Skipped() if skipped is None else skipped
    found = Selection(config, evaluated=0 if evaluated is None else len(evaluated))
    signatures = Signatures() if config.deduplicate == "near" else None
    training = [
        _read(_limited(source, config), config, skipped, evaluated, signatures, found.contaminated)
        for source in config.training_sources
    ]
    if not sum(len(part.keys) for part in training):
        raise nothing_in(config)
    found.parts = [*training, *_held_out(config, skipped)]
    warn_of_unread(skipped, config)
    again = repeated(np.concatenate([part.ids for part in found.parts]))
    for part, own in zip(found.parts, shared_out(found.parts, again), strict=True):
        part.is_numbered = own
    if config.deduplicate != "off":
        leave_out_duplicates(training, signatures)
    for part in found.parts[len(training) :]:
        leave_out_held_out(training, part)
    choose(training, config)
    if not sum(part.count for part in training):
        why = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.most_common())
        raise NothingLeft(f"nothing is left of {config.label}: {why}; give other sources, or change prepare's filters")
    return found


def _held_out(config: Config, skipped: Skipped) -> list[Part]:
    """The held-out source, if there is one.  Nothing trains on it, so it may ask what an evaluation asks."""
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
    """Of a data set no more is read than is used: the rest may be large."""
    if source.count is None and (source.name is not None or source.is_built_in):
        return source.model_copy(update={"count": config.count})
    return source


def _read(
    source: Source, config: Config, skipped: Skipped, evaluated: Evaluated | None, signatures: Signatures | None,
    contaminated: list[dict[str, Any]],
) -> Part:  # fmt: skip
    columns = {name: array(code) for name, code in COLUMNS.items()}
    used, sample = bytearray(), list[str]()
    left_out, before, taken = Counter[str](), len(skipped.reasons), 0
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
            signatures.add("\n".join(asked(conversation, config)))
        used.append(not why)
        taken += not why
        if is_endless and taken == source.count:
            break
    is_used = np.array(used, np.bool_)
    return Part(
        source, **{name: np.array(column, column.typecode) for name, column in columns.items()}, is_used=is_used,
        is_numbered=np.zeros(len(is_used), bool), left_out=left_out, unreadable=len(skipped.reasons) - before,
        sample=sample,
    )  # fmt: skip


def _refused(conversation: Conversation, config: Config) -> str:
    """Why a conversation's length leaves it out; empty where it does not."""
    if config.min_characters and sum(map(len, conversation.questions)) < config.min_characters:
        return "too short"
    if config.max_characters is not None and conversation.characters > config.max_characters:
        return "too long"
    return ""


def _key(conversation: Conversation, config: Config) -> int:
    """A hash of what is asked, and of the answers where those of the source train."""
    return content_key(conversation.content(answered=not config.regenerate))


def asked(conversation: Conversation, config: Config) -> list[str]:
    """The texts that near duplicates share."""
    wanted = ("user",) if config.regenerate else ("user", "assistant")
    return [message["content"] for message in conversation.messages if message["role"] in wanted]


def opening(conversation: Conversation) -> list[Any]:
    """The messages up to the first turn of the user, and the tools: what a conversation shares with its own
    beginnings."""
    first = next(i for i, message in enumerate(conversation.messages) if message["role"] == "user")
    return replace(conversation, messages=conversation.messages[: first + 1]).content(answered=True)
