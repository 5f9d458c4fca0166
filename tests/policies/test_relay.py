"""Relay hands over where it should and nowhere else, is the target without cues, and says how far it strayed."""

from __future__ import annotations

import json

import pytest
import torch
from contracts import chances
from contracts.chances import keeps_the_distribution
from contracts.parties import Drawn, OnAndOff, Tree
from policies.test_lossy import CHAINS, TREES, distances
from policies.worded import END, SO, THEN, A, B, C, Follows, WordTarget, begun, random_words, writes

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.demo import SMALL_MODEL
from outrider.errors import ConfigError
from outrider.generation import generate, serve
from outrider.policies.lossy import LossyJudge
from outrider.policies.relay import Relay, Segments, relay
from outrider.policies.sentences import Piece
from outrider.policies.take_over import node_distances
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

BIG = {A: B, B: C, C: SO, SO: A, END: A, THEN: A}
"""Never ends a sentence."""
SMALL = {SO: THEN, THEN: END, END: B, A: THEN, B: THEN, C: C}
WANTED = [B, C, SO, A, B, C, SO, THEN, END, A, B, C, SO, A, B, C, SO, THEN, END, A, B, C]
"""By hand: the seventh token is the first cue that may hand over, since the third comes too early; the small model then
writes `then .`, and the target takes over."""
SWITCHES = ((7, True), (9, False), (17, True), (19, False))


def run(judge: LossyJudge, drafter, new: int, prompts=((A,),), slots: int = 1, policy=None):
    """Texts, and the switches of each."""
    texts, switches = [[] for _ in prompts], [() for _ in prompts]
    requests = [Request(list(prompt), new, Sampling()) for prompt in prompts]
    for progress in serve(writes(BIG), requests, drafter, judge=judge, slots=slots, policy=policy):
        texts[progress.request] += progress.tokens
        switches[progress.request] = judge.rule.texts[progress.row].switches
    return texts, switches


@pytest.mark.parametrize(("limit", "min_tokens"), [(1, 5), (2, 5), (3, 7), (5, 5), (9, 7)])
def test_the_writers_change_exactly_where_they_should(limit: int, min_tokens: int) -> None:
    """Catches a hand-over that is one token off, one too early after the last, a bonus token of the target in a
    segment, and a segment that depends on how long drafts are."""
    judge = LossyJudge(Relay(["So"], min_tokens))  # the first hand-over is after 7 tokens, so at the earliest
    (text,), (switches,) = run(judge, Follows(SMALL, limit), len(WANTED))
    assert text == WANTED
    assert switches == SWITCHES
    figures = judge.figures
    assert figures["segments"] == 2
    assert figures["relayed_share"] == pytest.approx(4 / len(WANTED))
    # at temperature 0 a token of the small model that the target would not write is at distance 1: `then .`, twice
    assert judge.total == 4.0
    assert figures["tokens_per_step"] == len(WANTED) / judge.passes


def test_a_pass_over_a_segment_is_a_prefill() -> None:
    """Catches passes that are counted as the target's own where it decides nothing.  With drafts of one token the pass
    over `then` is such a one; the pass over `.` gives the target's next token too."""
    for limit, prefills in ((1, 2), (2, 0)):
        judge = LossyJudge(Relay(["So"], 5))
        run(judge, Follows(SMALL, limit), len(WANTED))
        assert judge.figures["prefills"] == prefills


def test_texts_do_not_depend_on_who_shares_the_batch_or_when_is_drafted() -> None:
    """Catches the state of another slot, and of the text before in a slot that is used again."""
    prompts = [[A], [C], [B, END], [THEN], [SO]]
    alone = [run(LossyJudge(Relay(["So"], 3)), Follows(SMALL), 20, [prompt]) for prompt in prompts]
    together = run(LossyJudge(Relay(["So"], 3)), Follows(SMALL), 20, prompts, slots=2)
    assert together[0] == [texts[0] for texts, _ in alone]
    assert together[1] == [switches[0] for _, switches in alone]
    resting = run(LossyJudge(Relay(["So"], 3)), Follows(SMALL), 20, prompts, slots=2, policy=OnAndOff(4))
    assert all(len(text) == 20 for text in resting[0])


def test_without_cues_the_text_is_the_targets_own() -> None:
    """Catches a token that is taken over although nobody handed over, greedy and in distribution.  Odds of a false
    alarm: 1e-6."""
    target = random_words(3)
    drafter = Tree(target, [-1, 0, 1, 1], "replacement")
    plain = generate(target, [[A], [B, C]], max_new_tokens=30)
    judge = LossyJudge(Relay([]))
    found = generate(target, [[A], [B, C]], drafter, max_new_tokens=30, verification=judge)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    assert (judge.distance, judge.figures["relayed_share"]) == (0.0, 0.0)


def drawn() -> Drawn:
    table = torch.randn(6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Drawn(lambda before, own: table[before, own].softmax(-1))


def test_the_distribution_test_sees_a_relay_and_passes_one_without_cues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a lossy rule that the contract suite takes for exact.  Odds of a false alarm: 1e-6."""
    for cues, is_exact in (([], True), (["a", "b", "c", "So", "then"], False)):
        judge = LossyJudge(Relay(cues, 1))
        monkeypatch.setattr(chances, "SamplingJudge", lambda _, judge=judge: judge)
        assert keeps_the_distribution(random_words(), drawn(), slots=1500, seeded=True, shared_noise=False) is is_exact
        assert (judge.distance > 0.05) is not is_exact


# ── the distance, by enumeration ──────────────────────────────────────────────────────────────────────────────────────

THREE = (" So", " a", ".")
"""Words of the enumeration's three tokens."""


class ThreeWords(WordTarget):
    words = THREE


def three() -> WordTarget:
    return ThreeWords(torch.zeros(3, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("text", [[1], [1, 0]], ids=["the target writes", "just handed over"])
@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("parents", CHAINS, ids=str)
def test_the_distance_of_a_relay_is_exact(parents: list[int], is_certain: bool, text: list[int]) -> None:
    """Catches a token whose distance is that of the acceptance rule, and a segment's end that is charged.

    Every draft and every coin is summed; `So` hands over at once, `.` takes back."""
    charged = 0.0
    for seed in range(1 if len(parents) > 2 else 4):
        rule = Relay(["So"], 1)
        judged = begun(rule, [1], three())
        if text == [1, 0]:
            before = Segments(("So",), 1).after(Piece(" a", " So"))
            assert before.is_relayed
            judged = begun(rule, text, three())
            rule.admit = lambda row, request, rule=rule, before=before: rule.texts.__setitem__(row, before)
        measure = lambda fn, draft, p, accepted, rule=rule: rule.distances(draft, p, accepted)
        found, exact, whole = distances(judged, parents, seed, measure, is_certain=is_certain)
        assert found == pytest.approx(exact, abs=1e-12)
        assert whole <= found + 1e-12
        charged += found
    # a draft of one node can't follow a cue that it holds itself
    assert charged > 0.01 or (text == [1] and (is_certain or len(parents) == 1))


@pytest.mark.parametrize("parents", TREES, ids=str)
def test_the_distance_of_a_relay_in_a_drawn_tree_is_never_too_small(parents: list[int]) -> None:
    for seed in range(1):  # every draft and coin of a tree takes seconds
        rule = Relay(["So"], 1)
        measure = lambda fn, draft, p, accepted, rule=rule: rule.distances(draft, p, accepted)
        found, exact, whole = distances(begun(rule, [1], three()), parents, seed, measure)
        assert found >= exact - 1e-12
        assert whole <= found + 1e-12


def test_the_enumeration_sees_a_distance_that_is_wrong() -> None:
    """Planted: a drawn token is charged as a given one, or every token of the path is."""
    rule = Relay(["So"], 1)

    def as_given(fn, draft, p, accepted):
        nodes = node_distances(draft, p, is_by_q=False)
        return torch.stack([nodes[0, node] for node in rule._emitted[0] if node in rule._taken[0]] or [torch.zeros(())])

    def everything(fn, draft, p, accepted):
        return node_distances(draft, p, is_by_q=True)[0][[node for node in rule._emitted[0] if node >= 0]]

    for planted in (as_given, everything):
        found, exact, _ = distances(begun(rule, [1], three()), [-1, 0], 0, planted)
        assert found != pytest.approx(exact, abs=1e-6)


# ── what it is made of ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_banned_token_is_never_taken_over() -> None:
    """Catches a small model that writes what the request forbids."""
    judge = LossyJudge(Relay(["So"], 5))
    sampling = Sampling(bad_words=[[END]])
    (found,) = generate(
        writes(BIG), [A], Follows(SMALL), max_new_tokens=20, verification=judge, sampling=sampling, policy="fixed"
    )
    assert END not in found.tokens
    assert THEN in found.tokens
    assert found.tokens[:8] == WANTED[:8]


def test_an_id_outside_the_vocabulary_is_never_taken_over() -> None:
    """Catches a segment that reads past the table."""

    class Outside(Follows):
        def propose(self, memory, state, budget):
            draft = super().propose(memory, state, budget)
            return Draft.chain(draft.tokens.masked_fill(draft.tokens == END, 99), draft.sizes)

    (found,) = generate(writes(BIG), [A], Outside(SMALL), max_new_tokens=20, verification=LossyJudge(Relay(["So"], 5)))
    assert found.tokens[:8] == WANTED[:8]
    assert found.tokens[8] == BIG[THEN]


def test_cues_come_from_a_table_or_a_list(tmp_path) -> None:
    """Catches a table that is read as a name, and a file of another kind that is taken for a table."""
    path = tmp_path / "cues.json"
    path.write_text(json.dumps({"kind": "relay", "selected": ["So", "Then"]}))
    assert relay(path).cues == relay(["So", " Then "]).cues == ("So", "Then")
    assert relay(str(path), 3).name == f"relay(cues={path}, min_tokens=3)"
    for wrong in ("[1]", "{}", '{"selected": [1]}', "So", '{"selected": "So"}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="outrider tune --relay"):
            relay(path)
    with pytest.raises(ConfigError, match="can't be read"):
        relay(tmp_path / "none.json")
    for wrong in ({"cues": [" "]}, {"cues": ["So"], "min_tokens": 0}):
        with pytest.raises(ConfigError):
            relay(**wrong)


def test_a_target_without_a_tokenizer_is_refused_before_anything_is_computed(target, prompts) -> None:
    with pytest.raises(ConfigError, match="relay reads the text"):
        generate(target, prompts[0], max_new_tokens=3, verification=LossyJudge(Relay(["So"])))


def test_the_demo_is_relayed_to_its_small_model() -> None:
    """Catches a drafter whose cache does not follow tokens that the target did not choose: the segments' text is the
    small model's own continuation, token for token."""
    target = load_target("demo", compile=False)
    small = load_target(str(SMALL_MODEL), compile=False)
    judge = LossyJudge(Relay(["def", "self", "return"], 2))
    prompt = target.encode("import os\n\n\ndef read(path):\n    ")
    requests = [Request(prompt, 60, Sampling())]
    tokens: list[int] = []
    for progress in serve(target, requests, "small_model", judge=judge, policy="fixed"):
        tokens += progress.tokens
        switches = judge.rule.texts[progress.row].switches
    ends = [*(at for at, _ in switches), len(tokens)]
    segments = [(at, end) for (at, own), end in zip(switches, ends[1:], strict=True) if own]
    assert segments
    for at, end in segments:
        (alone,) = generate(small, [[*prompt, *tokens[:at]]], max_new_tokens=end - at, sampling=Sampling())
        last = end - at - (end == len(tokens))  # the last token of a text is always the target's
        assert alone.tokens[:last] == tokens[at : at + last]
