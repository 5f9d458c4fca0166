"""Members of other tokenizers: which positions are ensembled, and that speculation changes nothing."""

import random
from dataclasses import replace

import pytest
import torch
from conftest import tiny_model
from contracts.parties import OnAndOff, Oracle
from drafters.test_cross_vocabulary import LINES, byte_fallback, byte_level, letters_alone, loaded, texts, unigram

from outrider import drafters
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.errors import TargetError
from outrider.generation import generate
from outrider.lab.alignment import AlignedCache, Opinion
from outrider.lab.targets.ensemble import EnsembleTarget
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

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


def small_model(target: EnsembleTarget) -> Drafter:
    """The first member drafts."""
    module = drafters.find("small_model")
    return module.SmallModel(target.members[0], module.Config())


def test_greedy_text_with_drafts_is_plain_ensembling(ensemble):
    """Catches a position whose share depends on what was drafted after it, and caches that do not go back to the common
    prefix: chains that are cut anywhere, and trees of a right and a wrong branch."""
    prompts, before = texts(ensemble), ensemble.shares.positions
    wanted = [result.tokens for result in generate(ensemble, prompts, max_new_tokens=16)]
    assert ensemble.shares.positions - before == sum(map(len, wanted))
    whole = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    for drafter in (small_model(ensemble), Oracle(whole, ensemble.spec.vocabulary)):
        results = generate(ensemble, prompts, drafter, max_new_tokens=16, slots=3, policy=OnAndOff(4))
        assert [each.tokens for each in results] == wanted
        assert sum(sum(each.accepted) for each in results) > 5
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
    for _ in range(15):
        ids = generator.choice(encoded)[: generator.randrange(2, 18)]
        wanted, is_mean = brute(plain_pair, ids)
        found = rows_alone(plain_pair, ids).exp()
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-9)
        assert torch.allclose(found, wanted, atol=1e-9)
        ensembled += is_mean
    assert 3 < ensembled < 15


def test_members_that_agree_where_both_have_a_token_decide_alone(plain_pair):
    """Catches a mean where a member is inside a token, and a dispute that is missed: greedy text with drafts is that of
    averaging every position of a pair."""
    pair = EnsembleTarget(plain_pair.members, (0.6, 0.4), "disputed")
    prompts = [plain_pair.encode(line)[:6] for line in ASCII]
    wanted = [each.tokens for each in generate(plain_pair, prompts, max_new_tokens=24)]
    for drafter in (None, small_model(pair)):
        assert [each.tokens for each in generate(pair, prompts, drafter, max_new_tokens=24)] == wanted
    assert 0 < pair.shares.ensembled < pair.shares.positions


def test_sharpening_moves_a_piece_to_the_token_that_it_begins(plain_pair):
    """Catches mass that is lost or made, moved where the mean is not flat, or from a piece of another token."""
    pair = EnsembleTarget(plain_pair.members, (0.6, 0.4), sharpen=True)
    (member, weight), pieces = pair._others[0], plain_pair._others[0][0].theirs.pieces
    split = [token for token, first in enumerate(member.beginnings.tolist()) if first >= 0]
    assert split
    for token in split:
        spelled = member.own.encode("a" + pieces[token].decode()).tokens[1:]
        begun = pieces[int(member.beginnings[token])].decode()
        assert len(spelled) > 1 and spelled[0].replace("Ġ", " ") == begun and pieces[token].decode().startswith(begun)
    token, begun = split[0], int(member.beginnings[split[0]])
    for chance, is_flat in ((0.3, True), (0.8, False)):
        p = torch.full((1, len(pieces)), (1 - chance) / (len(pieces) - 1), dtype=torch.float64)
        p[0, begun] = chance
        opinion = Opinion(p.log())
        found = pair.average.sharpened(p.log(), torch.tensor([token]), [opinion]).exp()
        assert float(found.sum()) == pytest.approx(1.0, abs=1e-12)
        moved = weight * chance * is_flat
        assert float(found[0, token] - p[0, token]) == pytest.approx(moved, abs=1e-12)
        assert float(p[0, begun] - found[0, begun]) == pytest.approx(moved, abs=1e-12)
    prompt = plain_pair.encode(ASCII[0])[:6]
    (drafted,) = generate(pair, prompt, small_model(pair), max_new_tokens=24)
    (alone,) = generate(pair, prompt, max_new_tokens=24)
    assert drafted.tokens == alone.tokens


def test_a_text_beyond_a_members_context_is_left_to_the_others(writer, tmp_path):
    """Catches positions beyond the last one, and a rule that depends on how much was drafted."""
    short = loaded(tmp_path, unigram(110, LINES), seed=1, max_position_embeddings=24)
    target = EnsembleTarget([writer, short])
    assert target.spec.context == writer.spec.context
    prompts = [target.encode(line)[:8] for line in LINES[:4]]
    wanted = [found.tokens for found in generate(target, prompts, max_new_tokens=40)]
    early = target.shares.ensembled
    assert 0 < early < 0.6 * target.shares.positions
    found = generate(target, prompts, small_model(target), max_new_tokens=40, slots=2)
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
    found = [generate(target, prompt, own, max_new_tokens=8)[0].tokens for own in (None, "ngram")]
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
