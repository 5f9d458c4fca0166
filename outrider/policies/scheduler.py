"""DSpark's hardware-aware prefix scheduler (Algorithm 1 of its paper), and its asynchronous variant: how many nodes of
each slot are verified, by how likely they are accepted and by what a pass of so many tokens costs.

a[r][n] is the probability that node n of slot r and all nodes before it are accepted: the product of confidences.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, islice, zip_longest

Survival = Sequence[Sequence[float]]
"""a of every slot, never rising; slots may have different numbers of nodes."""


Rate = Callable[[int], float]
"""Steps per second by tokens in the pass, anchors included."""


def admitted(survival: Survival, rate: Rate, scale: float = 1.0) -> list[int]:
    """Algorithm 1: how many nodes of each slot are verified.  scale: of a, which stays at most 1.

    Nodes are admitted in descending order of a while expected tokens times steps per second rise.  The first that does
    not raise it ends the search: to look beyond it would be inexact.
    """
    lengths = [0] * len(survival)
    tokens, expected = len(survival), float(len(survival))
    best = expected * rate(tokens)
    for minus_a, slot in _descending(survival):
        tokens, expected = tokens + 1, expected + min(1.0, -minus_a * scale)
        if expected * rate(tokens) <= best:
            break
        best = expected * rate(tokens)
        lengths[slot] += 1
    return lengths


def largest(survival: Survival, count: int) -> list[int]:
    """The `count` nodes with the highest a: how many of each slot."""
    lengths = [0] * len(survival)
    for _, slot in islice(_descending(survival), count):
        lengths[slot] += 1
    return lengths


def _descending(survival: Survival) -> Iterator[tuple[float, int]]:
    """(-a, slot) of all nodes, the highest a first; a slot's later node is looked at after the one before it."""
    return heapq.merge(*([(-a, slot) for a in own] for slot, own in enumerate(survival)))


def columns(survival: Survival, scale: float = 1.0) -> list[float]:
    """The sum of a over slots of the first nodes, of the second nodes, and so on, times `scale`."""
    live = float(len(survival))
    return [min(live, scale * sum(column)) for column in zip_longest(*survival, fillvalue=0.0)]


def admitted_columns(gains: Sequence[float], live: int, rate: Rate, means: Sequence[float] = ()) -> int:
    """Algorithm 1 over columns: how many of them are verified.  gains: as `columns` says.

    means: of a by node, from earlier steps; columns that follow are expected to fall as these do, and a column is
    admitted where it or some later one is expected to improve the rate.  () expects nothing, as the paper.
    """
    expected, current = float(live), live * rate(live)
    for n, gain in enumerate(gains):
        expected += gain
        own = expected * rate(live * (2 + n))
        if own <= current:
            fall = gain / means[n] if n < len(means) and means[n] > 0 else 0.0
            following = accumulate((fall * mean for mean in means[n + 1 :]), initial=expected)
            if all(each * rate(live * (2 + later)) <= current for later, each in enumerate(following, n)):
                return n
        current = own
    return len(gains)


def best_count(gains: Sequence[float], live: int, tokens: int, rate: Rate) -> int:
    """How many gains, the first ones, of `tokens` tokens each, give the highest rate; all are looked at."""
    expected = accumulate(gains, initial=float(live))
    found = [each * rate(live + n * tokens) for n, each in enumerate(expected)]
    return max(range(len(found)), key=found.__getitem__)
