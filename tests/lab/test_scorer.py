"""A scored block is accepted whole or not at all; one knob goes from the drafter's text to the target's."""

import math

import pytest
import torch
from conftest import first
from contracts.parties import Drawn, OnAndOff
from lab.test_lossy import CHAINS, TREES, distances
from lab.worded import END, SO, THEN, A, B, C, Follows, begun, chain, random_words, words_of_three, writes

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.generation import generate
from outrider.lab.judges.scorer import Block, ScoredBlocks, scorer
from outrider.policies.lossy import LossyJudge, Verified
from outrider.sampling.settings import Sampling

BIG = {A: B, B: C, C: END, END: A, SO: A, THEN: A}
SMALL = {A: SO, SO: THEN, THEN: B, B: END, END: C, C: A}
PROMPTS = [[A], [C], [B, END], [THEN], [SO]]


def texts_of(tau: float, limit: int = 4, prompts=PROMPTS, slots: int = 2, policy=None, new: int = 30, **settings):
    judge = LossyJudge(ScoredBlocks(tau, **settings))
    found = generate(
        writes(BIG), prompts, Follows(SMALL, limit), max_new_tokens=new, verification=judge, slots=slots, policy=policy
    )
    return [one.tokens for one in found], judge


@pytest.mark.parametrize("block", [3, "sentence"])
def test_at_infinity_the_text_is_the_targets_own(block) -> None:
    """Catches a block that is accepted unscored, and a token of a rejected block that stays."""
    target, drawn = random_words(2), random_drafts()
    wanted = [one.tokens for one in generate(target, PROMPTS, max_new_tokens=20)]
    for policy in (None, OnAndOff(3)):
        judge = LossyJudge(ScoredBlocks(math.inf, block=block))
        found = generate(target, PROMPTS, drawn, max_new_tokens=20, verification=judge, slots=2, policy=policy)
        assert [one.tokens for one in found] == wanted
        assert (judge.distance, judge.figures["blocks_accepted"]) == (0.0, 0.0)


@pytest.mark.parametrize("limit", [1, 8])
def test_at_minus_infinity_all_after_the_first_block_is_the_drafters(limit: int) -> None:
    """Catches a bonus token of the target between two drafts, and a first block of the wrong length.  The last token
    of a text is the target's, since there is no room for a draft."""
    texts, judge = texts_of(-math.inf, limit, block=limit)
    for (*_, last), text in zip(PROMPTS, texts, strict=True):
        first = chain(BIG, last, limit)
        assert text[:limit] == first
        assert text[limit:-1] == chain(SMALL, first[-1], 30 - limit - 1)
        assert text[-1] == BIG[text[-2]]
    assert judge.figures["blocks_accepted"] > 0.5
    nothing_forced, _ = texts_of(-math.inf, limit, block=limit, force_reject_first=0)
    assert [text[:-1] for text in nothing_forced] == [chain(SMALL, prompt[-1], 29) for prompt in PROMPTS]


def test_the_first_sentence_is_the_targets_and_later_ones_are_drafted() -> None:
    """Catches a forced rejection that ends with the draft and not with the sentence."""
    (text,), _ = texts_of(-math.inf, prompts=[[A]])
    assert text[:3] == [B, C, END]
    assert text[3:-1] == chain(SMALL, END, 26)
    (text,), _ = texts_of(-math.inf, prompts=[[A]], force_reject_first=2)
    assert text[:7] == [B, C, END, A, B, C, END]
    assert text[7:-1] == chain(SMALL, END, 22)


def random_drafts(limit: int = 5) -> Drawn:
    table = torch.randn(6, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Drawn(lambda before, own: table[before, own].softmax(-1), limit)


def first_step(tau: float, seed: int, temperature: float, **settings):
    """Accepted drafted tokens of one random draft at the beginning of a text, and the rule."""
    noise = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 7, 6, dtype=torch.float64, generator=noise) * 2
    p = logits.softmax(-1)
    if not temperature:
        p = torch.nn.functional.one_hot(logits.argmax(-1), 6).double()
    draft = Draft.chain(torch.randint(6, (1, 6), generator=noise), torch.tensor([6]))
    rule = ScoredBlocks(tau, force_reject_first=0, **settings)
    rule.allocate(random_words(), None)
    rule.admit(0, Request([A], 20, Sampling()))
    rule.begin(Verified([0], [[A]], logits))
    streams = Streams(torch.tensor([seed]), torch.tensor([0]))
    accepted = rule(draft, p, streams)
    rule.observe(accepted, [[A, *(draft.ids[0][n] for n in accepted.paths[0]), *accepted.next_tokens]])
    return rule


@pytest.mark.parametrize(("block", "aggregate"), [(2, "mean"), (3, "min")])
def test_a_higher_tau_accepts_no_more(block, aggregate) -> None:
    """Catches a comparison the wrong way round, and a mean that is taken over all blocks; blocks and tokens of the
    same draft fall as tau rises, and each tau between lies between."""
    steps = (-math.inf, -6.0, -3.0, -2.0, -1.0, -0.5, 0.0, math.inf)
    differs = 0
    for seed in range(15):
        rules = [first_step(tau, seed, seed % 2, block=block, aggregate=aggregate) for tau in steps]
        counts = [(rule.accepted_blocks, rule.drafted_tokens) for rule in rules]
        assert counts == sorted(counts, reverse=True)
        assert (rules[0].drafted_tokens, rules[-1].drafted_tokens) == (6, 0)
        differs += len(set(counts)) > 2
    assert differs > 1


def test_a_block_is_scored_by_the_targets_log_probabilities() -> None:
    """Catches scores of another row, or at the request's temperature, where they are 0 or -infinity."""
    target, blocks = random_words(4), list[Block]()
    note = lambda block: (blocks.append(block), block.log_probs)[1]
    judge = LossyJudge(ScoredBlocks(-2.0, block=2, force_reject_first=0, score=note))
    generate(target, [[A], [B]], random_drafts(), max_new_tokens=30, verification=judge)
    assert len(blocks) > 10
    for block in blocks:
        text = [0, *block.before, *block.tokens]
        start = len(text) - len(block.tokens)
        wanted = [
            float(target.table[text[at - 2], text[at - 1]].log_softmax(-1)[text[at]]) for at in range(start, len(text))
        ]
        assert block.log_probs == pytest.approx(wanted)
        assert block.text == target.decode(block.tokens)


def test_a_function_of_ones_own_may_score_a_block_or_its_tokens() -> None:
    """Catches a score that is taken for another block's, or a whole block's that is averaged."""
    for score in (lambda block: float(SO not in block.tokens), lambda block: [float(t != SO) for t in block.tokens]):
        judge = LossyJudge(scorer(1.0, "min", 2, 0, score))
        (found,) = generate(writes(BIG), [C], Follows(SMALL), max_new_tokens=20, verification=judge)
        # every block that the drafter begins where the target ends one has a `So`
        assert SO not in found.tokens
        assert judge.rule.name.startswith("scorer(tau=1, aggregate=min, block=2, force_reject_first=0, score=<function")
    with pytest.raises(ConfigError, match="no score"):
        generate(writes(BIG), [C], Follows(SMALL), max_new_tokens=20,
                 verification=LossyJudge(scorer(1.0, "min", 2, 0, lambda block: [])))  # fmt: skip


def test_a_rejected_block_is_written_by_the_target_to_its_end() -> None:
    """Catches a block that is judged again in its middle: the scorer is asked at the ends of blocks alone."""
    asked = list[int]()
    reject = lambda block: (asked.append(len(block.before)), -1.0)[1]
    judge = LossyJudge(scorer(0.0, "mean", 3, 0, reject))
    (found,) = generate(writes(BIG), [A], Follows(SMALL, 3), max_new_tokens=20, verification=judge)
    assert found.tokens == chain(BIG, A, 20)
    assert asked == [1, 4, 7, 10, 13, 16, 19]


def test_a_block_that_the_draft_does_not_hold_whole_is_left_to_the_next_draft() -> None:
    """Catches a part of a block that is scored, and blocks that no longer begin where they should: after a block of the
    target's, and after an accepted one."""
    scored = list[Block]()
    accept = lambda block: (scored.append(block), 1.0)[1]
    for limit in (4, 5, 7):
        judge = LossyJudge(scorer(0.0, "mean", 3, 1, accept))
        (result,) = generate(
            writes(BIG), [A], Follows(SMALL, limit), max_new_tokens=31, verification=judge, policy="fixed"
        )
        assert result.tokens[:3] == chain(BIG, A, 3)
        assert result.tokens[3:30] == chain(SMALL, result.tokens[2], 27)
    assert {len(block.tokens) for block in scored} == {3}
    assert {len(block.before) % 3 for block in scored} == {1}


def test_texts_do_not_depend_on_who_shares_the_batch() -> None:
    """Catches a gate that is another slot's, or the last text's of the same slot."""
    settings = {"block": 2, "force_reject_first": 2}
    together, judge = texts_of(-2.0, slots=2, **settings)
    alone = [texts_of(-2.0, slots=1, prompts=[prompt], **settings)[0][0] for prompt in PROMPTS]
    assert together == alone
    assert judge.tokens == 30 * len(PROMPTS)


THREE = words_of_three(" a", ".", " b")
RULES = [{"tau": -1.0, "block": 2}, {"tau": -1.5, "block": "sentence", "aggregate": "min"}, {"tau": -math.inf}]


@pytest.mark.parametrize("settings", RULES, ids=str)
@pytest.mark.parametrize("parents", first([CHAINS[1], TREES[0], TREES[1], CHAINS[-1], TREES[2]], 1), ids=str)
def test_the_distance_is_exact_for_a_deterministic_draft_and_never_too_small(parents, settings) -> None:
    """Catches a token of a rejected block that is charged, or one of an accepted block that is not.  Every draft and
    every coin is summed; the whole text's total variation is below the sum."""
    charged = 0.0
    rule = ScoredBlocks(force_reject_first=0, **settings)
    measure = lambda fn, draft, p, accepted, rule=rule: rule.distances(draft, p, accepted)
    for is_certain in (True, False):
        found, exact, whole = distances(begun(rule, [0], THREE), parents, 1, measure, is_certain=is_certain)
        assert found >= exact - 1e-12
        assert whole <= found + 1e-12
        if is_certain:
            assert found == pytest.approx(exact, abs=1e-12)
        charged += found
    rejected = ScoredBlocks(-math.inf, block=2, force_reject_first=1)
    measure = lambda fn, draft, p, accepted: rejected.distances(draft, p, accepted)
    found = distances(begun(rejected, [0], THREE), [-1, 0], 0, measure)
    assert found == pytest.approx((0.0, 0.0, 0.0), abs=1e-12), "a rejected token must say nothing"
    assert charged > 0.01 or settings["tau"] > -1.6
