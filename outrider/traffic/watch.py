"""Is the drafter in service still the one that was released?  Windows over a server's counters and a test that may be looked
at after every reading.  No torch.

The release says how many tokens a step brings, how sure that is, and how unlike its prompts are.  Of traffic like that, tokens
minus `tokens_per_step` × steps wanders around 0 with the variance that prompts give it, steps of one answer hanging together.
`Drift` bets against "the traffic lies within the release's interval" at several stakes at once and starts anew whenever it has
lost (an e-detector: Shin, Ramdas and Rinaldo, arXiv 2203.03532).  However often one looks, the mean time to a false alarm is at
least what was asked for; a smoothed average with limits of three sigma would cry wolf every half hour at one look in 5 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import DataError
from outrider.report import bootstrap
from outrider.report.bootstrap import Interval
from outrider.report.schema import Report, Row
from outrider.traffic.counters import Acceptance, Counters

LEVEL, SIGMAS = 0.99, 2.576
"""Of the release's interval, wider than the report's 95 %: a release that stands beside its own interval alarms for ever."""
FEWEST_PROMPTS = 8
DAYS_PER_FALSE_ALARM = 1000
MINUTE_S, TEN_MINUTES_S = 60.0, 600.0
SHIFTS = (0.02, 0.05, 0.1, 0.2, 0.4)
"""Changes that the bets are placed for, as shares of the release's tokens per step."""
SELDOM = 0.02
"""Share of steps without a draft that a drafter which always drafts may have."""
ONCE_SIGMAS = 3.29
"""Of a single look: 1 false alarm in 1000."""


VERDICTS = {None: None, -1: "below", 0: "inside", 1: "above"}
"""What a side is called in JSON."""


class Release(NamedTuple):
    """What a report promises of a drafter in service."""

    drafter: str
    temperature: float
    prompts: int
    tokens_per_step: Interval
    spread: float
    """Variance of tokens - tokens_per_step × steps, per step, over whole prompts; an upper estimate."""
    prompt_spread: float
    """Standard deviation of the same over one prompt."""
    by_depth: tuple[Interval, ...] = ()
    """[k]: share of the drafts of which at least k + 1 tokens were kept."""
    by_step: tuple[Interval, ...] = ()
    """[k]: the same as a share of all steps, with a draft or without."""
    always_drafts: bool = False
    """All but a few steps had a draft; False where the report does not say."""
    other_temperatures: tuple[float, ...] = ()
    """At which the report has rows of the drafter too."""

    @property
    def said(self) -> str:
        """Whose promise it is, in half a sentence."""
        others = f"; the report also has temperature {_listed(self.other_temperatures)}" if self.other_temperatures else ""
        return f"{self.drafter} at temperature {self.temperature:g}, {self.prompts} prompts{others}"


def release_of(report: Report, drafter: str | None = None, temperature: float | None = None) -> Release:
    """What `report` says of `drafter` at `temperature`, over all its tasks; by default of the row it speaks of first, which is
    one shown exact, so of temperature 0 wherever that was measured.

    DataError where the report has no such drafter, no row at that temperature, or too few prompts for an interval.
    """
    rows, lead = _rows_at(report, drafter, temperature)
    others = {row.temperature for row in rows if row.drafter == lead.drafter} - {lead.temperature}
    rows = [row for row in rows if (row.drafter, row.temperature) == (lead.drafter, lead.temperature)]
    pairs = [(float(p.tokens), float(p.steps)) for row in rows for p in row.per_prompt if p.tokens and p.steps]
    if len(pairs) < FEWEST_PROMPTS:
        raise DataError(
            f"the report measured {lead.drafter} at temperature {lead.temperature:g} on {len(pairs)} prompts; an interval "
            f"wants at least {FEWEST_PROMPTS}, and one narrow enough to notice a drop of 10 % a few hundred; measure again "
            "with evaluate.prompts=400"
        )
    tokens, steps = np.array(pairs).T
    center = bootstrap.ratio_of_totals(list(tokens), list(steps), level=LEVEL)
    variance = float(np.mean((tokens - center.center * steps) ** 2))
    # twice the standard error of a variance; prompts that are all alike are a few that happen to be
    spread = max(variance / float(steps.mean()) * (1 + 2 * math.sqrt(2 / len(pairs))), (center.center - 1) / 4, 0.05)
    prompt_spread = math.sqrt(spread * float(steps.mean()))
    # resampling a hundred prompts of which few are extreme gives intervals that hold 96 times in 100, not 99
    half = SIGMAS * math.sqrt(spread / float(steps.sum()))
    middle, low, high = center
    wide = Interval(middle, min(low, middle - half), max(high, middle + half))
    return Release(
        lead.drafter, lead.temperature, len(pairs), wide, spread, prompt_spread, _depths(rows, spread),
        _depths(rows, spread, of_steps=True), _always_drafts(rows), tuple(sorted(others)),
    )  # fmt: skip


def _rows_at(report: Report, drafter: str | None, temperature: float | None) -> tuple[list[Row], Row]:
    """The measured rows of `drafter`, at every temperature, and the one at `temperature` to speak of first."""
    rows = [row for row in report.rows if drafter in (None, row.drafter) and row.tokens_per_step is not None]
    if not rows:
        known = ", ".join(sorted({row.drafter for row in report.rows})) or "none"
        raise DataError(f"the report has no measured drafter {drafter or ''}; it has: {known}".replace("  ", " "))
    asked = tuple(row for row in rows if temperature in (None, row.temperature))
    lead = report.model_copy(update={"rows": asked}).lead
    if lead is None:
        of = "" if drafter is None else f" of {drafter}"
        raise DataError(
            f"the report has no row{of} at temperature {temperature:g}; it has: {_listed({row.temperature for row in rows})}; "
            "choose one of them, or measure again with that evaluate.temperatures"
        )
    return rows, lead


def _listed(temperatures: Collection[float]) -> str:
    return ", ".join(f"{temperature:g}" for temperature in sorted(temperatures))


def _always_drafts(rows: Sequence[Row]) -> bool:
    every = sum(sum(map(sum, row.accepted_histogram)) for row in rows)
    without = sum(sum(row.accepted_histogram[0]) for row in rows if row.accepted_histogram)
    # the last step of an answer may have no room for a draft
    return every > 0 and all(row.accepted_histogram for row in rows) and without <= SELDOM * every


def is_comparable(found: Acceptance, release: Release) -> bool:
    """Whether the server's tokens per step are what the release's are: of all steps, or of drafts where no step lacks one."""
    return found.is_of_every_step or release.always_drafts


def _depths(rows: Sequence[Row], spread: float, of_steps: bool = False) -> tuple[Interval, ...]:
    """Intervals of what is kept at each depth, as servers count it: of all drafts, short ones too; or of all steps.

    A report has no depths of single prompts; intervals are as much wider than those of independent drafts as the interval of
    tokens per step is.
    """
    kept: dict[int, int] = {}
    for row in rows:
        for drafted in row.accepted_histogram[0 if of_steps else 1 :]:
            for accepted, count in enumerate(drafted):
                kept[accepted] = kept.get(accepted, 0) + count
    drafts = sum(kept.values())
    if not drafts:
        return ()
    mean = sum(accepted * count for accepted, count in kept.items()) / drafts
    alone = sum((accepted - mean) ** 2 * count for accepted, count in kept.items()) / drafts
    wider = max(1.0, spread / alone) if alone else 1.0
    found = []
    for depth in range(1, max(kept) + 1):
        share = sum(count for accepted, count in kept.items() if accepted >= depth) / drafts
        half = SIGMAS * math.sqrt(max(share * (1 - share), 1 / drafts) * wider / drafts)
        found.append(Interval(share, max(0.0, share - half), min(1.0, share + half)))
    return tuple(found)


class Drift:
    """Bets that tokens per step left the release's interval, for any number of series side by side."""

    def __init__(self, release: Release, every_s: float, series: int = 1, days: float = DAYS_PER_FALSE_ALARM) -> None:
        """`days`: mean time to a false alarm, at one reading in `every_s` seconds."""
        self.release = release
        center = release.tokens_per_step.center
        stakes = np.array([shift * center / release.spread for shift in SHIFTS])
        # beyond that the tail of single prompts matters, of which a release knows little
        # beyond that single prompts decide, and of their tail a release knows little
        self.stakes: NDArray[np.float64] = np.minimum(stakes, 0.5 / release.prompt_spread)
        self.limit = math.log(2 * len(SHIFTS) * days * 86_400 / every_s)  # two sides; a mean over the bets
        self.won = np.zeros((2, series, len(SHIFTS)))

    def add(self, tokens: Any, steps: Any) -> NDArray[np.int64]:
        """After one reading: -1 where tokens per step fell out of the interval, 1 where they rose out of it, else 0.

        tokens, steps [series].  A bet that has won begins anew.
        """
        tokens, steps = np.atleast_1d(np.asarray(tokens, float)), np.atleast_1d(np.asarray(steps, float))
        _, low, high = self.release.tokens_per_step
        price = self.stakes**2 * self.release.spread / 2
        for side, beyond in enumerate((low * steps - tokens, tokens - high * steps)):
            gain = self.stakes * beyond[:, None] - price * steps[:, None]
            self.won[side] = np.maximum(self.won[side], 0) + gain
        below, above = self.evidence >= 1
        self.won[:, below | above] = 0
        return above.astype(np.int64) - below.astype(np.int64)

    @property
    def evidence(self) -> NDArray[np.float64]:
        """[2, series]: how near an alarm is, below and above; 1 is an alarm."""
        total: NDArray[np.float64] = np.maximum(np.logaddexp.reduce(self.won, axis=-1), 0) / self.limit
        return total

    def steps_to_notice(self, drop: float = 0.1) -> float | None:
        """About how many steps pass until a drop by this share is noticed; None where it lies within the interval."""
        center, low, _ = self.release.tokens_per_step
        gap = low - (1 - drop) * center
        growth = float(np.max(self.stakes * gap - self.stakes**2 * self.release.spread / 2))
        return self.limit / growth if growth > 0 else None


class Window(NamedTuple):
    """What happened over a stretch of time."""

    seconds: float
    found: Acceptance

    @property
    def tokens_per_s(self) -> float | None:
        return self.found.generated / self.seconds if self.found.generated is not None and self.seconds > 0 else None

    @property
    def steps(self) -> int:
        """All of them where the server counts them, else those with a draft."""
        return self.found.drafts if self.found.steps is None else self.found.steps

    def json(self) -> dict[str, Any]:
        found = self.found
        return {
            "seconds": round(self.seconds, 3), "tokens_per_step": found.tokens_per_step,
            "tokens_per_draft": found.tokens_per_draft, "steps": found.steps, "drafts": found.drafts,
            "drafted": found.drafted, "accepted": found.accepted, "by_position": list(found.by_position),
            "generated": found.generated, "tokens_per_s": self.tokens_per_s,
        }  # fmt: skip


def together(parts: Sequence[Window]) -> Window:
    """Several stretches as one: counts are added, gauges weighed by their drafts."""
    founds = [part.found for part in parts]

    def added(name: str) -> int | None:
        values = [getattr(found, name) for found in founds]
        return None if not values or None in values else sum(values)

    drafts, accepted, steps, generated = (added(name) for name in ("drafts", "accepted", "steps", "generated"))
    drafts, first = drafts or 0, added("first_tokens")
    depth = max((len(found.by_position) for found in founds), default=0)
    places = tuple(sum(found.by_position[k] for found in founds if k < len(found.by_position)) for k in range(depth))
    ratio = 1 + accepted / drafts if drafts and accepted is not None else None
    are_steps = any(found.drafts_are_steps for found in founds)
    per_draft = None if are_steps else ratio
    is_interval = any(found.is_interval for found in founds)
    if is_interval:
        known = [(found.tokens_per_step, max(found.drafts, 1)) for found in founds if found.tokens_per_step is not None]
        reached = sum(value * count for value, count in known) / sum(count for _, count in known) if known else None
    elif steps is not None and generated is not None:
        reached = (generated - (first or 0)) / steps if steps else None
    else:
        reached = ratio
    found = Acceptance(
        drafts, added("drafted"), accepted, places, reached, per_draft, steps, generated, first,
        any(found.restarted for found in founds), is_interval, are_steps,
    )  # fmt: skip
    return Window(sum(part.seconds for part in parts), found)


@dataclass(frozen=True)
class View:
    """What a watch shows after a look."""

    at_s: float
    counters: Counters | None
    """The last that were read; None before the first."""
    minute: Window
    ten_minutes: Window
    since_start: Acceptance | None
    away: str | None
    """Why the server could not be read; None where it could."""
    side: int | None
    """-1: tokens per step lie below the release's interval, 1: above, 0: no sign of either; None without a release that can be
    compared."""
    side_since_s: float | None
    evidence: float
    """How near an alarm is; 1 is an alarm."""
    alarmed: bool
    """This very look raised an alarm."""
    restarts: int

    @property
    def is_outside(self) -> bool:
        return bool(self.side)

    def json(self) -> dict[str, Any]:
        """One line of a log."""
        counters = self.counters
        return {
            "at": self.at_s, "server": counters.server if counters else None, "away": self.away,
            "verdict": VERDICTS[self.side], "alarm": self.alarmed,
            "evidence": round(self.evidence, 4), "restarts": self.restarts,
            "running": counters.running if counters else None, "waiting": counters.waiting if counters else None,
            "minute": self.minute.json(), "ten_minutes": self.ten_minutes.json(),
        }  # fmt: skip


class Watch:
    """Readings in, views out.  Holds ten minutes of differences, never more."""

    def __init__(self, release: Release | None, every_s: float) -> None:
        self.drift = Drift(release, every_s) if release else None
        self.release = release
        self.counters: Counters | None = None
        self._read_at_s = 0.0
        self._parts: deque[tuple[float, Window]] = deque()
        self._side, self._side_since_s = 0, None  # type: int, float | None
        self._restarts = 0

    def away(self, at_s: float, why: str) -> View:
        """The server could not be read."""
        return self._view(at_s, why, False)

    def add(self, at_s: float, counters: Counters) -> View:
        """The server was read.  DataError where it says nothing of drafts."""
        before, alarmed = self.counters, False
        found = counters.since(before)
        if before is not None:
            part = Window(at_s - self._read_at_s, found)
            self._restarts += found.restarted
            self._parts.append((at_s, part))
            alarmed = self._judge(at_s, part)
        self.counters, self._read_at_s = counters, at_s
        while self._parts and self._parts[0][0] <= at_s - TEN_MINUTES_S:
            self._parts.popleft()
        if self._side and not alarmed and self._is_back(at_s):
            self._side, self._side_since_s = 0, None
        return self._view(at_s, None, alarmed)

    def window(self, at_s: float, seconds: float) -> Window:
        return together([part for read_at_s, part in self._parts if read_at_s > at_s - seconds])

    def _judge(self, at_s: float, part: Window) -> bool:
        """Whether this stretch raised an alarm."""
        reached = part.found.tokens_per_step
        if self.drift is None or self.release is None or reached is None or not is_comparable(part.found, self.release):
            return False
        side = int(self.drift.add(reached * part.steps, part.steps)[0])
        if side and side != self._side:
            self._side, self._side_since_s = side, at_s
            return True
        return False

    def _is_back(self, at_s: float) -> bool:
        """Whether ten minutes after the alarm lie within the interval; one minute of little traffic may do so by chance."""
        assert self.release is not None
        late = at_s - (self._side_since_s or 0) >= TEN_MINUTES_S
        return late and standing(self.window(at_s, TEN_MINUTES_S), self.release, sigmas=0) == 0

    def _view(self, at_s: float, why: str | None, alarmed: bool) -> View:
        counters = self.counters
        since_start = counters.since() if counters else None
        is_judged = self.release is not None and (since_start is None or is_comparable(since_start, self.release))
        return View(
            at_s, counters, self.window(at_s, MINUTE_S), self.window(at_s, TEN_MINUTES_S),
            since_start, why, self._side if is_judged else None, self._side_since_s,
            float(self.drift.evidence.max()) if self.drift else 0.0, alarmed, self._restarts,
        )  # fmt: skip


def standing(window: Window, release: Release, sigmas: float = ONCE_SIGMAS) -> int | None:
    """-1 where a single reading lies below the release's interval beyond its own noise, 1 above, 0 neither; None: no steps, or
    the server counts others than the release."""
    reached = window.found.tokens_per_step
    if reached is None or window.steps <= 0 or not is_comparable(window.found, release):
        return None
    noise = sigmas * math.sqrt(release.spread / window.steps)
    _, low, high = release.tokens_per_step
    return -1 if reached + noise < low else 1 if reached - noise > high else 0
