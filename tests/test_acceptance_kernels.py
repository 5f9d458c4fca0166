"""Kernels that accept and draw, against the plain rule: a GPU's, run by Triton's interpreter where there is none, and a
CPU's."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState, Request, Scores, likeliest
from outrider.errors import DrafterError
from outrider.kernels import cpu_acceptance, gpu_acceptance, selection
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

KERNELS = pytest.mark.parametrize("kernels", [gpu_acceptance, *([cpu_acceptance] if DEVICE == "cpu" else [])])
FEW = settings(max_examples=15)
"""The interpreter takes a hundredth of a second for a chunk of a row."""


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Chunks of 64 tokens, so that a small vocabulary has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_acceptance, "CHUNK", 64)
        if DEVICE == "cpu":
            patch.setattr(
                interpreter.InterpretedFunction, "__call__", lambda self, *own, **named: self.rewrite()(*own, **named)
            )
        yield


class Case:
    """A draft, the target's logits, temperatures and noise, on the device that is tested."""

    def __init__(self, logits: Tensor, draft: Draft, temperature: Tensor, streams: Streams):
        on = lambda x: None if x is None else x.to(DEVICE)
        self.logits, self.temperature = on(logits), on(temperature)
        self.draft = replace(draft, tokens=on(draft.tokens), parents=on(draft.parents), q=on(draft.q))
        self.streams = Streams(on(streams.seeds), on(streams.index), on(streams.seeded))

    @property
    def p(self) -> Tensor:
        return distribution(self.logits, Settings(self.temperature, None, None))

    def found(self, kernels: Any = gpu_acceptance) -> Accepted:
        return selection.accepted(kernels.accept(self.draft, self.logits, self.temperature, self.streams))

    def wanted(self) -> Accepted:
        return accept(self.draft, self.p, self.streams)

    def is_tie(self) -> bool:
        """Whether changes of p by a hundred thousandth change what the rule accepts."""
        noise, wanted = torch.Generator().manual_seed(0), self.wanted()
        changed = (1 + 1e-5 * torch.randn(self.p.shape, generator=noise).to(self.p) for _ in range(40))
        return any(accept(self.draft, self.p * by, self.streams) != wanted for by in changed)


def masked(logits: Tensor, way: str) -> Tensor:
    """-inf for tokens that cuts of the distribution leave out."""
    if way == "some":
        logits = logits.masked_fill(torch.arange(logits.shape[-1]) % 3 == 1, -torch.inf)
    if way == "top_k":
        logits = logits.masked_fill(logits < logits.topk(min(3, logits.shape[-1])).values[..., -1:], -torch.inf)
    if way == "top_p":
        one = torch.ones(len(logits))
        logits = logits.masked_fill(distribution(logits, Settings(one, None, 0.7 * one)) == 0, -torch.inf)
    return logits


@st.composite
def cases(draw: Any) -> Case:
    slots, nodes, vocabulary = draw(st.integers(1, 3)), draw(st.integers(0, 4)), draw(st.sampled_from([2, 63, 64, 130]))
    noise, dtype = torch.Generator().manual_seed(seed := draw(st.integers(0, 2**20))), draw(st.sampled_from(TYPES))
    logits = 2 * torch.randn(slots, nodes + 1, vocabulary, generator=noise, dtype=torch.float64)
    is_chain = draw(st.booleans())
    parents = [n - 1 if is_chain else draw(st.integers(-1, n - 1)) for n in range(nodes)]
    above = logits[:, [1 + parent for parent in parents]]
    q = (above + torch.randn(above.shape, generator=noise)).softmax(-1)
    tokens = (
        q.flatten(0, 1).multinomial(1, generator=noise).view(slots, nodes) if nodes else q.new_empty(slots, 0).long()
    )
    odd = torch.rand(slots, nodes, generator=noise)
    tokens = torch.where(odd < 0.05, -1, torch.where(odd > 0.95, vocabulary + 2**33, tokens))
    one_hot = torch.nn.functional.one_hot(tokens.clamp(0, vocabulary - 1), vocabulary).double()
    kind = torch.rand(slots, nodes, 1, generator=noise)
    q = torch.where(kind < 0.2, one_hot, torch.where(kind < 0.25, torch.nan, torch.where(kind < 0.3, 2 * q, q)))
    sizes = torch.tensor([draw(st.integers(0, nodes)) for _ in range(slots)])
    which = draw(st.sampled_from(["dense", "dense", "none"]))
    given_q = q.to(torch.float64 if dtype == torch.float64 else torch.float32) if which == "dense" else None
    draft = Draft(
        tokens, torch.tensor(parents, dtype=torch.int64).expand(slots, -1), sizes, given_q, branches=not is_chain
    )
    heat = torch.tensor([draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0])) for _ in range(slots)])
    seeded = torch.tensor([draw(st.booleans()) for _ in range(slots)]) if draw(st.booleans()) else None
    cut = draw(st.sampled_from(["none", "some", "top_k", "top_p"]))
    return Case(
        masked(logits, cut).to(dtype), draft, heat, Streams(torch.arange(slots) + seed, 5 + torch.arange(slots), seeded)
    )


TYPES = [torch.float32, torch.bfloat16, torch.float64]


@KERNELS
@FEW
@given(case=cases())
def test_kernels_accept_what_the_rule_accepts(kernels, case):
    """Catches another coin, residual, sibling order, chunk or row; and an id, q or size taken at its word."""
    assert case.found(kernels) == case.wanted() or (case.logits.dtype != torch.float64 and case.is_tie())


@KERNELS
@FEW
@given(case=cases())
def test_greedy_kernels_accept_what_the_rule_accepts(kernels, case):
    """Catches a second of equals, a child that nobody chose, a choice that is not finite."""
    draft, choice = case.draft, likeliest(case.logits)
    one_hot = torch.zeros_like(case.logits).scatter_(-1, choice[..., None], 1.0)
    wanted = accept(replace(draft, q=None), one_hot, case.streams)
    for known in (None, choice):
        assert selection.accepted(kernels.accept_greedy(draft, case.logits, known)) == wanted
    ties = case.logits.round()
    assert torch.equal(gpu_acceptance.likeliest(ties), likeliest(ties))


@KERNELS
@FEW
@given(case=cases(), depth=st.integers(0, 3))
def test_kernels_draw_a_block_as_it_is_drawn_plainly(kernels, case, depth):
    """Catches the noise of another depth, purpose or slot, and a q that is not what was drawn from."""
    logits, p = case.logits[:, 0], case.p[:, 0]
    q, tokens = kernels.sample(logits, case.temperature, case.streams, depth)
    torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-12)
    wanted = case.streams.draw(p, depth, Purpose.DRAFT)
    for b in (tokens != wanted).nonzero()[:, 0].tolist():
        again = (
            case.streams.draw(p * (1 + 1e-5 * torch.randn(p.shape).to(p)), depth, Purpose.DRAFT)[b] for _ in range(40)
        )
        assert p.dtype != torch.float64 and any(token != wanted[b] for token in again)


def fixed_case(parents: Sequence[int], slots: int = 6, vocabulary: int = 100) -> Case:
    noise = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(slots, len(parents) + 1, vocabulary, generator=noise, dtype=torch.float64)
    above = logits[:, [1 + parent for parent in parents]]
    q = (above + torch.randn(above.shape, generator=noise)).softmax(-1)
    tokens = q.flatten(0, 1).multinomial(1, generator=noise).view(slots, -1)
    sizes = torch.tensor([len(parents) - b % 2 for b in range(slots)])
    draft = Draft.fixed(tokens, parents, sizes, q)
    return Case(logits, draft, torch.linspace(0.3, 1.2, slots), Streams(torch.arange(slots), torch.arange(slots), None))


TREE = [-1, -1, -1, 0, 0, 1]


def test_numbers_that_are_not_finite_are_told():
    """Catches a NaN that the largest logit does not show, and a pass that is refused for nothing."""
    case = fixed_case(TREE, slots=4)
    case.logits[1, 2, 70], case.logits[2, 0, 3], case.logits[3, 1, :] = torch.nan, torch.inf, -torch.inf
    for rows in (
        gpu_acceptance.accept(case.draft, case.logits, case.temperature, case.streams),
        gpu_acceptance.accept_greedy(case.draft, case.logits),
    ):
        assert rows[:, -1].tolist() == [1, 0, 0, 0]


def test_numbers_of_the_rows_that_are_read_are_told_on_a_cpu():
    """Catches a NaN that the largest logit does not show, at any temperature."""
    for temperature in (0.0, 0.7):
        case = fixed_case(TREE, slots=4)
        case.logits[1, 0, 70], case.logits[2, 0, 3], case.logits[3, 0, :] = torch.nan, torch.inf, -torch.inf
        for dtype in (torch.float32, torch.float64):
            own = case.logits.to(dtype).cpu(), torch.full((4,), temperature), Streams(*torch.zeros(2, 4).long())
            rows = cpu_acceptance.accept(replace(case.draft, q=None), *own)
            assert rows[:, -1].tolist() == [1, 0, 0, 0]


def test_a_q_over_another_vocabulary_is_refused_by_kernels_too():
    """Catches a kernel that reads beside q."""
    case = fixed_case(TREE, slots=1)
    case.draft = replace(case.draft, q=case.draft.q[..., :50])
    with pytest.raises(DrafterError, match="tokens, got 50"):
        case.found()


def test_rows_of_larger_tensors_are_read_where_they_lie():
    """Catches strides taken for those of a tensor without padding."""
    case = fixed_case(TREE, slots=1)
    wanted, (slots, rows, vocabulary) = case.found(), case.logits.shape
    wide = case.logits.new_full((slots, rows + 2, vocabulary + 5), 9.0)
    wide[:, :rows, :vocabulary] = case.logits
    case.logits = wide[:, :rows, :vocabulary]
    wider = case.draft.q.new_full((slots, rows + 3, vocabulary), 0.5)
    wider[:, : rows - 1] = case.draft.q
    case.draft = replace(case.draft, q=wider[:, : rows - 1])
    assert case.found() == wanted


def test_kernels_that_accept_otherwise_are_not_taken(monkeypatch):
    """Catches a trial that does not look: of rule, greedy walk and draws; and a CPU that gets a GPU's kernels."""
    device = torch.device(DEVICE)
    for name, value in {"VOCABULARY": 60, "SLOTS": 4, "CHAIN": (-1, 0), "TREE": (-1, -1, 0)}.items():
        monkeypatch.setattr(selection, name, value)
    assert selection.difference(gpu_acceptance, device) == ""
    read, sample = gpu_acceptance.read, gpu_acceptance.sample
    for name, fault, reason in (
        ("read", lambda *own: (rows := read(*own))._replace(coins=rows.coins.flip(0)), "accept different tokens"),
        ("likeliest", lambda logits: likeliest(logits).flip(0), "greedy"),
        ("sample", lambda *own: sample(*own[:3], 0), "sample different tokens"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(gpu_acceptance, name, fault)
            assert reason in selection.difference(gpu_acceptance, device)
    assert selection.acceptance_kernels(torch.device("cpu")) is cpu_acceptance


def judged(case: Case, sampling: dict[str, Any], kernels: Any) -> Accepted:
    judge = SamplingJudge()
    judge.kernels = kernels
    slots = len(case.draft.tokens)
    state = DecodeState(slots, 100, device=DEVICE, judge=judge)
    for row in range(slots):
        state.admit(row, Request([1], 50, Sampling(**sampling, seed=row)))
    return judge(case.draft, Scores(case.logits, case.logits, None), state)


@KERNELS
@pytest.mark.parametrize(
    ("sampling", "asked"), [({}, False), ({"temperature": 0.8}, True), ({"temperature": 0.8, "top_k": 4}, False)]
)
def test_a_judge_asks_kernels_where_they_apply(kernels, sampling, asked, monkeypatch):
    """Catches cuts that kernels do not know, and kernels that nobody asks; greedy drafts are faster without them."""
    calls, real = [], kernels.accept
    monkeypatch.setattr(kernels, "accept", lambda *own: calls.append(1) or real(*own))
    case = fixed_case(TREE, slots=2)
    assert judged(case, sampling, kernels) == judged(case, sampling, None)
    assert bool(calls) == asked


@KERNELS
def test_a_judge_goes_the_plain_way_where_logits_are_not_finite(kernels):
    """Catches an error about a request's numbers that kernels swallow."""
    case = fixed_case(TREE, slots=2)
    case.logits[0, 0, 5] = torch.inf
    assert judged(case, {"temperature": 0.8}, kernels) == judged(case, {"temperature": 0.8}, None)
