"""Calibrate a checkpoint's confidences on what serving sees: drafts of the served drafter on held-out prompts.

Every second prompt is left out of the scaling, to judge it on.  M drafts, K slots of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from outrider.training.scaling import BINS, Outcomes, Scaling, scaling

LEAST = 20 * BINS
"""Drafts below which a slot's temperature would be noise."""


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
    for progress in serve(target, requests, watched, policy="fixed", slots=slots, shared_noise=False):
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
