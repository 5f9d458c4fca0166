"""Jacobi: the window is the target's own last word on every place, exact above temperature 0, and an n-gram pool fills
it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from contracts import chances
from contracts.chances import emitted, keeps_the_distribution
from contracts.parties import OnAndOff, TableTarget

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.state import DecodeState, Request
from outrider.drafters.jacobi import Config, Jacobi, build
from outrider.generation import batch, generate, serve
from outrider.retrieval.pool import Pool
from outrider.sampling.distribution import distribution
from outrider.sampling.settings import Sampling

TABLE = TableTarget.random(5)


def watched(drafter: Jacobi) -> list[tuple[list[int], Draft]]:
    """What the drafter proposes from now on, with the text of slot 0 before it."""
    seen, propose = [], drafter.propose

    def proposing(memory, state, budget):
        draft = propose(memory, state, budget)
        seen.append((list(state.tokens[0]), draft))
        return draft

    drafter.propose = proposing
    return seen


def test_a_greedy_window_is_the_fixed_point_iteration_by_hand(target, prompts):
    """Catches a window that moves on by one too many or too few, and rows of another pass.  Beside a slow twin."""
    window, drafter = 5, build(Config(window=5, init="repeat"), target)
    seen = watched(drafter)
    for prompt in prompts[:3]:
        seen.clear()
        generate(target, prompt, drafter, max_new_tokens=40, slots=1)
        text, carried = list(prompt), []
        for before, draft in seen:
            assert before == text
            room = draft.sizes[0]
            guesses = (carried + [([*text, *carried])[-1]] * window)[: int(room)]
            assert draft.tokens[0, : int(room)].tolist() == guesses
            best = target.head(target.read(torch.tensor([text + guesses]))[0])[0, len(text) - 1 :].argmax(-1).tolist()
            kept = next(
                (n for n, (guess, true) in enumerate(zip(guesses, best, strict=False)) if guess != true), len(guesses)
            )
            text += best[: kept + 1]
            carried = best[kept + 1 :]
        plainly = generate(target, prompt, max_new_tokens=40)[0].tokens
        assert text[: len(prompt) + 38] == (prompt + plainly)[: len(prompt) + 38]


def test_a_text_that_no_guess_can_change_needs_two_passes_a_window():
    """Catches guesses that are thrown away: where the next token hangs on nothing, the second pass keeps a whole
    window."""
    constant = TableTarget.of([0.1, 0.2, 0.7])
    (found,) = generate(constant, [0], build(Config(window=4), constant), max_new_tokens=31)
    assert found.tokens == [2] * 31
    assert found.accepted[:4] == [0, 4, 4, 4]


def test_greedy_decoding_never_takes_more_steps_than_tokens(target, prompts):
    """Catches a step that brings nothing; and with a window of any size the text is the target's."""
    plainly = [one.tokens for one in generate(target, prompts, max_new_tokens=24)]
    for config in (Config(window=1), Config(window=7), Config(window=3, branches=3), Config(window=2, init="repeat")):
        found = generate(target, prompts, build(config, target), max_new_tokens=24, slots=3)
        assert [one.tokens for one in found] == plainly
        assert all(one.steps <= 24 and one.steps + sum(one.accepted) >= 24 for one in found)


def cyclic(length: int = 6) -> TableTarget:
    """A table whose greedy text goes round through as many tokens."""
    table = torch.zeros(length, length, length, dtype=torch.float64)
    for token in range(length):
        table[:, token, (token + 1) % length] = 5.0
    return TableTarget(table)


def test_a_pool_saves_steps_where_the_text_repeats_itself():
    """Catches a pool that is not read, or not from the text."""
    target, steps = cyclic(), {}
    for init in ("repeat", "ngram"):
        (found,) = generate(target, [0], build(Config(window=4, init=init), target), max_new_tokens=60)
        assert found.tokens == [(n + 1) % 6 for n in range(60)]
        steps[init] = found.steps
    assert steps["ngram"] < 0.5 * steps["repeat"]


def test_branches_save_steps_and_change_no_text(target, prompts):
    """Catches branches under the wrong parent, and a window lost when a branch was kept.  Fixed counts."""
    steps, texts = {}, {}
    for branches in (0, 4):
        found = generate(
            target, prompts, build(Config(window=4, branches=branches), target), max_new_tokens=48, slots=3
        )
        steps[branches], texts[branches] = sum(one.steps for one in found), [one.tokens for one in found]
    assert texts[0] == texts[4]
    assert steps[4] < steps[0]


# ── above temperature 0 ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "config", [Config(window=3, branches=2, ngram=3), Config(window=3, init="repeat")], ids=["tree", "repeat"]
)
@pytest.mark.parametrize("policy", [None, OnAndOff(5)], ids=["fixed", "on and off"])
def test_trees_and_windows_keep_the_distribution(config, policy):
    """Catches a q that is not what was drawn from, and a window that outlives a pause.  False alarm 1e-6."""
    assert keeps_the_distribution(TABLE, build(config, TABLE), policy, prompt=[0, 1, 2, 0, 1], slots=2500)


def test_drawn_guesses_are_partly_kept():
    """Guards the tests here against drafts that are never kept, where every distribution holds."""
    _, _, kept = emitted(TABLE, build(Config(window=3, init="repeat"), TABLE), slots=500)
    assert 300 < kept < 500 * 3 * 3


class Stale(Jacobi):
    """Planted fault: the draft says the q of the step before."""

    last = None

    def propose(self, memory, state, budget):
        draft = super().propose(memory, state, budget)
        before, self.last = self.last, draft.q
        if draft.q is None or before is None or before.shape != draft.q.shape:
            return draft
        return replace(draft, q=before)


class Again(Jacobi):
    """Stored guesses are proposed again with the q they were drawn from, from the `first` place behind what was kept.

    1: those that nobody judged.  0: also the one that was refused, the planted fault.
    """

    first = 1

    def observe(self, memory, state, draft, kept, scores):
        super().observe(memory, state, draft, kept, scores)
        for b, row in enumerate(state.rows):
            begin = len(kept.paths[b]) + self.first
            memory[row].stored = (draft.ids[b][begin:], None if draft.q is None else draft.q[b, begin:])

    def propose(self, memory, state, budget):
        draft = super().propose(memory, state, budget)
        if draft.q is None:
            draft = replace(draft, q=torch.nn.functional.one_hot(draft.tokens, self.vocabulary).double())
        tokens, q = draft.tokens.clone(), draft.q.clone()
        for b, row in enumerate(state.rows):
            kept, own = getattr(memory[row], "stored", ([], None))
            for n, token in enumerate(kept[: tokens.shape[1]]):
                if own is not None and float(own[n].max()) < 1:  # what was certain is better guessed anew
                    tokens[b, n], q[b, n] = token, own[n]
        return replace(draft, tokens=tokens, q=q)


class Refused(Again):
    first = 0


def test_the_q_of_another_step_is_caught():
    """Planted fault 1."""
    assert not keeps_the_distribution(TABLE, Stale(Config(window=2, init="repeat"), 5), slots=4000)


def test_a_guess_that_was_judged_and_is_proposed_again_is_caught(monkeypatch):
    """Planted fault 2, beside its valid twin: a guess that no one looked at may wait.  False alarm of the twin 1e-6.

    Four tokens: the first step's guesses are certain, the second's are the first that may be kept for too long.
    """
    monkeypatch.setattr(chances, "TOKENS", 4)
    table = TableTarget.random(3, seed=4)
    config = Config(window=3, init="repeat")
    assert keeps_the_distribution(table, Again(config, 3), slots=5000)
    assert not keeps_the_distribution(table, Refused(config, 3), slots=5000)


def test_q_is_the_distribution_of_the_row_that_the_guess_came_from(target, prompts):
    """Catches settings that are left out of q, a shift of rows, and a fresh guess that claims to be drawn."""
    drafter, sampling = build(Config(window=4, init="repeat"), target), Sampling(0.8, top_k=9, top_p=0.9)
    seen, observe, rows = watched(drafter), drafter.observe, [torch.empty(0, 64)]

    def observing(memory, state, draft, kept, scores):
        observe(memory, state, draft, kept, scores)
        rows.append(scores.logits[0, len(kept.paths[0]) + 1 : 1 + int(draft.sizes[0])])

    drafter.observe = observing
    state = batch(target, 1)
    for _ in serve(target, [Request(prompts[0], 40, sampling)], drafter, state=state):
        pass
    drawn = 0
    for (_, draft), logits in zip(seen, rows, strict=False):
        assert draft.q is not None or not len(logits)
        if draft.q is None:
            continue
        count = min(len(logits), draft.tokens.shape[1])
        drawn += count
        wanted = distribution(logits[None, :count], state.judge.settings._replace(**_columns(sampling)))
        torch.testing.assert_close(draft.q[:, :count], wanted)
        assert bool((draft.q[0, count:].amax(-1) == 1).all())
    assert drawn > 20


def _columns(sampling: Sampling) -> dict:
    return {name: torch.tensor([getattr(sampling, name)]) for name in ("temperature", "top_k", "top_p")}


@pytest.mark.parametrize("branches", [0, 3])
def test_with_a_seed_the_text_is_plain_decodings_and_guesses_foresee_it(branches, target, prompts):
    """Catches a draft that leaves traces in a seeded text, and one drawn from other noise than the target's."""
    drafter = build(Config(window=4, branches=branches), target)
    sampling = Sampling(0.7, seed=3)
    found = generate(target, prompts, drafter, max_new_tokens=32, sampling=sampling, slots=3)
    wanted = generate(target, prompts, max_new_tokens=32, sampling=sampling, slots=3)
    assert [one.tokens for one in found] == [one.tokens for one in wanted]
    assert sum(sum(one.accepted) for one in found) > 10


def test_fresh_noise_in_every_step(monkeypatch):
    """Catches a draw that is repeated: an unjudged guess has decided the next q, so its noise is spent.  False alarm
    1e-6."""
    asked, draw = [], DecodeState.streams.fget

    def spied(state):
        streams = draw(state)
        asked.append(streams.key(0, Purpose.DRAFT).tolist())
        return streams

    monkeypatch.setattr(DecodeState, "streams", property(spied))
    emitted(TABLE, build(Config(window=3, init="repeat"), TABLE), slots=50)
    steps = {tuple(keys) for keys in asked}
    assert all(len(set(keys)) == len(keys) for keys in zip(*steps, strict=True))


# ── one slot at a time ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_slot_that_is_used_again_has_forgotten(target, prompts):
    """Catches a pool or a window that speaks of the request before."""
    drafter = build(Config(window=4, branches=2), target)
    seen = watched(drafter)
    for _ in serve(
        target, [Request(prompts[0], 30, Sampling()), Request(prompts[7], 30, Sampling())], drafter, slots=1
    ):
        pass
    both = [(text, draft.ids) for text, draft in seen]
    seen.clear()
    for _ in serve(target, [Request(prompts[7], 30, Sampling())], drafter, slots=1):
        pass
    alone = [(text, draft.ids) for text, draft in seen]
    assert both[-len(alone) :] == alone


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0, "seed": 4}, {"temperature": 1.0}], ids=["greedy", "seeded", "hot"]
)
def test_no_guess_is_a_banned_token(settings, target, prompts):
    """Catches bans that are looked up along another path, and a window that shrinks since its fresh guesses are
    banned."""
    drafter, words = build(Config(window=4), target), [(token,) for token in range(20)] + [(30, 31), (40, 50)]
    sampling, propose, nodes = Sampling(**settings, bad_words=words), drafter.propose, []

    def watching(memory, state, budget):
        draft = propose(memory, state, budget)
        for b, size in enumerate(draft.sizes.tolist()):
            path = [state.tokens[state.rows[b]][-1], *draft.ids[b][:size]]
            nodes.extend(path[1:])
            assert all(token >= 20 for token in path[1:])
            assert not {(30, 31), (40, 50)} & set(itertools.pairwise(path))
        return draft

    drafter.propose = watching
    found = generate(target, prompts[:3], drafter, max_new_tokens=15, sampling=sampling, slots=3)
    assert len(nodes) > 50
    if settings != {"temperature": 1.0}:
        plainly = generate(target, prompts[:3], max_new_tokens=15, sampling=sampling, slots=3)
        assert [one.tokens for one in found] == [one.tokens for one in plainly]


def test_a_pool_prefers_the_longest_match_then_the_latest_and_forgets_the_oldest():
    """Catches an order of preferences turned round, and a pool that grows without end."""
    pool = Pool(longest=2, most=8192, siblings=2)
    pool.learn([1, 2, 3, 9, 2, 4, 1, 2])
    assert pool.after([1, 2]) == [3, 4]
    assert pool.after([7, 2]) == [4, 3]
    assert pool.after([8]) == []
    small = Pool(longest=1, most=3, siblings=1)
    small.learn([1, 2, 3, 4, 5, 6])
    assert list(small.follows) == [(3,), (4,), (5,)]


def test_settings_without_effect_are_said(target, monkeypatch, caplog):
    """Catches a setting that is ignored in silence, and branches for a target that verifies chains alone."""
    build(Config(init="repeat", ngram=3), target)
    assert "ngram has no effect" in caplog.text
    monkeypatch.setattr(target, "spec", replace(target.spec, mode="chain"))
    assert build(Config(window=3, branches=2), target).limit == 3
    assert "verifies no trees" in caplog.text
