"""At temperature 0 every drafter's output is `model.generate`'s, token for token, in float64.  No test here is
random."""

import pytest
import torch
from conftest import FEW, cases, fast, tiny_model
from contracts.parties import OnAndOff, Oracle

from outrider.decoding.state import Request
from outrider.generation import generate, serve
from outrider.sampling.settings import Sampling
from outrider.targets.load import load_target

EVERY = pytest.mark.parametrize("case", fast(cases()))
"""Every kind; variants of it only where there is time."""
KINDS = pytest.mark.parametrize("case", fast(cases(), FEW))
"""A kind of each sort."""


def served(target, requests, drafter, **options) -> list[list[int]]:
    """The new tokens of every request."""
    found = [[] for _ in requests]
    for progress in serve(target, requests, drafter, **options):
        found[progress.request] += progress.tokens
    return found


@pytest.fixture(scope="session")
def oracle(target, prompts, plain):
    """A tree whose true token is always the second child: kept deep, by paths that are no prefix."""
    return Oracle([prompt + plain(target, prompt, 96) for prompt in prompts], 64)


@EVERY
def test_one_prompt_alone(case, target, prompts, plain, drafter_of):
    """Catches a cache that keeps what was rejected; guards the tests here against drafts that are never kept, where any
    cache will do."""
    (alone,) = generate(target, prompts[0], drafter_of(case), max_new_tokens=30)
    assert alone.tokens == plain(target, prompts[0], 30)
    assert alone.steps + sum(alone.accepted) >= len(alone.tokens)
    together = generate(target, prompts, drafter_of(case), max_new_tokens=32)
    assert [found.tokens for found in together] == [plain(target, prompt, 32) for prompt in prompts]
    assert sum(sum(found.accepted) for found in together) >= 10


@EVERY
def test_slots_are_used_again_in_mid_flight(case, target, prompts, plain, drafter_of):
    """Catches a slot that remembers its last request, and rows of unequal length in one pass."""
    counts = [9, 31, 5, 17, 12, 26, 3, 22]
    requests = [Request(prompt, count, Sampling()) for prompt, count in zip(prompts, counts, strict=True)]
    wanted = [plain(target, prompt, count) for prompt, count in zip(prompts, counts, strict=True)]
    assert served(target, requests, drafter_of(case), slots=2) == wanted


@KINDS
def test_the_token_limit_ends_inside_a_block(case, target, prompts, plain, drafter_of):
    """Catches a token too many or too few, at every place in a block."""
    drafter = drafter_of(case)
    for prompt in (prompts[1], prompts[7]):
        requests = [Request(prompt, count, Sampling()) for count in range(1, 2 * drafter.limit + 1)]
        found = served(target, requests, drafter, slots=3)
        assert found == [plain(target, prompt, request.max_new_tokens) for request in requests]


@KINDS
def test_the_context_ends_inside_a_block(case, short_target, target, prompts, plain, workshop):
    """Catches a text that runs over the context, and a cache that has no room for the last draft."""
    # weights are equal, so the long target says what the short one would
    drafter = workshop.build(case, short_target)
    texts = [prompt for prompt in prompts if len(prompt) < 20] + [prompts[4] + [1, 2], prompts[0]]
    found = generate(short_target, texts, drafter, max_new_tokens=100, slots=3)
    for text, generation in zip(texts, found, strict=True):
        assert generation.tokens == plain(target, text, 20 - len(text))
        assert generation.finish_reason == "context"


@KINDS
def test_an_end_token_ends_inside_a_block(case, target, prompts, plain, drafter_of, monkeypatch):
    """Catches tokens behind the end, and an end that is only seen where a block ends."""
    for at in (0, 5):
        monkeypatch.setattr(target, "ends", frozenset({plain(target, prompts[0], 40)[at], 10_000}))
        found = generate(target, prompts, drafter_of(case), max_new_tokens=40, slots=3)
        for prompt, generation in zip(prompts, found, strict=True):
            whole = plain(target, prompt, 40)
            first = next((n for n, token in enumerate(whole) if token in target.ends), None)
            assert generation.tokens == (whole if first is None else whole[: first + 1])
            assert generation.finish_reason == ("length" if first is None else "stop")
        assert found[0].finish_reason == "stop"


@KINDS
def test_the_budget_goes_to_0_and_back(case, target, prompts, plain, drafter_of):
    """Catches a drafter that loses the tokens committed while it was not asked."""
    drafter = drafter_of(case)
    found = generate(target, prompts, drafter, max_new_tokens=30, slots=3, policy=OnAndOff(drafter.limit))
    assert [generation.tokens for generation in found] == [plain(target, prompt, 30) for prompt in prompts]


@KINDS
def test_a_long_pause_between_drafts(case, target, prompts, plain, drafter_of):
    """Catches a drafter that runs out of room where one slot has much to catch up on and another stands far ahead."""

    class Late(OnAndOff):
        def budget(self, state):
            self.turn += 1
            return torch.full((len(state.rows),), self.nodes if self.turn > 45 else 0)

    drafter = drafter_of(case)
    # the second ends at turn 40; the third takes its slot with a long prompt, while the first was never drafted for
    requests = [
        Request(prompts[3], 60, Sampling()),
        Request(prompts[0], 40, Sampling()),
        Request(prompts[4] * 4, 12, Sampling()),
    ]
    found = served(target, requests, drafter, slots=2, policy=Late(drafter.limit))
    assert found == [plain(target, request.prompt, request.max_new_tokens) for request in requests]


@KINDS
def test_a_long_prompt_enters_beside_a_slot_that_stands_far_ahead(case, target, plain, drafter_of):
    """Catches a drafter's cache that has no room for one slot's whole prompt behind another's whole text."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(64, (60,), generator=generator).tolist() for _ in range(3)]
    requests = [Request(prompt, count, Sampling()) for prompt, count in zip(prompts, (40, 10, 40), strict=True)]
    found = served(target, requests, drafter_of(case), slots=2)
    assert found == [plain(target, request.prompt, request.max_new_tokens) for request in requests]


@KINDS
def test_a_prompt_of_several_chunks(case, target, prompts, plain, drafter_of, monkeypatch):
    """Catches a drafter that sees only the first chunk of a prompt, or each chunk from its own beginning; and one that
    needs a prefill, of which prompts of one token have none."""
    monkeypatch.setattr("outrider.decoding.scheduler.PREFILL_CHUNK", 4)
    for texts in (prompts, [[5], [63], [0]]):
        found = generate(target, texts, drafter_of(case), max_new_tokens=20, slots=3)
        assert [generation.tokens for generation in found] == [plain(target, prompt, 20) for prompt in texts]


@KINDS
def test_slots_of_other_settings_stand_beside_greedy_ones(case, target, prompts, plain, drafter_of):
    """Catches settings that leak from slot to slot; a sampled text depends on its own seed alone."""
    drafter = drafter_of(case)
    hot = [Sampling(1.0, seed=3), Sampling(0.8, top_k=5, seed=4), Sampling(1.2, top_p=0.8, seed=5)]
    requests = [Request(prompt, 16, Sampling()) for prompt in prompts]
    for n, sampling in enumerate(hot):
        requests[2 * n + 1] = Request(prompts[2 * n + 1], 16, sampling)
    together = served(target, requests, drafter, slots=4)
    for request, found in zip(requests, together, strict=True):
        if request.sampling.temperature == 0:
            assert found == plain(target, request.prompt, 16)
    again = served(target, requests, drafter, slots=8)
    assert [found for n, found in enumerate(again) if n % 2 == 0] == [
        found for n, found in enumerate(together) if n % 2 == 0
    ]


def test_a_seeded_text_depends_on_its_seed_alone(target, prompts, workshop):
    """Catches noise that hangs on the slot, the batch or the time.

    With a chain drawn by the same settings, alone or in company; a tie within float64's rounding has odds below 1e-9.
    """
    drafter = workshop.build(next(case for case in cases() if case.kind == "small_model"), target)
    requests = [Request(prompt, 12, Sampling(1.0, seed=n)) for n, prompt in enumerate(prompts)]
    alone = [served(target, [request], drafter)[0] for request in requests]
    assert served(target, requests, drafter, slots=3) == alone
    assert served(target, requests[::-1], drafter, slots=5) == alone[::-1]


def test_a_tree_whose_path_is_no_prefix(target, prompts, plain, oracle):
    """Catches keys and values that are not moved when the kept nodes do not lie side by side."""
    found = generate(target, prompts, oracle, max_new_tokens=40, slots=3)
    assert [generation.tokens for generation in found] == [plain(target, prompt, 40) for prompt in prompts]
    assert max(max(generation.accepted) for generation in found) == oracle.depth
    assert sum(generation.steps for generation in found) < 0.4 * 40 * len(prompts)


def test_a_tree_ends_inside_its_block(target, short_target, prompts, plain, oracle, monkeypatch):
    """Catches limit, context and end token in the middle of a path."""
    for count in range(1, 9):
        (found,) = generate(target, prompts[0], oracle, max_new_tokens=count)
        assert found.tokens == plain(target, prompts[0], count)
    (found,) = generate(short_target, prompts[2], oracle, max_new_tokens=100)
    assert found.tokens == plain(target, prompts[2], 9)
    text = plain(target, prompts[2], 20)
    for at in (9, 11, 12):
        monkeypatch.setattr(target, "ends", frozenset({text[at]}))
        (found,) = generate(target, prompts[2], oracle, max_new_tokens=20)
        assert found.tokens == text[: text.index(text[at]) + 1]


@pytest.mark.slow
def test_a_target_in_float32_follows_the_same_texts_here(prompts, plain, target, workshop):
    """Catches an input that is float64 by accident: the loop must run in the dtype that people use."""
    single = load_target(tiny_model().float())
    for case in cases():
        found = generate(single, prompts[:2], workshop.build(case, single), max_new_tokens=12)
        assert [generation.tokens for generation in found] == [plain(target, prompt, 12) for prompt in prompts[:2]]
