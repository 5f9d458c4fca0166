"""When a drafter reads the target's features: ahead while it drafts, and not before it does while it does not."""

from itertools import pairwise
from typing import Any

import pytest
from conftest import Case

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.generation import generate
from outrider.nn.memory import FeatureBuffer
from outrider.policies.fixed import Fixed

PROMPTS = [[n % 64 for n in range(40)], [(3 * n) % 64 for n in range(40)], [(5 * n) % 64 for n in range(40)]]


@pytest.fixture(params=["dspark", "eagle3"])
def drafter(request, workshop, target) -> Drafter:
    return workshop.build(Case(request.param), target)


def reads(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the unread features of a slot each time that the drafter reads ahead."""
    found: list[int] = []
    read: Any = type(drafter).read

    def counted(self: Any, memory: Any, row: int, state: DecodeState) -> None:
        found.append(memory.features.count(row))
        read(self, memory, row, state)

    monkeypatch.setattr(type(drafter), "read", counted)
    return found


def texts(target, drafter, policy, count: int) -> list[list[int]]:
    return [one.tokens for one in generate(target, PROMPTS, drafter, max_new_tokens=count, policy=policy, slots=1)]


def test_prompts_are_read_ahead_while_it_drafts(target, drafter, monkeypatch):
    """Catches the last step of a text, which has no room for a draft, taken for a policy that wants none."""
    found = reads(drafter, monkeypatch)
    propose: Any = type(drafter).propose
    monkeypatch.setattr(type(drafter), "propose", lambda *given: (found.append(-1), propose(*given))[1])
    assert texts(target, drafter, Fixed(3), 2) == texts(target, None, Fixed(0), 2)
    ahead = [count for count, following in pairwise(found) if following == -1 and count >= len(PROMPTS[0]) - 2]
    assert len(ahead) == len(PROMPTS)


def test_no_more_than_a_bound_waits(target, drafter, monkeypatch):
    """Catches a drafter that is paid for whether it drafts or not."""
    found = reads(drafter, monkeypatch)
    texts(target, drafter, Fixed(0), 8)
    assert len(found) == 1
    monkeypatch.setattr(FeatureBuffer, "MAX_UNREAD", 8)
    monkeypatch.setattr(FeatureBuffer, "MAX_PASSES", 8)
    texts(target, drafter, Fixed(0), 30)
    assert len(found) >= 1 + 2 * len(PROMPTS)
    assert max(found) <= len(PROMPTS[0]) + 8
