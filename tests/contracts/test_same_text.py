"""A greedy text does not depend on the load: the same alone and among others, with drafts and without."""

import pytest

from outrider import demo
from outrider.generation import generate
from outrider.loading import load_drafter
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

NEW = 20


@pytest.fixture(scope="module")
def demo_target() -> TransformersTarget:
    return load_target("demo")


@pytest.fixture(scope="module")
def alone(demo_target: TransformersTarget) -> list[list[int]]:
    """The texts after each prompt, one at a time."""
    return [generate(demo_target, [prompt], max_new_tokens=NEW)[0].tokens for prompt in prompts()]


def prompts() -> list[str]:
    return [text for _, text in demo.prompts("held_out", 16)]


@pytest.mark.parametrize("drafter", [None, "ngram", "suffix"])
def test_a_greedy_text_is_the_same_at_any_load(
    demo_target: TransformersTarget, alone: list[list[int]], drafter: str | None
) -> None:
    """Catches a kernel, a shape of a pass or a cache that rounds otherwise for 16 texts than for one.  The demo target
    as a user gets it, in its own precision and on its fast paths.  Not random."""
    drafting = None if drafter is None else load_drafter(drafter, demo_target)
    together = generate(demo_target, prompts(), drafting, max_new_tokens=NEW, slots=16, policy="fixed")
    assert [text.tokens for text in together] == alone
    assert len({tuple(tokens) for tokens in alone}) > 10
