"""Make a confidence mean what it says: of drafts that promise 0.8, four of five are kept.

Sequential temperature scaling (DSpark, arXiv 2607.05147): slot by slot, with what was found before fixed, that
temperature is taken under which the product of confidences up to the slot has the least expected calibration error.  No order
within a slot changes.  What is scaled and judged is what serving sees: drafts of the served drafter on held-out prompts, and
whether they were kept.

Differs from the paper: with every temperature comes the shift of the logits under which promise and outcome agree on average,
since a temperature leaves even chances even, and texts of another kind than those trained on are kept less often.  Every second
prompt is kept apart to judge on; grid and number of bins are ours.

M drafts, K slots of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider import checkpoint
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.errors import CheckpointError, DataError
from outrider.generation import serve
from outrider.nn.heads import ConfidenceHead
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import Target

BINS = 15
"""Bins of equally many drafts."""
LEAST = 20 * BINS
"""Drafts below which a slot's temperature would be noise."""


@dataclass(frozen=True)
class Outcomes:
    """What was promised of drafted slots, and what became of them."""

    confidence: Tensor
    """[M, K] float64, of each slot given the slots before it."""
    survived: Tensor
    """[M, K] bool, whether slots 0..k were all kept."""
    seen: Tensor
    """[M, K] bool, False where a slot was not drafted, or stands behind the end of the text."""
    prompts: Tensor
    """[M] int64, which prompt."""

    def of(self, chosen: Tensor) -> Outcomes:
        """Those of `chosen` [M] bool."""
        return Outcomes(self.confidence[chosen], self.survived[chosen], self.seen[chosen], self.prompts[chosen])

    def scaled(self, by: Scaling) -> Outcomes:
        """As the drafter would have promised under other temperatures and shifts."""
        return replace(self, confidence=_tempered(_logits(self.confidence), by.temperatures, by.shifts))

    def errors(self, bins: int = BINS) -> list[float]:
        """Expected calibration error of reaching and keeping each slot."""
        pairs = zip(self.confidence.cumprod(-1).T, self.survived.T, self.seen.T, strict=True)
        return [ece(predicted[seen], survived[seen], bins) for predicted, survived, seen in pairs]

    def noise(self, bins: int = BINS, draws: int = 100) -> list[float]:
        """The errors that perfect promises would show on so many drafts, by outcomes drawn from the promises themselves."""
        generator = torch.Generator().manual_seed(0)
        found = []
        for predicted, seen in zip(self.confidence.cumprod(-1).T, self.seen.T, strict=True):
            mine = predicted[seen]
            drawn = (ece(mine, torch.rand(len(mine), generator=generator) < mine, bins) for _ in range(draws))
            found.append(sum(drawn) / draws)
        return found


def ece(predicted: Tensor, kept: Tensor, bins: int = BINS) -> float:
    """Mean distance of promise and outcome over bins of equally many.  predicted [M] in [0, 1], kept [M] bool."""
    order = predicted.argsort(stable=True)
    gaps = (predicted.double() - kept.double())[order].tensor_split(bins)
    return float(sum(gap.sum().abs() for gap in gaps)) / max(1, len(order))


class Scaling(NamedTuple):
    """Confidences become sigmoid((logit + shift) / temperature)."""

    temperatures: Tensor
    """[K] float64."""
    shifts: Tensor
    """[K] float64."""


def scaling(outcomes: Outcomes, shifting: bool = True, bins: int = BINS) -> Scaling:
    """Slot after slot the temperature of the least error of the product up to it.  shifting False is the paper's own way."""
    found: list[tuple[Tensor, Tensor]] = []
    reached = torch.ones(len(outcomes.confidence), dtype=torch.float64)
    for confidence, survived, seen in zip(_logits(outcomes.confidence).T, outcomes.survived.T, outcomes.seen.T, strict=True):
        slot = _Slot(reached[seen], confidence[seen], survived[seen], shifting, bins)
        coarse, _ = slot.best(torch.linspace(-3, 3, 33, dtype=torch.float64).exp2())
        found.append(slot.best(coarse * torch.linspace(-3 / 16, 3 / 16, 13, dtype=torch.float64).exp2()))
        reached = reached * _tempered(confidence, *found[-1])
    return Scaling(*(torch.stack(column) for column in zip(*found, strict=True)))


class _Slot(NamedTuple):
    """What one slot is scaled on.  m drafts that had it, G temperatures."""

    reached: Tensor
    """[m] chance of the slots before it, as scaled already."""
    logits: Tensor
    """[m]."""
    survived: Tensor
    """[m] bool."""
    shifting: bool
    bins: int

    def best(self, tried: Tensor) -> tuple[Tensor, Tensor]:
        """The temperature among `tried` [G] of the least error, of equals the nearest to 1, and its shift."""
        shifts = self._shifts(tried) if self.shifting else torch.zeros_like(tried)
        pairs = zip(tried.unbind(), shifts.unbind(), strict=True)
        return min(pairs, key=lambda pair: (self._error(*pair), abs(float(pair[0].log()))))

    def _error(self, temperature: Tensor, shift: Tensor) -> float:
        return ece(self.reached * _tempered(self.logits, temperature, shift), self.survived, self.bins)

    def _shifts(self, tried: Tensor) -> Tensor:
        """[G] by bisection: promise and outcome agree on average, or as nearly as a shift of 8 lets them."""
        low, high = torch.full_like(tried, -8.0), torch.full_like(tried, 8.0)
        share = self.survived.double().mean()
        for _ in range(24):
            middle = (low + high) / 2
            promised = self.reached * _tempered(self.logits, tried[:, None], middle[:, None])
            is_less = promised.mean(-1) < share
            low, high = torch.where(is_less, middle, low), torch.where(is_less, high, middle)
        return (low + high) / 2


def _logits(confidence: Tensor) -> Tensor:
    # float32 rounds what is nearly certain to 0 or 1, whose logits are not finite
    return confidence.double().clamp(1e-8, 1 - 1e-8).logit()


def _tempered(logits: Tensor, temperature: Tensor, shift: Tensor) -> Tensor:
    return ((logits + shift) / temperature).sigmoid()


# ── watching ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Watched(Drafter):
    """The drafter as it is; notes what it promised of every verified draft, and how much of it was kept."""

    def __init__(self, drafter: Drafter, requests: Sequence[Request]):
        self.drafter, self.taps, self.limit, self.hidden = drafter, drafter.taps, drafter.limit, drafter.hidden
        self.probe_rows = drafter.probe_rows
        self.number = {id(request): i for i, request in enumerate(requests)}
        self.rows: list[tuple[list[float], int, bool, int]] = []
        """Confidences of a draft's nodes, how many of them were kept, whether the text ended there, which prompt."""

    def allocate(self, cache: Cache) -> Any:
        return self.drafter.allocate(cache)

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]) -> None:
        self.drafter.admit(memory, rows, state, scores, lengths)

    def propose(self, memory: Any, state: DecodeState, budget: Tensor) -> Draft:
        return self.drafter.propose(memory, state, budget)

    def probe(self, memory: Any, state: DecodeState, draft: Draft) -> Probe | None:
        return self.drafter.probe(memory, state, draft)

    def free(self, memory: Any, rows: Sequence[int]) -> None:
        self.drafter.free(memory, rows)

    def observe(self, memory: Any, state: DecodeState, draft: Draft, kept: Accepted, scores: Scores) -> None:
        promised = [[]] * len(draft.live) if draft.confidence is None else draft.confidence.tolist()
        if max(draft.live) and (draft.confidence is None or draft.branches):
            raise DataError("a draft is a tree or has no confidences; calibrate at a temperature above 0, where it is a chain")
        for b, row in enumerate(state.rows):
            own = promised[b][: draft.live[b]]
            self.rows.append((own, len(kept.paths[b]), kept.next_tokens[b] < 0, self.number[id(state.requests[row])]))
        self.drafter.observe(memory, state, draft, kept, scores)


def watch(
    target: Target, drafter: Drafter, prompts: Sequence[list[int]], *, max_new_tokens: int = 96, temperature: float = 1.0,
    seed: int = 0, slots: int = 16, on_prompt: Callable[[int], None] | None = None,
) -> Outcomes:  # fmt: skip
    """Continue every prompt and note what the drafter's confidences promised and what came of it.

    on_prompt(how many are done).  Slots behind the end of a text are not seen, those up to it are: with the whole draft left
    out, tokens that end a text would count where they are rejected and be missing where they are kept.
    """
    longest = max(map(len, prompts), default=0)
    if longest + max_new_tokens > target.spec.context:
        raise DataError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones do not fit into the context of {target.spec.name}, "
            f"{target.spec.context}; give shorter prompts, or fewer tokens"
        )
    requests = [
        Request(prompt, max_new_tokens, Sampling(temperature, seed=seed + i), detokenizer=target.detokenizer)
        for i, prompt in enumerate(prompts)
    ]
    watched, done = _Watched(drafter, requests), 0
    for progress in serve(target, requests, watched, slots=slots, shared_noise=False):
        done += progress.finish_reason is not None
        if progress.finish_reason is not None and on_prompt is not None:
            on_prompt(done)
    rows = [row for row in watched.rows if row[0]]
    if not rows:
        raise DataError(f"{len(prompts)} prompts of {max_new_tokens} new tokens gave no draft to judge by; give more of both")
    return _gathered(rows)


def _gathered(rows: Sequence[tuple[list[float], int, bool, int]]) -> Outcomes:
    slots = max((len(own) for own, *_ in rows), default=0)
    at = torch.arange(slots)
    confidence = torch.tensor([own + [1.0] * (slots - len(own)) for own, *_ in rows], dtype=torch.float64).view(-1, slots)
    counts = torch.tensor([[len(own), kept, ended, prompt] for own, kept, ended, prompt in rows]).view(-1, 4)
    drafted, kept, ended, prompts = counts.unbind(-1)
    survived = at < kept[:, None]
    return Outcomes(confidence, survived, (at < drafted[:, None]) & (survived | (ended == 0)[:, None]), prompts)


# ── a checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Calibration:
    """What was done to a checkpoint, and what it was worth on prompts that were kept apart."""

    temperatures: list[float]
    """[K], as they stand in the checkpoint now."""
    shifts: list[float]
    before: list[float]
    """[K] expected calibration error of reaching and keeping each slot, with the scaling that was there."""
    after: list[float]
    noise: list[float]
    """[K] what perfect promises would show on so few drafts."""
    drafts: tuple[int, int]
    """Scaled on, judged on."""
    prompts: tuple[int, int]
    temperature: float
    """At which the prompts were continued."""
    bins: int = BINS


def calibrate(
    folder: str | Path, target: Target, prompts: Sequence[list[int]], *, max_new_tokens: int = 96, temperature: float = 1.0,
    shifting: bool = True, seed: int = 0, slots: int = 16, on_prompt: Callable[[int], None] | None = None,
) -> Calibration:  # fmt: skip
    """Scale the confidences of the checkpoint in `folder` on every second prompt, judge them on the others, and write them.

    The checkpoint is rewritten whole or not at all, and only its scaling and `calibration` in its manifest change.
    Raises CheckpointError where it has no confidence head, DataError where the prompts give too few drafts.
    """
    drafter = checkpoint.load_drafter(folder, target)
    name, head = head_of(drafter, folder)
    outcomes = watch(
        target, drafter, prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, slots=slots,
        on_prompt=on_prompt,
    )  # fmt: skip
    scaled, judged = outcomes.of(outcomes.prompts % 2 == 0), outcomes.of(outcomes.prompts % 2 == 1)
    fewest = int(min(half.seen.sum(0).min() for half in (scaled, judged)))
    if fewest < LEAST:
        raise DataError(
            f"{len(prompts)} prompts of {max_new_tokens} tokens give a slot only {fewest} drafts to scale or to judge on, "
            f"wanted are {LEAST}; give {-(-len(prompts) * LEAST // max(fewest, 1))} prompts or more, or more tokens"
        )
    change = scaling(scaled, shifting)
    better = judged.scaled(change)
    before = head.temperatures.double().cpu()
    own = Scaling(before * change.temperatures, head.shifts.double().cpu() + before * change.shifts)
    found = Calibration(
        temperatures=own.temperatures.tolist(), shifts=own.shifts.tolist(),
        before=judged.errors(), after=better.errors(), noise=better.noise(),
        drafts=(len(scaled.confidence), len(judged.confidence)), prompts=(-(-len(prompts) // 2), len(prompts) // 2),
        temperature=temperature,
    )  # fmt: skip
    weights = {f"{name}.{key}": value.float() for key, value in own._asdict().items()}
    checkpoint.amend(folder, weights, {"calibration": asdict(found)})
    return found


def head_of(drafter: Any, folder: str | Path) -> tuple[str, ConfidenceHead]:
    """The confidence head of a loaded checkpoint, with its name.  Raises CheckpointError where there is none."""
    model = getattr(drafter, "model", None)
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    for name, module in modules:
        if isinstance(module, ConfidenceHead):
            return name, module
    raise CheckpointError(
        f"{folder} has no confidence head to calibrate; train one (dspark with drafter.confidence=true), or wrap the drafter "
        "in outrider.policies.by_confidence, which counts what is kept while decoding"
    )
