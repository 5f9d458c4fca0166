"""Two vocabularies of one text: which tokens they have in common, and a text of one's tokens in those of the other.

Tokens are compared by the bytes they add to a text, whatever alphabet a tokenizer writes them in: GPT-2's letters for bytes,
SentencePiece's `▁` and `<0x0A>`, WordPiece's `##`.  A text is turned over by its bytes as well, never by `decode`, which may
tidy spaces up, strip the first one, or show half a character as a question mark.

A mistake here costs drafted tokens, never the target's distribution: what is drawn, and from what, is said in the target's
own ids.

V the target's vocabulary, U the other one; K tokens in common.
"""

from __future__ import annotations

import codecs
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider.errors import DrafterError
from outrider.targets.protocol import Target

LOOK_BEHIND = 8
"""Tokens before a seam that are encoded again with what is new, since it may merge with them."""
TAIL = 48
"""Characters before a seam that stand before a text to be encoded, so that it is split as in the middle of a text."""


class Vocabulary:
    """What the ids of a tokenizer stand for.  `size`: rows of its model's output; ids beyond are left out.

    Raises DrafterError for a tokenizer that can't say which letters a token covers.
    """

    def __init__(self, tokenizer: Any, size: int, name: str):
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise DrafterError(
                f"{name!r} has {'no' if tokenizer is None else 'a slow'} tokenizer; to draft across vocabularies both models "
                "need a fast one (tokenizer.json): load the target by name or folder, and choose a small model that has one"
            )
        self.name, self.size = name, size
        self.pieces: list[bytes | None] = [None] * size
        """The bytes that each id adds in the middle of a text; None for special tokens and for ids that no text has."""
        self.specials: dict[str, int] = {}
        """Special tokens by their content."""
        self.end: int | None = _within(tokenizer.eos_token_id, size)
        """Id that ends a text."""
        as_bytes, added = _alphabet(self._backend), tokenizer.added_tokens_decoder
        special = {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
        for text, token in tokenizer.get_vocab().items():
            if token in special and 0 <= token < size:
                self.specials[text] = token
            elif 0 <= token < size:
                self.pieces[token] = text.encode() if token in added else as_bytes(text)
        self._backend.no_truncation()
        whole, bare = (tokenizer.encode("a", add_special_tokens=special) for special in (True, False))
        count = len(whole) - len(bare)
        self.begin: list[int] = next((whole[:n] for n in range(count + 1) if whole[n : n + len(bare)] == bare), [])
        """Ids that the tokenizer puts before every text."""
        self.filler = next((found for found in (_within(tokenizer.bos_token_id, size), self.end) if found is not None), 0)
        """Stands where there is no text at all."""

    @property
    def mute(self) -> list[bool]:
        """Which ids say nothing, and end no text."""
        return [piece is None and token != self.end for token, piece in enumerate(self.pieces)]

    def encode(self, text: str) -> Any:
        """`ids` and `offsets` of a text, with nothing added."""
        return self._backend.encode(text, add_special_tokens=False)


def _within(token: int | None, size: int) -> int | None:
    return token if token is not None and 0 <= token < size else None


def _alphabet(backend: Any) -> Callable[[str], bytes | None]:
    """From a token as the vocabulary writes it to its bytes; None for one that is in another alphabet."""
    kinds = _kinds(backend.decoder) | _kinds(backend.pre_tokenizer)
    if "ByteLevel" in kinds:
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return lambda text: bytes(letters[c] for c in text) if all(c in letters for c in text) else None
    if "WordPiece" in kinds:
        return lambda text: (text[2:] if text.startswith("##") else " " + text).encode()
    return lambda text: bytes([int(text[3:5], 16)]) if _BYTE.fullmatch(text) else text.replace("▁", " ").encode()


def _kinds(part: Any) -> set[str]:
    """Types of a tokenizer's part and of the parts it is made of."""
    found: set[str] = set()
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        at = waiting.pop()
        found.add(at.get("type", ""))
        waiting += [*at.get("decoders", ()), *at.get("pretokenizers", ())]
    return found


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


# ── tokens in common ──────────────────────────────────────────────────────────────────────────────────────────────────


class SharedVocabulary:
    """Tokens that two vocabularies have in common, one to one."""

    def __init__(self, own: Vocabulary, target: Vocabulary, device: torch.device | str = "cpu"):
        pairs = _pairs(own, target)
        self.count = len(pairs)
        self.vocabulary = target.size
        self.own_ids, self.target_ids = torch.tensor(pairs, dtype=torch.int64, device=device).view(-1, 2).T.contiguous()
        """[K] ids of the drafting model, and the target's."""
        self.by_target = {other: one for one, other in pairs}
        self._own = torch.zeros(target.size, dtype=torch.int64, device=device)
        self._own[self.target_ids] = self.own_ids

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [..., U] over the target's vocabulary, [..., V]: -inf for what has no twin.

        Its softmax is the drafting model's distribution given that the token is in common.
        """
        out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        out[..., self.target_ids] = logits[..., self.own_ids]
        return out

    def of(self, tokens: Sequence[int]) -> list[int] | None:
        """The drafting model's ids of these tokens of the target; None where one has no twin."""
        found = [self.by_target[token] for token in tokens if token in self.by_target]
        return found if len(found) == len(tokens) else None

    def own(self, tokens: Tensor) -> Tensor:
        """The drafting model's ids of these tokens of the target; 0 for one without a twin."""
        return self._own[tokens]


def _pairs(own: Vocabulary, target: Vocabulary) -> list[tuple[int, int]]:
    """(own id, target's id), ascending.  The ends of a text are twins too, where they have no others."""
    mine, theirs = _by_bytes(own), _by_bytes(target)
    pairs = {theirs[piece]: mine[piece] for piece in theirs.keys() & mine.keys()}
    pairs |= {target.specials[text]: own.specials[text] for text in target.specials.keys() & own.specials.keys()}
    is_free = target.end is not None and target.end not in pairs and own.end not in pairs.values()
    if is_free and own.end is not None and target.end is not None:
        pairs[target.end] = own.end
    return sorted((one, other) for other, one in pairs.items())


def _by_bytes(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Each piece's id; of several the one that `encode` gives, or else the first."""
    found: dict[bytes, int] = {}
    for token, piece in enumerate(vocabulary.pieces):
        if piece and (piece not in found or token in vocabulary.encode(piece.decode(errors="replace")).ids):
            found[piece] = token
    return found


# ── one text in two vocabularies ──────────────────────────────────────────────────────────────────────────────────────


class Transcript:
    """A text that comes in one vocabulary's tokens and is kept in another's.

    It is encoded anew from a few tokens before its end, and goes on from where the old and the new encoding both begin a token.
    Tokens that end inside a character wait until it is whole.
    """

    def __init__(self, source: Vocabulary, reader: Vocabulary):
        self._source, self._reader = source, reader
        shared = source.specials.keys() & reader.specials.keys()
        self._specials = {source.specials[text]: text.encode() for text in shared}
        self.taken = 0
        """Tokens of the source read so far."""
        self.text = ""
        self.ids: list[int] = []
        """The reader's ids of `text`, without what it puts before every text."""
        self._spans: list[tuple[int, int]] = []
        """Where in `text` each of them begins and ends; parts of a character have all of it."""
        self.waiting: list[int] = []
        """The source's tokens behind `text`: the last one ends inside a character."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unsaid = ""

    @property
    def waiting_bytes(self) -> bytes:
        """What the waiting tokens say."""
        return b"".join(map(self._said, self.waiting))

    def push(self, tokens: Sequence[int]) -> None:
        """The source's tokens that follow."""
        self.taken += len(tokens)
        fresh = ""
        for token in tokens:
            self._unsaid += self._decoder.decode(self._said(token))
            self.waiting.append(token)
            if not self._decoder.getstate()[0]:
                fresh, self._unsaid, self.waiting = fresh + self._unsaid, "", []
        if fresh:
            self._extend(fresh)

    def continued(self, ids: Sequence[int]) -> list[int]:
        """The source's tokens for what these ids of the reader say behind the text; the end of a text is a token of both."""
        spoken = list(itertools.takewhile(lambda token: token != self._reader.end, ids))
        said = b"".join(self._reader.pieces[token] or b"" for token in spoken)
        found = continuation(self._source, self.text, self.waiting_bytes, said)
        is_over = len(spoken) < len(ids)
        if is_over and self._source.end is not None and (found or said == self.waiting_bytes):
            found.append(self._source.end)
        return found

    def _said(self, token: int) -> bytes:
        """A special token speaks where the reader has one of the same name."""
        piece = self._source.pieces[token]
        return self._specials.get(token, b"") if piece is None else piece

    def _extend(self, text: str) -> None:
        self.text += text
        for behind in (LOOK_BEHIND, 8 * LOOK_BEHIND, len(self.ids)):
            first = max(0, len(self.ids) - behind)
            begin = self._spans[first][0] if first else 0
            encoding = self._reader.encode(self.text[begin:])
            spans = [(begin + start, begin + end) for start, end in encoding.offsets]
            seam = _seam(self._spans, first, spans)
            if seam is not None:
                old, new = seam
                self.ids[old:], self._spans[old:] = encoding.ids[new:], spans[new:]
                return


Spans = Sequence[tuple[int, int]]


def _seam(old: Spans, first: int, new: Spans) -> tuple[int, int] | None:
    """The first place from `first` on where a token begins in both: its number among the old and among the new ones.

    The new encoding's own first token does not count, since it is split as at the beginning of a text; nor does one that
    begins inside a character, which the token before it has a part of.
    """
    if first == 0:
        return 0, 0
    places = {old[n][0]: n for n in range(first + 1, len(old)) if old[n - 1][1] <= old[n][0]}
    begins = ((new[k][0], k) for k in range(1, len(new)) if new[k - 1][1] <= new[k][0])
    return next(((places[start], k) for start, k in begins if start in places), None)


def continuation(target: Vocabulary, before: str, waiting: bytes, said: bytes) -> list[int]:
    """The target's ids of what was `said` behind the text `before`, of which `waiting` is known already.

    Empty where it begins otherwise, or where the target's encoding has no token that begins at the seam or does not give the
    same bytes back.  Half a character at the end is left out.
    """
    text = _readable(said)
    wanted = text.encode()[len(waiting) :]
    if not wanted or not said.startswith(waiting):
        return []
    for context in dict.fromkeys((before[-TAIL:], "\n", "")):
        ids = target.encode(context + text).ids
        found = _ending(target, ids, wanted)
        if found:
            return found
    return []


def _ending(target: Vocabulary, ids: list[int], wanted: bytes) -> list[int]:
    """The last of these ids that say exactly what is wanted; none where no such place is."""
    for n in range(len(ids) - 1, -1, -1):
        piece = target.pieces[ids[n]] if ids[n] < target.size else None
        if piece is None or not wanted.endswith(piece):
            return []
        wanted = wanted[: len(wanted) - len(piece)]
        if not wanted:
            return ids[n:]
    return []


def _readable(data: bytes) -> str:
    """The text up to the first byte that is none, or that begins a character which is not whole."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


class Overlap(NamedTuple):
    """How much two vocabularies have in common."""

    tokens: int
    """Tokens in common."""
    share: float
    """Of the target's vocabulary."""
    mass: float
    """Of the target's probability, on average over the places of a sample text."""

    def __str__(self) -> str:
        return f"{self.tokens} tokens in common, {self.share:.0%} of the target's; they hold {self.mass:.1%} of its probability"


def overlap(shared: SharedVocabulary, p: Tensor) -> Overlap:
    """p [..., V]: the target's distributions at the places of some text."""
    return Overlap(shared.count, shared.count / shared.vocabulary, float(p[..., shared.target_ids].sum(-1).mean()))


SAMPLE = """The committee met on Tuesday and agreed, after a short discussion, that the road should be repaired before winter.
def mean(values):
    return sum(values) / len(values)  # fails for an empty list
In 2024 about 3,150 people lived there; by 1911 it had been twice as many.
Die Straße führt über den Fluss. La forêt était déjà loin. El niño llegó mañana.
{"name": "Ann", "items": [1, 2.5, null], "done": true}
"""
"""Prose, code, numbers and letters beyond English: where the target's probability of the tokens in common is measured."""


@torch.inference_mode()
def sample_distributions(vocabulary: Vocabulary, target: Target) -> Tensor:
    """The target's distributions [1, S, V] at the places of the sample text, at temperature 1."""
    ids = [token for token in vocabulary.encode(SAMPLE).ids if token < vocabulary.size]
    tokens = torch.tensor([[*vocabulary.begin, *ids][: target.spec.context] or [vocabulary.filler]], device=target.device)
    hidden, _ = target.read(tokens, ())
    return target.head(hidden).float().softmax(-1)
