"""The engine beside `generate`: calls that come, go, fail and are cancelled never change each other's texts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import Case
from lab.test_counterfactual import Neighbours
from torch import Tensor

from outrider import generation
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Pace
from outrider.decoding.state import DecodeState, Request
from outrider.errors import DataError
from outrider.lab.judges.counterfactual import Counterfactual
from outrider.policies.lossy import LossyJudge
from outrider.sampling.settings import Sampling
from outrider.serve.calls import Call, EngineStopped, Output, QueueFull, WaitingCalls
from outrider.serve.engine import INTERNAL, Engine
from outrider.serve.records.metrics import Telemetry
from outrider.targets.hf.transformers import TransformersTarget

SECONDS = 60.0
"""After which a test gives up waiting."""


@dataclass
class Caller:
    """One call and what it was given."""

    call: Call
    outputs: list[Output] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    on_output: Callable[[Output], None] = lambda output: None

    @staticmethod
    def of(request: Request, **settings: Any) -> Caller:
        caller = Caller(Call(request, lambda output: caller.receive(output), **settings))
        return caller

    def receive(self, output: Output) -> None:
        self.outputs.append(output)
        self.on_output(output)
        if output.finish_reason is not None:
            self.over.set()

    def wait(self) -> Caller:
        assert self.over.wait(SECONDS), "the call did not end"
        return self

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def reason(self) -> str | None:
        """How it ended; an output after the last is an error."""
        reasons = [output.finish_reason for output in self.outputs]
        assert reasons.count(None) == len(reasons) - 1 and reasons[-1] is not None, reasons
        return reasons[-1]


def request(prompt: Sequence[int], new: int, **settings: Any) -> Request:
    own = {name: settings.pop(name) for name in list(settings) if name in Request.__dataclass_fields__}
    return Request(list(prompt), new, Sampling(**settings), **own)


def alone(target: TransformersTarget, asked: Request) -> list[int]:
    """What `generate` writes for a request by itself, without a drafter."""
    [only] = generation.generate(target, [asked.prompt], max_new_tokens=asked.max_new_tokens, sampling=asked.sampling)
    return only.tokens


def served(engine: Engine, asked: Sequence[Request]) -> list[Caller]:
    """All of these at once, to their ends."""
    callers = [Caller.of(each) for each in asked]
    for caller in callers:
        engine.submit(caller.call)
    return [caller.wait() for caller in callers]


def mixed(prompts: Sequence[Sequence[int]], count: int, seed: int = 0) -> list[Request]:
    """Requests of unequal lengths, greedy and seeded, some without drafts."""
    draw = random.Random(seed)
    return [
        request(
            [*draw.choice(prompts), *(draw.randrange(64) for _ in range(draw.randrange(40)))], draw.randrange(1, 40),
            **draw.choice([{}, {}, {"temperature": 0.8, "seed": n}, {"presence_penalty": 0.5}]),
            max_draft=draw.choice([None, None, 0, 2]),
        )
        for n in range(count)
    ]  # fmt: skip


def test_every_text_is_what_the_target_alone_writes(target, prompts, drafter_of):
    asked = mixed(prompts, 14)
    with Engine(target, drafter_of(Case("eagle3")), slots=4, length=128) as engine:
        callers = []
        for n, each in enumerate(asked):
            callers.append(Caller.of(each, owner=str(n % 3)))
            engine.submit(callers[-1].call)
            time.sleep(0.002 * (n % 4))
        for caller in callers:
            caller.wait()
    assert [caller.tokens for caller in callers] == [alone(target, each) for each in asked]
    assert engine.running == engine.queued == 0
    assert not engine.state.requests
    assert sum(caller.call.accepted for caller in callers) > 0


def test_a_cancelled_call_gives_its_slot_to_the_next(target, prompts):
    """Catches a slot that is kept until the text of nobody would have ended, and a client told before its time."""
    with Engine(target, slots=1, length=128) as engine:
        long, short = Caller.of(request(prompts[0], 100)), Caller.of(request(prompts[2], 5))
        long.on_output = lambda output: engine.cancel(long.call)
        engine.submit(long.call)
        engine.submit(short.call)
        assert long.wait().reason == "cancelled" and short.wait().reason == "length"
        assert len(long.tokens) < 50 and long.tokens == alone(target, long.call.request)[: len(long.tokens)]
        assert short.tokens == alone(target, short.call.request)


def test_a_judge_with_passes_of_its_own_serves_as_it_generates(target, prompts):
    """Catches a judge that gets no target here and a second text of the request that had the slot before."""
    rule = lambda: LossyJudge(Counterfactual({(3,): (9,), (9,): (3, 3)}, 2.0))
    asked = [request(prompt, 9) for prompt in [*prompts[:3], [3] * 150, [9] * 3]]
    with Engine(target, Neighbours(), slots=3, length=200, verification=rule()) as engine:
        callers = served(engine, asked)
    wanted = [
        generation.generate(target, [each.prompt], Neighbours(), max_new_tokens=9, verification=rule())[0].tokens
        for each in asked
    ]
    assert [caller.tokens for caller in callers] == wanted != [alone(target, each) for each in asked]


def by_pieces(patch: pytest.MonkeyPatch, most: int) -> None:
    """Prompts are read in such pieces beside other texts, whatever the time."""
    patch.setattr(Pace, "most", lambda pace, live, reading: most if live else pace.chunk)


def test_a_slot_that_is_new_reads_its_prompt_beside_others(target, monkeypatch):
    by_pieces(monkeypatch, 64)
    first = Caller.of(request([1, 2, 3], 60))
    long = Caller.of(request([n % 64 for n in range(180)], 4))
    between = []
    with Engine(target, slots=2) as engine:
        first.on_output = lambda output: (
            between.append(engine.state.prefilled[1]) if len(first.outputs) > 2 else engine.submit(long.call)
            if len(first.outputs) == 2 else None
        )  # fmt: skip
        engine.submit(first.call)
        assert first.wait().tokens == alone(target, first.call.request)
        assert long.wait().tokens == alone(target, long.call.request)
    assert 128 in between  # after one piece, while the other slot went on
    assert 179 in between


@pytest.mark.parametrize(("writing", "count"), [(1, 6), (4, 2)], ids=["in one piece", "in two pieces"])
def test_calls_that_come_together_share_what_the_first_has_read(writing, count, target, drafter_of, monkeypatch):
    """Catches a store that is asked at admission alone, when nobody has read the beginning yet, and tokens that are
    counted twice where a beginning is taken over piece by piece; pieces end within blocks."""
    by_pieces(monkeypatch, 24)
    shared = [(7 * n + n // 9) % 64 for n in range(200)]
    asked = [request([*shared, n], 9) for n in range(count)]
    telemetry = Telemetry("tiny", 6)
    with Engine(
        target, drafter_of(Case("dspark")), slots=6, length=256, prefix_bytes=2**26, telemetry=telemetry
    ) as engine:  # fmt: skip
        warm = [Caller.of(request([1], 60)) for _ in range(writing)]
        # all are in the queue before the engine's thread gets to them
        warm[-1].on_output = lambda output: (
            [engine.submit(caller.call) for caller in callers] if len(warm[-1].outputs) == 1 else None
        )  # fmt: skip
        callers = [Caller.of(each) for each in asked]
        for each in warm:
            engine.submit(each.call)
        for caller in callers:
            caller.wait()
    assert [caller.tokens for caller in callers] == [alone(target, each) for each in asked]
    assert [caller.call.cached for caller in callers] == [0] + (count - 1) * [192]
    assert telemetry.snapshot()["totals"]["prefix_cache_hits"] == (count - 1) * 192


def test_a_full_queue_and_a_stopped_engine_refuse(target):
    with Engine(target, slots=1, queue=2, length=100) as engine:
        callers = [Caller.of(request([1], 90)) for _ in range(4)]
        callers[0].on_output = lambda output: time.sleep(0.002)
        engine.submit(callers[0].call)
        while not callers[0].outputs:
            time.sleep(0.001)
        engine.submit(callers[1].call)
        engine.submit(callers[2].call)
        with pytest.raises(QueueFull, match="2 requests are waiting") as full:
            engine.submit(callers[3].call)
        assert full.value.retry_after_s >= 1
        with pytest.raises(DataError, match="120 tokens, and prompt and answer have at most 100"):
            engine.submit(Call(request(range(120), 1), print))
        engine.stop(drain_s=SECONDS)
        with pytest.raises(EngineStopped):
            engine.submit(callers[3].call)
        assert [len(caller.wait().tokens) for caller in callers[:3]] == [90, 90, 90]


def test_calls_that_wait_end_with_the_engine(target):
    """Catches clients that wait forever for an engine that has stopped."""
    with Engine(target, slots=1, length=100) as engine:
        callers = [Caller.of(request([1], 90)) for _ in range(3)]
        callers[0].on_output = lambda output: time.sleep(0.002)
        for caller in callers:
            engine.submit(caller.call)
        while not callers[0].outputs:
            time.sleep(0.001)
        engine.stop()
    assert [caller.wait().reason for caller in callers] == ["error"] * 3


def test_owners_take_turns():
    waiting = WaitingCalls(10)
    calls = {name: [Call(request([1], 1), print, owner=name) for _ in range(count)] for name, count in
             {"busy": 4, "calm": 2, "rare": 1}.items()}  # fmt: skip
    for own in calls.values():
        for call in own:
            waiting.push(call)
    assert waiting.remove(calls["busy"][1])
    assert not waiting.remove(calls["busy"][1])
    order = [waiting.take(waiting.next({}, 16)) for _ in range(len(waiting))]
    assert [call.owner for call in order] == ["busy", "calm", "rare", "busy", "calm", "busy"]
    assert [call for call in order if call.owner == "busy"] == [calls["busy"][n] for n in (0, 2, 3)]


class Broken(Drafter):
    """Drafts token 1 three times, until the given call of one of its methods, in which it does `fault`."""

    limit = 3

    def __init__(self, method: str, at: int, fault: Callable[[], Any]):
        self.method, self.at, self.fault, self.count = method, at, fault, 0

    def _turn(self, method: str) -> Any:
        self.count += method == self.method
        return self.fault() if method == self.method and self.count == self.at else None

    def admit(self, *_: Any) -> None:
        self._turn("admit")

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        given = self._turn("propose")
        tokens = torch.ones(len(state.rows), 3, dtype=torch.int64)
        return Draft.chain(tokens, budget.clamp(max=3)) if given is None else given

    def observe(self, *_: Any) -> None:
        self._turn("observe")

    def free(self, *_: Any) -> None:
        self._turn("free")


def raising() -> Any:
    raise RuntimeError("a bug of the drafter")


RELEASED = threading.Event()
"""Lets drafters that hang return at the end."""


def hanging() -> Any:
    RELEASED.wait(SECONDS)


@pytest.mark.parametrize(
    ("method", "at", "fault", "alarm"),
    [
        ("admit", 1, raising, "drafter_raised"), ("propose", 1, hanging, "drafter_hung"),
        ("propose", 3, lambda: "no draft", "drafter_raised"), ("observe", 3, hanging, "drafter_hung"),
        ("free", 1, raising, "drafter_raised"),
    ],
)  # fmt: skip
def test_a_drafter_that_breaks_is_switched_off_and_texts_go_on(target, prompts, method, at, fault, alarm):
    RELEASED.clear()
    asked, alarms = mixed(prompts, 5, seed=2), list[str]()
    engine = Engine(target, Broken(method, at, fault), slots=3, length=128, drafter_timeout_s=0.2, policy="fixed")
    engine.drafter.alarm = alarms.append
    with engine:
        found = [caller.tokens for caller in served(engine, asked)]
        RELEASED.set()
        assert served(engine, asked[:1])[0].tokens == found[0]
    assert found == [alone(target, each) for each in asked]
    assert engine.is_degraded
    assert alarms == [alarm]


def test_a_drafter_that_hangs_when_texts_end_ends_them_once(target):
    RELEASED.clear()
    with Engine(target, Broken("free", 1, hanging), slots=3, drafter_timeout_s=0.2) as engine:
        callers = [Caller.of(request([n], 6, max_draft=0)) for n in (1, 2, 3)]
        with engine._changed:  # admitted in one turn, so that they end in one step
            for caller in callers:
                engine.submit(caller.call)
        last = Caller.of(request([4], 3))
        for caller in callers:
            caller.wait()
        engine.submit(last.call)
        assert last.wait().reason == "length"
        assert [caller.reason for caller in callers] == ["length"] * 3
    RELEASED.set()


def test_ids_outside_the_vocabulary_are_an_alarm_and_change_nothing(target):
    wild = Broken("propose", 2, lambda: Draft.chain(torch.full((1, 3), 10**9), torch.tensor([3])))
    engine, alarms = Engine(target, wild, slots=1, policy="fixed"), list[str]()
    engine.telemetry.alarm = alarms.append  # type: ignore[method-assign]
    with engine:
        [caller] = served(engine, [request([1, 2, 3], 30)])
    assert caller.tokens == alone(target, caller.call.request)
    assert alarms == ["invalid_draft"]
    assert not engine.is_degraded


@pytest.mark.parametrize("fault", [lambda scores: torch.full_like(scores, -torch.inf), lambda scores: raising()])
def test_a_request_that_leaves_no_token_fails_alone(target, fault):
    wrong = lambda ids, scores: scores if ids.shape[1] < 8 else fault(scores)
    asked = [request([1, 2, 3], 40), request([4, 5], 40, processors=[wrong]), request([6], 40, temperature=1, seed=3)]
    with Engine(target, slots=3) as engine:
        callers = served(engine, asked)
    assert callers[1].reason == "error"
    error = callers[1].outputs[-1].error
    assert "leave no token possible" in error or error == INTERNAL
    if error != INTERNAL:
        assert [callers[n].tokens for n in (0, 2)] == [alone(target, asked[n]) for n in (0, 2)]
