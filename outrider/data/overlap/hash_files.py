"""The hashes of many texts in one file, to find which parts of a source contain which questions of an evaluation.

The rule is in `overlap.questions`; a phrase that occurs in more than 10 documents of a source is common and does not
count.  Only hashes are stored.  Imports no torch.
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
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular, whole_text

FORMAT = 2
"""Version of the file and of the hashing rule."""
LIMIT = 1 << 23
"""Maximum number of stored hashes per kind; if there are more, every second, fourth, … is stored."""
KINDS = ("runs", "wholes", "spans")
"""The kinds of hashes in `overlap.units.Units`."""
CELLS = 1 << 22
"""Pairs of a stored bag and a question's bag that are compared at a time."""
ENTRY = 16
"""Memory overhead of a statement, in tokens."""


class HashCounter:
    """Number of documents that contain each hash, counted up to COMMON + 1.

    If there are more than `limit` hashes, a sample is stored that does not depend on the order of the documents.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self._halvings = limit, 0
        self._hashes, self._counts = np.empty(0, np.uint64), np.empty(0, np.uint8)
        self._new: list[np.ndarray] = []
        self._buffered = 0

    def add(self, document: np.ndarray) -> None:
        """document [n] uint64: its hashes, without repetitions."""
        sampled = document[self._sampled(document)]
        self._new.append(sampled)
        self._buffered += len(sampled)
        if self._buffered > 1 << 20:
            self._merge()

    def result(self) -> tuple[np.ndarray, np.ndarray, int]:
        """Sorted hashes [n] uint64, counts [n] uint8, and the sampling interval n: every n-th hash is stored."""
        self._merge()
        return self._hashes, self._counts, 1 << self._halvings

    def _sampled(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes & np.uint64((1 << self._halvings) - 1)) == 0

    def _merge(self) -> None:
        if not self._buffered:
            return
        new, counts = np.unique(np.concatenate(self._new), return_counts=True)
        self._new, self._buffered = [], 0
        at, is_old = _look_up(self._hashes, new)
        self._counts[at[is_old]] = np.minimum(self._counts[at[is_old]] + counts[is_old], COMMON + 1)
        self._hashes = np.insert(self._hashes, at[~is_old], new[~is_old])
        self._counts = np.insert(self._counts, at[~is_old], np.minimum(counts[~is_old], COMMON + 1))
        while len(self._hashes) > self.limit:
            self._halvings += 1
            sampled = self._sampled(self._hashes)
            self._hashes, self._counts = self._hashes[sampled], self._counts[sampled]


class Statements:
    """Distinct statements of questions, each the bags of content tokens of its sentences.

    At most `limit` tokens, counting ENTRY more per statement; if there are more, a sample is stored that does not
    depend on their order.
    """

    def __init__(self, limit: int = LIMIT):
        self.limit, self._halvings, self._size = limit, 0, 0
        self._stored = dict[int, tuple[bytes, bytes]]()
        """By hash: all tokens, and the number of tokens of each sentence."""

    def add(self, bags: Sequence[np.ndarray]) -> None:
        """bags: sorted tokens [n] uint32 of each sentence; none is empty."""
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
        """The statements and the sampling interval n: every n-th statement is stored.

        `tokens` [n] int32, `tokens.sizes` [s] int32: tokens per sentence, `tokens.sentences` [t] int32: sentences per
        statement.
        """
        stored = [self._stored[value] for value in sorted(self._stored)]
        tokens, sizes = (
            np.frombuffer(b"".join(parts), np.int32) for parts in (zip(*stored, strict=True) if stored else ((), ()))
        )
        lengths = np.array([len(each[1]) // sizes.itemsize for each in stored], np.int32)
        return {"tokens": tokens, "tokens.sizes": sizes, "tokens.sentences": lengths}, 1 << self._halvings

    def _is_sampled(self, value: int) -> bool:
        return not value & ((1 << self._halvings) - 1)


class Collector:
    """Collects the hashes of many documents, by part (such as prompts and answers), in at most 0.7 GB per part."""

    def __init__(self, *parts: str, limit: int = LIMIT):
        self._counters = {part: {kind: HashCounter(limit) for kind in KINDS} for part in parts}
        self._statements = {part: Statements(limit) for part in parts}
        self.documents = dict.fromkeys(parts, 0)

    def add(self, part: str, texts: Iterable[str]) -> None:
        """Add one document: the turns of a conversation, or a text."""
        self.documents[part] += 1
        turns = [turn for turn in map(units, texts) if turn.whole is not None]
        if not turns:
            return
        wholes = [np.array([turn.whole for turn in turns], np.uint64), *(turn.wholes for turn in turns)]
        hashes = {"runs": [turn.runs for turn in turns], "wholes": wholes, "spans": [turn.spans for turn in turns]}
        for kind, arrays in hashes.items():
            self._counters[part][kind].add(once(np.concatenate(arrays)))
        for bags in chain.from_iterable(turn.statements for turn in turns):
            if sum(weights_of(bag).sum() for bag in bags) >= LIGHTEST_TEXT:
                self._statements[part].add(bags)

    def save(self, path: Path) -> dict[str, Any]:
        """Write the file atomically; returns its entry for a manifest.  Raises DataError if it can't be written."""
        tensors: dict[str, np.ndarray] = {}
        parts: dict[str, dict[str, int]] = {}
        for part, documents in self.documents.items():
            parts[part] = {"documents": documents}
            for kind, counter in self._counters[part].items():
                hashes, counts, one_in = counter.result()
                # int64: torch, which reads the file too, supports few operations on unsigned types
                tensors |= {f"{part}.{kind}": hashes.view(np.int64), f"{part}.{kind}.documents": counts}
                parts[part] |= {kind: len(hashes), f"{kind}_one_in": one_in}
            arrays, one_in = self._statements[part].result()
            tensors |= {f"{part}.{name}": array for name, array in arrays.items()}
            parts[part] |= {"statements": len(arrays["tokens.sentences"]), "statements_one_in": one_in}
        try:
            with replacing(path) as part_file:
                # one key, since the order of several is random
                metadata = {"outrider": json.dumps({"format": FORMAT, "rule": RULE}, sort_keys=True)}
                # not save_file, whose temporary file would be left behind by a kill
                part_file.write_bytes(save(tensors, metadata))
                facts = {"file": path.name, "hash": hash_of(part_file), "format": FORMAT, "rule": RULE, "parts": parts}
        except (OSError, SafetensorError) as error:
            raise DataError(f"can't write {path}: {error}; free some space and run again") from error
        return facts


def hash_of(path: Path) -> str:
    """Hash, 32 hex digits, of a file's content."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


class HashFile(NamedTuple):
    """A file of hashes, and its entry in the manifest."""

    path: Path
    facts: Mapping[str, Any]


def named(folder: Path, manifest: str = "answers.json") -> HashFile | None:
    """The file of hashes that a folder's manifest names; None if it names none or its texts have changed since."""
    try:
        facts = parse_json(whole_text(folder / manifest))["ngram_hashes"]
        made_of = facts.get("of")
        if made_of is not None and (folder / made_of["file"]).stat().st_size != made_of["size_bytes"]:
            return None
        return HashFile(folder / facts["file"], facts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_intact(file: HashFile) -> bool:
    """Whether the file exists and matches its entry in the manifest."""
    return file.path.exists() and hash_of(file.path) == file.facts["hash"]


class TextPrompt(NamedTuple):
    """A single text as a prompt."""

    id: str
    questions: tuple[str, ...]


class NgramHashes:
    """The hashes of a source, for look-ups."""

    def __init__(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]):
        """Use `read`."""
        self.parts = tuple(facts["parts"])
        self.sampled: int = max((part["runs_one_in"] for part in facts["parts"].values()), default=1)
        """Sampling interval: every n-th run is stored."""
        self._hashes = {
            (part, kind): (tensors[f"{part}.{kind}"].view(np.uint64), tensors[f"{part}.{kind}.documents"] <= COMMON)
            for part in self.parts for kind in KINDS
        }  # fmt: skip
        self._facts = facts["parts"]
        self._tensors = tensors

    def holding(self, text: str) -> tuple[str, ...]:
        """The parts that contain the question of a text."""
        questions = Questions({"": [TextPrompt("", (text,))]})
        return tuple(part for part in self.parts if self.questions_in(part, questions))

    def questions_in(self, part: str, questions: Questions) -> set[int]:
        """The numbers of the questions that a part contains."""
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
        """The rows of a look-up that are stored [n], and whether few documents contain them [n] bool."""
        hashes, is_rare = self._hashes[part, kind]
        at, is_in = _look_up(hashes, lookup.hashes)
        return np.flatnonzero(is_in), is_rare[at[is_in]]

    def _near(self, part: str, questions: Questions) -> set[int]:
        tokens = self._tensors[f"{part}.tokens"].view(np.uint32)
        sizes, lengths = (self._tensors[f"{part}.tokens.{name}"] for name in ("sizes", "sentences"))
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        counts = Counter[int]()
        batch_size = max(1, CELLS // max(1, len(questions.near.owners)))
        texts, first, num_sentences = list[list[np.ndarray]](), 0, 0
        for length in lengths.tolist():
            bounds = ends[first : first + length + 1].tolist()
            texts.append([tokens[begin:end] for begin, end in pairwise(bounds)])
            first += length
            num_sentences += length
            if num_sentences >= batch_size or first == len(sizes):
                counts.update(number for _, number in questions.near.near(texts))
                texts, num_sentences = [], 0
        return {number for number, count in counts.items() if count <= COMMON}


def _look_up(table: np.ndarray, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Index of each hash in the sorted `table` [n], and whether it is in the table [n] bool."""
    at = np.searchsorted(table, hashes)
    is_in = at < len(table)
    is_in[is_in] = table[at[is_in]] == hashes[is_in]
    return at, is_in


def read(file: HashFile) -> NgramHashes:
    """Open a file of hashes.  Raises DataError if it does not match its manifest or has another format."""
    path, facts = file
    if facts.get("format") != FORMAT:
        raise DataError(
            f"{path} has format {facts.get('format')!r}, but this Outrider reads {FORMAT}; run `outrider prepare` "
            "again, or build the corpus again"
        )
    if not path.exists():
        raise DataError(f"{path} is missing, but its manifest names it; copy the file there")
    try:
        hashes = NgramHashes(load_file(path), facts) if is_intact(file) else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path} can't be read ({error}); run `outrider prepare` again, or build the corpus again"
        ) from None
    if hashes is None:
        raise DataError(
            f"{path} does not match its manifest; copy it again, run `outrider prepare` again, or build the corpus "
            "again"
        )
    return hashes
