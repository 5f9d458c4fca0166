"""What is noted of a judged place is what the target says there, by a pass over the whole text; and noting moves
nothing."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import DRAFTER, folder, talker
from torch import Tensor

from outrider import load_drafter
from outrider.decoding.accept import accept, overlap
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState, Request
from outrider.measure import rejections
from outrider.measure.rejections import judged, kind_of, patterns
from outrider.measure.timing import run_once
from outrider.nn.drafting import trees
from outrider.report import parts as report
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget as Target

__all__ = ["folder", "talker"]
PROMPT = "tell me of ab ab ab ab"


class Oracle(Drafter):
    """Proposes the text that it was told of, wrong at some places; with `siblings` a wrong token is tried first at
    each."""

    limit = 8

    def __init__(self, text: Sequence[int], wrong: Sequence[int] = (), width: int = 3, siblings: bool = False):
        self.text, self.wrong, self.width, self.siblings = list(text), set(wrong), width, siblings

    def propose(self, memory: None, state: DecodeState, budget: Tensor) -> Draft:
        at = len(state.tokens[state.rows[0]]) - len(state.requests[state.rows[0]].prompt)
        ids = [
            self.text[n] ^ 1 if n in self.wrong else self.text[n]
            for n in range(at, min(at + self.width, len(self.text)))
        ]
        if not self.siblings:
            return trees.of_lists([ids], [list(range(-1, len(ids) - 1))])
        tokens = [token for pair in zip((i ^ 3 for i in ids), ids, strict=True) for token in pair]
        return trees.of_lists([tokens], [[2 * (n // 2) - 1 for n in range(len(tokens))]])


def observe(talker: Target, request: Request, drafter: Drafter) -> list[report.TracedToken]:
    return judged(talker, request, drafter).tested


@pytest.fixture(scope="module")
def request_(talker: Target) -> Request:
    return Request(talker.encode([{"role": "user", "content": PROMPT}]), 24, Sampling(0.0, seed=1))


@pytest.fixture(scope="module")
def text(talker: Target, request_: Request) -> list[int]:
    return run_once(talker, request_).tokens


def drafter(talker: Target, kind: str) -> Drafter:
    own = {key: value for key, value in DRAFTER.items() if key != "kind"}
    return load_drafter(kind, talker, **(own if kind == "dspark" else {"shortest": 1}))


@pytest.mark.parametrize(("kind", "temperature"), [("ngram", 0.0), ("dspark", 1.0)])
def test_the_observed_run_writes_what_the_timed_one_wrote(talker: Target, kind: str, temperature: float) -> None:
    """Catches an observer that disturbs what it observes, or that watches another text than the one that was
    measured."""
    request = Request(talker.encode([{"role": "user", "content": PROMPT}]), 24, Sampling(temperature, seed=5))
    own = drafter(talker, kind)
    timed = run_once(talker, request, own, ends=temperature == 0)
    found = judged(talker, request, own, ends=temperature == 0)
    assert found.tokens == timed.tokens
    assert len(found.tested) == len(timed.tokens)
    assert sum(place.accepted for place in found.tested) == sum(timed.accepted)
    proposed = [place for place in found.tested if place.depth is not None]
    assert len(proposed) == sum(a + (a < r) for a, r in zip(timed.accepted, timed.reached, strict=True))
    assert len(found.overlap) == len(proposed)


def test_every_place_says_what_the_target_says_there(talker: Target, request_: Request, text: list[int]) -> None:
    """Catches chances read from the row of another node; against one pass over the whole text, at temperature 1."""
    wrong = [4, 5, 11]
    found = observe(talker, request_, Oracle(text, wrong))
    with torch.inference_mode():
        logits = talker.model(input_ids=torch.tensor([request_.prompt + text])).logits[0, len(request_.prompt) - 1 :]
    logs = logits.log_softmax(-1)
    kept = [place for place in found if place.accepted]
    assert {place.rank for place in kept} == {1}
    assert [n for n, place in enumerate(found) if place.depth is not None and not place.accepted] == wrong
    for n, place in enumerate(found):
        entropy = float(-(logs[n].exp() * logs[n]).sum())
        assert place.entropy == pytest.approx(entropy, rel=1e-5)
        if place.depth is None:
            assert (place.p, place.rank, place.drafted, place.kind, place.q) == (None, None, None, None, None)
            continue
        token = text[n] ^ 1 if n in wrong else text[n]
        assert place.p == pytest.approx(float(logs[n, token].exp()), rel=1e-5)
        assert place.rank == 1 + int((logs[n] > logs[n, token]).sum())
        assert place.drafted == talker.tokenizer.decode([token])
        assert place.q is None
    # three drafted and the target's own one
    assert [place.depth for place in found[:10]] == [1, 2, 3, None, 1, 1, 1, 2, 3, None]
    assert "".join(place.text for place in found) == talker.tokenizer.decode(text)


def test_of_a_tree_the_branch_that_is_kept_is_followed(talker: Target, request_: Request, text: list[int]) -> None:
    """Catches depths and chances of an elder sibling that was turned down before the kept one was tried."""
    chain, tree = (observe(talker, request_, Oracle(text, siblings=siblings)) for siblings in (False, True))
    # near the end there is no room for both siblings
    chain, tree = chain[:16], tree[:16]
    assert all(place.accepted for place in tree if place.depth is not None)
    for one, other in zip(chain, tree, strict=True):
        # another shape of pass rounds otherwise
        assert one.model_dump(exclude={"p", "entropy"}) == other.model_dump(exclude={"p", "entropy"})
        assert one.entropy == pytest.approx(other.entropy, rel=1e-5)


def test_a_greedy_run_s_overlap_is_what_was_kept(talker: Target, request_: Request, text: list[int]) -> None:
    """Catches an overlap at temperature 1 where the run is at 0: there p is one-hot, and nothing is left to chance."""
    for oracle in (Oracle(text, [3, 9]), Oracle(text, [2], siblings=True)):
        found = judged(talker, request_, oracle)
        assert found.overlap == [float(place.accepted) for place in found.tested if place.depth is not None]


def test_a_sampled_draft_s_q_and_overlap_are_its_own(talker: Target) -> None:
    """Catches the q of another node, and a chance that is not the mean of min(p, q)."""
    request = Request(talker.encode([{"role": "user", "content": PROMPT}]), 20, Sampling(1.0, seed=3))
    verified: list[tuple[Draft, Tensor]] = []
    traced: Any = rejections.TracedTarget(talker, lambda draft, scores: verified.append((draft, scores.logits.clone())))
    found = judged(traced, request, drafter(talker, "dspark"), ends=False)
    first = verified[0]
    place = found.tested[0]
    assert first[0].q is not None
    assert place.q == pytest.approx(float(first[0].q[0, 0, first[0].ids[0][0]]), rel=1e-5)
    assert found.overlap[0] == pytest.approx(float(overlap(first[1][0, 0].softmax(-1), first[0].q[0, 0].double())))


def test_the_chance_of_siblings_is_how_often_the_distribution_keeps_one() -> None:
    """Catches siblings judged against the whole p.  40,000 draws, five standard errors: a false alarm in a million
    runs."""
    count, noise = 40_000, torch.Generator().manual_seed(3)
    p, q = (torch.rand(5, generator=noise, dtype=torch.float64).pow(2) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    first = torch.multinomial(q, count, replacement=True, generator=noise)
    second_q = q.expand(count, 5).clone()
    second_q[torch.arange(count), first] = 0
    second_q /= second_q.sum(-1, keepdim=True)
    second = torch.multinomial(second_q, 1, generator=noise)[:, 0]
    draft = Draft(
        torch.stack([first, second], 1), torch.full((count, 2), -1), torch.full((count,), 2),
        torch.stack([q.expand(count, 5), second_q], 1),
    )  # fmt: skip
    streams = Streams(torch.arange(count), torch.zeros(count, dtype=torch.int64))
    kept = torch.tensor(accept(draft, p.expand(count, 3, 5), streams).counts).double().mean()
    chance = {}
    for token in range(5):
        b = int((first == token).nonzero()[0])
        one = Draft(draft.tokens[b : b + 1], draft.parents[:1], draft.sizes[:1], torch.stack([q, second_q[b]])[None])
        chance[token] = rejections._chance(p, one, [0, 1])
    expected = sum(chance[int(token)] for token in first) / count
    assert abs(float(kept) - expected) < 5 * math.sqrt(expected * (1 - expected) / count)
    # the planted fault: each sibling against p itself
    naive = 1 - (1 - overlap(p, q)) * (1 - overlap(p, second_q)).mean()
    assert abs(float(kept) - float(naive)) > 10 * math.sqrt(expected * (1 - expected) / count)


def test_a_token_that_is_none_is_noted_and_not_looked_up(talker: Target, request_: Request, text: list[int]) -> None:
    """Catches an index error, or another token's chance, for an id outside the vocabulary."""
    oracle = Oracle([*text[:2], 10_000_000, *text[3:]])
    found = observe(talker, request_, oracle)
    assert (found[2].p, found[2].rank, found[2].accepted, found[2].drafted) == (0.0, None, False, None)
    assert sum(pattern.tested for pattern in patterns(found).by_rank) == sum(place.depth is not None for place in found)


KINDS = {
    "word": ("the", " naïve", "x1", "_name"), "number": ("12", " 3.5", "½"), "space": ("\n  ", ""),
    "punctuation": (" ,", "())"), "symbol": ("+=", "$", "→"), "hangul": ("안녕", " 은", "ㅋㅋ", "한A"),
    "other script": ("日本", "привет", "\ufffd", "नी"),
}  # fmt: skip


def test_a_token_s_kind_is_its_letters_else_its_digits_else_its_marks() -> None:
    """Catches Hangul counted as a word, and parts of characters counted as symbols."""
    assert {kind: tuple(text for text in texts if kind_of(text) == kind) for kind, texts in KINDS.items()} == KINDS


def test_patterns_count_every_proposal_once() -> None:
    """Catches places without a proposal that are counted, values on the edge of two bins, and kinds that vanish."""
    places = [
        report.TracedToken(text="a", accepted=True, depth=1, rank=1, entropy=0.0, kind="word"),
        report.TracedToken(text="b", accepted=False, depth=2, rank=2, entropy=0.1, kind="word"),
        report.TracedToken(text="c", entropy=3.0),
        report.TracedToken(text="1", accepted=False, depth=1, rank=5, entropy=1.999, kind="number"),
        report.TracedToken(text="2", accepted=False, depth=1, rank=6, entropy=2.0, kind="number"),
        report.TracedToken(text="3", accepted=True, depth=1, rank=20, entropy=0.5, kind="number"),
        report.TracedToken(text="4", accepted=False, depth=1, rank=21, entropy=7.0, kind="special"),
    ]
    found = patterns(places)
    pairs = lambda rows: {row.name: (row.tested, row.accepted) for row in rows}
    assert pairs(found.by_rank) == {"1": (1, 1), "2": (1, 0), "3-5": (1, 0), "6-20": (2, 1), ">20": (1, 0)}
    assert pairs(found.by_entropy) == {
        "below 0.1": (1, 1), "0.1 to 0.5": (1, 0), "0.5 to 1": (1, 1), "1 to 2": (1, 0), "2 and more": (2, 0),
    }  # fmt: skip
    kinds = pairs(found.by_kind)
    assert list(kinds) == list(rejections.KINDS)
    assert (kinds["word"], kinds["number"], kinds["special"], kinds["hangul"]) == ((2, 1), (3, 1), (1, 0), (0, 0))
