"""Times of passes, drafts and the loop on this machine, measured once and stored.

Stored in `$OUTRIDER_CACHE/plan`, one file per machine, versions and target.  Stored sizes are not timed again, and new
ones are added.  Times measured while other programs are busy are used but not stored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

from outrider import machine
from outrider.costs.passes import timed
from outrider.costs.stored import RunnerSeconds
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.state import DecodeState, Request, Timing
from outrider.drafters import find, kinds
from outrider.generation import batch, serve, stored_costs
from outrider.loading import describe, load_drafter
from outrider.machine import measurements
from outrider.measure.fingerprint import fingerprint
from outrider.plan.measured.allowance import Allowance
from outrider.sampling.settings import Sampling
from outrider.storage import cache
from outrider.targets.cache.capacity import token_bytes
from outrider.targets.protocol import Target

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64)
"""Rows per text in the timed passes."""
MOST_ROWS = 1024
"""Maximum number of rows of a timed pass, over all texts."""
ALONE = 32
"""Number of prompt tokens read in about the time of a one-token pass."""
FEWER = 4
"""Divisor for a batch that does not fit."""
PASSES = 6
"""Runs of each size of pass, including a warm-up."""
STEPS, SKIPPED = 5, 1
"""Timed steps of each depth per round; warm-up steps."""
ROUNDS = 3
"""Rounds over everything, so that load from other programs slows all sizes alike; fewer if time is short."""
SPREAD = 0.25
"""Standard deviation / mean of the lengths of a batch's texts.  Served texts have unequal lengths, and equal lengths
would be faster."""
CHAINS = "random chains"
"""The drafter whose steps measure verification, independent of the method."""
GRAIN = 32
"""Contexts are rounded to multiples of this, so that plans for similar traffic share times."""
SLOW_S = 5.0
"""Total seconds after which reading a prompt is no longer repeated."""


class Cell(NamedTuple):
    """Median seconds of steps of one kind."""

    draft_s: float
    verify_s: float
    other_s: float
    drafted: float = 0.0
    """Nodes per draft if all drafts have the same size; else 0, as for lookups."""
    spread: float = 0.0
    """Half of the interquartile range of the steps' seconds / their median."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.draft_s + self.verify_s + self.other_s

    def scaled(self, by: float) -> Cell:
        """A copy with all seconds multiplied by `by`."""
        return self._replace(draft_s=by * self.draft_s, verify_s=by * self.verify_s, other_s=by * self.other_s)


Key = tuple[int, int, int]


@dataclass
class Timings:
    """The times of one target on one machine."""

    passes: dict[Key, float] = field(default_factory=dict)
    """Seconds by slots, rows per slot, context."""
    plain: dict[Key, Cell] = field(default_factory=dict)
    """By (slots, 0, context)."""
    drafts: dict[str, dict[Key, Cell]] = field(default_factory=dict)
    """By identity of the drafter, then by (slots, depth, context)."""
    prompt_s: float = 0.0
    """Seconds of the target per prompt token."""
    prompts: dict[str, float] = field(default_factory=dict)
    """By identity of the drafter: its additional seconds per prompt token."""

    def runner_seconds(self, drafter: str, context: int) -> RunnerSeconds:
        """Times of this drafter's steps (by its identity) in the form that policies use."""
        steps = [(key, cell) for key, cell in (self.plain | self.drafts[CHAINS]).items() if key[2] == context]
        drafts = [(key, cell) for key, cell in self.drafts[drafter].items() if key[2] == context]
        return RunnerSeconds(
            {(slots, 1 + depth): cell.verify_s + cell.other_s for (slots, depth, _), cell in steps},
            {(slots, depth): cell.draft_s for (slots, depth, _), cell in drafts},
        )


def nearest(value: float, values: set[int] | Sequence[int]) -> int:
    return min(values, key=lambda other: (abs(other - value), other))


def rounded(context: float, most: int) -> int:
    """A context rounded to a size that is timed."""
    return max(1, min(GRAIN * max(1, round(context / GRAIN)), most - max(ROWS) - 1))


# ── storage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def folder() -> Path:
    """Folder of the stored times."""
    return cache.folder() / "plan"


def place(target: Target) -> Path:
    """File of this target's times on this machine."""
    spec = target.spec
    about = [machine.identity(), fingerprint(target), spec.name, spec.weights_hash, spec.layers, spec.hidden]
    return folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"


def load_timings(target: Target) -> Timings:
    """The stored times; empty if the file is missing or damaged."""
    try:
        content = json.loads(cache.read(place(target)))
        cells = lambda rows: {tuple(key): Cell(*values) for key, values in rows}
        return Timings(
            {tuple(key): float(seconds) for key, seconds in content["passes"]}, cells(content["plain"]),
            {name: cells(rows) for name, rows in content["drafts"].items()},
            float(content["prompt_s"]), {name: float(each) for name, each in content["prompts"].items()},
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Timings()


def save_timings(target: Target, times: Timings) -> Path | None:
    """Store the times; None if the machine is busy, so that they may be wrong, or if the folder is not writable."""
    if measurements.is_busy():
        log.info("other programs are busy: these times are not stored, and the next plan measures again")
        return None
    rows = lambda cells: [[list(key), list(cell)] for key, cell in cells.items()]
    content = {
        "target": target.spec.name, "fingerprint": fingerprint(target),
        "passes": [[list(key), seconds] for key, seconds in times.passes.items()], "plain": rows(times.plain),
        "drafts": {name: rows(cells) for name, cells in times.drafts.items()},
        "prompt_s": times.prompt_s, "prompts": times.prompts,
    }  # fmt: skip
    with suppress(OSError), cache.keeping(place(target)) as part:
        part.write_text(json.dumps(content), encoding="utf-8")
        return place(target)
    return None


def identity_of(name: str) -> str:
    """What a drafter's times depend on: its kind and settings, but not its weights."""
    if name in kinds():
        kind, settings = name, find(name).Config().model_dump(mode="json")
    else:
        source = describe(name)
        kind, settings = source.kind, dict(source.manifest.get("config") or {"folder": str(source.folder)})
    return f"{kind} {hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]}"


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work:
    """What is still to be timed for one batch size, and its expected cost."""

    slots: int
    names: Sequence[str]
    """Drafters whose steps are still to be timed."""
    sizes: Sequence[tuple[int, int]]
    """Passes still to be timed: (slots, rows per slot)."""
    depths: Sequence[int]
    context: int

    def seconds(self, token_s: float, rounds: int) -> float:
        """Expected seconds, given those of a prompt token."""
        steps = (STEPS + SKIPPED) * sum(2 + depth + 2 * ALONE / self.slots for depth in self.depths)
        drafted = 2 * rounds * len(self.names) * self.slots * (self.context + steps)
        passes = PASSES * sum(max(ALONE, slots * rows) for slots, rows in self.sizes)
        return token_s * (drafted + passes + self.slots * self.context * bool(self.sizes))

    def bytes(self, token_bytes: float, vocabulary: int) -> float:
        """Bytes of caches, which exist twice while they grow, and of a pass's logits."""
        longest = (1 + 3 * SPREAD) * self.context + (STEPS + SKIPPED) * sum(1 + depth for depth in self.depths)
        rows = max(self.slots * (1 + max(self.depths)), *(slots * each for slots, each in self.sizes), 0)
        return 2 * self.slots * longest * token_bytes + 8 * rows * vocabulary


def measure(
    target: Target, names: Sequence[str], batches: Sequence[int], depths: Sequence[int], context: int, times: Timings,
    load: Callable[[str], Drafter] | None = None, say: Callable[[str], None] = lambda line: None,
    allowance: Allowance | None = None,
) -> Timings:  # fmt: skip
    """Add missing passes, plain steps, and steps of each drafter at each depth to `times`.

    load: makes a drafter from its name.  allowance: limits; a batch that does not fit is replaced by a smaller one or
    left out, which is reported; the smallest requested batch is always timed.
    """
    load, allowance = load or functools.partial(load_drafter, target=target), allowance or Allowance()
    times.prompt_s = times.prompt_s or _prompt_seconds(target, context)
    keys = {CHAINS: CHAINS} | {name: identity_of(name) for name in names}
    work_for = lambda slots: _missing(times, keys, slots, depths, context)
    size_of = lambda work: work.bytes(token_bytes(target), target.spec.vocabulary)
    lacking = lambda share, work, rounds: allowance.lacks(work.seconds(times.prompt_s, rounds), size_of(work), share)
    work_by_batch, largest = [work_for(slots) for slots in sorted(batches)], 0
    if seconds := sum(work.seconds(times.prompt_s, ROUNDS) for work in work_by_batch):
        gigabytes = max(map(size_of, work_by_batch)) / 1e9
        say(f"measuring takes about {seconds:.0f} s and {gigabytes:.2g} GB{allowance.says()}")
    for left, requested in zip(range(len(work_by_batch), 0, -1), work_by_batch, strict=True):
        lacks = functools.partial(lacking, 1 / left)
        why = lacks(requested, 1)
        fits = _affordable(requested.slots, largest, work_for, lacks)
        work, rounds = fits or (requested, 0 if largest else 1)
        if not rounds or work.slots < requested.slots:
            say(allowance.leave_out(f"{requested.slots} texts at once", why))
        if rounds:
            largest = work.slots
            if expected := work.seconds(times.prompt_s, rounds):
                parts = [*(["plain", *work.names] if work.names else []), f"passes of {len(work.sizes)} sizes"]
                say(f"timing {work.slots} concurrent texts: {', '.join(parts)}")
                allowance.spend(expected, functools.partial(_time, times, target, work, keys, load, rounds))
    return times


def _affordable(
    slots: int, above: int, missing: Callable[[int], Work], lacks: Callable[[Work, int], str]
) -> tuple[Work, int] | None:
    """Work for this batch size, or for a quarter of it and so on (but above `above`), and the number of rounds; None if
    nothing fits."""
    while slots > above:
        work = missing(slots)
        rounds = next((rounds for rounds in range(ROUNDS, 0, -1) if not lacks(work, rounds)), 0)
        if rounds:
            return work, rounds
        slots //= FEWER
    return None


def _missing(times: Timings, keys: Mapping[str, str], slots: int, depths: Sequence[int], context: int) -> Work:
    is_timed = lambda name: all((slots, depth, context) in times.drafts.get(keys[name], {}) for depth in depths)
    sizes = [(slots, rows) for rows in ROWS if slots * rows <= max(MOST_ROWS, slots)]
    sizes = [size for size in sizes if (*size, context) not in times.passes]
    return Work(slots, [name for name in keys if not is_timed(name)], sizes, depths, context)


def _time(
    times: Timings, target: Target, work: Work, keys: Mapping[str, str], load: Callable[[str], Drafter], rounds: int
) -> None:  # fmt: skip
    if work.sizes:
        pass_seconds = timed(target, Drafter(), work.sizes, context=work.context, repeats=PASSES - 1, most_s=15.0)
        times.passes |= {(*size, work.context): seconds for size, seconds in pass_seconds.items()}
    if work.names:
        chains = RandomChains(target.spec.vocabulary, max(work.depths))
        drafters = {keys[name]: chains if name == CHAINS else load(name) for name in work.names}
        _add(times, target, drafters, work.slots, work.depths, work.context, rounds)
        for key, drafter in drafters.items():
            if key != CHAINS:
                costs = stored_costs(target, drafter)
                costs.write(costs.read() | {"plain": times.runner_seconds(key, work.context)})


class RandomChains(Drafter):
    """Drafts random tokens, as many as the budget allows."""

    def __init__(self, vocabulary: int, limit: int):
        self.vocabulary, self.limit = vocabulary, limit

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        drafted = torch.randint(self.vocabulary, (len(state.rows), int(budget.max())), device=state.device)
        return Draft.chain(drafted, budget)


def _add(
    times: Timings, target: Target, drafters: Mapping[str, Drafter], slots: int, depths: Sequence[int], context: int,
    rounds: int,
) -> None:  # fmt: skip
    """Add steps of these drafters, each timed right after a plain step.

    A machine's speed can change by a fifth within seconds.  So a drafter's steps are measured relative to adjacent
    plain steps, and multiplied by the stored time of a plain step.
    """
    plain: list[Cell] = []
    drafted: dict[tuple[str, int], list[Cell]] = {}
    """By drafter and depth, relative to plain steps."""
    for _ in range(rounds):
        for key, drafter in drafters.items():
            own_depths = [depth for depth in depths if depth <= drafter.limit] or [drafter.limit]
            state = batch(target, slots, ends=frozenset())
            undrafted = steps(target, None, batch(target, slots, ends=frozenset()), own_depths, context)
            pairs = zip(undrafted, steps(target, drafter, state, own_depths, context), strict=False)
            for (_, one), (depth, other) in pairs:
                plain.append(one)
                drafted.setdefault((key, depth), []).append(other.scaled(1 / one.seconds))
            times.prompts[key] = state.read_s / state.read_tokens if state.read_tokens else 0.0
    usual = times.plain.setdefault((slots, 0, context), middle(plain)).seconds
    for key, depth in product(drafters, depths):
        # beyond a drafter's limit, its deepest drafts are used
        cells = drafted.get((key, depth)) or drafted[key, max(other for name, other in drafted if name == key)]
        times.drafts.setdefault(key, {})[slots, depth, context] = middle(cells).scaled(usual)


def middle(cells: Sequence[Cell]) -> Cell:
    """The median of steps, separately for each part."""
    whole = sorted(cell.seconds for cell in cells)
    quarter = len(whole) // 4
    spread = (whole[-1 - quarter] - whole[quarter]) / 2 / whole[len(whole) // 2]
    parts = [statistics.median(each) for each in list(zip(*cells, strict=True))[:3]]
    drafted = {cell.drafted for cell in cells}
    return Cell(parts[0], parts[1], parts[2], drafted.pop() if len(drafted) == 1 else 0.0, spread)


class RoundRobin(Policy):
    """Cycles through the depths, one per step."""

    def __init__(self, depths: Sequence[int]):
        self.depths, self.step, self.nodes = depths, -1, 0

    @property
    def depth(self) -> int:
        """Depth of the last step."""
        return self.depths[self.step % len(self.depths)]

    def budget(self, state: DecodeState) -> torch.Tensor:
        self.step += 1
        return torch.full((len(state.rows),), self.depth)

    def observe(self, state: DecodeState, sizes: torch.Tensor, accepted: Accepted, timing: Timing) -> None:
        self.nodes = int(sizes.max()) if len(sizes) else 0


def ragged(context: int, slots: int) -> list[float]:
    """Lengths of the texts of a batch with mean `context`: quantiles of a normal distribution."""
    normal = statistics.NormalDist(context, SPREAD * context)
    return [normal.inv_cdf((slot + 0.5) / slots) for slot in range(slots)]


def steps(
    target: Target, drafter: Drafter | None, state: DecodeState, depths: Sequence[int], context: int
) -> Iterator[tuple[int, Cell]]:  # fmt: skip
    """Depths and times of steps of the loop over random text, generated lazily."""
    rounds, slots = STEPS + SKIPPED, len(state.tokens)
    room = min(rounds * sum(depth + 1 for depth in depths) + 1, target.spec.context // 2)
    longest = target.spec.context - room - max(depths) - 2
    lengths = [max(2, min(round(each) - room // 4, longest)) for each in ragged(context, slots)]
    noise = torch.Generator().manual_seed(slots)
    texts = [torch.randint(target.spec.vocabulary, (length,), generator=noise).tolist() for length in lengths]
    policy = RoundRobin(depths)
    requests = [Request(text, room, Sampling()) for text in texts]
    timing, count = None, 0
    for _ in serve(target, requests, drafter, policy=policy if drafter else None, state=state):
        if state.timing is timing:
            continue
        timing, count = state.timing, count + 1
        if count > SKIPPED * len(depths):
            cell = Cell(timing.draft, timing.verify, timing.other, float(policy.nodes))
            yield (policy.depth if drafter else 0), cell
        if count == rounds * len(depths):
            return


def _prompt_seconds(target: Target, context: int) -> float:
    """Seconds per prompt token when one prompt is read alone."""
    text = torch.randint(target.spec.vocabulary, (1, context), generator=torch.Generator().manual_seed(1))
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < SLOW_S:
        cache = target.allocate(1, context + 1)
        began = perf_counter()
        scores = target.prefill(cache, [0], text.to(target.device), [context], ())
        float(scores.logits.flatten()[0])  # waits for a GPU
        seconds.append(perf_counter() - began)
    return min(seconds) / context


def as_mapping(times: Timings) -> Mapping[str, Any]:
    """Counts of stored times, for a line of output."""
    return {"passes": len(times.passes), "drafts": sum(map(len, times.drafts.values()))}
