"""Seconds of a target's passes, by slots and tokens: the table SPS(B) of DSpark's scheduler.

Differs from the paper: it is also measured for several numbers of slots, since sixteen slots of one token and two of
eight have equal tokens and different times.
"""

from __future__ import annotations

import logging
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Target
from outrider.errors import ConfigError

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, *(each for n in range(2, 16) for each in (2**n, 3 * 2 ** (n - 1))))
"""Numbers of tokens per slot to time, besides the widest."""


class PassSeconds:
    """Seconds of a target's pass, by slots and tokens; linear between measured sizes.

    Outside the measured numbers of slots, the nearest curve is read by the total number of tokens.  So a table with one
    curve depends on tokens only, as in the paper: `PassSeconds.by_tokens`.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]):
        """seconds: of one pass, by (slots, tokens per slot).  Raises ConfigError for an invalid table."""
        wrong = [f"{size}: {each}" for size, each in seconds.items() if min(size) < 1 or not 0 < each < float("inf")]
        if wrong or not seconds:
            raise ConfigError(
                f"a table of passes needs seconds above 0 by (slots, tokens per slot), both at least 1, got "
                f"{', '.join(wrong) or 'none'}; measure it with costs.passes.measured"
            )
        curves: dict[int, list[tuple[int, float]]] = {}
        for (slots, width), each in sorted(seconds.items()):
            curves.setdefault(slots, []).append((width, each))
        self.slots = list(curves)
        """Measured numbers of slots, ascending."""
        self.curves = {slots: tuple(zip(*curve, strict=True)) for slots, curve in curves.items()}
        """By number of slots: tokens per slot, ascending, and seconds."""
        self._cache: dict[tuple[int, float], float] = {}

    @classmethod
    def by_tokens(cls, rates: Mapping[int, float]) -> PassSeconds:
        """From steps per second by tokens per step, for any number of slots.  Raises ConfigError for a rate of 0."""
        if not all(rate > 0 for rate in rates.values()):
            raise ConfigError(f"steps per second must be above 0, got {dict(rates)}; leave out sizes that never run")
        return cls({(1, tokens): 1 / rate for tokens, rate in rates.items()})

    def seconds(self, slots: int, tokens: float) -> float:
        """Seconds of a pass over `slots` slots and `tokens` tokens in total."""
        seconds = self._cache.get((slots, tokens))
        if seconds is None:
            seconds = self._cache[slots, tokens] = self._between(slots, tokens)
        return seconds

    def _between(self, slots: int, tokens: float) -> float:
        after = bisect_right(self.slots, slots)
        low, high = self.slots[max(0, after - 1)], self.slots[min(after, len(self.slots) - 1)]
        if low in (slots, high):
            return self._along(low, tokens / low)
        less, more = self._along(low, tokens / slots), self._along(high, tokens / slots)
        return less + (more - less) * (slots - low) / (high - low)

    def _along(self, slots: int, width: float) -> float:
        """A curve's seconds at `width` tokens per slot, extrapolated with its last slope, at least 0."""
        widths, seconds = self.curves[slots]
        if width <= widths[0] or len(widths) == 1:
            return float(seconds[0])
        right = min(bisect_right(widths, width), len(widths) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (widths[right] - widths[right - 1])
        if width > widths[-1]:
            return float(seconds[-1] + max(0.0, slope) * (width - widths[-1]))
        return float(seconds[right - 1] + slope * (width - widths[right - 1]))


def measured(
    target: Target, drafter: Drafter, slots: int, *, context: int = 32, repeats: int = 7, most_s: float = 20.0
) -> PassSeconds:
    """Time passes of this target for 1, 2, 4 ... `slots` slots, from the anchor alone to all of the drafter's nodes.

    Every slot holds `context` random tokens.  After a warm-up round, all sizes are timed in turn for `repeats` rounds,
    or fewer if that would take longer than most_s seconds; the median counts.  Raises ConfigError for slots or repeats
    below 1.
    """
    if slots < 1 or repeats < 1:
        raise ConfigError(f"slots and repeats must be at least 1, got {slots} and {repeats}")
    widest = 1 if target.spec.mode == "off" else 1 + drafter.limit
    rows = [*(2**n for n in range(slots.bit_length()) if 2**n < slots), slots]
    sizes = [(row, width) for row in rows for width in sorted({*WIDTHS, widest}) if width <= widest]
    return PassSeconds(timed(target, drafter, sizes, context=context, repeats=repeats, most_s=most_s))


def timed(
    target: Target, drafter: Drafter, sizes: Sequence[tuple[int, int]], *, context: int, repeats: int, most_s: float
) -> dict[tuple[int, int], float]:  # fmt: skip
    """Median seconds of passes by (slots, tokens per slot), with the drafter's taps; timed as in `measured`."""
    slots, widest = (max(each) for each in zip(*sizes, strict=True))
    context = max(1, min(context, target.spec.context - widest - 1))
    noise = torch.Generator().manual_seed(0)
    text = torch.randint(target.spec.vocabulary, (slots, context + widest), generator=noise).to(target.device)
    cache = target.allocate(slots, context + widest + 1)
    target.prefill(cache, range(slots), text[:, :context], [context] * slots, drafter.taps)
    samples: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    began = time.perf_counter()
    for number in range(repeats + 1):
        for size in sizes:
            seconds = _pass_seconds(target, drafter, cache, text[: size[0], context : context + size[1]])
            if number:
                samples[size].append(seconds)
        spent = time.perf_counter() - began
        if not number:
            log.info("timing passes of %d sizes, about %.1f s", len(sizes), min(spent * repeats, max(spent, most_s)))
        elif spent * (number + 2) / (number + 1) > most_s:
            break
    return {size: statistics.median(each) for size, each in samples.items()}


def _pass_seconds(target: Target, drafter: Drafter, cache: Any, tokens: torch.Tensor) -> float:
    """Seconds to verify the chains tokens[:, 1:] after the anchors tokens[:, 0], [R, n]; nothing stays cached."""
    slots, width = tokens.shape
    nothing = Draft.empty(slots, target.device)
    draft = Draft.chain(tokens[:, 1:], torch.full((slots,), width - 1)) if width > 1 else nothing
    began = time.perf_counter()
    scores = target.verify(cache, range(slots), tokens[:, 0], draft, drafter.taps)
    float(scores.logits.flatten()[0])  # waits for a GPU
    return time.perf_counter() - began
