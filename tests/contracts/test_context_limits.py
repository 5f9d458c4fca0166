"""Texts at the end of the context: an exact answer, or a sentence that names the numbers; whatever drafts."""

from __future__ import annotations

import pytest
import torch
from serve.running import running

from outrider import generate, load_drafter
from outrider.drafters.small_model import Config, SmallModel
from outrider.errors import DataError

CONTEXT = 20
TEXT = [3, 9, 4] * 9
KINDS = pytest.mark.parametrize("kind", [None, "ngram", "suffix", "dspark", "eagle3", "medusa"])


@KINDS
@pytest.mark.parametrize("length", [CONTEXT - 6, CONTEXT - 2, CONTEXT - 1])
def test_an_answer_ends_with_the_context(kind, length, short_target, plain):
    """Catches a draft that is verified past the last position, and a text that is longer than the context."""
    torch.manual_seed(0)
    drafter = None if kind is None else load_drafter(kind, short_target)
    prompt = TEXT[:length]
    (found,) = generate(short_target, prompt, drafter, max_new_tokens=100, policy="fixed")
    assert found.tokens == plain(short_target, prompt, CONTEXT - length)
    assert found.finish_reason == "context" and len(found.tokens) == CONTEXT - length


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_a_prompt_that_leaves_no_room_is_refused_with_its_length(length, short_target):
    """Catches a prompt that is cut in silence."""
    with pytest.raises(DataError, match=f"prompt 0 has {length} tokens and leaves no room in .* context of {CONTEXT}"):
        generate(short_target, TEXT[:length], max_new_tokens=1)


def test_a_drafting_model_of_a_shorter_context_goes_on_drafting(target, short_target, plain):
    """Catches an error at its limit, drafts from positions that it never learnt, and drafts that end there."""
    drafter, count = SmallModel(short_target, Config(length=3)), 3 * CONTEXT
    (found,) = generate(target, TEXT[:8], drafter, max_new_tokens=count, policy="fixed")
    assert found.tokens == plain(target, TEXT[:8], count)
    assert sum(found.accepted[len(found.accepted) // 2 :]) > 0, "far beyond the limit nothing is drafted"


def test_a_server_says_what_is_left(short_target):
    """Catches an answer that is cut in silence where more was asked for than there is room for."""
    with running(short_target) as server:
        client = server.client()
        ask = lambda length, most: client.completions.create(model="tiny", prompt=TEXT[:length], max_tokens=most)
        assert ask(CONTEXT - 1, 1).choices[0].finish_reason == "length"
        for length, most, said in (
            (CONTEXT - 1, 2, f"after a prompt of {CONTEXT - 1} tokens there is room for 1"),
            (CONTEXT, 1, str(CONTEXT)), (CONTEXT + 1, 1, str(CONTEXT + 1)),
        ):  # fmt: skip
            with pytest.raises(Exception, match=said) as refused:
                ask(length, most)
            assert refused.value.status_code == 400  # type: ignore[attr-defined]
