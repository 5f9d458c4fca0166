"""Where a slot ends: at an end token, a stop string, its limit or the context, wherever in a block that falls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.state import DecodeState, Judge, Request
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer


def letters(tokens) -> str:
    return "".join(chr(97 + token) for token in tokens)


def one_slot(limit=100, context=1000, ends=(), stop=(), prompt=(0, 1)) -> DecodeState:
    state = DecodeState(1, context, frozenset(ends), judge=SamplingJudge())
    state.admit(0, Request(list(prompt), limit, Sampling(), tuple(stop), Detokenizer(letters, is_local=True)))
    return state


def new_tokens(state: DecodeState, row: int = 0) -> list[int]:
    return state.tokens[row][len(state.requests[row].prompt) :]


def committed(state: DecodeState, block: list[int]) -> Accepted:
    """Commit a chain that was kept whole, its last token being the bonus."""
    drafted = len(block) - 1
    tokens = torch.tensor([block[:-1]], dtype=torch.int64).view(1, drafted)
    draft = Draft.chain(tokens, torch.tensor([drafted]))
    return state.commit(draft, Accepted([list(range(drafted))], [block[-1]], [0]))


def check_cut(state: DecodeState, found: Accepted, block: list[int], kept: int) -> None:
    assert new_tokens(state) == block[:kept]
    assert state.anchor.tolist() == [block[kept - 1]]
    if kept == len(block):
        assert found.next_tokens == [block[-1]]
        assert found.paths == [list(range(len(block) - 1))]
    else:
        assert found.next_tokens == [-1]
        assert found.paths == [list(range(kept))]


@given(st.integers(1, 6), st.integers(1, 9))
def test_the_limit_cuts_a_block(size, most):
    """Catches a token too many, an accepted count that speaks of the block before the cut, and a text longer than the
    context, prompt included."""
    for state, reason in ((one_slot(most), "length"), (one_slot(context=2 + most), "context")):
        found = committed(state, [5] * size)
        check_cut(state, found, [5] * size, min(size, most))
        assert state.finished == [reason if size >= most else None]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.integers(1, 8))
def test_the_first_end_token_cuts_a_block(block, limit):
    """Catches an end token behind the limit that still counts, or the last of two that wins."""
    state = one_slot(limit, ends={3, 4})
    kept = next((n + 1 for n, token in enumerate(block) if token in (3, 4)), len(block))
    found = committed(state, block)
    check_cut(state, found, block, min(kept, limit))
    is_end = new_tokens(state)[-1] in (3, 4)
    assert state.finished == ["stop" if is_end else "length" if len(block) >= limit else None]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from(["ab", "aab", "c", "ccb"]),
)
def test_the_first_stop_string_cuts_a_block(blocks, stop):
    """Catches a stop string that lies over the border of two blocks, or stands twice in one."""
    state, text = one_slot(stop=(stop, "zz")), letters([token for block in blocks for token in block])
    for block in blocks:
        committed(state, block)
        if state.finished[0]:
            break
    found = text.find(stop)
    wanted = text if found < 0 else text[: found + len(stop)]
    assert letters(new_tokens(state)) == wanted
    assert state.finished == [None if found < 0 else "stop"]


def test_an_end_token_wins_over_a_stop_string_behind_it():
    """Catches a stop string over the border of the prompt, and one of tokens behind an end token."""
    state = one_slot(stop=("ab",), prompt=(1, 0))
    committed(state, [1, 1])
    assert state.finished == [None]
    state = one_slot(ends={2}, stop=("ba",))
    committed(state, [0, 2, 1, 0])
    assert (new_tokens(state), state.finished) == ([0, 2], ["stop"])


def test_a_slot_used_again_tells_no_text_of_the_request_before():
    """Catches a request without a detokenizer that is given the last piece of text of the slot's former one."""
    state = one_slot()
    for request, text in ((None, "cd"), (Request([1, 2], 4, Sampling()), "")):
        if request:
            state.free(0)
            state.admit(0, request)
            assert state.judge.text(0) == ""
        committed(state, [2, 3])
        assert state.judge.text(0) == text


@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 5)])
def test_a_judge_of_temperature_alone_says_what_the_full_one_says(shape):
    """Catches two judges that read one temperature in two ways, and a greedy slot warmed by its neighbour."""
    logits = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for temperatures in ([0.0, 0.7, 1.3], [0.0, 0.0, 0.0], [1.0, 1.0, 0.5]):
        states = [DecodeState(3, 100, judge=judge) for judge in (Judge(), SamplingJudge())]
        for state in states:
            for row, temperature in enumerate(temperatures):
                state.admit(row, Request([1], 5, Sampling(temperature)))
        plain, full = (state.judge for state in states)
        assert (plain.temperature is None) == (full.temperature is None) == (not any(temperatures))
        torch.testing.assert_close(plain.distribution(logits), full.distribution(logits), rtol=1e-6, atol=1e-7)


def test_a_slot_with_a_seed_drafts_with_the_targets_noise_unless_told_otherwise():
    """Catches a seed that shares its noise where that was refused, and a slot without one that does."""
    for shared, wanted in ((True, [False, True]), (False, None)):
        state = DecodeState(2, 100, shared_noise=shared)
        state.admit(0, Request([1], 5, Sampling(1.0)))
        state.admit(1, Request([1], 5, Sampling(1.0, seed=4)))
        assert (None if state.seeded is None else state.seeded.tolist()) == wanted
        assert int(state.noise_seeds[1]) == 4
        state.free(1)
        assert state.seeded is None
