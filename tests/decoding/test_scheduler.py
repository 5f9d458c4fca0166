"""What the scheduler promises to those who add, cancel and ask for steps, while texts come and go."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from contracts.parties import Proposer, TableTarget
from hypothesis import given
from hypothesis import strategies as st

from outrider.decoding import scheduler
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Pace, Progress, Scheduler, chunk_sizes, draft_columns
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError
from outrider.generation import batch, generate
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

TABLE = TableTarget.random(6)
LENGTH = 200


class Random(Proposer):
    """Drafts that are right by chance."""

    limit = 3

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        tokens = torch.randint(6, (len(state.rows), self.limit), generator=memory)
        return Draft.chain(tokens, budget.clamp(max=self.limit))


def scheduled(slots: int, drafter: Drafter | None = None, **more: Any) -> Scheduler:
    drafter = Random() if drafter is None else drafter
    return Scheduler(TABLE, drafter, Fixed(drafter.limit), batch(TABLE, slots), LENGTH, **more)


def alone(request: Request) -> list[int]:
    return generate(TABLE, [request.prompt], max_new_tokens=request.max_new_tokens)[0].tokens


def asked(count: int, new: int = 9) -> list[Request]:
    return [Request([n % 6, (n * n) % 6], new + n % 4, Sampling()) for n in range(count)]


@pytest.mark.parametrize("is_patient", [True, False])
@given(st.integers(1, 3), st.lists(st.sampled_from(["add", "step", "cancel"]), max_size=40), st.data())
def test_texts_are_their_own_whatever_comes_and_goes(is_patient, slots, events, data):
    """Catches tokens that are given twice or not at all, a slot that is kept, and one that two requests have."""
    texts, requests, gone, own = defaultdict[int, list[int]](list), dict[int, Request](), set[int](), iter(asked(99))
    there = scheduled(slots, is_patient=is_patient)

    def step() -> None:
        found = there.step()
        assert len({each.row for each in found}) == len(found) <= slots
        for each in found:
            assert each.request not in gone and each.error is None
            texts[each.request] += each.tokens
            if each.finish_reason is not None:
                gone.add(each.request)

    for event in events:
        if event == "add":
            request = next(own)
            number = there.add(request)
            assert number == len(requests)
            requests[number] = request
        elif event == "step":
            step()
        elif alive := sorted(requests.keys() - gone):
            number = data.draw(st.sampled_from(alive))
            there.cancel(number)
            gone.add(number)
            requests[number] = requests[number]
            assert number not in there.serving.values()
    for _ in range(2000):
        if not there.is_busy:
            break
        step()
    there.release()
    assert gone == requests.keys() and not there.serving and there.free == slots
    for number, request in requests.items():
        wanted = alone(request)
        assert texts[number] == wanted[: len(texts[number])]
        assert len(texts[number]) == len(wanted) or number in gone


def test_a_prompt_is_read_in_pieces_where_others_wait(monkeypatch):
    """Catches a long prompt that holds up a text, and one that is read in pieces where nobody waits."""
    monkeypatch.setattr(Pace, "most", lambda pace, live, reading: 8 if live else scheduler.PREFILL_CHUNK)
    long, short = Request([n % 6 for n in range(41)], 5, Sampling()), Request([3], 30, Sampling())
    for is_patient, steps in ((False, 5), (True, 1)):
        there = scheduled(2, is_patient=is_patient)
        there.add(short)
        there.step()
        there.add(long)
        there.add(short)  # waits for a slot, though one of the two takes part in no step yet
        written = list[Progress]()
        for _ in range(steps):
            assert all(each.request == 0 for each in written)
            written += there.step()
        assert [each.request for each in written].count(0) == steps and written[-1].request == 1
        assert there.read_tokens == 40


def test_a_text_waits_until_there_are_tokens_for_it():
    """Catches a budget that two texts exceed together, a short one that overtakes, and one that never comes."""
    tokens = 36 + 2 * draft_columns(Random())
    there = scheduled(3, tokens=tokens)
    for new in (20, 10, 2, 30):
        there.add(Request([1, 2, 3], new, Sampling()))
    live, order = [set[int]()], list[int]()
    while there.is_busy:
        for each in there.step():
            order += [each.request] if each.request not in order else []
        live.append({*there.serving.values()})
        held = sum(len(there.state.tokens[row]) for row in there.serving)
        assert held <= tokens
    assert order == [0, 1, 2, 3] and {0, 1, 2} not in live and {0, 1} in live
    there.release()
    assert there.fits(Request([1], 30, Sampling())) and there.fits(Request([1], 300, Sampling()))
    there.add(Request([1], 30, Sampling()))
    assert not there.fits(Request([1], 30, Sampling())) and there.fits(Request([1], 2, Sampling()))


def test_what_fails_ends_those_whom_it_concerns():
    """Catches an error of one text that ends the others, one that is swallowed, and a slot that is lost by it."""

    class Broken(Random):
        def admit(self, memory: Any, rows: Any, state: DecodeState, scores: Any, lengths: Any) -> None:
            if any(state.requests[row].tenant == "bad" for row in rows):
                raise ConfigError("a prompt that can't be read")

    there = scheduled(2, Broken())
    good, bad = Request([1, 2], 20, Sampling()), Request([1, 2], 20, Sampling(), tenant="bad")
    there.add(good)
    there.step()
    there.add(bad)
    found = there.step()
    [error] = [each for each in found if each.error is not None]
    assert error.request == 1 and "can't be read" in str(error.error) and not error.tokens
    assert [each.request for each in found if each.tokens] == [0]
    there.release()
    assert there.free == 1
    # what breaks a whole step ends everybody, or those who are suspected
    for suspects, ended in ((lambda state, error: [0], {0}), (None, {0, 1})):
        there = scheduled(2, **({} if suspects is None else {"suspects": suspects}))
        for request in asked(2, 30):
            there.add(request)
        there.step()
        there.policy.budget = None  # type: ignore[assignment]
        assert {each.request for each in there.step() if isinstance(each.error, TypeError)} == ended
        there.release()
        assert there.free == len(ended)


def test_what_a_lost_step_committed_is_given_out():
    """Catches tokens of a step whose thread was given up after its commit, and a text that ended in it."""

    class Gone(BaseException):
        pass

    class Leaving(Random):
        def observe(self, *given: Any) -> None:
            raise Gone

    there = scheduled(2, Leaving())
    requests = [Request([1, 2], 1, Sampling()), Request([4], 20, Sampling())]
    for request in requests:
        there.add(request)
    with pytest.raises(Gone):
        there.step()
    found = {each.request: each for each in there.step()}
    assert found[0].finish_reason == "length" and found[0].tokens == alone(requests[0])
    assert found[1].tokens == alone(requests[1])[: len(found[1].tokens)] != []


def test_a_prompt_holds_up_the_others_for_a_few_steps():
    """Catches a size that suits one machine, a single slow moment that decides for good, and the time of reading, or
    of an empty server, counted as a step's."""
    pace, now = Pace(512), 1.0
    assert (pace.most(0, 1), pace.most(3, 1)) == (512, 8)

    def pass_by(steps: int, step_s: float, token_s: float) -> None:
        nonlocal now
        for _ in range(steps):
            pace.read(100 * token_s, 100)
            now += step_s + 100 * token_s
            pace.stepped(now)

    pass_by(20, 0.1, 0.001)
    assert pace.most(3, 1) == 320
    pass_by(1, 0.2, 0.002)
    assert 280 <= pace.most(3, 1) <= 360
    pass_by(20, 0.02, 0.001)
    assert pace.most(1, 1) == 64 and pace.most(0, 1) == 512
    assert (pace.most(2, 4), pace.most(4, 2)) == (128, 64)  # more wait than write, or fewer
    pace.since = 0.0  # nobody is there for an hour
    now += 3600
    pass_by(1, 0.02, 0.001)
    assert pace.most(1, 1) == 64
    pass_by(20, 10.0, 0.001)
    assert pace.most(1, 1) == 512


@given(st.lists(st.integers(0, 900), min_size=1, max_size=9), st.integers(0, 20))
def test_pieces_keep_to_the_size_of_a_pass(lefts, live):
    """Catches a pass that is wider than it may be, an eldest prompt that waits, and a prompt that nobody reads."""
    most = Pace(512).most(live, 1)
    found = chunk_sizes(enumerate(lefts), most, lambda row, other: False)
    assert all(0 < count <= lefts[row] for row, count in found.items())
    assert len(found) * max(found.values(), default=0) <= max(most, 1) * (1 if len(found) > 1 else 1.5)
    first = next((row for row, left in enumerate(lefts) if left), None)
    assert first is None or found[first] == (lefts[first] if lefts[first] <= 1.5 * most else most)
    assert list(chunk_sizes(enumerate(lefts), most, lambda row, other: True))[1:] == []
