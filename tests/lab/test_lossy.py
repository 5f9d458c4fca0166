"""Lossy rules do what they say and no more, say how far they strayed, and are reached by nobody who did not ask."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from contracts.chances import _drafts, _spread, outcomes
from contracts.parties import Drawn, Proposer, TableTarget, Tree
from contracts.test_acceptance_rule_enumerated import random_distribution
from decoding.drafts import distribution_of, drafts, streams_of, well_formed
from hypothesis import given
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.state import Request
from outrider.errors import ConfigError
from outrider.generation import batch, generate, serve, stream
from outrider.lab import likely
from outrider.lab.judges.relaxed import relaxed
from outrider.lab.judges.typical import typical
from outrider.lab.likely import LikelyEnough
from outrider.policies import named
from outrider.policies.block import accept_block
from outrider.policies.lossy import LossyJudge
from outrider.sampling.distribution import Settings, distribution
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

V = 3
TABLE = TableTarget.random(5)
RULES = [typical(0.4, 0.9), relaxed(2)]
NAMED = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def is_typical(epsilon: float, delta: float, p: list[float]) -> list[bool | None]:
    """Medusa's definition, number by number; None where rounding decides."""
    least = min(epsilon, delta * math.exp(sum(x * math.log(x) for x in p if x > 0)))
    return [None if abs(x - least) < 1e-12 else x > least for x in p]


def is_among(k: int, p: list[float]) -> list[bool | None]:
    return [x > 0 and sum(other > x for other in p) < k for x in p]


DEFINED = [(typical(*own), partial(is_typical, *own)) for own in [(0.09, 0.3), (1.0, 1.0)]]
DEFINED += [(relaxed(k), partial(is_among, k)) for k in (2, 7)]


@pytest.mark.parametrize(("rule", "definition"), DEFINED, ids=[rule.name for rule, _ in DEFINED])
def test_typical_passes_what_is_above_the_lesser_of_epsilon_and_the_entropys_share(rule, definition):
    """Catches bits for nats, the greater for the lesser, and NaN from impossible tokens; and of relaxed a rank that is
    one off and an equal that is dropped by order: for every distribution over three tokens in twentieths, all of them
    as one batch and each alone."""
    grid = [[a / 20, b / 20, (20 - a - b) / 20] for a in range(21) for b in range(21 - a)]
    distributions = torch.tensor(grid, dtype=torch.float64)
    alone = [rule.passes(one[None, None])[0, 0].tolist() for one in distributions]
    assert rule.passes(distributions).tolist() == alone
    for p, passed in zip(grid, alone, strict=True):
        assert all(wanted in (None, own) for own, wanted in zip(passed, definition(p), strict=True)), p


def test_numbers_without_meaning_are_refused():
    for make, wrong in (
        (typical, (0.0,)), (typical, (1.1,)), (typical, (0.3, 0.0)), (typical, (0.3, math.inf)), (typical, (math.nan,)),
        (relaxed, (0,)),
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            make(*wrong)


def best_path(draft: Draft, b: int, p: Tensor, passes: Tensor) -> list[int]:
    """By trying every node's path: the longest whose tokens all pass, of equals the likeliest, then the eldest."""
    found = [(0, 0.0, 0, [])]
    for n in range(int(draft.sizes[b])):
        path, at = [], n
        while at >= 0:
            path.insert(0, at)
            at = int(draft.parents[b, at])
        chances = [1.0]
        for m in path:
            token, row = int(draft.tokens[b, m]), int(draft.parents[b, m]) + 1
            inside = 0 <= token < p.shape[-1]
            chances.append(float(p[b, row, token]) if inside and passes[b, row, token] else 0.0)
        if min(chances) > 0:
            found.append((len(path), sum(map(math.log, chances)), -n, path))
    return max(found)[3]


@NAMED
@given(drafts(with_q=True))
def test_the_longest_path_that_passes_is_kept_and_the_next_token_is_the_targets(rule, made):
    """Catches ids outside the vocabulary that pass, a q that is read, padding that is kept, and a token from another
    row."""
    draft, seed = made
    p = distribution_of(draft, seed)
    streams = streams_of(len(draft.sizes), seed)
    accepted = rule(draft, p, streams)
    well_formed(draft, accepted)
    paths = [best_path(draft, b, p, rule.passes(p)) for b in range(len(draft.sizes))]
    assert accepted.paths == paths
    ends = p[torch.arange(len(paths)), torch.tensor([[-1, *path][-1] + 1 for path in paths])]
    assert accepted.next_tokens == streams.draw(ends, torch.tensor(accepted.counts), Purpose.TARGET).tolist()
    live = torch.arange(draft.tokens.shape[1]) < draft.sizes[:, None]
    assert accepted.invalid == (((draft.tokens < 0) | (draft.tokens >= p.shape[-1])) & live).sum(-1).tolist()


def proposal_of(seed: int, parents: list[int], is_certain: bool) -> Callable[[list[int]], Tensor]:
    """One that looks at the tokens above, as a chain's q must; siblings are drawn with replacement."""
    expected = random_distribution(seed + 77)

    def proposal(tokens: list[int]) -> Tensor:
        at, path = parents[len(tokens)], ()
        while at >= 0:
            at, path = parents[at], (tokens[at], *path)
        q = expected(path)
        return torch.nn.functional.one_hot(q.argmax(), V).double() if is_certain else q

    return proposal


def distances(
    rule: LikelyEnough, parents: list[int], seed: int, measure: Callable = likely.tv_distance, *,
    is_certain: bool = False, size: int | None = None,
) -> tuple[float, float, float]:  # fmt: skip
    """(measured, exact by place, of the whole text), each the mean over all drafts and all coins of one step.

    Exact by place: between p and the distribution of the token emitted there, given the drafted tokens kept before it.
    Of the text: total variation of the first three tokens' joint distribution, the step's tokens continued by the
    target.
    """
    expected, measured = random_distribution(seed), 0.0
    places: dict[tuple[int, ...], Tensor] = defaultdict(lambda: torch.zeros(V, dtype=torch.float64))
    texts, exact = (torch.zeros((V,) * 3, dtype=torch.float64) for _ in range(2))
    for weight, tokens, rows in _drafts(proposal_of(seed, parents, is_certain), len(parents)):
        paths: list[tuple[int, ...]] = []
        for n, parent in enumerate(parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), tokens[n]))
        p = torch.stack([expected(()), *(expected(path) for path in paths)])[None]
        draft = Draft(
            torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([size or len(parents)]),
            None if is_certain else torch.stack(rows)[None], branches=parents != list(range(-1, len(parents) - 1)),
        )  # fmt: skip
        found = []

        def noted(draft, p, streams, found=found):
            found.append(rule(draft, p, streams))
            return found[-1]

        for chance, out in outcomes(draft, p, noted):
            measured += weight * chance * float(measure(rule, draft, p, found[-1]).sum())
            for n, token in enumerate(out):
                places[tuple(out[:n])][token] += weight * chance
            _spread(texts, expected, tuple(out[:3]), weight * chance)
    _spread(exact, expected, (), 1.0)
    by_place = sum(float((seen - seen.sum() * expected(path)).abs().sum()) / 2 for path, seen in places.items())
    return measured, by_place, float((texts - exact).abs().sum()) / 2


CHAINS = [[-1], [-1, 0], [-1, 0, 1]]
TREES = [[-1, -1], [-1, -1, 0], [-1, 0, 0]]


@NAMED
@pytest.mark.parametrize("parents", CHAINS + TREES, ids=str)
def test_the_distance_of_a_deterministic_draft_is_exact(rule, parents):
    """Catches a kept token that counts as valid because it was likely; of a drawn chain, a closed form that forgets
    what p adds where the draft fails, or counts places that were never reached; and siblings of a drawn tree that hide
    how often the rule kept one of them."""
    for is_certain, size in ((True, None), (False, None), (False, 1)):
        if size and parents in TREES:
            continue
        measured, exact, text = distances(rule, parents, 1, is_certain=is_certain, size=size)
        assert text <= measured + 1e-12
        assert measured >= exact - 1e-12
        assert (is_certain is False and parents in TREES) or measured == pytest.approx(exact, abs=1e-12)


class Wrong(Proposer):
    """A chain, or a tree, of ids that do not depend on the target."""

    def __init__(self, parents: list[int]):
        self.parents, self.limit = parents, len(parents)

    def propose(self, memory, state, budget):
        shape = (len(state.rows), len(self.parents))
        tokens = torch.randint(TABLE.spec.vocabulary, shape, generator=memory)
        return Draft(tokens, torch.tensor(self.parents).expand(shape), budget)


def test_a_lossy_rule_is_handed_out_to_who_allows_it_alone(caplog):
    """Catches a word, or a 1, that is taken for consent; and a consent that has no effect and is not told."""
    assert named.judge("typical", allow_lossy=True).rule.name == "typical(epsilon=0.09, delta=0.3)"
    assert named.judge("relaxed", allow_lossy=True).rule.name == "relaxed(k=2)"
    assert relaxed(3).name == "relaxed(k=3)"
    for allow in (False, None, 1, "yes", "true"):
        for refuse in (named.judge, named.check_verification):
            with pytest.raises(ConfigError, match=r"set allow_lossy: true"):
                refuse("typical", allow)
    for refuses in (generate, stream):
        with pytest.raises(ConfigError, match="allow_lossy"):
            refuses(None, [1, 2], max_new_tokens=3, verification="typical")
    with pytest.raises(ConfigError, match=r"did you mean 'typical'"):
        named.judge("tipical", True)
    for name in (None, "standard"):
        caplog.clear()
        assert type(named.judge(name)) is SamplingJudge and named.judge(name).rule is None and not caplog.records
        assert named.judge(name, True).rule is None and "no effect" in caplog.text
    assert named.judge("block").rule is accept_block


PROMPTS = [[0], [1, 2], [3, 4, 0, 2], [2]]
CHAIN, TREE = [-1, 0, 1, 2], [-1, -1, 0, 1]


@pytest.mark.parametrize(("name", "parents"), [("typical", CHAIN), ("relaxed", TREE)])
def test_temperature_0_is_never_changed(name, parents):
    """Catches a rule that keeps a runner-up where the target is greedy, alone or beside a slot that is not."""
    options = {"max_new_tokens": 24, "slots": 3}
    wanted = [generation.tokens for generation in generate(TABLE, PROMPTS, **options)]
    for drafter in (Wrong(parents), Tree(TABLE, parents, "replacement")):
        judge = named.judge(name, allow_lossy=True)
        found = generate(TABLE, PROMPTS, drafter, verification=judge, **options)
        assert [generation.tokens for generation in found] == wanted
        assert (judge.distance, judge.tokens) == (0.0, 24 * len(PROMPTS))
        mixed = [Request(prompt, 24, Sampling(n % 2, seed=n)) for n, prompt in enumerate(PROMPTS)]
        tokens, far = served(mixed, drafter, named.judge(name, allow_lossy=True))
        assert tokens[::2] == wanted[::2]
        assert far[::2] == [0.0, 0.0]
        assert min(far[1::2]) > 0
    resting = [replace(mixed[1], max_new_tokens=1)]  # no room for a draft
    assert served(resting, Wrong(parents), named.judge(name, allow_lossy=True))[1] == [0.0]


def served(requests: list[Request], drafter: Any, judge: LossyJudge) -> tuple[list[list[int]], list[float]]:
    tokens, far = [[] for _ in requests], [0.0] * len(requests)
    for progress in serve(TABLE, requests, drafter, slots=3, judge=judge):
        tokens[progress.request] += progress.tokens
        far[progress.request] += judge.tv_distance[progress.row]
    return tokens, far


def test_a_judge_says_what_every_text_strayed():
    """Catches a distance that is another slot's, another step's, or divided by another count; by hand from the text.

    The drafts are deterministic: a kept token strays by 1 - p, a drawn one by nothing.
    """
    sampling = Sampling(1.0, seed=4)
    judge = named.judge("typical", allow_lossy=True)
    found = generate(TABLE, PROMPTS, Wrong(TREE), max_new_tokens=21, slots=3, verification=judge, sampling=sampling)
    p = distribution(TABLE.table[None], Settings.of([sampling]))[0]
    by_hand = []
    for prompt, generation in zip(PROMPTS, found, strict=True):
        text, at, far = [0, *prompt, *generation.tokens], len(prompt) + 1, 0.0
        for kept in generation.accepted:
            far += sum(1 - float(p[text[n - 2], text[n - 1], text[n]]) for n in range(at, at + kept))
            at += kept + 1
        assert far > 0
        by_hand.append(far)
    assert judge.total == pytest.approx(sum(by_hand))
    assert judge.distance == pytest.approx(sum(by_hand) / (21 * len(PROMPTS)))
    requests = [Request(prompt, 21, sampling) for prompt in PROMPTS]
    tokens, far = served(requests, Wrong(TREE), named.judge("typical", allow_lossy=True))
    assert tokens == [generation.tokens for generation in found]
    assert far == pytest.approx(by_hand)


def test_tokens_after_an_end_do_not_count():
    """Catches a distance of what a text does not hold: it could exceed 1."""
    requests = [Request(prompt, 40, Sampling(1.0, seed=n)) for n, prompt in enumerate(PROMPTS * 4)]
    chain = Drawn(lambda before, own: torch.full((len(own), 5), 0.2, dtype=torch.float64), 4)
    whole: list[float] = []

    class Noting(LossyJudge):
        def __call__(self, draft: Draft, scores: Any, state: Any) -> Any:
            accepted = super().__call__(draft, scores, state)
            whole.append(float(likely.tv_distance(self.rule, draft, self.distribution(scores.logits), accepted).sum()))
            return accepted

    judge, seen, tokens, cut = Noting(relaxed(4)), 0.0, 0, 0
    for progress in serve(TABLE, requests, chain, state=batch(TABLE, 3, judge, ends=frozenset({3}))):
        assert 0 <= judge.tv_distance[progress.row] <= len(progress.tokens)
        seen += judge.tv_distance[progress.row]
        tokens += len(progress.tokens)
        cut += progress.finish_reason == "stop" and progress.accepted == len(progress.tokens)
    assert cut > 3
    assert (judge.total, judge.tokens) == (pytest.approx(seen), tokens)
    # what was cut off was measured, and left out
    assert seen < sum(whole) - 0.1
