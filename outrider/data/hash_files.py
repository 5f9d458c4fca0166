"""The n-gram hashes of many texts in one file: which of a source's parts hold a piece of a text?

GPT-3's rule (arXiv 2005.14165, appendix C): a run that more than 10 documents of a source hold is a common phrase and
does not count.  Only hashes are stored.  Knows no torch.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from outrider.atomic import replacing
from outrider.data.ngram_hashes import LETTERS, WORDS, Hashes, hashes, once
from outrider.errors import DataError

FORMAT = 1
"""Of the file, and of the rule: hashes of another format are others."""
COMMON = 10
"""A run that more documents of a source hold does not count."""
LIMIT = 1 << 23
"""Most hashes of one kind that are stored; of more, one in two, in four, and so on."""
RULE = (
    f"{WORDS} words, or {LETTERS} letters of Chinese, Japanese or Korean, in a row in common, in lower case without "
    f"punctuation; shorter texts whole; what more than {COMMON} documents hold does not count"
)


KINDS = ("runs", "wholes")
"""The two kinds of hashes in `ngram_hashes.Hashes`."""


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


class Collector:
    """The hashes of many documents, by part (such as prompts and answers), in bounded memory: at most 0.4 GB a part."""

    def __init__(self, *parts: str, limit: int = LIMIT):
        self._tallies = {part: {kind: Tally(limit) for kind in KINDS} for part in parts}
        self.documents = dict.fromkeys(parts, 0)

    def add(self, part: str, texts: Iterable[str]) -> None:
        """One document: the turns of a conversation, or a text."""
        found = [hashes(text) for text in texts]
        self.documents[part] += 1
        if not found:
            return
        runs = found[0].runs if len(found) == 1 else once(np.concatenate([one.runs for one in found]))
        self._tallies[part]["runs"].add(runs)
        self._tallies[part]["wholes"].add(
            once(np.array([one.whole for one in found if one.whole is not None], np.uint64))
        )

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


class NgramHashes:
    """Hashes of a source, for look-ups."""

    def __init__(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]):
        """Use `read`."""
        self.parts = tuple(facts["parts"])
        self.sampled: int = max((part["runs_one_in"] for part in facts["parts"].values()), default=1)
        """n, where one in n runs was stored."""
        self._known = {
            (part, kind): (tensors[f"{part}.{kind}"].view(np.uint64), tensors[f"{part}.{kind}.documents"] <= COMMON)
            for part in self.parts for kind in KINDS
        }  # fmt: skip

    def holding(self, text: str) -> tuple[str, ...]:
        """The parts that hold a piece of a text."""
        asked = hashes(text)
        return tuple(part for part in self.parts if self._holds(part, asked))

    def _holds(self, part: str, asked: Hashes) -> bool:
        if asked.whole is None:
            return False
        known, rare = self._known[part, "runs"]
        at, there = _found(known, asked.runs)
        if bool(rare[at[there]].any()):
            return True
        known, rare = self._known[part, "wholes"]
        at, there = _found(known, np.array([asked.whole], np.uint64))
        # a whole long text is never a common phrase; a short one, such as `go on`, may be
        return bool(there.all()) and (len(asked.runs) > 0 or bool(rare[at].all()))


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
