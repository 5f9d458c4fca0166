"""A prediction changes no text, whatever it says; a right one is accepted nearly whole."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from conftest import FEW, Case, cases, fast
from contracts.chances import keeps_the_distribution
from contracts.parties import Drawn, Proposer, TableTarget, Tree
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.errors import ConfigError
from outrider.generation import batch, serve
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.serve.prediction import Alignment, Predicted

V, COUNT, LIMIT = 64, 40, 6
PROBING = {"confu", "jacobi_denoising", "tidar"}
"""Kinds with rows of their own in the target's pass, next to which nothing is predicted."""
EVERY = pytest.mark.parametrize("case", fast((case for case in cases() if case.kind not in PROBING), FEW))
"""Every other kind; further variants of it only where there is time."""
NONE, DSPARK = Case("none"), Case("dspark", {"markov": "vanilla"})


@pytest.fixture
def inner_of(drafter_of, workshop, target):
    """A drafter of its kind, or none; of one that learns a new one each time."""

    def made(case: Case) -> Drafter | None:
        if case == NONE:
            return None
        return drafter_of(case) if case.trains else workshop.build(case, target)

    return made


class Served:
    """Texts of requests, and for each its steps: drafted tokens and how many of them were accepted."""

    def __init__(
        self, target: Any, drafter: Drafter, requests: Sequence[Request], policy: Policy | None = None, **options: Any
    ):  # fmt: skip
        self.texts: list[list[int]] = [[] for _ in requests]
        self.accepted: list[list[int]] = [[] for _ in requests]
        self.drafts: list[list[list[int]]] = [[] for _ in requests]
        self.state, noted, drafts = batch(target, 3, **options), copy.copy(drafter), dict[int, list[int]]()

        def propose(memory: Any, state: DecodeState, budget: Tensor) -> Draft:
            draft = drafter.propose(memory, state, budget)
            drafts.update({row: draft.ids[b][: draft.live[b]] for b, row in enumerate(state.rows)})
            return draft

        noted.propose = propose
        for progress in serve(target, requests, noted, policy=policy or Fixed(drafter.limit), state=self.state):
            self.texts[progress.request] += progress.tokens
            self.accepted[progress.request].append(progress.accepted)
            self.drafts[progress.request].append(drafts.pop(progress.row, []))


def edited(text: list[int]) -> list[int]:
    """With a token replaced, two left out and three added."""
    return [*text[:8], (text[8] + 1) % V, *text[9:15], *text[17:24], 1, 2, 3, *text[24:]]


def predictions(text: list[int]) -> dict[str, list[int]]:
    return {
        "right": text, "longer": text + [5] * 30, "shorter": text[:11], "empty": [],
        "wrong": [(token + 1) % V for token in text],
        "edited": edited(text), "later": text[20:], "late": [7] * 10 + text, "one token": text[:1],
        "outside": [*text[:5], V, *text[6:9], -1, 2**40, *text[9:]], "repeated": text[:4] * 20,
        "one again and again": [text[3]] * 300,
    }  # fmt: skip


@pytest.mark.parametrize("case", [Case("eagle3"), Case("dspark")], ids=str)
def test_no_prediction_changes_a_greedy_text(case, target, prompts, plain, inner_of):
    """Catches a drafter that lost what the prediction drafted, in slots with a prediction and beside them."""
    whole = [plain(target, prompt, COUNT) for prompt in prompts]
    kinds = list(predictions(whole[0]))
    requests = [
        Request(prompt, COUNT, Sampling(), prediction=predictions(text)[kinds[(n + shift) % len(kinds)]])
        for shift in (0, 5) for n, (prompt, text) in enumerate(zip(prompts, whole, strict=True))
    ]  # fmt: skip
    served = Served(target, Predicted(inner_of(case), V, LIMIT), requests)
    assert served.texts == whole * 2 and served.state.invalid == 0


@pytest.mark.parametrize(("case", "shared_noise"), [(DSPARK, True), (NONE, False)], ids=str)
def test_no_prediction_changes_a_seeded_text(case, shared_noise, target, prompts, inner_of):
    """Catches noise that depends on a prediction, of a slot's own or of another's."""
    plain = Served(target, Drafter(), requests := [
        Request(prompt, 20, Sampling(1.0, seed=n) if n % 3 else Sampling()) for n, prompt in enumerate(prompts)
    ]).texts  # fmt: skip
    without = Served(target, Predicted(inner_of(case), V, LIMIT), requests, shared_noise=shared_noise).texts
    some = [
        Request(request.prompt, 20, request.sampling, prediction=text if n % 2 else ())
        for n, (request, text) in enumerate(zip(requests, plain, strict=True))
    ]
    found = Served(target, Predicted(inner_of(case), V, LIMIT), some, shared_noise=shared_noise).texts
    assert [found[n] for n in range(0, len(some), 2)] == [without[n] for n in range(0, len(some), 2)]
    if shared_noise:
        assert found == without == plain


def test_a_right_prediction_is_accepted_whole(target, prompts, plain, inner_of):
    """Catches a draft that begins one token too early or too late, or that is cut."""
    drafter = Predicted(inner_of(DSPARK), V, LIMIT)
    requests = [Request(prompt, COUNT, Sampling(), prediction=plain(target, prompt, COUNT)) for prompt in prompts]
    width = LIMIT + 1
    for accepted in Served(target, drafter, requests).accepted:
        assert accepted == [LIMIT] * (COUNT // width) + [COUNT % width - 1]


class Late(Fixed):
    """Nothing for the first tokens of a text that has a prediction."""

    def __init__(self, nodes: int, begin: int):
        super().__init__(nodes)
        self.begin = begin

    def budget(self, state: DecodeState) -> Tensor:
        slots = [(state.requests[row], len(state.tokens[row])) for row in state.rows]
        early = [bool(own.prediction) and count - len(own.prompt) < self.begin for own, count in slots]
        return torch.tensor([0 if is_early else self.nodes for is_early in early])


@EVERY
def test_the_other_drafter_goes_on_where_the_prediction_ends(case, target, prompts, plain, inner_of, monkeypatch):
    """Catches a drafter that was not given all tokens that the prediction drafted."""
    monkeypatch.setattr(Alignment, "_match_end", lambda self, text: None)
    steps = 3
    count = steps * (LIMIT + 1)
    requests = [
        Request(prompt, COUNT, Sampling(), prediction=plain(target, prompt, count) if n % 3 else ())
        for n, prompt in enumerate(prompts[:3])
    ]
    inner = inner_of(case)
    if inner.learns:
        return  # from other requests, which are at other tokens here and there
    late = Served(target, inner, requests, policy=Late(inner.limit, count))
    found = Served(target, Predicted(inner_of(case), V, LIMIT), requests)
    assert found.texts == late.texts
    for request, one, other in zip(requests, late.drafts, found.drafts, strict=True):
        if not request.prediction:
            assert one == other
        else:
            assert one[:count] == [[]] * count and other[steps:] == one[count:] != []


class Spy(Proposer):
    """A drafter of one chain, which notes what it is asked and what it is given."""

    limit = 4

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.observed: list[Any] = []

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        self.asked.append(budget.tolist())
        tokens = torch.tensor([[3, 1, 2, 0]]).expand(len(state.rows), -1)
        self.draft = Draft.chain(tokens, budget)
        return self.draft

    def observe(self, memory: Any, state: DecodeState, draft: Draft, *more: Any) -> None:
        self.observed.append(draft)


def pair(spy: Drafter, prediction: list[int]) -> tuple[Predicted, DecodeState, Any]:
    """Two slots, the second with a prediction: the drafter, its state and its memory."""
    table = TableTarget.random(5)
    drafter, state = Predicted(spy, 5, 8), batch(table, 2)
    state.admit(0, Request([1, 2], 20, Sampling()))
    state.admit(1, Request([2, 2], 20, Sampling(), prediction=prediction))
    return drafter, state, drafter.allocate(table.allocate(2, 40))


def test_without_a_prediction_a_step_is_the_other_drafters_own():
    """Catches work in steps that have nothing to do with predictions: the very draft goes through."""
    drafter, state, memory = pair(spy := Spy(), [])
    draft = drafter.propose(memory, state, torch.tensor([8, 2]))
    assert draft is spy.draft and spy.asked == [[4, 2]]
    drafter.observe(memory, state, draft, None, None)
    assert spy.observed == [draft]
    # with one, the slot that has none is asked for alone
    state.free(1)
    state.admit(1, Request([2, 2], 20, Sampling(), prediction=[0, 4, 0]))
    draft = drafter.propose(memory, state, torch.tensor([3, 2]))
    assert spy.asked[1:] == [[3, 0]] and [draft.ids[b][: draft.live[b]] for b in range(2)] == [[3, 1, 2], [0, 4]]
    assert not draft.branches


def test_the_other_drafter_observes_its_own_nodes_and_then_those_of_the_prediction():
    """Catches a drafter that takes the prediction's nodes for its own, which it would look up in its own tree."""

    class Noting(Spy):
        def observe(self, memory, state, draft, accepted, scores):
            ids = [draft.ids[b][:size] for b, size in enumerate(draft.live)]
            texts = [state.tokens[row] for row in state.rows]
            rows = [scores.logits[b, :, 0].tolist() for b in range(len(ids))]
            self.observed.append((ids, accepted.paths, accepted.next_tokens, texts, rows))

    drafter, state, memory = pair(noting := Noting(), [0, 4, 3])
    draft = drafter.propose(memory, state, torch.tensor([3, 3]))
    assert draft.ids == [[3, 1, 2], [0, 4, 3]]
    state.tokens = [[1, 2, 3, 2], [2, 2, 0, 4, 1]]
    logits = torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13]])[..., None].expand(-1, -1, 5)
    drafter.observe(memory, state, draft, Accepted([[0], [0, 1]], [2, 1], [0, 0]), Scores(logits, logits, None))
    own, rest = noting.observed
    assert own == ([[3, 1, 2], []], [[0], []], [2, 0], [[1, 2, 3, 2], [2, 2, 0]], [[0, 1, 2, 3], [10, 11, 12, 13]])
    assert rest == ([[4]], [[0]], [1], [[2, 2, 0, 4, 1]], [[11, 12]])


def test_a_step_that_failed_leaves_nothing_to_the_next():
    """Catches a draft of a step that never ended, taken for that of the next one without a draft."""
    drafter, state, memory = pair(spy := Spy(), [0, 4, 0])
    drafter.propose(memory, state, torch.tensor([3, 2]))
    drafter.free(memory, [1])
    state.free(1)
    nothing = Draft.empty(1)
    drafter.observe(memory, state, nothing, None, None)
    assert spy.observed == [nothing] and not memory.alignments


def test_a_drafter_with_a_probe_is_refused():
    """Catches a probe for a pass over a draft that is not its own."""

    class Probing(Drafter):
        probe_rows = 1

    with pytest.raises(ConfigError, match="probe"):
        Predicted(Probing(), 5)


TABLE = TableTarget.random(5)
INNERS = {
    "a drawn chain": lambda: Drawn(lambda before, own: (0.5 * TABLE.table[before, own]).softmax(-1), 3),
    "a drawn tree": lambda: Tree(TABLE, [-1, -1, 0, 0, 1, 2], "without"),
}


@pytest.mark.parametrize("inner", INNERS)
def test_predictions_keep_the_distribution(inner):
    """Catches a predicted token that is accepted for its own value, or judged by the other drafter's q.

    Half of the slots have a prediction, of three kinds.  False alarm 1e-6.
    """
    predictions = [[1, 1, 1, 1], [], [2, 0, 4, 3, 1], [], [0], []]
    drafter = Predicted(INNERS[inner](), 5, 3)
    assert keeps_the_distribution(TABLE, drafter, slots=3000, predictions=predictions)


def after(prediction: list[int], text: list[int], most: int = 3, begin: int = 0) -> list[int]:
    """What is drafted after this text, of which the first `begin` tokens are the prompt; read token by token."""
    one, found = Alignment(prediction, begin), []
    for end in range(begin, len(text) + 1):
        found = one.following(text[:end], most)
    assert begin or Alignment(prediction, 0).following(text, most) == found or one._shortest > Alignment.SHORTEST
    return found


def test_the_draft_follows_the_prediction_from_its_first_token():
    """Catches a prompt that is looked for in the prediction, and a first token that is not drafted."""
    assert after([1, 2, 3, 4], [9, 9], begin=2) == [1, 2, 3]
    assert after([1, 2, 3, 4], [9, 9, 1], begin=2) == [2, 3, 4]
    assert after([1, 2, 3, 4], [1, 2, 3, 4]) == [] == after([], [1, 2]) == after([1, 2], [2])


def test_the_longest_match_counts_and_of_equals_the_nearest():
    """Catches a text that continues after a place that only looks alike."""
    line, other = [5, 6, 7], [8, 5, 6, 7]
    assert after([1, *line, 2, *other, 3, 4], [9, *other]) == [3, 4]
    assert after([1, *line, 2, 2, *other, 3, 4], [9, *line]) == [2, 2, 8]
    # the text left it after 1, 2: the first line after that is the nearest
    assert after([*line, 0, 1, 2, *line, 3, 4, 4, 4, *line, 5], [*line, 0, 1, 2, 9, *line]) == [3, 4, 4]
    # two equal tokens are no match
    assert after([1, 2, 3, 4], [9, 2, 3]) == [] and after([1, 2, 3, 4], [9, 1, 2, 3]) == [4]
