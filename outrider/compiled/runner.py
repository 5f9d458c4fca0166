"""Which runner takes steps: whole ones, where they were seen to write what plain steps write, tried on a few words."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch

from outrider.compiled import folder
from outrider.compiled.step_package import CompiledWholeStep
from outrider.compiled.whole_step import WholeSteps, is_compiled
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Progress, advance
from outrider.decoding.state import DecodeState, Request
from outrider.decoding.static import NoStatic
from outrider.errors import first_line
from outrider.kernels.selection import acceptance_kernels
from outrider.policies import named
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.selftest import plain_words

log = logging.getLogger(__name__)

PROMPTS, NEW = (3, 9, 5), 16
"""Tokens of the prompts that are tried, and of each answer; two slots serve them."""

_known: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], str]] = weakref.WeakKeyDictionary()
"""By drafter, or by target where nothing is drafted."""


Use = Literal["none", "known", "built"]
"""Of whole steps: none; those of a GPU and of packages that are on disk; and packages are built where they are not."""
_use: ContextVar[Use] = ContextVar("use", default="known")


@contextmanager
def using(use: Use) -> Iterator[None]:
    """Which whole steps batches that begin in this thread may have."""
    token = _use.set(use)
    try:
        yield
    finally:
        _use.reset(token)


def whole_steps(target: Any, drafter: Drafter, state: DecodeState, length: int) -> WholeSteps | None:
    """The runner of whole steps for a batch of texts of at most `length` tokens: that of the call before, where it
    serves this one too, or a new one.  None where no step of this target and drafter can be whole, or is right."""
    before = vars(drafter).pop("whole", None)  # one of two threads gets it
    use = _use.get()
    is_there = use == "built" or target.device.type == "cuda" or is_on_disk()
    if use == "none" or not is_compiled(target) or not is_there:
        return None
    slots, ends = len(state.tokens), state.ends
    if before is not None and before.serves(target, drafter, slots, length, ends):
        return before  # type: ignore[no-any-return]
    kernels = state.judge.kernels if isinstance(state.judge, SamplingJudge) else None
    longest = min(1 << (length - 1).bit_length(), target.spec.context)
    try:
        if found := wrong(target, drafter):
            log.warning("steps are of several calls: whole ones of %s write other texts (%s)", target.spec.name, found)
            return None
        return WholeSteps(target, drafter, slots, longest, ends, kernels, builds=use == "built")
    except NoStatic as reason:
        log.info("steps of %s are of several calls: %s", target.spec.name, reason)
        return None


def is_on_disk() -> bool:
    """Whether there is a package of any whole step."""
    return any(folder().glob(f"{CompiledWholeStep.name}-*.pt2"))


def wrong(target: Any, drafter: Drafter) -> str:
    """What captured steps of these two do otherwise than plain ones, in words; "" for nothing.  Tried once.

    Raises NoStatic where there can be none.
    """
    key: Any = drafter if drafter.limit else target
    of, found = _known.get(key, (lambda: None, ""))
    if of() is not target:
        found = _tried(target, drafter)
        _known[key] = weakref.ref(target), found
    return found


def _tried(target: Any, drafter: Drafter) -> str:
    words = plain_words(target, len(PROMPTS), max(PROMPTS))
    prompts = [text[:count] for text, count in zip(words, PROMPTS, strict=True)]
    requests = [Request(prompt, NEW, Sampling()) for prompt in prompts]
    policy, state = named.policy("fixed", drafter), _batch(target)
    plain = _texts(requests, advance(target, requests, drafter, policy, state))
    builds = _use.get() == "built"
    whole = WholeSteps(target, drafter, 2, max(PROMPTS) + NEW, frozenset(), state.judge.kernels, builds=builds)
    try:
        by_graphs = _texts(requests, advance(target, requests, drafter, policy, _batch(target), fast=lambda _: whole))
    except RuntimeError as error:  # an operation that no graph takes
        return first_line(error)[:300]
    for prompt, wanted, found in zip(prompts, plain, by_graphs, strict=True):
        both = enumerate(itertools.zip_longest(wanted, found))
        at = next((i for i, (one, other) in both if one != other), None)
        if at is not None and not is_tie(target, [*prompt, *wanted[:at]], wanted[at], found[at]):
            return f"token {at} after a prompt of {len(prompt)} is {found[at]}, not {wanted[at]}"
    return ""


def _batch(target: Any) -> DecodeState:
    judge = SamplingJudge()
    judge.kernels = acceptance_kernels(target.device)
    return DecodeState(2, target.spec.context, frozenset(), target.device, judge)


def _texts(requests: list[Request], steps: Iterator[Progress]) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in requests]
    for step in steps:
        found[step.request] += step.tokens
    return found


@torch.inference_mode()
def is_tie(target: Any, text: list[int], one: int, other: int) -> bool:
    """Whether rounding decides between two tokens after a text."""
    tokens = torch.tensor([text], device=target.device)
    logits = target.prefill(target.allocate(1, len(text) + 1), [0], tokens, [len(text)], ()).logits[0, -1].double()
    return float(abs(logits[one] - logits[other])) <= target.selftest.allowed
