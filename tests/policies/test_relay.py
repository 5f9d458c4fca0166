"""Relay hands over where it should and nowhere else, is the target without cues, and says how far it strayed."""

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
    if limit <= 2:  # a pass that decides nothing: with drafts of one token that over `then`, twice
        relayed = LossyJudge(Relay(["So"], 5))
        run(relayed, Follows(SMALL, limit), len(WANTED))
        assert relayed.figures["prefills"] == {1: 2, 2: 0}[limit]


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


def test_the_distribution_test_sees_a_relay_and_passes_one_without_cues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a relay that draws otherwise than the acceptance rule where nobody handed over.  False alarm 1e-6."""
    table = torch.randn(6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr(chances, "SamplingJudge", lambda _: LossyJudge(Relay([], 1)))
    drafter = Drawn(lambda before, own: table[before, own].softmax(-1))
    assert keeps_the_distribution(random_words(), drafter, slots=1500, seeded=True, shared_noise=False)


# ── the distance, by enumeration ──────────────────────────────────────────────────────────────────────────────────────

THREE = (" So", " a", ".")
"""Words of the enumeration's three tokens."""


class ThreeWords(WordTarget):
    words = THREE


def three() -> WordTarget:
    return ThreeWords(torch.zeros(3, 3, 3, dtype=torch.float64))


@pytest.mark.parametrize("text", [[1], [1, 0]], ids=["the target writes", "just handed over"])
@pytest.mark.parametrize("is_certain", [False, True], ids=["drawn", "deterministic"])
@pytest.mark.parametrize("parents", [*CHAINS[:2], TREES[1]], ids=str)
def test_the_distance_of_a_relay_is_exact(parents: list[int], is_certain: bool, text: list[int]) -> None:
    """Catches a token whose distance is that of the acceptance rule, a segment's end that is charged, and a drawn tree
    of which too little is.

    Every draft and every coin is summed; `So` hands over at once, `.` takes back."""
    charged = 0.0
    for seed in range(1 if len(parents) > 2 else 3):
        rule = Relay(["So"], 1)
        judged = begun(rule, text, three())
        if text == [1, 0]:
            before = Segments(("So",), 1).after(Piece(" a", " So"))
            assert before.is_relayed
            rule.admit = lambda row, request, rule=rule, before=before: rule.texts.__setitem__(row, before)
        measure = lambda fn, draft, p, accepted, rule=rule: rule.distances(draft, p, accepted)
        found, exact, whole = distances(judged, parents, seed, measure, is_certain=is_certain)
        assert found >= exact - 1e-12
        assert whole <= found + 1e-12
        assert found == pytest.approx(exact, abs=1e-12) or not (is_certain or parents in CHAINS)
        charged += found
    # a draft of one node can't follow a cue that it holds itself
    assert charged > 0.01 or (text == [1] and (is_certain or len(parents) == 1))


# ── what it is made of ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_banned_token_is_never_taken_over() -> None:
    """Catches a small model that writes what the request forbids, and a segment that reads past the table."""
    asked = {"max_new_tokens": 20, "policy": "fixed"}
    sampling, judge = Sampling(bad_words=[[END]]), LossyJudge(Relay(["So"], 5))
    (found,) = generate(writes(BIG), [A], Follows(SMALL), verification=judge, sampling=sampling, **asked)
    assert END not in found.tokens
    assert THEN in found.tokens
    assert found.tokens[:8] == WANTED[:8]

    class Outside(Follows):
        def propose(self, memory, state, budget):
            draft = super().propose(memory, state, budget)
            return Draft.chain(draft.tokens.masked_fill(draft.tokens == END, 99), draft.sizes)

    (found,) = generate(writes(BIG), [A], Outside(SMALL), verification=LossyJudge(Relay(["So"], 5)), **asked)
    assert found.tokens[:9] == [*WANTED[:8], BIG[THEN]]


def test_cues_come_from_a_table_or_a_list(tmp_path, target, prompts) -> None:
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
