"""What passes, drafts and the loop take on this machine: timed once, kept by machine and target, used again.

Kept in `$OUTRIDER_CACHE/plan`, one file for each machine, versions and target; what is there is not timed again, and
what is new is added.  As with all times of this machine, those taken while other programs were busy are not kept.
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
from outrider.generation import batch, kept_costs, serve
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
"""Rows of each text in the timed passes."""
MOST_ROWS = 1024
"""Of all texts together."""
ALONE = 32
"""Tokens of a prompt that are read in about the time of a pass over one."""
FEWER = 4
"""How many times fewer texts at once are timed where so many don't fit."""
PASSES = 6
"""Times that each size of pass runs, the first to warm up."""
STEPS, SKIPPED = 5, 1
"""Timed steps of each depth in a round, and steps before them that warm up."""
ROUNDS = 3
"""Times that everything is timed in turn, so that other load slows all of it; fewer where there is no time for them."""
SPREAD = 0.25
"""Standard deviation of the lengths of a batch's texts, over their mean, as served ones differ that began at other
times: equal ones are read faster."""
CHAINS = "random chains"
"""The drafter whose steps tell what a verification takes, whoever drafts."""
GRAIN = 32
"""Contexts are rounded to it, so that plans for similar traffic share times."""
SLOW_S = 5.0
"""Seconds after which a prompt is not read again."""


class Cell(NamedTuple):
    """Median seconds of steps of one kind."""

    draft_s: float
    verify_s: float
    other_s: float
    drafted: float = 0.0
    """Nodes of every such draft; 0 where steps differ, as those of drafters do that look texts up."""
    spread: float = 0.0
    """Half of the range of the middle half of the steps' seconds, over their median."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.draft_s + self.verify_s + self.other_s

    def scaled(self, by: float) -> Cell:
        """As if the machine's pace were another."""
        return self._replace(draft_s=by * self.draft_s, verify_s=by * self.verify_s, other_s=by * self.other_s)


Key = tuple[int, int, int]


@dataclass
class Timings:
    """The times of one target on one machine."""

    passes: dict[Key, float] = field(default_factory=dict)
    """By slots, rows of each, context."""
    plain: dict[Key, Cell] = field(default_factory=dict)
    """By slots, 0, context."""
    drafts: dict[str, dict[Key, Cell]] = field(default_factory=dict)
    """By drafter, then by slots, depth, context."""
    prompt_s: float = 0.0
    """Of the target for a token of a prompt."""
    prompts: dict[str, float] = field(default_factory=dict)
    """The same of each drafter, beside the target's."""

    def known(self, drafter: str, context: int) -> RunnerSeconds:
        """What a policy needs of steps of this drafter, by its identity."""
        steps = [(key, cell) for key, cell in (self.plain | self.drafts[CHAINS]).items() if key[2] == context]
        drafts = [(key, cell) for key, cell in self.drafts[drafter].items() if key[2] == context]
        return RunnerSeconds(
            {(slots, 1 + depth): cell.verify_s + cell.other_s for (slots, depth, _), cell in steps},
            {(slots, depth): cell.draft_s for (slots, depth, _), cell in drafts},
        )


def nearest(value: float, known: set[int] | Sequence[int]) -> int:
    return min(known, key=lambda other: (abs(other - value), other))


def rounded(context: float, most: int) -> int:
    """A context as it is timed."""
    return max(1, min(GRAIN * max(1, round(context / GRAIN)), most - max(ROWS) - 1))


# ── kept ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def folder() -> Path:
    """Where times are."""
    return cache.folder() / "plan"


def place(target: Target) -> Path:
    """The file of this target's times on this machine."""
    spec = target.spec
    about = [machine.identity(), fingerprint(target), spec.name, spec.weights_hash, spec.layers, spec.hidden]
    return folder() / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"


def cached(target: Target) -> Timings:
    """What was timed before; nothing where there is no file, or a damaged one."""
    try:
        found = json.loads(place(target).read_text(encoding="utf-8"))
        cells = lambda rows: {tuple(key): Cell(*values) for key, values in rows}
        return Timings(
            {tuple(key): float(seconds) for key, seconds in found["passes"]}, cells(found["plain"]),
            {name: cells(rows) for name, rows in found["drafts"].items()},
            float(found["prompt_s"]), {name: float(each) for name, each in found["prompts"].items()},
        )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Timings()


def keep(target: Target, found: Timings) -> Path | None:
    """Write the times; None where they may be wrong, since other programs were busy, or can't be written."""
    if measurements.is_busy():
        log.info("other programs are busy: these times are used now, and the next plan measures again")
        return None
    rows = lambda cells: [[list(key), list(cell)] for key, cell in cells.items()]
    content = {
        "target": target.spec.name, "fingerprint": fingerprint(target),
        "passes": [[list(key), seconds] for key, seconds in found.passes.items()], "plain": rows(found.plain),
        "drafts": {name: rows(cells) for name, cells in found.drafts.items()},
        "prompt_s": found.prompt_s, "prompts": found.prompts,
    }  # fmt: skip
    with suppress(OSError), cache.keeping(place(target)) as part:
        part.write_text(json.dumps(content), encoding="utf-8")
        return place(target)
    return None


def identity_of(name: str) -> str:
    """What a drafter's times depend on: its kind and settings, whatever it learnt."""
    if name in kinds():
        kind, settings = name, find(name).Config().model_dump(mode="json")
    else:
        source = describe(name)
        kind, settings = source.kind, dict(source.manifest.get("config") or {"folder": str(source.folder)})
    return f"{kind} {hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]}"


# ── timed ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work:
    """What is not timed yet of one number of texts at once, and what timing it takes."""

    slots: int
    names: Sequence[str]
    """Drafters whose steps are missing."""
    sizes: Sequence[tuple[int, int]]
    """Passes that are missing: slots, rows of each."""
    depths: Sequence[int]
    context: int

    def seconds(self, token_s: float, rounds: int) -> float:
        """Expected, by what a token of a prompt takes."""
        steps = (STEPS + SKIPPED) * sum(2 + depth + 2 * ALONE / self.slots for depth in self.depths)
        drafted = 2 * rounds * len(self.names) * self.slots * (self.context + steps)
        passes = PASSES * sum(max(ALONE, slots * rows) for slots, rows in self.sizes)
        return token_s * (drafted + passes + self.slots * self.context * bool(self.sizes))

    def bytes(self, token_bytes: float, vocabulary: int) -> float:
        """Of caches, which are there twice while they grow, and of a pass's logits."""
        longest = (1 + 3 * SPREAD) * self.context + (STEPS + SKIPPED) * sum(1 + depth for depth in self.depths)
        rows = max(self.slots * (1 + max(self.depths)), *(slots * each for slots, each in self.sizes), 0)
        return 2 * self.slots * longest * token_bytes + 8 * rows * vocabulary


def measure(
    target: Target, names: Sequence[str], batches: Sequence[int], depths: Sequence[int], context: int, found: Timings,
    load: Callable[[str], Drafter] | None = None, say: Callable[[str], None] = lambda line: None,
    allowed: Allowance | None = None,
) -> Timings:  # fmt: skip
    """Add to `found` what is not in it: passes, plain steps, and steps of each drafter at each depth.

    load: how a drafter is made of its name.  allowed: what this may take; in place of a batch that does not fit a
    smaller one is timed, if any, which is said; the smallest that was asked for always is.
    """
    load, allowed = load or functools.partial(load_drafter, target=target), allowed or Allowance()
    found.prompt_s = found.prompt_s or _prompt_seconds(target, context)
    keys = {CHAINS: CHAINS} | {name: identity_of(name) for name in names}
    missing = lambda slots: _missing(found, keys, slots, depths, context)
    size_of = lambda work: work.bytes(token_bytes(target), target.spec.vocabulary)
    lacking = lambda share, work, rounds: allowed.lacks(work.seconds(found.prompt_s, rounds), size_of(work), share)
    wanted, largest = [missing(slots) for slots in sorted(batches)], 0
    if seconds := sum(work.seconds(found.prompt_s, ROUNDS) for work in wanted):
        say(f"all of it takes about {seconds:.0f} s and {max(map(size_of, wanted)) / 1e9:.2g} GB{allowed.says()}")
    for left, whole in zip(range(len(wanted), 0, -1), wanted, strict=True):
        lacks = functools.partial(lacking, 1 / left)
        why = lacks(whole, 1)
        fits = _affordable(whole.slots, largest, missing, lacks)
        work, rounds = fits or (whole, 0 if largest else 1)
        if not rounds or work.slots < whole.slots:
            say(allowed.leave_out(f"{whole.slots} texts at once", why))
        if rounds:
            largest = work.slots
            if expected := work.seconds(found.prompt_s, rounds):
                names = ["plain", *work.names] if work.names else []
                say(f"timing {work.slots} at once: {', '.join([*names, f'{len(work.sizes)} sizes of pass'])}")
                allowed.spend(expected, functools.partial(_time, found, target, work, keys, load, rounds))
    return found


def _affordable(
    slots: int, above: int, missing: Callable[[int], Work], lacks: Callable[[Work, int], str]
) -> tuple[Work, int] | None:
    """Work for so many texts at once, or a quarter of them and so on, but more than `above`, and in how many rounds.

    None where nothing fits."""
    while slots > above:
        work = missing(slots)
        rounds = next((rounds for rounds in range(ROUNDS, 0, -1) if not lacks(work, rounds)), 0)
        if rounds:
            return work, rounds
        slots //= FEWER
    return None


def _missing(
    found: Timings, keys: Mapping[str, str], slots: int, depths: Sequence[int], context: int
) -> Work:  # fmt: skip
    known = lambda name: all((slots, depth, context) in found.drafts.get(keys[name], {}) for depth in depths)
    sizes = [(slots, rows) for rows in ROWS if slots * rows <= max(MOST_ROWS, slots)]
    sizes = [size for size in sizes if (*size, context) not in found.passes]
    return Work(slots, [name for name in keys if not known(name)], sizes, depths, context)


def _time(
    found: Timings, target: Target, work: Work, keys: Mapping[str, str], load: Callable[[str], Drafter], rounds: int
) -> None:  # fmt: skip
    if work.sizes:
        taken = timed(target, Drafter(), work.sizes, context=work.context, repeats=PASSES - 1, most_s=15.0)
        found.passes |= {(*size, work.context): seconds for size, seconds in taken.items()}
    if work.names:
        chains = RandomChains(target.spec.vocabulary, max(work.depths))
        drafters = {keys[name]: chains if name == CHAINS else load(name) for name in work.names}
        _add(found, target, drafters, work.slots, work.depths, work.context, rounds)
        for key, drafter in drafters.items():
            if key != CHAINS:
                kept = kept_costs(target, drafter)
                kept.write(kept.read() | {"plain": found.known(key, work.context)})


class RandomChains(Drafter):
    """As many random tokens as are asked for."""

    def __init__(self, vocabulary: int, limit: int):
        self.vocabulary, self.limit = vocabulary, limit

    def propose(self, memory: Any, state: DecodeState, budget: torch.Tensor) -> Draft:
        drafted = torch.randint(self.vocabulary, (len(state.rows), int(budget.max())), device=state.device)
        return Draft.chain(drafted, budget)


def _add(
    found: Timings, target: Target, drafters: Mapping[str, Drafter], slots: int, depths: Sequence[int], context: int,
    rounds: int,
) -> None:  # fmt: skip
    """Steps of these drafters, each right after a plain one.

    A machine's pace changes by a fifth within seconds.  So a drafter's times are those of its steps in plain steps
    beside them, times what a plain step took when the first were timed: ratios are kept, whenever they were taken.
    """
    plain: list[Cell] = []
    drafted: dict[tuple[str, int], list[Cell]] = {}
    """By drafter and depth, in plain steps."""
    for _ in range(rounds):
        for key, drafter in drafters.items():
            own = [depth for depth in depths if depth <= drafter.limit] or [drafter.limit]
            state = batch(target, slots, ends=frozenset())
            undrafted = steps(target, None, batch(target, slots, ends=frozenset()), own, context)
            for (_, one), (depth, other) in zip(undrafted, steps(target, drafter, state, own, context), strict=False):
                plain.append(one)
                drafted.setdefault((key, depth), []).append(other.scaled(1 / one.seconds))
            found.prompts[key] = state.read_s / state.read_tokens if state.read_tokens else 0.0
    usual = found.plain.setdefault((slots, 0, context), middle(plain)).seconds
    for key, depth in product(drafters, depths):
        # one that is asked for more than it drafts gives what it has
        cells = drafted.get((key, depth)) or drafted[key, max(known for name, known in drafted if name == key)]
        found.drafts.setdefault(key, {})[slots, depth, context] = middle(cells).scaled(usual)


def middle(cells: Sequence[Cell]) -> Cell:
    """The median of steps, part by part."""
    whole = sorted(cell.seconds for cell in cells)
    quarter = len(whole) // 4
    spread = (whole[-1 - quarter] - whole[quarter]) / 2 / whole[len(whole) // 2]
    parts = [statistics.median(each) for each in list(zip(*cells, strict=True))[:3]]
    drafted = {cell.drafted for cell in cells}
    return Cell(parts[0], parts[1], parts[2], drafted.pop() if len(drafted) == 1 else 0.0, spread)


class RoundRobin(Policy):
    """One depth after the other, step by step."""

    def __init__(self, depths: Sequence[int]):
        self.depths, self.step, self.nodes = depths, -1, 0

    @property
    def depth(self) -> int:
        """Of the last step."""
        return self.depths[self.step % len(self.depths)]

    def budget(self, state: DecodeState) -> torch.Tensor:
        self.step += 1
        return torch.full((len(state.rows),), self.depth)

    def observe(self, state: DecodeState, sizes: torch.Tensor, accepted: Accepted, timing: Timing) -> None:
        self.nodes = int(sizes.max()) if len(sizes) else 0


def ragged(context: int, slots: int) -> list[float]:
    """Lengths of the texts of a batch, `context` in the mean: the middles of equal parts of a normal distribution."""
    normal = statistics.NormalDist(context, SPREAD * context)
    return [normal.inv_cdf((slot + 0.5) / slots) for slot in range(slots)]


def steps(
    target: Target, drafter: Drafter | None, state: DecodeState, depths: Sequence[int], context: int
) -> Iterator[tuple[int, Cell]]:  # fmt: skip
    """Depths and times of steps of the loop over random text; each is made when it is asked for."""
    rounds, slots = STEPS + SKIPPED, len(state.tokens)
    room = min(rounds * sum(depth + 1 for depth in depths) + 1, target.spec.context // 2)
    longest = target.spec.context - room - max(depths) - 2
    lengths = [max(2, min(round(each) - room // 4, longest)) for each in ragged(context, slots)]
    noise = torch.Generator().manual_seed(slots)
    texts = [torch.randint(target.spec.vocabulary, (length,), generator=noise).tolist() for length in lengths]
    policy = RoundRobin(depths)
    asked = [Request(text, room, Sampling()) for text in texts]
    timing, count = None, 0
    for _ in serve(target, asked, drafter, policy=policy if drafter else None, state=state):
        if state.timing is timing:
            continue
        timing, count = state.timing, count + 1
        if count > SKIPPED * len(depths):
            cell = Cell(timing.draft, timing.verify, timing.other, float(policy.nodes))
            yield (policy.depth if drafter else 0), cell
        if count == rounds * len(depths):
            return


def _prompt_seconds(target: Target, context: int) -> float:
    """Of a prompt's token, where one prompt is read alone."""
    text = torch.randint(target.spec.vocabulary, (1, context), generator=torch.Generator().manual_seed(1))
    taken: list[float] = []
    while len(taken) < 3 and sum(taken) < SLOW_S:
        cache = target.allocate(1, context + 1)
        began = perf_counter()
        scores = target.prefill(cache, [0], text.to(target.device), [context], ())
        float(scores.logits.flatten()[0])  # waits for a GPU
        taken.append(perf_counter() - began)
    return min(taken) / context


def as_mapping(found: Timings) -> Mapping[str, Any]:
    """Counts of what is known, for a line of output."""
    return {"passes": len(found.passes), "drafts": sum(map(len, found.drafts.values()))}
