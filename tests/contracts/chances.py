"""The distribution of what the loop emits against the target's: by chi-square over many slots, and exactly for `accept`
alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from decoding.drafts import prefill
from scipy import stats
from torch import Tensor

from outrider.decoding import accept as accepting
from outrider.decoding.accept import Rule
from outrider.decoding.draft import Draft
from outrider.decoding.loop import step
from outrider.decoding.state import DecodeState, Request
from outrider.policies.fixed import Fixed
from outrider.sampling.distribution import Settings
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling

FALSE_ALARM = 1e-6
TOKENS = 3


def fits(counts: Tensor, p: Tensor, false_alarm: float = FALSE_ALARM) -> bool:
    """Whether counts could have come from p; cells expected fewer than 5 times are pooled."""
    counts, expected = counts.double().flatten(), p.double().flatten() * counts.sum()
    if counts[expected == 0].sum():
        return False
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:
        least = expected[:-1].argmin()
        counts[least] += counts[-1]
        expected[least] += expected[-1]
        counts, expected = counts[:-1], expected[:-1]
    if len(counts) < 2:
        return True
    statistic = ((counts - expected) ** 2 / expected).sum()
    return bool(stats.chi2.sf(float(statistic), len(counts) - 1) >= false_alarm)


def emitted(
    target: Any, drafter: Any, policy: Any = None, *, slots: int = 4000, prompt: Sequence[int] = (0,),
    rule: Rule | None = None, sampling: dict | None = None, seeded: bool = False, shared_noise: bool = True,
    predictions: Sequence[Sequence[int]] = ((),),
) -> tuple[Tensor, DecodeState, int]:  # fmt: skip
    """First tokens [slots, TOKENS] of as many seeds, the state after, and how many drafted tokens were kept.

    The noise is fixed either way; `seeded` requests ask for it, and draft with the target's own.  Slots have these
    predictions by turns.

    `advance` would admit slot after slot; here all stand up at once, and the loop is the package's own `step`.
    """
    judge = SamplingJudge(rule)
    state = DecodeState(slots, target.spec.context, target.ends, judge=judge, shared_noise=shared_noise)
    settings = sampling or {"temperature": 1.0}
    # every admission would look at all slots again: once is enough
    state._select = lambda: None
    for seed in range(slots):
        own = Sampling(**settings, seed=seed if seeded else None)
        state.admit(seed, Request(list(prompt), 500, own, prediction=predictions[seed % len(predictions)]))
        state.seeds[seed] = seed
    del state._select
    state._select()
    cache = target.allocate(slots, len(prompt) + TOKENS * (drafter.limit + 1) + drafter.limit + 1 + drafter.probe_rows)
    memory = drafter.allocate(cache)
    state.judge.allocate(target, cache)
    prefill(target, drafter, cache, memory, state, range(slots))
    policy, kept = policy or Fixed(drafter.limit), 0
    for _ in range(TOKENS):
        kept += sum(step(target, drafter, policy, cache, memory, state)[0].counts)
    begin = len(prompt)
    return torch.tensor([tokens[begin : begin + TOKENS] for tokens in state.tokens]), state, kept


def keeps_the_distribution(
    target: Any, drafter: Any, policy: Any = None, *, prompt: Sequence[int] = (0,), **options: Any
) -> bool:
    """Whether the first token, the first two and the first three all follow the target's distribution; FALSE_ALARM
    together."""
    tokens, _, _ = emitted(target, drafter, policy, prompt=prompt, **options)
    settings = Settings.of([Sampling(**(options.get("sampling") or {"temperature": 1.0}))])
    return follows(tokens, target.distribution(prompt, TOKENS, settings))


def follows(tokens: Tensor, distribution: Tensor) -> bool:
    """tokens [slots, TOKENS] against their joint distribution [V, V, V]."""
    cells = distribution.shape[0] ** torch.arange(distribution.dim() - 1, -1, -1)
    counts = torch.bincount((tokens * cells).sum(-1), minlength=distribution.numel()).view(distribution.shape)
    while True:
        if not fits(counts, distribution, FALSE_ALARM / TOKENS):
            return False
        if distribution.dim() == 1:
            return True
        counts, distribution = counts.sum(-1), distribution.sum(-1)


# ── exact, for `accept` alone ─────────────────────────────────────────────────────────────────────────────────────────


class Chance:
    """One slot's noise, scripted: every question is answered by the script, beyond it by the first answer.

    `weight` is the probability of the answers given; `open` the questions' numbers of answers, so that all scripts can
    be walked through.  A uniform number is never drawn: it answers only the comparison it stands in, with both
    outcomes.
    """

    seeded = None

    def __init__(self, script: Sequence[int]):
        self.script, self.weight, self.open = list(script), 1.0, []

    def _answer(self, chances: Sequence[float]) -> int:
        asked = len(self.open)
        self.open.append(len(chances))
        answer = self.script[asked] if asked < len(self.script) else 0
        if asked >= len(self.script):
            self.script.append(answer)
        self.weight *= chances[answer]
        return answer

    def uniform(self, depth: Any, purpose: Any, salt: int = 0) -> Coin:
        return Coin(self)

    def draw(self, weights: Tensor, depth: Any, purpose: Any) -> Tensor:
        assert len(weights) == 1
        return torch.tensor([self._answer((weights[0] / weights[0].sum()).tolist())])


class Coin:
    """A uniform number times `scale`."""

    def __init__(self, chance: Chance, scale: float = 1.0):
        self.chance, self.scale = chance, scale

    def __mul__(self, by: Tensor) -> Coin:
        return Coin(self.chance, self.scale * float(by))

    def __lt__(self, threshold: Tensor) -> Tensor:
        # 0 * coin < 0 never holds
        below = min(1.0, float(threshold) / self.scale) if self.scale > 0 else float(threshold > 0)
        return torch.tensor([self.chance._answer([1.0 - below, below]) == 1])


def every_script(ask: Callable[[Any], Any], kind: type[Chance] = Chance) -> Iterator[tuple[float, Any]]:
    """What `ask` says under every script of one slot's noise, and the script's probability."""
    script: list[int] = []
    while True:
        chance = kind(script)
        answer = ask(chance)
        if chance.weight > 0:
            yield chance.weight, answer
        script = chance.script
        while script and script[-1] + 1 == chance.open[len(script) - 1]:
            script.pop()
        if not script:
            return
        script[-1] += 1


def outcomes(draft: Draft, p: Tensor, rule: Rule = accepting.accept) -> Iterator[tuple[float, list[int]]]:
    """Every outcome of judging one slot's draft: (probability, emitted tokens)."""
    for weight, accepted in every_script(lambda chance: rule(draft, p, chance)):
        yield weight, [*(int(draft.tokens[0, n]) for n in accepted.paths[0]), accepted.next_tokens[0]]


def paths_of(draft: Draft, b: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the anchor to each live node."""
    paths: list[tuple[int, ...]] = []
    for n in range(draft.live[b]):
        above = draft.tree[b][n]
        paths.append((*(paths[above] if above >= 0 else ()), draft.ids[b][n]))
    return paths


def difference(
    emitted: Iterable[tuple[float, Sequence[int]]], distribution: Callable[[tuple[int, ...]], Tensor], depth: int = 3
) -> float:
    """Largest difference between the distribution of the first `depth` tokens of (probability, tokens) and the
    target's."""
    found, exact = torch.zeros(2, *[len(distribution(()))] * depth, dtype=torch.float64)
    for weight, tokens in emitted:
        _spread(found, distribution, tuple(tokens[:depth]), weight)
    _spread(exact, distribution, (), 1.0)
    return float((found - exact).abs().max())


def judged(
    drafted: Iterable[tuple[float, Draft]], distribution: Callable[[tuple[int, ...]], Tensor],
    rule: Rule = accepting.accept,
) -> Iterator[tuple[float, list[int]]]:  # fmt: skip
    """Every outcome of judging each of these drafts."""
    for weight, draft in drafted:
        p = torch.stack([distribution(()), *(distribution(path) for path in paths_of(draft))])[None]
        for chance, tokens in outcomes(draft, p, rule):
            yield weight * chance, tokens


Proposal = Callable[[list[int]], Tensor]
"""The tokens drawn so far to the distribution of the next node [V]."""


def worst_error(
    distribution: Callable[[tuple[int, ...]], Tensor], parents: Sequence[int], proposal: Proposal, *, depth: int = 3,
    rule: Rule = accepting.accept, keep: Callable[[list[int]], int] | None = None,
    q_of: Proposal | None = None, is_certain: bool = False,
) -> float:  # fmt: skip
    """Largest difference between the distribution of the first `depth` tokens, exactly as emitted, and the target's
    own.

    distribution: a path of tokens to p [V].  keep: the drafted tokens to how many nodes stay.  q_of: the q that the
    draft claims, where it is not the proposal.
    """

    def outcomes_of_all() -> Iterator[tuple[float, list[int]]]:
        for weight, tokens, rows in _drafts(proposal, len(parents)):
            claimed = rows if q_of is None else [q_of(tokens[:n]) for n in range(len(tokens))]
            q = None if is_certain else torch.stack(claimed)[None]
            whole = Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(parents)]), q)
            p = torch.stack([distribution(()), *(distribution(path) for path in paths_of(whole))])[None]
            size = len(parents) if keep is None else keep(tokens)
            for chance, out in outcomes(replace(whole, sizes=torch.tensor([size])), p, rule):
                yield weight * chance, out

    return difference(outcomes_of_all(), distribution, depth)


def _drafts(
    proposal: Proposal, nodes: int, tokens: tuple[int, ...] = (), rows: tuple = (), weight: float = 1.0
) -> Iterator:
    if len(tokens) == nodes:
        yield weight, list(tokens), list(rows)
        return
    q = proposal(list(tokens))
    for token, chance in enumerate(q.tolist()):
        if chance > 0:
            yield from _drafts(proposal, nodes, (*tokens, token), (*rows, q), weight * chance)


def _spread(found: Tensor, distribution: Callable, tokens: tuple[int, ...], weight: float) -> None:
    """Add `weight` to every text that begins with `tokens`, continued by the target's own distribution."""
    if len(tokens) == found.dim():
        found[tokens] += weight
        return
    for token, chance in enumerate(distribution(tokens).tolist()):
        _spread(found, distribution, (*tokens, token), weight * chance)
