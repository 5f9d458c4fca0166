"""Do two sets of sampled texts follow the same distribution?  Permutation tests within prompts, corrected for their
number, with their power.

The tests compare the token at each position (chi-square over tokens, rare ones pooled), the lengths of texts
(Kolmogorov-Smirnov), and their 3-grams (energy distance of hashed counts: Székely and Rizzo, 2013).  All share the same
relabelled sets: under the same distribution labels carry no information, so every test has exactly its nominal
false-alarm probability, even with few texts or many ties.  Holm's rule corrects for the number of tests.  No torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, chndtrinc

from outrider.errors import DataError
from outrider.report.bootstrap import holm

Floats = NDArray[np.float32]
Text = Sequence[int]
ENDED = -1
"""Stands for the token of a text that has already ended."""
MIN_TEXTS = 10
"""Number of texts, in both sets together, that a token needs for its own cell: five expected in each set."""
SHARED = 8
"""Maximum number of cells shared by rare tokens."""
BUCKETS = 512
ENTRIES = 4_000_000
"""Number of labels kept in memory at once."""


class Test(NamedTuple):
    """One statistical test and its result."""

    name: str
    statistic: float
    chance: float
    """The p-value: probability of a statistic at least as large if both sets have the same distribution."""
    allowed: float
    """This test's share of the false-alarm probability, by Holm's rule."""

    @property
    def differs(self) -> bool:
        return self.chance <= self.allowed


@dataclass(frozen=True, slots=True)
class Samples:
    """The tests, and how large a difference they can detect."""

    tests: tuple[Test, ...]
    prompts: int
    samples: int
    """Texts per prompt and set."""
    alpha: float
    """False-alarm probability of all tests together."""
    draws: int
    detectable: float
    """Total variation of the tokens at one position (root mean square over prompts) detected with 80 % power."""

    @property
    def verdict(self) -> Literal["no difference", "different"]:
        return "different" if any(test.differs for test in self.tests) else "no difference"

    def as_json(self) -> dict[str, Any]:
        tests = [test._asdict() | {"differs": test.differs} for test in self.tests]
        return {"verdict": self.verdict} | asdict(self) | {"tests": tests}


def two_samples(
    first: Sequence[Sequence[Text]], second: Sequence[Sequence[Text]], *, positions: int = 8, alpha: float = 0.01,
    draws: int = 4999, seed: int = 0,
) -> Samples:  # fmt: skip
    """Test two sets of texts, by prompt, with equally many texts of a prompt in both.  positions: number of leading
    tokens to test.

    Raises DataError if the sets do not match, or if so few draws could never show a difference at `alpha`.
    """
    _check(first, second, positions + 2, alpha, draws)
    positions = min(positions, max(len(text) for texts in (*first, *second) for text in texts) + 1)
    names = [*(f"token {position + 1}" for position in range(positions)), "lengths", "3-grams"]
    both = [[*one, *other] for one, other in zip(first, second, strict=True)]
    cells = [[_cells(texts, position) for position in range(positions)] for texts in both]
    thresholds = sorted({len(text) for texts in both for text in texts})
    shorter = [
        np.array([[len(text) <= most for most in thresholds] for text in texts], dtype=np.float32) for texts in both
    ]
    distances = [_distances(texts) for texts in both]
    rows = []
    for signs in _labels([len(texts) for texts in first], draws, seed):
        columns = [
            sum(_chi_square(labels, hot[at]) for labels, hot in zip(signs, cells, strict=True))
            for at in range(positions)
        ]
        columns.append(
            np.abs(sum(labels @ each / len(each) for labels, each in zip(signs, shorter, strict=True))).max(1) * 2
        )
        columns.append(
            -sum(((labels @ each) * labels).sum(1) / len(each) for labels, each in zip(signs, distances, strict=True))
        )
        rows.append(np.stack(columns, 1))
    table = np.concatenate(rows)
    # equal statistics may differ in the last digit, depending on the order of summation
    reached = table >= table[0] - 1e-5 * np.abs(table[0]) - 1e-9
    chances = [float(chance) for chance in reached.mean(0)]
    count = min(map(len, first))
    freedom = max(sum(hot[position].shape[1] - 1 for hot in cells) for position in range(positions))
    return Samples(
        tests=tuple(map(Test, names, map(float, table[0]), chances, holm(chances, alpha))),
        prompts=len(first), samples=count, alpha=alpha, draws=draws,
        detectable=detectable(freedom, sum(map(len, first)), alpha / len(names)),
    )  # fmt: skip


def _check(
    first: Sequence[Sequence[Text]], second: Sequence[Sequence[Text]], tests: int, alpha: float, draws: int
) -> None:
    counts = [len(texts) for texts in first], [len(texts) for texts in second]
    if counts[0] != counts[1] or not all(counts[0]) or not counts[0]:
        raise DataError(
            f"each prompt must have equally many texts in both sets, at least 1, got {counts[0]} and {counts[1]}"
        )
    if draws + 1 < tests / alpha:
        raise DataError(
            f"{draws} draws can't show a probability below {1 / (draws + 1):.1e}, and {tests} tests at {alpha:g} need "
            f"{alpha / tests:.1e}; use at least {math.ceil(tests / alpha)} draws"
        )


def _labels(counts: Sequence[int], draws: int, seed: int) -> Iterator[list[Floats]]:
    """Signs [draws, 2n] per prompt, in pieces: +1 for the first set, -1 for the second.  The first row has the true
    labels."""
    noise = np.random.default_rng(seed)
    truth = [np.repeat(np.array([1, -1], dtype=np.float32), count) for count in counts]
    yield [labels[None] for labels in truth]
    piece = max(1, ENTRIES // (2 * sum(counts)))
    for start in range(0, draws, piece):
        rows = min(piece, draws - start)
        yield [noise.permuted(np.broadcast_to(labels, (rows, len(labels))).copy(), axis=1) for labels in truth]


def _cells(texts: Sequence[Text], position: int) -> Floats:
    """One-hot [texts, cells] of the token at a position.  Tokens too rare for their own cell share a few, by id."""
    tokens = [text[position] if position < len(text) else ENDED for text in texts]
    counts = Counter(tokens)
    often = {token: i for i, token in enumerate(token for token, count in counts.most_common() if count >= MIN_TEXTS)}
    rare = sum(count for token, count in counts.items() if token not in often)
    shared = max(1, min(SHARED, rare // (2 * MIN_TEXTS)))
    column = [often.get(token, len(often) + token % shared) for token in tokens]
    hot = np.zeros((len(texts), max(column) + 1), dtype=np.float32)
    hot[np.arange(len(texts)), column] = 1
    return hot[:, hot.any(0)]


def _chi_square(signs: Floats, cells: Floats) -> Floats:
    """Statistic of two sets of equal size: sum (a - b)² / (a + b) over cells.  Returns [draws]."""
    return ((signs @ cells) ** 2 / cells.sum(0)).sum(1)


def _distances(texts: Sequence[Text]) -> Floats:
    """Euclidean distances [texts, texts] between counts of hashed 3-grams, including beginning and end."""
    counts = np.zeros((len(texts), BUCKETS), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        padded = (-3, -2, *text, ENDED)
        for one, two, three in zip(padded, padded[1:], padded[2:], strict=False):
            row[(one * 1_000_003 ^ two * 65_537 ^ three * 257) % BUCKETS] += 1
    squares = (counts**2).sum(1)
    distances: Floats = np.sqrt(np.maximum(squares[:, None] + squares[None] - 2 * counts @ counts.T, 0))
    return distances


# ── power ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def detectable(freedom: int, samples: int, tail: float, power: float = 0.8) -> float:
    """Total variation that a chi-square test of two sets of `samples` texts detects with probability `power` at level
    `tail`.

    For any direction of the difference: sum (p - q)² / (p + q) >= 2 TV² (Cauchy-Schwarz), so the noncentrality is at
    least 2 · samples · TV².  Differences among tokens that share a cell do not count; returns 1 if all tokens share
    one.
    """
    if not freedom:
        return 1.0
    critical = chdtri(freedom, tail)
    return min(1.0, math.sqrt(float(chndtrinc(critical, freedom, 1 - power)) / (2 * samples)))
