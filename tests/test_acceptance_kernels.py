"""Kernels that accept and draw, run by Triton's interpreter where there is no GPU, against the plain rule.

They draw the same noise, so their tokens are the rule's, but where rounding decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import DEVICE
from contracts.test_acceptance_rule_enumerated import drawn, random_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="there is no Triton for this system")

from triton.runtime import interpreter

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState, Request, Scores, likeliest
from outrider.errors import DrafterError
from outrider.kernels import acceptance, selection
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

FEW = settings(max_examples=12)
"""The interpreter takes a hundredth of a second for a chunk of a row."""


@pytest.fixture(scope="module", autouse=True)
def small_chunks() -> Iterator[None]:
    """Chunks of 64 tokens, so that a small vocabulary has several; and an interpreter that prepares its language once a
    launch, not once a function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "CHUNK", 64)
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

    def found(self) -> Accepted:
        return selection.accepted(acceptance.accept(self.draft, self.logits, self.temperature, self.streams))

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


@FEW
@given(cases())
def test_kernels_accept_what_the_rule_accepts(case):
    """Catches another coin, residual, sibling order, chunk or row; and an id, q or size taken at its word."""
    assert case.found() == case.wanted() or (case.logits.dtype != torch.float64 and case.is_tie())


@FEW
@given(cases())
def test_greedy_kernels_accept_what_the_rule_accepts(case):
    """Catches a second of equals, a child that nobody chose, a choice that is not finite."""
    draft, choice = case.draft, likeliest(case.logits)
    one_hot = torch.zeros_like(case.logits).scatter_(-1, choice[..., None], 1.0)
    wanted = accept(replace(draft, q=None), one_hot, case.streams)
    for known in (None, choice):
        assert selection.accepted(acceptance.accept_greedy(draft, case.logits, known)) == wanted
    ties = case.logits.round()
    assert torch.equal(acceptance.likeliest(ties), likeliest(ties))


@FEW
@given(cases(), st.integers(0, 3))
def test_kernels_draw_a_block_as_it_is_drawn_plainly(case, depth):
    """Catches the noise of another depth, purpose or slot, and a q that is not what was drawn from."""
    logits, p = case.logits[:, 0], case.p[:, 0]
    q, tokens = acceptance.sample(logits, case.temperature, case.streams, depth)
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
        acceptance.accept(case.draft, case.logits, case.temperature, case.streams),
        acceptance.accept_greedy(case.draft, case.logits),
    ):
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


# ── planted faults ────────────────────────────────────────────────────────────────────────────────────────────────────


def planted(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    of, read, masses = acceptance.Nodes.of, acceptance.read, acceptance.masses_of
    if fault == "no residual":
        monkeypatch.setattr(acceptance, "masses_of", lambda rows, nodes: masses(rows, nodes).zero_())
    elif fault == "depths":
        monkeypatch.setattr(acceptance.Nodes, "of", lambda draft: (made := of(draft))._replace(depths=made.depths + 1))
    elif fault == "sizes":
        monkeypatch.setattr(acceptance.Nodes, "of", lambda draft: (made := of(draft))._replace(sizes=made.sizes - 1))
    elif fault == "totals":
        monkeypatch.setattr(acceptance, "read", lambda *own: (rows := read(*own))._replace(total=0.5 * rows.total))
    elif fault == "noise":
        monkeypatch.setattr(acceptance, "read", lambda *own: (rows := read(*own))._replace(coins=rows.coins.flip(0)))


@pytest.mark.parametrize("fault", ["", "no residual", "depths", "sizes", "totals", "noise"])
def test_a_planted_fault_is_seen(fault, monkeypatch):
    """The comparison above over some slots, with a part of the kernels' input wrong; without one it holds."""
    case = fixed_case(TREE, slots=9, vocabulary=60)
    planted(monkeypatch, fault)
    assert (case.found() == case.wanted()) == (fault == "")


def test_kernels_that_accept_otherwise_are_not_taken(monkeypatch):
    """Catches a trial that does not look: of rule, greedy walk and draws; and a CPU that gets kernels."""
    device = torch.device(DEVICE)
    monkeypatch.setattr(selection, "VOCABULARY", 60)
    monkeypatch.setattr(selection, "SLOTS", 6)
    assert selection.difference(acceptance, device) == ""
    for fault in ("no residual", "noise"):
        with monkeypatch.context() as patch:
            planted(patch, fault)
            assert "accept other tokens" in selection.difference(acceptance, device)
    with monkeypatch.context() as patch:
        patch.setattr(acceptance, "likeliest", lambda logits: likeliest(logits).flip(0))
        assert "greedy" in selection.difference(acceptance, device)
    sample = acceptance.sample
    with monkeypatch.context() as patch:
        patch.setattr(acceptance, "sample", lambda *own: sample(*own[:3], 0))
        assert "draw other tokens" in selection.difference(acceptance, device)
    assert selection.acceptance_kernels(torch.device("cpu")) is None


# ── the distribution, by enumeration ──────────────────────────────────────────────────────────────────────────────────


def enumerated_error(parents: list[int], seed: int, how: str, dtype: torch.dtype) -> float:
    """Largest difference between the probability that kernels give a sequence and the target's, over all drafts and
    coins: each is a slot of one batch."""
    p_of, proposal, nodes, vocabulary = random_distribution(seed), drawn(parents, seed, how), len(parents), 3
    tokens, chances, q = [], [], []
    for ids in itertools.product(range(vocabulary), repeat=nodes):
        rows = [proposal(list(ids[:n])) for n in range(nodes)]
        chance = float(torch.stack([row[token] for row, token in zip(rows, ids, strict=True)]).prod())
        for _ in range(2**nodes if chance else 0):
            tokens.append(ids), chances.append(chance), q.append(torch.stack(rows))
    coins = torch.tensor(list(itertools.product([0.0, 1.0], repeat=nodes)), dtype=torch.float64)
    coins = coins.repeat(len(tokens) // len(coins), 1)
    paths = [[()] + [path_of(parents, ids, n) for n in range(nodes)] for ids in tokens]
    logits = torch.stack([torch.stack([p_of(path) for path in own]) for own in paths]).log().to(dtype)
    draft = Draft.fixed(torch.tensor(tokens), parents, torch.full((len(tokens),), nodes), torch.stack(q).to(dtype))
    case = Case(logits, draft, torch.ones(len(tokens)), Streams(*torch.zeros(2, len(tokens), dtype=torch.int64)))
    made = acceptance.Nodes.of(case.draft)
    rows = acceptance.read(case.logits, case.temperature, made, case.streams)._replace(coins=coins.to(DEVICE))
    left = torch.full(draft.tokens.shape, torch.nan, dtype=dtype, device=DEVICE)
    rest = torch.zeros(len(tokens), vocabulary, dtype=dtype, device=DEVICE)
    masses = acceptance.masses_of(rows, made)
    walked = acceptance.walk(rows, made, masses, None, left=left)
    acceptance.emit(rows, made, masses, case.streams, walked, out=rest)
    accepted, found = selection.accepted(walked), dict[tuple[int, ...], float]()
    for b, ids in enumerate(tokens):
        weight = chances[b]
        for n in range(nodes):
            own = float(left[b, n])
            passing = 1.0 if own != own else min(1.0, own / float(case.draft.q[b, n, ids[n]]))
            is_tested = own == own
            weight *= (passing if coins[b, n] == 0 else 1 - passing) if is_tested else 0.5
        after = rest[b].double() / rest[b].double().sum() if weight else rest[b]
        start = tuple(ids[n] for n in accepted.paths[b])
        for token in range(vocabulary if weight else 0):
            found[(*start, token)] = found.get((*start, token), 0.0) + weight * float(after[token])
    return worst_of(found, p_of, vocabulary)


def path_of(parents: Sequence[int], ids: Sequence[int], n: int) -> tuple[int, ...]:
    return () if n < 0 else (*path_of(parents, ids, parents[n]), ids[n])


def worst_of(found: dict[tuple[int, ...], float], p_of: Any, vocabulary: int) -> float:
    """Of sequences of two tokens: those that are emitted shorter go on by the target's own distribution."""
    wanted, emitted = torch.zeros(2, vocabulary, vocabulary, dtype=torch.float64).unbind()
    for first in range(vocabulary):
        wanted[first] = p_of(())[first] * p_of((first,))
    for sequence, chance in found.items():
        emitted[sequence[0]] += chance * (
            p_of(sequence[:1]) if len(sequence) == 1 else torch.eye(vocabulary, dtype=torch.float64)[sequence[1]]
        )
    return float((wanted - emitted).abs().max())


SHAPES = [
    [-1, 0], [-1, -1], pytest.param([-1, -1, 0], marks=pytest.mark.slow),
    pytest.param([-1, -1, -1], marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("how", ["without", "mixed"])
@pytest.mark.parametrize("parents", SHAPES)
def test_what_kernels_emit_follows_the_target_exactly(parents, how):
    """Catches any error in ratio test, residual or sibling order, with no chance of a false alarm."""
    assert enumerated_error(parents, 0, how, torch.float64) < 1e-12


def test_what_kernels_emit_follows_the_target_in_float32(monkeypatch):
    """Within the rounding of float32; and a residual that is not taken is seen."""
    assert enumerated_error([-1, -1], 1, "without", torch.float32) < 1e-6
    masses = acceptance.masses_of
    monkeypatch.setattr(acceptance, "masses_of", lambda rows, nodes: masses(rows, nodes).zero_())
    assert enumerated_error([-1, -1], 1, "without", torch.float32) > 0.01


# ── the judge ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def judged(case: Case, sampling: dict[str, Any], kernels: Any) -> Accepted:
    judge = SamplingJudge()
    judge.kernels = kernels
    slots = len(case.draft.tokens)
    state = DecodeState(slots, 100, device=DEVICE, judge=judge)
    for row in range(slots):
        state.admit(row, Request([1], 50, Sampling(**sampling, seed=row)))
    return judge(case.draft, Scores(case.logits, case.logits, None), state)


class Spy:
    """Kernels that remember what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def ask(*own: Any) -> Any:
            self.asked.append(name)
            return getattr(acceptance, name)(*own)

        return ask


@pytest.mark.parametrize(
    ("sampling", "asked"),
    [({}, []), ({"temperature": 0.8}, ["accept"]), ({"temperature": 0.8, "top_k": 4}, [])],
)
def test_a_judge_asks_kernels_where_they_apply(sampling, asked):
    """Catches cuts that kernels do not know, and kernels that nobody asks; greedy drafts are faster without them."""
    case, spy = fixed_case(TREE, slots=4), Spy()
    assert judged(case, sampling, spy) == judged(case, sampling, None)
    assert spy.asked == asked


def test_a_judge_goes_the_plain_way_where_logits_are_not_finite():
    """Catches an error about a request's numbers that kernels swallow."""
    case = fixed_case(TREE, slots=2)
    case.logits[0, 0, 5] = torch.inf
    assert judged(case, {"temperature": 0.8}, acceptance) == judged(case, {"temperature": 0.8}, None)
