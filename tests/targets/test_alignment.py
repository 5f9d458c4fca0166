"""Members of other tokenizers: which positions are ensembled, what is carried over, and that speculation changes
nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from conftest import first, tiny_model
from contracts.parties import OnAndOff
from drafters.test_cross_vocabulary import LINES, byte_fallback, byte_level, letters_alone, loaded, texts, unigram
from hypothesis import given
from hypothesis import strategies as st

from outrider import drafters, load_drafter
from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.errors import TargetError
from outrider.generation import generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.alignment import AlignedCache, AlignedMember, Trie
from outrider.targets.ensemble import EnsembleTarget
from outrider.targets.load import load_target
from outrider.targets.transformers import TransformersTarget

ASCII = [
    "the road over the river is long, and the river is wide", "def mean(values): return sum(values)",
    "a road and a river and the long road", "two  spaces (and) one; the end is over",
]  # fmt: skip
WEIGHTS = (0.5, 0.3, 0.2)


@pytest.fixture(scope="module")
def writer(tmp_path_factory) -> TransformersTarget:
    """Byte-level BPE over all bytes; its text may end inside a character."""
    return loaded(tmp_path_factory.mktemp("writer"), byte_level(320, LINES))


@pytest.fixture(scope="module")
def readers(tmp_path_factory) -> list[TransformersTarget]:
    """A unigram model that puts nothing before a text, and one of bytes and merges that begins with `<s>`."""
    made = unigram(110, LINES), byte_fallback(450, LINES)
    return [
        loaded(tmp_path_factory.mktemp("reader"), own, seed=n + 1, num_hidden_layers=2) for n, own in enumerate(made)
    ]


@pytest.fixture(scope="module")
def ensemble(writer, readers) -> EnsembleTarget:
    return EnsembleTarget([writer, *readers], WEIGHTS)


@pytest.fixture(scope="module")
def plain_pair(tmp_path_factory) -> EnsembleTarget:
    """Two tokenizers of ASCII letters alone, so that any ids are a text."""
    one = loaded(tmp_path_factory.mktemp("one"), byte_level(70, ASCII, alphabet=False))
    two = loaded(tmp_path_factory.mktemp("two"), byte_level(48, ASCII[:3], alphabet=False), seed=2, num_hidden_layers=2)
    return EnsembleTarget([one, two], (0.6, 0.4))


# ── exact ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

KINDS = ["ngram", "suffix", "recycle", "small_model"]


def drafter_for(kind: str, target: EnsembleTarget):
    if kind == "small_model":
        module = drafters.find(kind)
        return module.SmallModel(target.members[0], module.Config())
    return load_drafter(kind, target)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", first(["ensemble", "plain_pair"]))
def test_greedy_text_with_drafts_is_plain_ensembling(kind, pair, request):
    """Catches a position whose share depends on what was drafted after it, a cache that keeps a rejected draft's
    tokens, and slots that are used again with another's text in them."""
    target = request.getfixturevalue(pair)
    prompts = (
        texts(target) if pair == "ensemble" else [target.encode(line)[: 3 + n] for n, line in enumerate(ASCII * 2)]
    )
    before = target.shares.positions
    wanted = [found.tokens for found in generate(target, prompts, max_new_tokens=30)]
    assert target.shares.positions - before == sum(map(len, wanted))
    drafter = drafter_for(kind, target)
    for policy in (None, OnAndOff(4)):
        found = generate(target, prompts, drafter, max_new_tokens=30, slots=3, policy=policy)
        assert [each.tokens for each in found] == wanted
    if kind == "small_model":
        assert sum(sum(each.accepted) for each in found) > 20
    assert 0.05 < target.shares.ensembled / target.shares.positions < 1


def test_sampled_text_with_drafts_is_plain_ensembling(ensemble):
    """Catches a p that differs above temperature 0: with a seed, drafts change nothing."""
    requests = [Request(prompt, 20, Sampling(0.9, top_p=0.95, seed=n)) for n, prompt in enumerate(texts(ensemble))]
    served = []
    for drafter in (None, drafter_for("small_model", ensemble)):
        found = {n: [] for n in range(len(requests))}
        for progress in serve(ensemble, requests, drafter, slots=3):
            found[progress.request] += progress.tokens
        served.append(found)
    assert served[0] == served[1]


def rows_alone(target: EnsembleTarget, text: list[int]) -> torch.Tensor:
    """Log p after a text by plain decoding: the first token as the prompt, and then steps of one token."""
    cache, logits = target.allocate(1, len(text) + 4), None
    if len(text) > 1:
        target.prefill(cache, [0], torch.tensor([text[:1]]), [1])
    for token in text[1:] or text:
        logits = target.verify(cache, [0], torch.tensor([token]), Draft.empty(1)).logits[0, 0]
        cache.keep([[]])
    return logits


@pytest.mark.parametrize("pair", first(["ensemble", "plain_pair"]))
def test_every_row_is_what_plain_decoding_finds_after_its_text(pair, request):
    """Catches caches that do not go back to the common prefix, over random trees, paths and slots that are freed: 60
    passes, every accepted row and some rejected ones against a text read token by token."""
    target, generator, texts_of = request.getfixturevalue(pair), random.Random(3), dict[int, list[int]]()
    size, cache = target.spec.vocabulary, target.allocate(3, 60)
    encoded = [target.encode(line) for line in (LINES if pair == "ensemble" else ASCII)]
    for turn in range(60):
        for row in range(3):
            if row in texts_of and (len(texts_of[row]) > 40 or generator.random() < 0.05):
                cache.free([row])
                del texts_of[row]
            if row not in texts_of:
                line = generator.choice(encoded)
                texts_of[row] = line[: generator.randrange(1, 14)]
                target.prefill(cache, [row], torch.tensor([texts_of[row]]), [len(texts_of[row])])
        rows = generator.sample(range(3), 3)

        def token() -> int:
            return (
                generator.choice(generator.choice(encoded)) if generator.random() < 0.8 else generator.randrange(size)
            )

        tokens = [[token() for _ in range(5)] for _ in rows]
        parents = [[generator.randrange(-1, n) for n in range(5)] for _ in rows]
        anchor = [token() for _ in rows]
        draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor([5, 3, 5]))
        logits = target.verify(cache, rows, torch.tensor(anchor), draft).logits
        paths = []
        for b, row in enumerate(rows):
            own, path = [[*texts_of[row], anchor[b]]], []
            for n in range(draft.live[b]):
                own.append([*own[parents[b][n] + 1], tokens[b][n]])
            while (below := [n for n in range(draft.live[b]) if parents[b][n] == (path[-1] if path else -1)]) and (
                generator.random() < 0.7
            ):
                path.append(generator.choice(below))
            checked = {path[-1] + 1 if path else 0, generator.randrange(draft.live[b] + 1)} if turn % 4 == 0 else ()
            for n in checked:
                assert torch.allclose(logits[b, n].exp(), rows_alone(target, own[n]).exp(), atol=1e-9)
            texts_of[row] = own[path[-1] + 1 if path else 0]
            paths.append(path)
        cache.keep(paths)


# ── the rule itself ───────────────────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def brute(target: EnsembleTarget, ids: list[int]) -> tuple[torch.Tensor, bool]:
    """p after these ids by the rule as the docs have it, with encodings of the whole text; and whether it is a mean."""
    (first, second), (one, other) = target.members, target.weights
    p = first.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
    writes, reads = target._others[0][0].theirs, target._others[0][0].own
    text = b"".join(writes.pieces[token] or b"" for token in ids).decode()
    following = text + (writes.pieces[int(p.argmax())] or b"").decode()
    own, after = (second.tokenizer.encode(each, add_special_tokens=False) for each in (text, following))
    if not own or after[: len(own)] != own:
        return p, False
    theirs = second.model(torch.tensor([own])).logits[0, -1].softmax(-1)
    carried = torch.zeros_like(p)
    by_piece = {piece: token for token, piece in enumerate(reads.pieces) if piece}
    for token, piece in enumerate(writes.pieces):
        if piece in by_piece:
            carried[token] = theirs[by_piece[piece]]
    carried[writes.end] = theirs[reads.end]
    return one * p + other * (carried + (1 - carried.sum()) * p), True


def test_p_is_the_mean_over_the_common_vocabulary_and_the_first_members_rest(plain_pair):
    """Catches ids of one side taken for the other's, mass that is lost or divided again, and a wrong boundary: against
    encodings of the whole text, passes without a cache, and probabilities in place of logarithms."""
    generator, ensembled = random.Random(5), 0
    encoded = [plain_pair.encode(line) for line in ASCII]
    for _ in range(40):
        ids = generator.choice(encoded)[: generator.randrange(2, 18)]
        wanted, is_mean = brute(plain_pair, ids)
        found = rows_alone(plain_pair, ids).exp()
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-9)
        assert torch.allclose(found, wanted, atol=1e-9)
        ensembled += is_mean
    assert 8 < ensembled < 40


SPLITS = [
    ("the ri", "ver", False), ("the river", " is", True), ("the r", "oad", False), ("the", " road", True),
    ("a  ", "b", False), ("over", ";", True),
]  # fmt: skip
"""A text, what the first member would add, and whether the boundary between them is one of the reader's."""


@pytest.mark.parametrize(("text", "added", "wanted"), SPLITS, ids=[f"{one}|{two}" for one, two, _ in SPLITS])
def test_a_boundary_inside_a_members_token_is_not_ensembled(text, added, wanted, tmp_path):
    """The table of boundaries: catches one judged by the text alone, which always ends at a boundary."""
    words = ["the river is over", "the road is over", "a  b", "the river", "the road", "over; the"] * 3
    tokenizer = byte_level(340, words)
    reader = loaded(tmp_path / "reader", tokenizer)
    letters = loaded(tmp_path / "letters", byte_level(257, ["ab"]), seed=1)
    member = AlignedMember(reader, letters)
    reading = member.blank()
    for token in letters.encode(text):
        reading.push([token])
    # one token of the writer's that spells all of `added`
    member.theirs.pieces[0] = added.encode()
    assert (member.text(reading, 0) is not None) == wanted
    ids = member.ids(reading)
    assert ids == reader.encode(text)


def test_the_inside_of_a_character_is_not_ensembled(ensemble):
    """Catches half a character read as a question mark."""
    member = ensemble._others[0][0]
    for reading, token in ((member.blank(), 5),):
        for byte in "é".encode()[:1]:
            reading.push([member.theirs.pieces.index(bytes([byte]))])
        assert member.text(reading, token) is None


def test_a_text_beyond_a_members_context_is_left_to_the_others(writer, tmp_path):
    """Catches positions beyond the last one, and a rule that depends on how much was drafted."""
    short = loaded(tmp_path, unigram(110, LINES), seed=1, max_position_embeddings=24)
    target = EnsembleTarget([writer, short])
    assert target.spec.context == writer.spec.context
    prompts = [target.encode(line)[:8] for line in LINES[:4]]
    wanted = [found.tokens for found in generate(target, prompts, max_new_tokens=60)]
    early = target.shares.ensembled
    assert 0 < early < 0.6 * target.shares.positions
    found = generate(target, prompts, drafter_for("small_model", target), max_new_tokens=60, slots=2)
    assert [each.tokens for each in found] == wanted
    assert target.shares.ensembled == 2 * early


def test_a_cache_grows_where_a_member_needs_more_tokens(tmp_path, monkeypatch):
    """Catches a text that has many more tokens for one member than for the first, and runs over its cache."""
    one = loaded(tmp_path / "one", byte_level(290, ["abcdabcdabcdabcd 12341234 abcdabcd"] * 4))
    two = loaded(tmp_path / "two", letters_alone(list(range(64))), seed=1)
    target, grown = EnsembleTarget([one, two], (0.5, 0.5)), []
    plain_grow = AlignedCache.grow
    monkeypatch.setattr(AlignedCache, "grow", lambda self, length: (grown.append(length), plain_grow(self, length))[1])
    prompt = one.encode("abcdabcdabcdabcd" * 6)
    assert len(two.encode("abcdabcdabcdabcd" * 6)) > 5 * len(prompt)
    found = [generate(target, prompt, own, max_new_tokens=8)[0].tokens for own in (None, drafter_for("ngram", target))]
    assert found[0] == found[1] and grown


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6))
def test_a_trie_has_every_text_once(texts_after):
    """Catches two texts that share nodes which differ, and parents after their children."""
    own = [[9, *text] for text in texts_after]
    trie = Trie(0, own)
    spelt = {-1: [9]}
    for node, (token, parent) in enumerate(zip(trie.tokens, trie.parents, strict=True)):
        assert parent < node
        spelt[node] = [*spelt[parent], token]
    assert [spelt[end] for end in trie.ends] == own
    assert len({tuple(text) for text in spelt.values()}) == len(spelt) == 1 + len(trie.tokens)
    for text, end in zip(own, trie.ends, strict=True):
        assert (trie.path(text[1:]) or [-1])[-1] == end
        assert trie.path([*text[1:], 7]) == trie.path(text[1:])


def test_what_can_not_be_aligned_is_refused(writer, tmp_path):
    """Catches a member that can't say which bytes a token has, or can't go back along a tree."""
    reader = loaded(tmp_path, unigram(110, LINES), seed=1)
    reader.spec = replace(reader.spec, mode="chain")
    with pytest.raises(TargetError, match="such a member must verify trees"):
        EnsembleTarget([writer, reader])
    bare = load_target(tiny_model(vocab_size=writer.spec.vocabulary))
    with pytest.raises(TargetError, match="needs both tokenizers"):
        EnsembleTarget([writer, bare])
