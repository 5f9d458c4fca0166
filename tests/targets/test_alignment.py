"""Members of other tokenizers: which positions are ensembled, and that speculation changes nothing."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model
from contracts.parties import OnAndOff
from drafters.test_cross_vocabulary import LINES, byte_fallback, byte_level, letters_alone, loaded, texts, unigram

from outrider import drafters, load_drafter
from outrider.decoding.draft import Draft
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.targets.alignment import AlignedCache, AlignedMember
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


def drafter_for(kind: str, target: EnsembleTarget):
    if kind == "small_model":
        module = drafters.find(kind)
        return module.SmallModel(target.members[0], module.Config())
    return load_drafter(kind, target)


@pytest.mark.parametrize("kind", ["suffix", "small_model"])
def test_greedy_text_with_drafts_is_plain_ensembling(kind, ensemble):
    """Catches a position whose share depends on what was drafted after it."""
    prompts, before = texts(ensemble), ensemble.shares.positions
    wanted = [result.tokens for result in generate(ensemble, prompts, max_new_tokens=30)]
    assert ensemble.shares.positions - before == sum(map(len, wanted))
    drafter = drafter_for(kind, ensemble)
    for policy in (None, OnAndOff(4)):
        results = generate(ensemble, prompts, drafter, max_new_tokens=30, slots=3, policy=policy)
        assert [each.tokens for each in results] == wanted
    if kind == "small_model":
        assert sum(sum(each.accepted) for each in results) > 20
    assert 0.05 < ensemble.shares.ensembled / ensemble.shares.positions < 1


def rows_alone(target: EnsembleTarget, text: list[int]) -> torch.Tensor:
    """Log p after a text by plain decoding: the first token as the prompt, and then steps of one token."""
    cache, logits = target.allocate(1, len(text) + 4), None
    if len(text) > 1:
        target.prefill(cache, [0], torch.tensor([text[:1]]), [1])
    for token in text[1:] or text:
        logits = target.verify(cache, [0], torch.tensor([token]), Draft.empty(1)).logits[0, 0]
        cache.keep([[]])
    return logits


def test_every_row_is_what_plain_decoding_finds_after_its_text(ensemble):
    """Catches caches that do not go back to the common prefix: every tree's rows against texts read token by token."""
    target, generator, texts_of = ensemble, random.Random(3), dict[int, list[int]]()
    size, cache = target.spec.vocabulary, target.allocate(3, 60)
    encoded = [target.encode(line) for line in LINES]
    for turn in range(24):
        for row in range(3):
            if row in texts_of and (len(texts_of[row]) > 40 or generator.random() < 0.05):
                cache.free([row])
                del texts_of[row]
            if row not in texts_of:
                line = generator.choice(encoded)
                texts_of[row] = line[: generator.randrange(1, 14)]
                target.prefill(cache, [row], torch.tensor([texts_of[row]]), [len(texts_of[row])])
        rows = generator.sample(range(3), 3)
        token = lambda: generator.choice([*generator.choice(encoded), generator.randrange(size)])
        tokens = [[token() for _ in range(5)] for _ in rows]
        parents = [[generator.randrange(-1, n) for n in range(5)] for _ in rows]
        anchor = [token() for _ in rows]
        draft = Draft(torch.tensor(tokens), torch.tensor(parents), torch.tensor([5, 3, 5]))
        logits, accepted = target.verify(cache, rows, torch.tensor(anchor), draft).logits, []
        for b, row in enumerate(rows):
            ends, paths = [[*texts_of[row], anchor[b]]], [[]]
            for n in range(draft.live[b]):
                ends.append([*ends[parents[b][n] + 1], tokens[b][n]])
                paths.append([*paths[parents[b][n] + 1], n])
            last = generator.randrange(len(ends))
            for node in {last, generator.randrange(len(ends))} if turn % 4 == 0 else ():
                assert torch.allclose(logits[b, node].exp(), rows_alone(target, ends[node]).exp(), atol=1e-9)
            texts_of[row] = ends[last]
            accepted.append(paths[last])
        cache.keep(accepted)


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
    """Catches ids of one side taken for the other's, mass that is lost or divided again, and a wrong boundary."""
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


def test_a_boundary_inside_a_members_token_is_not_ensembled(ensemble, tmp_path):
    """The table of boundaries: catches one judged by the text alone, which always ends at a boundary."""
    words = ["the river is over", "the road is over", "a  b", "the river", "the road", "over; the"] * 3
    reader = loaded(tmp_path / "reader", byte_level(340, words))
    letters = loaded(tmp_path / "letters", byte_level(257, ["ab"]), seed=1)
    member = AlignedMember(reader, letters)
    for text, added, is_boundary in SPLITS:
        reading = member.blank()
        for token in letters.encode(text):
            reading.push([token])
        # one token of the writer's that spells all of `added`
        member.theirs.pieces[0] = added.encode()
        assert (member.text(reading, 0) is not None) == is_boundary, (text, added)
        assert member.ids(reading) == reader.encode(text)
    member = ensemble._others[0][0]
    reading = member.blank()
    reading.push([member.theirs.pieces.index("é".encode()[:1])])
    assert member.text(reading, 5) is None


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


def test_what_can_not_be_aligned_is_refused(writer, tmp_path):
    """Catches a member that can't say which bytes a token has, or can't go back along a tree."""
    reader = loaded(tmp_path, unigram(110, LINES), seed=1)
    reader.spec = replace(reader.spec, mode="chain")
    with pytest.raises(TargetError, match="such a member must verify trees"):
        EnsembleTarget([writer, reader])
    bare = load_target(tiny_model(vocab_size=writer.spec.vocabulary))
    with pytest.raises(TargetError, match="needs both tokenizers"):
        EnsembleTarget([writer, bare])
