"""Members of an ensemble: those with the first member's vocabulary, and those with another tokenizer.

The text is in the first member's tokens.  A member with another tokenizer reads it in its own tokens, and its
distribution is mapped to the first member's vocabulary: a token that spells the same bytes in both keeps its
probability; the rest of the probability is distributed as in the first member.

Not every position can be ensembled.  If the text continued with the first member's likeliest token and this member
would then split the end of the text differently, the position is inside one of its tokens, and its prediction there
would be meaningless.  So it has no opinion there, nor inside a character, nor beyond its context.  This depends only on
the tokens before the position, never on those drafted after it, so speculation is exact.

B slots of a pass, R rows of each (anchor and drafted nodes), V the first member's vocabulary, U this member's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.decoding.draft import Draft, padded, to_device
from outrider.errors import DrafterError, TargetError
from outrider.sampling.distribution import wide
from outrider.sampling.text import common_prefix
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.vocabulary import SharedVocabulary, Transcript, Vocabulary

FEW = 16
"""Most unread tokens of a text that are read in the pass itself; more are read before it."""


class Opinion(NamedTuple):
    """A member's distributions for the rows of a pass, in the first member's vocabulary."""

    log_p: Tensor
    """[B, R, V]; -inf for rows without an opinion."""
    rest: Tensor | None = None
    """[B, R], the probability left to the first member, 1 for rows without an opinion; None for 0 everywhere."""

    def at(self, rows: Tensor) -> Opinion:
        """For the K rows of a mask [B, R]."""
        return Opinion(self.log_p[rows], None if self.rest is None else self.rest[rows])


class SharedMember:
    """A member with the first one's vocabulary, which reads the same ids."""

    def __init__(self, target: TransformersTarget, vocabulary: int):
        self.target, self.vocabulary = target, vocabulary

    def allocate(self, slots: int, length: int) -> Any:
        return self.target.allocate(slots, length)

    def prefill(
        self, cache: Any, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], likeliest: Tensor
    ) -> Opinion:
        return self._opinion(self.target.prefill(cache, rows, self._known(tokens), lengths).logits)

    def verify(self, cache: Any, rows: Sequence[int], anchor: Tensor, draft: Draft, likeliest: Tensor) -> Opinion:
        return self._opinion(self.target.verify(cache, rows, self._known(anchor), draft).logits)

    def _known(self, tokens: Tensor) -> Tensor:
        """These ids, 0 for spare rows of the first member's embedding that this member's lacks."""
        rows = self.target.spec.vocabulary
        return tokens if rows >= self.vocabulary else tokens.where(tokens < rows, 0)

    def _opinion(self, logits: Tensor) -> Opinion:
        """Spare rows of either embedding are not tokens: they are dropped, or get no probability."""
        more = self.vocabulary - logits.shape[-1]
        logits = nn.functional.pad(logits, (0, more), value=-torch.inf) if more > 0 else logits[..., : self.vocabulary]
        return Opinion(wide(logits).log_softmax(-1))


class PrefixTree:
    """Texts that begin with one token, the root, as a tree: what a pass over all of them reads."""

    def __init__(self, base: int, texts: Sequence[Sequence[int]]):
        """base: how many tokens come before the texts."""
        self.base, self.root = base, texts[0][0]
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self.ends = [self._add(text[1:]) for text in texts]
        """The node that each text ends at, -1 for the root."""

    def path(self, text: Sequence[int]) -> list[int]:
        """The nodes that read this text, which comes after the root, as far as there are any."""
        path: list[int] = []
        for token in text:
            node = self._nodes.get((path[-1] if path else -1, token))
            if node is None:
                break
            path.append(node)
        return path

    def _add(self, text: Sequence[int]) -> int:
        at = -1
        for token in text:
            if (at, token) not in self._nodes:
                self._nodes[at, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(at)
            at = self._nodes[at, token]
        return at


class AlignedCache:
    """A member's keys and values of every slot, and each slot's text in the member's tokens."""

    def __init__(self, member: AlignedMember, slots: int, length: int):
        self._member, self.slots, self.length = member, slots, length
        # a text may have more tokens in this vocabulary than in the first member's
        self.cache: SlotCache = member.target.allocate(slots, 2 * length)
        self.readings = [member.blank() for _ in range(slots)]
        """What the first member has read, up to the anchor."""
        self.held: list[list[int]] = [[] for _ in range(slots)]
        """Ids in the cache."""
        self._rows: list[int] = []
        self._readings: list[list[Transcript | None]] = []
        """Of the open pass, by slot: the text up to the end of each row; None for a row that no text has."""
        self._tries: dict[int, PrefixTree] = {}
        """By slot that the member's own pass reads, in its order."""

    def open(self, rows: Sequence[int], readings: Sequence[list[Transcript | None]]) -> None:
        self._rows, self._readings, self._tries = list(rows), list(readings), {}

    def opened(self, tries: dict[int, PrefixTree]) -> None:
        """The member's own pass has read these."""
        self._tries = tries

    def begin(self, row: int, text: Sequence[int], most: int) -> int:
        """Drop a slot's cached tokens after the common prefix with `text`, or after `most`; returns how many stay."""
        base = min(common_prefix(self.held[row], text), most)
        self.cache.cut(row, base)
        del self.held[row][base:]
        return base

    def grow(self, length: int) -> None:
        """Allocate room for `length` tokens per slot; everything must be read again."""
        self.cache = self._member.target.allocate(self.slots, length)
        self.held = [[] for _ in range(self.slots)]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """The anchor and the nodes on each slot's path stay; of the member's own tokens those that spell them."""
        for row, row_readings, path in zip(self._rows, self._readings, paths, strict=True):
            reading = row_readings[path[-1] + 1 if path else 0]
            assert reading is not None, "a token outside the vocabulary was accepted"
            self.readings[row] = reading
        if not self._tries:
            return
        read = []
        for row, trie in self._tries.items():
            ids = self._member.ids(self.readings[row])[trie.base :]
            path = trie.path(ids[1:]) if ids[:1] == [trie.root] else []
            self.held[row] += [trie.root, *(trie.tokens[node] for node in path)]
            read.append(path)
        self.cache.keep(read)

    def free(self, rows: Sequence[int]) -> None:
        self.cache.free(rows)
        for row in rows:
            self.readings[row], self.held[row] = self._member.blank(), []

    @property
    def column_bytes(self) -> int:
        """Bytes of one token of a slot of the first member's, for which two columns are allocated."""
        return 2 * self.cache.column_bytes


class AlignedMember:
    """A target whose distributions are mapped to another target's vocabulary.

    Raises TargetError for a tokenizer whose tokens have no known bytes, and for a model that verifies no trees.
    """

    def __init__(self, target: TransformersTarget, writer: TransformersTarget):
        if target.spec.mode != "tree":
            raise TargetError(
                f"{target.spec.name} has another tokenizer than {writer.spec.name}, and its mode is "
                f"{target.spec.mode!r}; such a member must verify trees, so choose one of attention alone"
            )
        try:
            self.own = Vocabulary(target.tokenizer, target.spec.vocabulary, target.spec.name)
            self.theirs = Vocabulary(writer.tokenizer, writer.spec.vocabulary, writer.spec.name)
        except DrafterError as error:
            raise TargetError(f"an ensemble of two vocabularies needs both tokenizers: {error}") from error
        if max(target.tokenizer.get_vocab().values()) >= target.spec.vocabulary:
            raise TargetError(
                f"the tokenizer of {target.spec.name} has token ids up to "
                f"{max(target.tokenizer.get_vocab().values())}, but the model's ids end at "
                f"{target.spec.vocabulary - 1}; use the tokenizer that belongs to the model"
            )
        self.target = target
        self.shared = SharedVocabulary(self.own, self.theirs, target.device)

    def allocate(self, slots: int, length: int) -> AlignedCache:
        return AlignedCache(self, slots, length)

    def blank(self) -> Transcript:
        return Transcript(self.theirs, self.own)

    @functools.cached_property
    def beginnings(self) -> Tensor:
        """[V], for each token of the first member's that begins a word and that this member splits, the first member's
        id of the first piece; -1 for every other token."""
        before = self.own.encode("a").ids
        shared = {piece_id: first_id for first_id, piece_id in self.shared.by_target.items()}
        beginnings = torch.full((self.theirs.size,), -1)
        for token, piece in enumerate(self.theirs.pieces):
            if piece and piece[:1] == b" ":
                ids = self.own.encode("a" + piece.decode(errors="replace")).ids
                if ids[: len(before)] == before and len(ids) > len(before) + 1:
                    beginnings[token] = shared.get(ids[len(before)], -1)
        return beginnings.to(self.target.device)

    def ids(self, reading: Transcript) -> list[int]:
        """A text's ids as the member reads it, with the ids that its tokenizer puts before every text."""
        begin = self.own.begin
        return (reading.ids if reading.ids[: len(begin)] == begin else begin + reading.ids) or [self.own.filler]

    def text(self, reading: Transcript | None, likeliest: int) -> list[int] | None:
        """The member's ids of a text; None if the position can't be ensembled.

        likeliest: the first member's choice of the token that follows.
        """
        if reading is None or reading.incomplete:
            return None
        ids, after = self.ids(reading), reading.copied()
        after.push([likeliest])
        is_split = after.ids[: len(reading.ids)] != reading.ids
        return None if is_split or len(ids) > self.target.spec.context else ids

    def prefill(
        self, cache: AlignedCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], likeliest: Tensor
    ) -> Opinion | None:
        """Read a chunk [B, S] of prompts, right-padded; what it says after the last token, R = 1.  likeliest [B, 1]."""
        for row, piece, length in zip(rows, tokens.tolist(), lengths, strict=True):
            for token in piece[:length]:  # one by one, as in steps, so that a text is split in one way
                cache.readings[row].push([token])
        opinion = self._opinion(cache, rows, [[cache.readings[row]] for row in rows], likeliest)
        cache.keep([[]] * len(rows))
        return opinion

    def verify(
        self, cache: AlignedCache, rows: Sequence[int], anchor: Tensor, draft: Draft, likeliest: Tensor
    ) -> Opinion | None:
        """Its opinion after anchor and nodes; None if it has none.  likeliest [B, R]."""
        texts = zip(rows, anchor.tolist(), draft.ids, draft.tree, draft.live, strict=True)
        readings = [self._rows_of(cache.readings[row], last, ids, tree, live) for row, last, ids, tree, live in texts]
        return self._opinion(cache, rows, readings, likeliest)

    def _rows_of(
        self, before: Transcript, anchor: int, ids: Sequence[int], tree: Sequence[int], live: int
    ) -> list[Transcript | None]:
        """The text of a slot up to the end of each row."""
        readings = [self._pushed(before, anchor)]
        for node, token in enumerate(ids):
            readings.append(self._pushed(readings[tree[node] + 1], token) if node < live else None)
        return readings

    def _pushed(self, reading: Transcript | None, token: int) -> Transcript | None:
        if reading is None or not 0 <= token < self.theirs.size:
            return None
        after = reading.copied()
        after.push([token])
        return after

    def _opinion(
        self, cache: AlignedCache, rows: Sequence[int], readings: Sequence[list[Transcript | None]], likeliest: Tensor
    ) -> Opinion | None:
        cache.open(rows, readings)
        both = zip(readings, likeliest.tolist(), strict=True)
        texts = [[self.text(*pair) for pair in zip(slot_texts, best, strict=True)] for slot_texts, best in both]
        slots = [b for b, slot_texts in enumerate(texts) if any(ids is not None for ids in slot_texts)]
        if not slots:
            return None
        spoken = [[ids for ids in texts[b] if ids is not None] for b in slots]
        logits = self._read(cache, [rows[b] for b in slots], spoken)
        at = [(b, n) for b in slots for n, ids in enumerate(texts[b]) if ids is not None]
        return self._carried(logits, at, likeliest)

    def _read(self, cache: AlignedCache, rows: Sequence[int], texts_by_slot: Sequence[Sequence[list[int]]]) -> Tensor:
        """Logits [K, U] after these texts of each slot, slot by slot, in one pass over what they do not share."""
        common = [min(common_prefix(texts[0], other) for other in texts) for texts in texts_by_slot]
        sizes = (
            max(map(len, texts)) + sum(len(ids) - n for ids in texts)
            for texts, n in zip(texts_by_slot, common, strict=True)
        )
        if (most := max(sizes)) > cache.cache.length:
            cache.grow(2 * most)
        tries, logits = dict[int, PrefixTree](), dict[int, Tensor]()
        for row, texts, n in zip(rows, texts_by_slot, common, strict=True):
            if n:
                tries[row] = self._trie(cache, row, texts, n)
            else:  # not even the first token is the same: no tree has them
                logits[row] = self._whole(texts)
        if tries:
            scores = self._pass(cache, tries)
            cache.opened(tries)
            for slot_logits, (row, trie) in zip(scores, tries.items(), strict=True):
                logits[row] = slot_logits[to_device([end + 1 for end in trie.ends], slot_logits.device)]
        return torch.cat([logits[row] for row in rows])

    def _trie(self, cache: AlignedCache, row: int, texts: Sequence[list[int]], common: int) -> PrefixTree:
        base, text = cache.begin(row, texts[0], common - 1), texts[0]
        if common - 1 - base > FEW:
            piece = text[base : common - 1]
            self.target.prefill(cache.cache, [row], to_device([piece], self.target.device), [len(piece)])
            cache.held[row] += piece
            base = common - 1
        return PrefixTree(base, [ids[base:] for ids in texts])

    def _pass(self, cache: AlignedCache, tries: dict[int, PrefixTree]) -> Tensor:
        """Logits [B', n, U] after the root and the nodes of each trie."""
        device, trees = self.target.device, list(tries.values())
        tokens, sizes = padded([t.tokens for t in trees], 0, device), torch.tensor([len(t.tokens) for t in trees])
        if all(t.parents == list(range(-1, len(t.tokens) - 1)) for t in trees):
            draft = Draft.chain(tokens, sizes)
        else:
            draft = Draft(tokens, padded([t.parents for t in trees], -1, device), sizes)
        roots = to_device([trie.root for trie in trees], device)
        return self.target.verify(cache.cache, list(tries), roots, draft).logits

    def _whole(self, texts: Sequence[list[int]]) -> Tensor:
        """Logits [K, U] after whole texts, without a cache."""
        hidden, _ = self.target.read(padded(texts, 0, self.target.device))
        last = to_device([len(ids) - 1 for ids in texts], self.target.device)
        return self.target.head(hidden[torch.arange(len(texts), device=hidden.device), last])

    def _carried(self, logits: Tensor, at: Sequence[tuple[int, int]], likeliest: Tensor) -> Opinion:
        """Logits [K, U] of rows `at` as an opinion in the first member's vocabulary."""
        member_log_p = wide(logits).log_softmax(-1)
        b, n = to_device(at, member_log_p.device).T
        log_p = member_log_p.new_full((*likeliest.shape, self.theirs.size), -torch.inf)
        log_p[b, n] = self.shared.spread(member_log_p)
        rest = member_log_p.new_ones(likeliest.shape)
        rest[b, n] = member_log_p.index_fill(-1, self.shared.drafter_ids, -torch.inf).logsumexp(-1).exp()
        return Opinion(log_p, rest)
