"""Whole steps that were captured write what plain steps write.

No GPU is needed: a record of the step's operations stands for its graph.
"""

import functools
import itertools
import secrets
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Case, Workshop, first, tiny_model

from benchmarks.recording import Recording
from outrider import generation
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.drafters.small_model import Config, SmallModel
from outrider.fast import runner
from outrider.fast.gpu import cuda_graphs
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.runner import using, wrong
from outrider.fast.static import step as static
from outrider.fast.whole import graphs as step_graphs
from outrider.fast.whole import steps as whole_step
from outrider.fast.whole.package import CompiledWholeStep
from outrider.fast.whole.steps import WholeSteps, is_compiled
from outrider.policies.fixed import Fixed
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.cache import stacks
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

V, STOP, ENDS = 16, 7, frozenset({2})
CASES = [
    Case("eagle3", {"width": 3, "nodes": 7}), Case("dspark"), Case("medusa", {"sequential": True}), Case("small_model"),
    Case("medusa"), Case("mtp"), Case("mtp", {"modules": 1}), Case("eagle3"), Case("dflash"),
    Case("dflash", {"siblings": (2, 1)}), Case("dflash2"), Case("dflash2", {"nodes": 7}),
    Case("domino"), Case("eagle"), Case("mtp", {"width": 2, "nodes": 9}),
    Case("eagle", {"width": 3, "replacement": True}), Case("medusa", {"drawn": False}),
    Case("medusa", {"sequential": True, "drawn": False}), Case("small_model", {"width": 2, "nodes": 9}),
]  # fmt: skip
SAMPLINGS = {
    "greedy": [Sampling()],
    "cut": [Sampling(temperature=0.9, top_k=6, top_p=0.9), Sampling(temperature=0.8, min_p=0.1, seed=2), Sampling()],
    "mixed": [Sampling(temperature=0.9, seed=3), Sampling(), Sampling(temperature=0.8)],
    "sampled": [Sampling(temperature=0.8), Sampling(temperature=1.2, seed=5)],
}


def cells(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Every case with every sampling; the first of them have each case once."""
    kinds = [*SAMPLINGS]
    return [(case, kinds[(n + shift) % len(kinds)]) for shift in range(len(kinds)) for n, case in enumerate(cases)]


LENGTHS, COUNTS = (5, 1, 11, 17, 1, 30), (22, 17, 1, 30, 9, 12)
"""Tokens of prompts, and of their answers at most."""


class Stops(SamplingJudge):
    """Ends a text at the second of a token that the device does not know as an end, as a stop string does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[int] = Counter()

    def admit(self, row: int, *more: Any) -> None:
        super().admit(row, *more)
        self.seen[row] = 0

    def read(self, row: int, tokens: list[int], is_last: bool) -> tuple[int, bool]:
        for i, token in enumerate(tokens):
            self.seen[row] += token == STOP
            if self.seen[row] == 2:
                return i + 1, True
        return len(tokens), False


def taken_as_it_is(self: CompiledWholeStep, build: bool) -> None:
    """In place of a package, what it would be made of."""
    self.example()  # opens the caches of what is traced
    self.graph = SimpleNamespace(forward=torch.inference_mode()(self.traced))


@pytest.fixture(scope="module")
def small() -> TransformersTarget:
    """Few tokens, so that drafts of untrained models are accepted now and then."""
    return load_target(tiny_model(vocab_size=V, num_hidden_layers=2), compile=False)


@pytest.fixture(autouse=True)
def few_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches grow while texts do, and many sizes are captured."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 32)
    monkeypatch.setattr(stacks.lazy_memory, "comes_by_page", lambda device: False)
    monkeypatch.setattr(stacks, "FIRST", 40)


@pytest.fixture
def drafter_for(workshop: Workshop, small: TransformersTarget) -> Any:
    return lambda case: workshop.build(case, small)


def requests_of(samplings: Sequence[Sampling]) -> list[Request]:
    noise = torch.Generator().manual_seed(7)
    prompts = [torch.randint(V, (length,), generator=noise).tolist() for length in LENGTHS]
    settings = itertools.cycle(samplings)
    return [Request(prompt, count, next(settings)) for prompt, count in zip(prompts, COUNTS, strict=True)]


class AfterFirst(Fixed):
    """As much as the drafter offers, but nothing in a text's first step, as where slots join a whole step."""

    def budget(self, state: DecodeState) -> torch.Tensor:
        is_first = [len(state.tokens[row]) == len(state.requests[row].prompt) for row in state.rows]
        return super().budget(state).masked_fill(torch.tensor(is_first), 0)


def written(
    target: Any, drafter: Any, requests: list[Request], recorder: Any = None, slots: int = 3, packages: bool = False
) -> list[Any]:
    """Tokens, reason, accepted tokens and depths of drafts of every request: by plain steps, recorded ones or those of
    a package."""
    state, whole = DecodeState(slots, target.spec.context, ENDS, target.device, Stops()), None
    policy: Fixed = AfterFirst(drafter.limit)
    if recorder is not None or packages:
        policy = Fixed(drafter.limit)
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        before = vars(drafter).pop("whole", None)
        if before is not None and before.serves(target, drafter, slots, longest, ENDS):
            whole = before
        else:
            whole = WholeSteps(target, drafter, slots, longest, ENDS, recorder=recorder, builds=True)
    steps = advance(target, requests, drafter, policy, state, fast=lambda _length: whole)
    found: list[Any] = [[[], None, 0, 0] for _ in requests]
    with pytest.MonkeyPatch.context() as patch:
        seeds = iter(range(1000))
        patch.setattr(secrets, "randbits", lambda _bits: next(seeds))
        for step in steps:
            own = found[step.request]
            own[0], own[1] = own[0] + step.tokens, step.finish_reason
            own[2], own[3] = own[2] + step.accepted, own[3] + step.reached
    return found


@pytest.mark.parametrize("cell", first(cells(CASES), 6), ids=lambda cell: "-".join(map(str, cell)))
def test_captured_steps_write_what_plain_ones_write(cell, small, drafter_for):
    """Uneven prompts, slots that are used again, ends by token, length and the host's stop, caches that grow.

    Catches a length that is not advanced, a tensor that is bound anew, a buffer that is not restored after recording,
    tokens behind a stop, and noise that depends on more than a slot's text.
    """
    case, kind = cell
    drafter, requests, graph = drafter_for(case), requests_of(SAMPLINGS[kind]), Recording()
    plain, found = written(small, drafter, requests), written(small, drafter, requests, graph)
    if kind in ("mixed", "cut"):  # slots go from steps of greedy requests to others and back, and lose a draft
        plain, found = ([own[:2] + [1] for own in texts] for texts in (plain, found))
    assert found == plain
    assert sum(accepted for _, _, accepted, *_ in plain) > 0
    assert {reason for _, reason, *_ in plain} >= {"stop", "length"}
    assert 1 < graph.recorded < graph.replayed


@pytest.mark.parametrize("shape", [{}, {"width": 2}], ids=["chain", "tree"])
def test_drafts_that_are_right_are_kept(shape, small):
    """Catches captured steps that agree with plain ones because nothing is ever accepted."""
    drafter, requests = SmallModel(small, Config(length=4, **shape)), requests_of([Sampling()])
    plain, found = (written(small, drafter, requests, graph) for graph in (None, Recording()))
    # of a text that is nearly over plain steps draft a smaller tree, and this the first nodes of the usual one
    assert [own[:3] for own in found] == [own[:3] for own in plain]
    assert sum(accepted for _, _, accepted, _ in found) > sum(len(tokens) for tokens, *_ in found) / 2


def test_captures_serve_the_next_call(small, drafter_for):
    """Catches captures that are made anew for every call, those of greedy steps that serve sampled ones, and a slot in
    which something of the call before is left."""
    drafter, graph = drafter_for(Case("eagle3")), Recording()
    for kind in ("greedy", "sampled", *["greedy"] * 3):  # in the second of them no cache grows any more
        before, wanted = graph.recorded, requests_of(SAMPLINGS[kind])
        assert written(small, drafter, wanted, graph) == written(small, drafter, wanted)
        made = graph.recorded - before
    assert made == 0
    short, long = requests_of([Sampling()])[1:2] * 3, [Request([1] * 100, 40, Sampling())] * 3
    assert written(small, drafter, short, graph) == written(small, drafter, short) and graph.recorded == before
    assert written(small, drafter, long, graph) == written(small, drafter, long) and graph.recorded > before


# ── as callers get it ─────────────────────────────────────────────────────────────────────────────────────────────────

ASKED: dict[str, Any] = {"max_new_tokens": 12, "policy": "fixed", "sampling": Sampling(temperature=0.7, seed=2)}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every caller takes whole steps, as on a GPU; what was launched."""
    launched: list[tuple[Any, ...]] = []
    real = step_graphs.StepGraphs.launch
    monkeypatch.setattr(
        step_graphs.StepGraphs, "launch", lambda self, *given: (launched.append(given), real(self, *given))[1]
    )
    monkeypatch.setattr(runner, "is_compiled", lambda target: True)
    monkeypatch.setattr(runner, "is_on_disk", lambda: True)
    monkeypatch.setattr(runner, "_pays", lambda target, drafter: True)
    made = functools.partial(WholeSteps, recorder=step_graphs.rerunning)
    monkeypatch.setattr(runner, "WholeSteps", made)
    return launched


def test_generate_takes_whole_steps_by_itself(small, drafter_for, recorded):
    """Catches a runner that nobody uses, and one that writes otherwise."""
    drafter, prompts = drafter_for(Case("dspark")), [[1, 2, 3], [4], [5, 6]]
    assert not wrong(small, drafter)
    recorded.clear()
    found = generation.generate(small, prompts, drafter, **ASKED)
    assert recorded
    with using("none"):
        plain = generation.generate(small, prompts, drafter, **ASKED)
    assert [one.tokens for one in found] == [one.tokens for one in plain]


@pytest.mark.parametrize("policy", ["auto", "fixed"])
@pytest.mark.parametrize(
    "asked",
    [
        Sampling(temperature=0.7, seed=2, repetition_penalty=1.2), Sampling(logprobs=2), Sampling(min_new_tokens=9),
        Sampling(temperature=0.9, seed=1, typical_p=0.8), Sampling(temperature=0.9, seed=1),
    ],
    ids=["penalty", "log probabilities", "banned ends", "typical", "sampled"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dspark", "eagle3", "medusa", "small_model"])
def test_slots_change_runners_in_the_middle_of_their_texts(kind, asked, policy, small, drafter_for, recorded):
    """A request that needs the host comes and goes beside others: catches features that are lost or read twice, lengths
    of caches, and drafts of a text that has gone on meanwhile; they would be right for a text, and accepted less."""
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [3, 3]]
    requests = [Request(prompt, 40, Sampling()) for prompt in prompts]
    requests[2] = Request(prompts[2], 15, asked)
    drafter = drafter_for(Case(kind))
    assert not wrong(small, drafter)
    recorded.clear()
    both = []
    for use in ("known", "none"):
        with using(use):
            found: list[Any] = [[[], 0] for _ in requests]
            for step in generation.serve(small, requests, drafter, slots=2, policy=policy):
                found[step.request][0] += step.tokens
                found[step.request][1] += step.accepted
        both.append(found)
    assert recorded
    assert [tokens for tokens, _ in both[0]] == [tokens for tokens, _ in both[1]]
    if policy == "fixed":
        assert sum(accepted for _, accepted in both[0]) > 0.8 * sum(accepted for _, accepted in both[1])


class Moody(Fixed):
    """Wants no drafts in every fifth step, which is then one of several calls."""

    steps = 0

    def budget(self, state: DecodeState) -> torch.Tensor:
        self.steps += 1
        return super().budget(state) * (self.steps % 5 > 0)


SEEDED = [Sampling(temperature=0.9, seed=3), Sampling(), Sampling(temperature=0.8, seed=4), Sampling()]


class Seldom(WholeSteps):
    """Takes no more than two steps one after another; drafts are made between them by several calls too."""

    asked = 0

    def prepare(self, state: DecodeState) -> bool:
        self.asked += 1
        if self.asked % 4 < 2:
            self.leave(state)
            return False
        return super().prepare(state)


@pytest.mark.parametrize("way", ["graphs", "package", "graphs alone"])
@pytest.mark.parametrize(
    ("kind", "samplings"),
    [
        ("dspark", [Sampling()]), ("eagle3", [Sampling()]), ("mtp", [Sampling()]), ("medusa", [Sampling()]),
        ("small_model", [Sampling()]), ("dspark", SEEDED), ("eagle3", SEEDED),
    ],
    ids=["dspark", "eagle3", "mtp", "medusa", "small_model", "dspark-mixed", "eagle3-mixed"],
)  # fmt: skip
def test_what_is_drafted_does_not_depend_on_the_runner(kind, samplings, way, small, drafter_for, monkeypatch):
    """Catches features that are lost or read twice where a slot changes its runner, and caches that are longer there
    than what was read: texts stay right, and what an untrained model drafts tells all the same."""
    drafter, drafted, real = drafter_for(Case(kind)), dict[tuple[int, ...], list[int]](), DecodeState.commit

    def noted(state: DecodeState, draft: Any, accepted: Any) -> Any:
        for b, row in enumerate(state.rows):
            drafted[tuple(state.tokens[row])] = draft.ids[b][: draft.live[b]]
        return real(state, draft, accepted)

    monkeypatch.setattr(DecodeState, "commit", noted)
    monkeypatch.setattr(whole_step, "is_compiled", lambda target: True)
    monkeypatch.setattr(CompiledWholeStep, "get", taken_as_it_is)
    requests, found = requests_of(samplings), list[dict[tuple[int, ...], list[int]]]()
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    moody = Fixed(drafter.limit) if way == "graphs alone" else Moody(drafter.limit)
    for policy, is_whole in ((Fixed(drafter.limit), False), (moody, True)):
        drafted.clear()
        recorder = None if way == "package" else step_graphs.rerunning
        runner = WholeSteps if way == "graphs alone" else Seldom
        whole = runner(small, drafter, 3, longest, ENDS, recorder=recorder) if is_whole else None
        state = DecodeState(3, small.spec.context, ENDS, small.device, Stops())
        for _ in advance(small, requests, drafter, policy, state, fast=lambda _length, own=whole: own):
            pass
        found.append(dict(drafted))
    both = [(one, found[1][text]) for text, one in found[0].items() if one and found[1].get(text)]
    assert len(both) >= 8
    assert all(one[: len(other)] == other[: len(one)] for one, other in both)


def test_whoever_watches_drafts_or_passes_sees_all_of_them(small, drafter_for, recorded, monkeypatch):
    """Catches whole steps behind the back of a judge, or of what stands for a target, that records what it is given:
    traces of `evaluate` were empty, and so were confidences to calibrate by."""
    drafter = drafter_for(Case("dspark"))
    seen = list[int]()

    class Noting(SamplingJudge):
        def __call__(self, draft: Any, scores: Any, state: DecodeState) -> Any:
            seen.extend(draft.live)
            return super().__call__(draft, scores, state)

    wrong(small, drafter)
    recorded.clear()
    generation.generate(small, [[1, 2, 3]], drafter, max_new_tokens=12, policy="fixed", verification=Noting())
    assert seen and not recorded
    monkeypatch.setattr(runner, "is_compiled", is_compiled)
    monkeypatch.setattr(type(small.step), "graph", CudaGraphs(torch.nn.Identity()), raising=False)
    assert not is_compiled(SimpleNamespace(step=small.step))


def test_a_batch_that_is_in_use_is_not_given_to_another_call(small, drafter_for, recorded):
    """Catches two calls that write into the same caches."""
    drafter = drafter_for(Case("eagle3"))

    def streamed():
        return generation.stream(small, [[1, 2, 3], [4]], drafter, max_new_tokens=12, policy="fixed")

    alone = [piece.tokens for piece in streamed()]
    one, other = zip(*zip(streamed(), streamed(), strict=True), strict=True)
    assert [piece.tokens for piece in one] == [piece.tokens for piece in other] == alone


def test_steps_are_plain_where_whole_ones_write_other_texts(small, drafter_for, monkeypatch, caplog, recorded):
    """Catches a graph that is used though it is wrong."""
    drafter, advance = drafter_for(Case("dspark")), static._advance
    monkeypatch.setattr(static, "_advance", lambda slots, *more: (advance(slots, *more), slots.length.sub_(1)))
    assert wrong(small, drafter)
    recorded.clear()
    found = generation.generate(small, [[1, 2, 3]], drafter, **ASKED)
    assert not recorded and "steps take several calls" in caplog.text
    with using("none"):
        assert found == generation.generate(small, [[1, 2, 3]], drafter, **ASKED)
