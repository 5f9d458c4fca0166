"""Relay hands over where it should and nowhere else, is the target without cues, and says how far it strayed; and the
sentence ends and cue words that it goes by are found as they stand in the text."""

import json

import pytest
from contracts.parties import OnAndOff, Tree
from lab.test_lossy import CHAINS, TREES, distances
from lab.worded import END, SO, THEN, A, B, C, Follows, begun, random_words, words_of_three, writes

from outrider.decoding.draft import Draft
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.generation import generate, serve
from outrider.lab.judges.relay import Relay, Segments, relay
from outrider.policies.lossy import LossyJudge
from outrider.policies.sentences import Piece, piece, pieces
from outrider.sampling.settings import Sampling

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


@pytest.mark.parametrize(("limit", "min_tokens"), [(1, 5), (3, 7), (9, 7)])
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
    if limit == 1:  # a pass that decides nothing: that over `then`, twice
        relayed = LossyJudge(Relay(["So"], 5))
        run(relayed, Follows(SMALL, limit), len(WANTED))
        assert relayed.figures["prefills"] == 2


@pytest.mark.parametrize("limit", [1, 3])
def test_the_small_model_writes_the_final_answer(limit: int) -> None:
    """Catches an answer that ends with its first sentence, one that begins a token late or with a token of the
    target's, and an end of reasoning inside a segment of the small model's that is missed.  By hand."""
    judge = LossyJudge(Relay([], answer="c So"))
    (text,), (switches,) = run(judge, Follows(SMALL, limit), 12)
    assert text[:11] == [B, C, SO, THEN, END, B, THEN, END, B, THEN, END]  # there is no room for a draft at the end
    assert switches == ((3, True),)
    (text,), (switches,) = run(LossyJudge(Relay(["So"], 3, answer="then")), Follows(SMALL, limit), 12)
    assert text[:11] == [B, C, SO, THEN, END, B, THEN, END, B, THEN, END]
    assert switches == ((3, True),)


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


WRITES, HANDED_OVER = [1], [1, 0]


@pytest.mark.parametrize(
    ("parents", "is_certain", "text"),
    [
        (CHAINS[1], False, WRITES), (CHAINS[1], False, HANDED_OVER), (CHAINS[1], True, HANDED_OVER),
        (TREES[1], False, HANDED_OVER),
    ],
)  # fmt: skip
def test_the_distance_of_a_relay_is_exact(parents: list[int], is_certain: bool, text: list[int]) -> None:
    """Catches a token whose distance is that of the acceptance rule, a segment's end that is charged, a drawn tree of
    which too little is, and a relay that draws otherwise than the acceptance rule where nobody handed over.

    Every draft and every coin is summed; `So` hands over at once, `.` takes back."""
    charged = 0.0
    for seed in range(1 if len(parents) > 2 else 2):
        rule = Relay(["So"], 1)
        judged = begun(rule, text, words_of_three(" So", " a", "."))
        if text == HANDED_OVER:
            before = Segments(("So",), 1).after(Piece(" a", " So"))
            assert before.is_relayed
            rule.admit = lambda row, request, rule=rule, before=before: rule.texts.__setitem__(row, before)
        measure = lambda fn, draft, p, accepted, rule=rule: rule.distances(draft, p, accepted)
        found, exact, whole = distances(judged, parents, seed, measure, is_certain=is_certain)
        assert found >= exact - 1e-12
        assert whole <= found + 1e-12
        assert found == pytest.approx(exact, abs=1e-12) or not (is_certain or parents in CHAINS)
        charged += found
    assert charged > 0.01


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
    assert relay(path, answer="</think>").name == f"relay(cues={path}, min_tokens=5, answer=</think>)"
    for wrong in ("[1]", "{}", '{"selected": [1]}', "So", '{"selected": "So"}'):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="outrider lab cues"):
            relay(path)
    with pytest.raises(ConfigError, match="can't be read"):
        relay(tmp_path / "none.json")
    for wrong in ({"cues": [" "]}, {"cues": ["So"], "min_tokens": 0}):
        with pytest.raises(ConfigError):
            relay(**wrong)
    with pytest.raises(ConfigError, match="relay reads the text"):
        generate(target, prompts[0], max_new_tokens=3, verification=LossyJudge(Relay(["So"])))


DECODE = random_words().decode


def test_a_sentence_ends_at_a_stop_or_a_blank_line() -> None:
    """Catches an end that is told again at the next token, and one that only a look at the line before shows."""
    for before, added, ends in (
        ("a b", ".", True), ("a b", " c", False), ("a", "! ", True), ("a", ' why?"', False), ("a\n", "\n", True),
        ("a", "\n\n", True), ("a\n", "  \n", True), ("a\n\n", " b", False), ("a\n\n", "", False), ("a", "\n", False),
        ("", ".", True), ("a", " 3.14", False), ("a.", " ", False),
    ):  # fmt: skip
        assert Piece(before, added).ends_sentence is ends, (before, added)


def test_a_cue_is_a_whole_word_that_this_token_completes() -> None:
    """Catches a word within another, and one that is found twice because white space follows it."""
    for before, added, found in (
        ("a.", " So", "So"), ("a.", " Som", None), ("aS", "o", None), ("a. So", ",", "So,"), ("a. So", " ", None),
        ("", "So", "So"), ("a (", "So", "So"), ("a.", " So ", "So"), ("a. S", "o", "So"), ("Also", " So", "So"),
    ):  # fmt: skip
        assert Piece(before, added).completes(["So", "So,"]) == found, (before, added)


def test_a_text_is_contained_once_at_the_token_that_ends_it() -> None:
    """Catches an end that is seen again at the next token, and one that the token goes on after."""
    for before, added, found in (
        ("a </th", "ink>", True), ("a", " </think> b", True), ("a </think>", " b", False), ("a </th", "in", False),
    ):  # fmt: skip
        assert Piece(before, added).contains_end("</think>") is found


def test_pieces_join_to_the_text() -> None:
    """Catches a window that repeats or loses text; the word pieces are longer than one window."""
    tokens = [n % 6 for n in range(50)]
    assert "".join(one.added for one in pieces(DECODE, tokens, 0)) == DECODE(tokens)
    assert piece(DECODE, tokens, 40).before == DECODE(tokens[24:40])
