"""The hashes of many texts in one file: which of a source's parts hold which questions of an evaluation?

What counts is written in `overlap.questions`; what more than 10 documents of a source hold is a common phrase and does
not count.  Only hashes are stored.  Knows no torch.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from outrider.data.overlap.content import weights_of
from outrider.data.overlap.near import LIGHTEST_TEXT
from outrider.data.overlap.ngram_hashes import mixed, once
from outrider.data.overlap.questions import COMMON, RULE, Lookup, Questions
from outrider.data.overlap.units import units
from outrider.errors import DataError
from outrider.storage.atomic import replacing

FORMAT = 2
"""Of the file, and of the rule: hashes of another format are others."""
LIMIT = 1 << 23
"""Most hashes of one kind that are stored; of more, one in two, in four, and so on."""
KINDS = ("runs", "wholes", "spans")
"""The kinds of hashes in `overlap.units.Units`."""
CELLS = 1 << 22
"""Pairs of a stored bag and a question's bag that are compared at a time."""


ENTRY = 16
"""Tokens that take the memory which a statement takes besides its tokens."""


class Tally:
    """How many documents hold each hash, counted to COMMON + 1; of more than `limit` hashes a sample, the same in any
    order."""

    def __init__(self, limit: int = LIMIT):
        self.limit, self._halvings = limit, 0
        self._known, self._counts = np.empty(0, np.uint64), np.empty(0, np.uint8)
        self._new: list[np.ndarray] = []
        self._buffered = 0

    def add(self, document: np.ndarray) -> None:
        """[n] uint64, the hashes of one document, each once."""
        sampled = document[self._sampled(document)]
        self._new.append(sampled)
        self._buffered += len(sampled)
        if self._buffered > 1 << 20:
            self._merge()

    def result(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Hashes [n] uint64, sorted; counts [n] uint8; and n, where one in n hashes was stored."""
        self._merge()
        return self._known, self._counts, 1 << self._halvings

    def _sampled(self, found: np.ndarray) -> np.ndarray:
        return (found & np.uint64((1 << self._halvings) - 1)) == 0

    def _merge(self) -> None:
        if not self._buffered:
            return
        new, counts = np.unique(np.concatenate(self._new), return_counts=True)
        self._new, self._buffered = [], 0
        at, old = _found(self._known, new)
        self._counts[at[old]] = np.minimum(self._counts[at[old]] + counts[old], COMMON + 1)
        self._known = np.insert(self._known, at[~old], new[~old])
        self._counts = np.insert(self._counts, at[~old], np.minimum(counts[~old], COMMON + 1))
        while len(self._known) > self.limit:
            self._halvings += 1
            sampled = self._sampled(self._known)
            self._known, self._counts = self._known[sampled], self._counts[sampled]


class Statements:
    """Different statements of questions, each the bags of content tokens of its sentences.

    At most `limit` tokens, where a statement counts as ENTRY more; of more a sample, the same in any order.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self._halvings, self._size = limit, 0, 0
        self._stored = dict[int, tuple[bytes, bytes]]()
        """By hash: all tokens, and the number of tokens of each sentence."""

    def add(self, bags: Sequence[np.ndarray]) -> None:
        """bags: of each sentence, [n] uint32, sorted; none is empty."""
        tokens, sizes = np.concatenate(bags), np.array(list(map(len, bags)), np.int32)
        places = np.arange(1, len(tokens) + 1, dtype=np.uint64) << np.uint64(32)
        value = int(mixed(mixed(tokens.astype(np.uint64) + places).sum(keepdims=True))[0])
        if value in self._stored or not self._is_sampled(value):
            return
        self._stored[value] = (tokens.tobytes(), sizes.tobytes())
        self._size += len(tokens) + ENTRY
        while self._size > self.limit:
            self._halvings += 1
            self._stored = {value: each for value, each in self._stored.items() if self._is_sampled(value)}
            self._size = sum(len(each[0]) // tokens.itemsize + ENTRY for each in self._stored.values())

    def result(self) -> tuple[dict[str, np.ndarray], int]:
        """All tokens [n] int32, the tokens of each sentence [s] int32 and the sentences of each statement [t] int32,
        and n, where one in n statements was stored."""
        listed = [self._stored[value] for value in sorted(self._stored)]
        tokens, sizes = (
            np.frombuffer(b"".join(each), np.int32) for each in (zip(*listed, strict=True) if listed else ((), ()))
        )
        lengths = np.array([len(each[1]) // sizes.itemsize for each in listed], np.int32)
        return {"tokens": tokens, "tokens.sizes": sizes, "tokens.sentences": lengths}, 1 << self._halvings

    def _is_sampled(self, value: int) -> bool:
        return not value & ((1 << self._halvings) - 1)


class Collector:
    """The hashes of many documents, by part (such as prompts and answers), in bounded memory: at most 0.7 GB a part."""

    def __init__(self, *parts: str, limit: int = LIMIT):
        self._tallies = {part: {kind: Tally(limit) for kind in KINDS} for part in parts}
        self._statements = {part: Statements(limit) for part in parts}
        self.documents = dict.fromkeys(parts, 0)

    def add(self, part: str, texts: Iterable[str]) -> None:
        """One document: the turns of a conversation, or a text."""
        self.documents[part] += 1
        each = [one for one in map(units, texts) if one.whole is not None]
        if not each:
            return
        wholes = [np.array([one.whole for one in each], np.uint64), *(one.wholes for one in each)]
        hashes = {"runs": [one.runs for one in each], "wholes": wholes, "spans": [one.spans for one in each]}
        for kind, arrays in hashes.items():
            self._tallies[part][kind].add(once(np.concatenate(arrays)))
        for bags in chain.from_iterable(one.statements for one in each):
            if sum(weights_of(bag).sum() for bag in bags) >= LIGHTEST_TEXT:
                self._statements[part].add(bags)

    def save(self, path: Path) -> dict[str, Any]:
        """Write the file whole and return its entry for a manifest.  Raises DataError where it can't be written."""
        tensors: dict[str, np.ndarray] = {}
        parts: dict[str, dict[str, int]] = {}
        for part, documents in self.documents.items():
            parts[part] = {"documents": documents}
            for kind, tally in self._tallies[part].items():
                known, counts, one_in = tally.result()
                # int64: torch, which reads the file too, does little with unsigned ones
                tensors |= {f"{part}.{kind}": known.view(np.int64), f"{part}.{kind}.documents": counts}
                parts[part] |= {kind: len(known), f"{kind}_one_in": one_in}
            arrays, one_in = self._statements[part].result()
            tensors |= {f"{part}.{name}": array for name, array in arrays.items()}
            parts[part] |= {"statements": len(arrays["tokens.sentences"]), "statements_one_in": one_in}
        try:
            with replacing(path) as part_file:
                # one key, since the order of several is random
                metadata = {"outrider": json.dumps({"format": FORMAT, "rule": RULE}, sort_keys=True)}
                part_file.write_bytes(save(tensors, metadata))  # save_file leaves another name when it is killed
                facts = {"file": path.name, "hash": hash_of(part_file), "format": FORMAT, "rule": RULE, "parts": parts}
        except (OSError, SafetensorError) as error:
            raise DataError(f"can't write {path}: {error}; free some space and run again") from error
        return facts


def hash_of(path: Path) -> str:
    """32 hex digits of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class Named(NamedTuple):
    """A file of hashes, and its entry in the manifest."""

    path: Path
    facts: Mapping[str, Any]


def named(folder: Path, manifest: str = "answers.json") -> Named | None:
    """The hashes that a folder's manifest names; None where it names none, or where its texts have changed since."""
    try:
        facts = json.loads((folder / manifest).read_text(encoding="utf-8"))["ngram_hashes"]
        made_of = facts.get("of")
        if made_of is not None and (folder / made_of["file"]).stat().st_size != made_of["size_bytes"]:
            return None
        return Named(folder / facts["file"], facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_whole(one: Named) -> bool:
    """Whether the file is there and is the one its manifest names."""
    return one.path.exists() and hash_of(one.path) == one.facts["hash"]


class TextPrompt(NamedTuple):
    """One text to be looked for."""

    id: str
    questions: tuple[str, ...]


class NgramHashes:
    """Hashes of a source, for look-ups."""

    def __init__(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]):
        """Use `read`."""
        self.parts = tuple(facts["parts"])
        self.sampled: int = max((part["runs_one_in"] for part in facts["parts"].values()), default=1)
        """n, where one in n runs was stored."""
        self._hashes = {
            (part, kind): (tensors[f"{part}.{kind}"].view(np.uint64), tensors[f"{part}.{kind}.documents"] <= COMMON)
            for part in self.parts for kind in KINDS
        }  # fmt: skip
        self._facts = facts["parts"]
        self._tensors = tensors

    def holding(self, text: str) -> tuple[str, ...]:
        """The parts that hold the question of a text."""
        questions = Questions({"": [TextPrompt("", (text,))]})
        return tuple(part for part in self.parts if self.questions_in(part, questions))

    def questions_in(self, part: str, questions: Questions) -> set[int]:
        """The numbers of the questions that a part holds."""
        firsts, wholes, pieces = questions.lookups
        numbers = set[int]()
        for lookup, kind in ((firsts, "wholes"), (wholes, "wholes"), (wholes, "spans"), (pieces, "wholes")):
            rows, is_rare = self._held(part, kind, lookup)
            owners = lookup.owners[rows]
            # a whole long question is never a common phrase; a short one, such as `go on`, may be
            is_whole_question = lookup is not pieces and kind == "wholes"
            numbers.update(owners[is_rare | (questions.is_long[owners] & is_whole_question)].tolist())
        rows, is_rare = self._held(part, "runs", questions.runs.lookup)
        numbers |= questions.prompts_of(questions.runs.covered(rows[is_rare], self._facts[part]["runs_one_in"]))
        return numbers | self._near(part, questions)

    def _held(self, part: str, kind: str, lookup: Lookup) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a look-up that are stored [n], and whether few documents have them [n] bool."""
        hashes, is_rare = self._hashes[part, kind]
        at, is_in = _found(hashes, lookup.hashes)
        return np.flatnonzero(is_in), is_rare[at[is_in]]

    def _near(self, part: str, questions: Questions) -> set[int]:
        tokens = self._tensors[f"{part}.tokens"].view(np.uint32)
        sizes, lengths = (self._tensors[f"{part}.tokens.{name}"] for name in ("sizes", "sentences"))
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        counts, most = Counter[int](), max(1, CELLS // max(1, len(questions.near.owners)))
        texts, first, held = list[list[np.ndarray]](), 0, 0
        for length in lengths.tolist():
            bounds = ends[first : first + length + 1].tolist()
            texts.append([tokens[begin:end] for begin, end in pairwise(bounds)])
            first, held = first + length, held + length
            if held >= most or first == len(sizes):
                counts.update(number for _, number in questions.near.near(texts))
                texts, held = [], 0
        return {number for number, count in counts.items() if count <= COMMON}


def _found(known: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index in the sorted `known` of each wanted hash [n], and whether it is there [n] bool."""
    at = np.searchsorted(known, wanted)
    there = at < len(known)
    there[there] = known[at[there]] == wanted[there]
    return at, there


def read(one: Named) -> NgramHashes:
    """Open hashes.  Raises DataError for a file that is not the one its manifest names, or that is of another
    format."""
    path, facts = one
    if facts.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {facts.get('format')!r}, but this Outrider reads {FORMAT}; run `outrider prepare` "
            "again, or build the corpus again"
        )
    if not path.exists():
        raise DataError(f"{path} is missing, but its manifest names it; copy that file there")
    try:
        found = NgramHashes(load_file(path), facts) if is_whole(one) else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} can't be read ({error}); run `outrider prepare` again, or build the corpus again"
        ) from None
    if found is None:
        raise DataError(
            f"{path} has another content than its manifest says; copy it again, run `outrider prepare` again, or build "
            "the corpus again"
        )
    return found
