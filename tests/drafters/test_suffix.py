"""Suffix decoding: own text, others' texts where they are shared, corpora; and the best of all."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contracts.parties import TableTarget

from outrider.decoding.state import DecodeState, Request
from outrider.drafters import suffix
from outrider.errors import DataError
from outrider.generation import serve
from outrider.retrieval import native_trie
from outrider.retrieval.corpus import build
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.retrieval.trie import Trie
from outrider.sampling.settings import Sampling


@pytest.fixture(params=["native", "python"], autouse=True)
def either(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(native_trie, "fastest", Trie)


def proposed(
    drafter: suffix.Suffix, texts: list[list[int]], most: int = 8, tenants: tuple[str, ...] = ()
) -> list[list[int]]:
    """What is drafted behind these texts, slots side by side."""
    state = DecodeState(len(texts), 1000)
    for row, text in enumerate(texts):
        state.admit(row, Request(text, 100, Sampling(), tenant=tenants[row] if tenants else ""))
    draft = drafter.propose([None] * len(texts), state, torch.full((len(texts),), most)).checked(len(texts))
    return [ids[:size] for ids, size in zip(draft.ids, draft.live, strict=True)]


def made(sources: tuple = (), **settings) -> suffix.Suffix:
    return suffix.Suffix(suffix.Config(**settings), sources)


def corpus_of(place: Path, name: str, text: list[int], tokenizer_hash: str | None = None) -> Corpus:
    return build.build(place / name, [text], vocabulary=100, tokenizer_hash=tokenizer_hash)


def test_what_followed_the_longest_suffix_comes_first():
    """Catches a shorter match that is believed before a longer one, and a text that finds its own end."""
    assert proposed(made(), [[1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]])[0][0] == 4
    assert proposed(made(), [[1, 2, 3, 4, 5]]) == [[]]


def test_the_more_matches_the_more_is_proposed():
    """Catches a length that does not hang on the match, and a `min_confidence` that is not looked at."""
    drafter = made(factor=2.0, min_confidence=0.0)
    sizes = [len(proposed(drafter, [[*range(20, 60), 99, *range(20, 20 + n)]], 16)[0]) for n in (1, 2, 4, 6)]
    assert sizes == [2, 4, 8, 12]
    text = [1, 2, 7, 1, 3, 7, 1, 4, 7, 1, 5, 7, 1]
    all_of_it, sure = (proposed(made(min_confidence=least, factor=16), [text])[0] for least in (0.0, 0.3))
    assert len(all_of_it) > len(sure)


@pytest.mark.parametrize("shared", [False, "tenant", "all"])
def test_others_texts_are_looked_up_only_where_asked_for(shared):
    """Catches a text that shows in another tenant's drafts, and one that is not shared though asked for."""
    drafter = made(shared=shared)
    proposed(drafter, [[1, 2, 3, 4, 5, 6]], tenants=("a",))
    mine, theirs = proposed(drafter, [[9, 2, 3], [8, 2, 3]], tenants=("a", "b"))
    assert bool(mine) == bool(shared)
    assert bool(theirs) == (shared == "all")


def test_a_text_is_shared_up_to_its_end():
    """Catches a last block that nobody reads, since no draft follows it."""
    target = TableTarget.random(5)
    drafter = made(shared="all")
    [*_] = serve(target, [Request([0, 1], 30, Sampling())], drafter, slots=1)
    [*told] = serve(target, [Request([0, 1], 30, Sampling())], drafter, slots=1)
    assert len(told) < 10  # the same text again, and greedy


def test_a_corpus_is_looked_up_and_distractors_do_not_hurt(tmp_path):
    """Catches a corpus that is not read, and one without a match that takes nodes."""
    right = corpus_of(tmp_path, "right", [5, 6, 7, 8, 9, 10, 11, 12])
    wrong = [corpus_of(tmp_path, f"wrong{n}", [7, 20 + n, 21, 7, 30 + n, 31]) for n in range(2)]
    alone = proposed(made((right,), factor=2), [[40, 5, 6, 7]], 4)
    assert alone == [[8, 9, 10, 11]]
    assert proposed(made((*wrong, right), factor=2), [[40, 5, 6, 7]], 4) == alone
    assert proposed(made((*wrong,), factor=2), [[40, 5, 6, 7]], 4) != alone


def test_corpora_are_opened_by_name_for_this_tokenizer_alone(tmp_path, monkeypatch, target):
    """Catches a corpus of another tokenizer, and one that is not there."""
    monkeypatch.setenv("OUTRIDER_CORPORA", str(tmp_path))
    corpus_of(tmp_path, "own", [1, 2, 3])
    corpus_of(tmp_path, "other", [1, 2, 3], "0123456789abcdef")
    assert len(suffix.build(suffix.Config(corpora=("own",)), target).sources) == 1
    with pytest.raises(DataError, match="none"):
        suffix.build(suffix.Config(corpora=("none",)), target)
    told = type("Target", (), {"spec": replace(target.spec, tokenizer_hash="f" * 16)})
    with pytest.raises(DataError, match="0123456789abcdef"):
        suffix.build(suffix.Config(corpora=("other",)), told)


def test_a_slot_used_again_carries_nothing_over():
    """Catches a former request, perhaps another tenant's, that still shows in a slot's drafts."""
    drafter, memory, state, found = made(), [None], DecodeState(1, 1000), []
    for text in ([1, 2, 3, 4, 5, 1, 2], [9, 8, 1, 2]):
        state.admit(0, Request(text, 100, Sampling()))
        found.append(drafter.propose(memory, state, torch.tensor([8])).checked(1).live)
        drafter.free(memory, [0])
        state.free(0)
    assert found[0] != [0] and found[1] == [0]
