"""Two vocabularies: the tokens they share, and how to translate a text from one to the other.

Tokens are compared by the bytes they add to a text, regardless of how a tokenizer spells them: GPT-2's letters for
bytes, SentencePiece's `▁` and `<0x0A>`, WordPiece's `##`.  Texts are also translated by their bytes, not with `decode`,
which may clean up spaces, strip the first one, or replace a partial character.

A mistake here costs drafted tokens but can't change the target's distribution: sampled tokens and q are in the target's
ids.

V the target's vocabulary, U the other one; K shared tokens.
"""

from __future__ import annotations

import codecs
import copy
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

ENCODED_AGAIN = 8
"""Number of trailing tokens that are re-encoded together with new text, which may merge with them."""
TAIL = 48
"""Characters of context that are encoded before a text, so that it is split as in the middle of a text."""


class Vocabulary:
    """The bytes of a tokenizer's ids.  size: rows of its model's output; larger ids are ignored.

    Raises DrafterError for a tokenizer without character offsets.
    """

    def __init__(self, tokenizer: Any, size: int, name: str):
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise DrafterError(
                f"{name!r} has {'no' if tokenizer is None else 'a slow'} tokenizer; to draft across vocabularies both "
                "models need a fast one (tokenizer.json): load the target by name or folder, and choose a small model "
                "that has one"
            )
        self.name, self.size = name, size
        self.pieces: list[bytes | None] = [None] * size
        """The bytes that each id adds in the middle of a text; None for special tokens and unused ids."""
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
        self.filler = next(
            (filler for filler in (_within(tokenizer.bos_token_id, size), self.end) if filler is not None), 0
        )
        """Stands for an empty text."""

    @property
    def mute(self) -> list[bool]:
        """Which ids neither add text nor end it."""
        return [piece is None and token != self.end for token, piece in enumerate(self.pieces)]

    def encode(self, text: str) -> Any:
        """`ids` and `offsets` of a text, without special tokens added."""
        return self._backend.encode(text, add_special_tokens=False)


def _within(token: int | None, size: int) -> int | None:
    return token if token is not None and 0 <= token < size else None


def _alphabet(backend: Any) -> Callable[[str], bytes | None]:
    """A function from a token's spelling in the vocabulary to its bytes; None for a token in another alphabet."""
    kinds = _kinds(backend.decoder) | _kinds(backend.pre_tokenizer)
    if "ByteLevel" in kinds:
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return lambda text: bytes(letters[c] for c in text) if all(c in letters for c in text) else None
    if "WordPiece" in kinds:
        return lambda text: (text[2:] if text.startswith("##") else " " + text).encode()
    return lambda text: bytes([int(text[3:5], 16)]) if _BYTE.fullmatch(text) else text.replace("▁", " ").encode()


def bytes_of_names(tokenizer: Any) -> Callable[[str], bytes | None] | None:
    """A function from tokens' spelling in the vocabulary to their bytes; None for a slow tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else _alphabet(backend)


def _kinds(part: Any) -> set[str]:
    """Types of a tokenizer's component and all its parts."""
    kinds: set[str] = set()
    remaining = [] if part is None else [json.loads(part.__getstate__())]
    while remaining:
        at = remaining.pop()
        kinds.add(at.get("type", ""))
        remaining += [*at.get("decoders", ()), *at.get("pretokenizers", ())]
    return kinds


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


# ── shared tokens ─────────────────────────────────────────────────────────────────────────────────────────────────────


class SharedVocabulary:
    """Tokens that two vocabularies share, one to one."""

    def __init__(self, drafter: Vocabulary, target: Vocabulary, device: torch.device | str = "cpu"):
        shared = _shared_ids(drafter, target)
        self.count = len(shared)
        self.vocabulary = target.size
        pairs = torch.tensor(shared, dtype=torch.int64, device=device).view(-1, 2)
        self.drafter_ids, self.target_ids = pairs.T.contiguous()
        """[K] ids in the drafting model, and in the target."""
        self.by_target = {other: one for one, other in shared}
        self._drafter_ids = torch.zeros(target.size, dtype=torch.int64, device=device)
        self._drafter_ids[self.target_ids] = self.drafter_ids

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [..., U] over the target's vocabulary, [..., V]: -inf for tokens that are not shared.

        Its softmax is the drafting model's distribution given that the token is shared.
        """
        out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf)
        out[..., self.target_ids] = logits[..., self.drafter_ids]
        return out

    def of(self, tokens: Sequence[int]) -> list[int] | None:
        """The drafting model's ids of these target tokens; None if one is not shared."""
        ids = [self.by_target[token] for token in tokens if token in self.by_target]
        return ids if len(ids) == len(tokens) else None

    def to_drafter(self, tokens: Tensor) -> Tensor:
        """The drafting model's ids of these target tokens; 0 for one that is not shared."""
        return self._drafter_ids[tokens]


def _shared_ids(drafter: Vocabulary, target: Vocabulary) -> list[tuple[int, int]]:
    """(drafting model's id, target's id), ascending.  The two end tokens count as shared unless either already is."""
    drafter_pieces, target_pieces = _by_bytes(drafter), _by_bytes(target)
    shared = {target_pieces[piece]: drafter_pieces[piece] for piece in target_pieces.keys() & drafter_pieces.keys()}
    names = target.specials.keys() & drafter.specials.keys()
    shared |= {target.specials[name]: drafter.specials[name] for name in names}
    is_free = target.end is not None and target.end not in shared and drafter.end not in shared.values()
    if is_free and drafter.end is not None and target.end is not None:
        shared[target.end] = drafter.end
    return sorted((one, other) for other, one in shared.items())


def _by_bytes(vocabulary: Vocabulary) -> dict[bytes, int]:
    """Each piece's id; if there are several, the one that `encode` returns, otherwise the first."""
    ids: dict[bytes, int] = {}
    for token, piece in enumerate(vocabulary.pieces):
        if piece and (piece not in ids or token in vocabulary.encode(piece.decode(errors="replace")).ids):
            ids[piece] = token
    return ids


# ── one text in two vocabularies ──────────────────────────────────────────────────────────────────────────────────────


class Transcript:
    """A growing text, received in one vocabulary's tokens and translated into another's.

    New text is encoded together with a few tokens before it, and joined where a token begins in both encodings.  Tokens
    that end inside a character are held back until it is complete.
    """

    def __init__(self, source: Vocabulary, reader: Vocabulary):
        self._source, self._reader = source, reader
        shared = source.specials.keys() & reader.specials.keys()
        self._specials = {source.specials[text]: text.encode() for text in shared}
        self.taken = 0
        """Tokens of the source read so far."""
        self.text = ""
        self.ids: list[int] = []
        """The reader's ids of `text`, without its beginning tokens."""
        self._spans: list[tuple[int, int]] = []
        """Start and end of each of them in `text`; partial characters count as whole."""
        self.incomplete: list[int] = []
        """The source's tokens after `text`, the last of which ends inside a character."""
        self._decoder = _decoder()
        self._unfinished = ""

    def copied(self) -> Transcript:
        """An independent copy."""
        there = copy.copy(self)
        there.ids, there._spans, there.incomplete = list(self.ids), list(self._spans), list(self.incomplete)
        there._decoder = _decoder()
        there._decoder.setstate(self._decoder.getstate())
        return there

    @property
    def incomplete_bytes(self) -> bytes:
        """Bytes of the incomplete tokens."""
        return b"".join(map(self._bytes_of, self.incomplete))

    def push(self, tokens: Sequence[int]) -> None:
        """Add the source's next tokens."""
        self.taken += len(tokens)
        new = ""
        for token in tokens:
            piece = self._bytes_of(token)
            self._unfinished += self._decoder.decode(piece)
            pending = self._decoder.getstate()[0]
            self.incomplete.append(token)
            if pending in (b"", piece):  # everything before this token is complete, or invalid
                new, self._unfinished, self.incomplete = new + self._unfinished, "", [token] if pending else []
        if new:
            self._extend(new)

    def continued(self, ids: Sequence[int]) -> list[int]:
        """The source's tokens for the text of these reader ids after `text`; end tokens are translated too."""
        before_end = list(itertools.takewhile(lambda token: token != self._reader.end, ids))
        added = b"".join(self._reader.pieces[token] or b"" for token in before_end)
        tokens = continuation(self._source, self.text, self.incomplete_bytes, added)
        is_over = len(before_end) < len(ids)
        if is_over and self._source.end is not None and (tokens or added == self.incomplete_bytes):
            tokens.append(self._source.end)
        return tokens

    def _bytes_of(self, token: int) -> bytes:
        """A special token has the bytes of its name if the reader has one with the same name, otherwise none."""
        piece = self._source.pieces[token]
        return self._specials.get(token, b"") if piece is None else piece

    def _extend(self, text: str) -> None:
        self.text += text
        for count in (ENCODED_AGAIN, 8 * ENCODED_AGAIN, len(self.ids)):
            first = max(0, len(self.ids) - count)
            begin = self._spans[first][0] if first else 0
            encoding = self._reader.encode(self.text[begin:])
            spans = [(begin + start, begin + end) for start, end in encoding.offsets]
            seam = _seam(self._spans, first, spans)
            if seam is not None:
                old, new = seam
                self.ids[old:], self._spans[old:] = encoding.ids[new:], spans[new:]
                return


def _decoder() -> codecs.IncrementalDecoder:
    return codecs.getincrementaldecoder("utf-8")("replace")


Spans = Sequence[tuple[int, int]]


def _seam(old: Spans, first: int, new: Spans) -> tuple[int, int] | None:
    """The indices in both encodings of the first token from `first` on that begins at the same offset in both.

    The new encoding's first token does not count, since it is split as at the start of a text; nor does a token that
    begins inside a character.
    """
    if first == 0:
        return 0, 0
    starts = {old[n][0]: n for n in range(first + 1, len(old)) if old[n - 1][1] <= old[n][0]}
    begins = ((new[k][0], k) for k in range(1, len(new)) if new[k - 1][1] <= new[k][0])
    return next(((starts[start], k) for start, k in begins if start in starts), None)


def continuation(target: Vocabulary, before: str, prefix: bytes, added: bytes) -> list[int]:
    """The target's ids of the bytes `added` after the text `before`, without their first bytes `prefix`.

    Empty if they don't begin with `prefix`, or if the target's encoding has no token that begins there or does not
    reproduce the bytes.  A partial character at the end is left out.
    """
    text = _readable(added)
    expected = text.encode()[len(prefix) :]
    if not expected or not added.startswith(prefix):
        return []
    for context in dict.fromkeys((before[-TAIL:], "\n", "")):
        ids = target.encode(context + text).ids
        ending = _ending(target, ids, expected)
        if ending:
            return ending
    return []


def _ending(target: Vocabulary, ids: list[int], expected: bytes) -> list[int]:
    """As many trailing ids as have exactly the expected bytes; empty if there are none."""
    for n in range(len(ids) - 1, -1, -1):
        piece = target.pieces[ids[n]] if ids[n] < target.size else None
        if piece is None or not expected.endswith(piece):
            return []
        expected = expected[: len(expected) - len(piece)]
        if not expected:
            return ids[n:]
    return []


def _readable(data: bytes) -> str:
    """The text up to the first invalid byte or incomplete character."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()


class VocabularyOverlap(NamedTuple):
    """How much two vocabularies share."""

    tokens: int
    """Number of shared tokens."""
    share: float
    """Fraction of the target's vocabulary."""
    mass: float
    """Fraction of the target's probability, on average over the positions of a sample text."""

    def __str__(self) -> str:
        held = f"they hold {self.mass:.1%} of its probability"
        return f"{self.tokens} shared tokens, {self.share:.0%} of the target's; {held}"


def overlap(shared: SharedVocabulary, p: Tensor) -> VocabularyOverlap:
    """p [..., V]: the target's distributions at the positions of a text."""
    return VocabularyOverlap(
        shared.count, shared.count / shared.vocabulary, float(p[..., shared.target_ids].sum(-1).mean())
    )


SAMPLE = """The committee met on Tuesday and agreed, after a short talk, that the road should be repaired before winter.
def mean(values):
    return sum(values) / len(values)  # fails for an empty list
In 2024 about 3,150 people lived there; by 1911 it had been twice as many.
Die Straße führt über den Fluss. La forêt était déjà loin. El niño llegó mañana.
{"name": "Ann", "items": [1, 2.5, null], "done": true}
"""
"""Prose, code, numbers and other languages: the text on which the probability of shared tokens is measured."""


@torch.inference_mode()
def sample_distributions(vocabulary: Vocabulary, target: Target) -> Tensor:
    """The target's distributions [1, S, V] at the positions of the sample text, at temperature 1."""
    ids = [token for token in vocabulary.encode(SAMPLE).ids if token < vocabulary.size]
    tokens = torch.tensor(
        [[*vocabulary.begin, *ids][: target.spec.context] or [vocabulary.filler]], device=target.device
    )
    hidden, _ = target.read(tokens, ())
    return target.head(hidden).float().softmax(-1)
