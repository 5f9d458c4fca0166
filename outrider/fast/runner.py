"""Selects the runner of a batch: whole steps, if a test on a few prompts shows that they generate the same text as
plain ones."""

from __future__ import annotations

import functools
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch

from outrider import machine
from outrider.decoding.protocols import Drafter, NoStatic
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.errors import first_line
from outrider.fast import NotCompiled, folder
from outrider.fast.whole.package import CompiledWholeStep
from outrider.fast.whole.steps import WholeSteps, is_compiled
from outrider.kernels.selection import acceptance_kernels
from outrider.policies import named
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling
from outrider.targets.hf.proof.selftest import plain_words

log = logging.getLogger(__name__)

PROMPTS, NEW = (3, 9, 5), 16
"""Number of tokens of the test's prompts and of each answer; two slots serve them."""

_differences: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], str]] = weakref.WeakKeyDictionary()
"""Results of `wrong`, by drafter, or by target if nothing is drafted."""


Use = Literal["none", "known", "built"]
"""Which whole steps are used: none; those of a GPU and of packages on disk; or these plus missing packages, which are
built."""
_use: ContextVar[Use] = ContextVar("use", default="known")


@contextmanager
def using(use: Use) -> Iterator[None]:
    """Within this context, which whole steps batches of this thread may use."""
    token = _use.set(use)
    try:
        yield
    finally:
        _use.reset(token)


class Runner(NamedTuple):
    """The runner of a batch's steps."""

    whole: WholeSteps | None
    """For the steps that requests allow; None if all steps take several calls."""
    words: str
    """Which it is, and why."""


def runner_of(target: Any, drafter: Drafter, state: DecodeState, length: int) -> Runner:
    """The runner for a batch of texts of at most `length` tokens: that of the last batch if it fits, a new one, or
    none."""
    before = vars(drafter if drafter.limit else target).pop("whole", None)  # if two threads do this, one gets it
    try:
        _refuse(target)
        slots, ends = len(state.tokens), state.ends
        if before is not None and before.serves(target, drafter, slots, length, ends):
            return Runner(before, WHOLE)
        kernels, builds = acceptance_kernels(target.device), _use.get() == "built"
        if difference := wrong(target, drafter):
            log.warning(
                "steps take several calls: whole steps of %s generate different texts (%s)",
                target.spec.name,
                difference,
            )
            raise NoStatic(f"whole steps generate different texts ({difference})")
        if _use.get() == "known" and target.device.type != "cuda" and not _pays(target, drafter):
            raise NoStatic("these are no slower on this machine")
        return Runner(WholeSteps(target, drafter, slots, length, ends, kernels, builds=builds), WHOLE)
    except NoStatic as reason:
        return Runner(None, f"of several calls, since {reason}")


WHOLE = "whole, one call each, where requests and policy allow it"


def _refuse(target: Any) -> None:
    """Raises NoStatic if steps can't be whole, whatever the drafter."""
    use = _use.get()
    if use == "none":
        raise NoStatic("others are switched off")
    if not is_compiled(target):
        raise NoStatic("the target's passes are not compiled")
    if use == "known" and target.device.type != "cuda" and not is_on_disk():
        raise NoStatic("no package of whole steps was built on this machine")


def is_on_disk() -> bool:
    """Whether there is a package of any whole step."""
    return any(folder().glob(f"{CompiledWholeStep.name}-*.pt2"))


def build_whole(target: Any, drafter: Drafter, sampling: Sampling) -> float:
    """Build the package of whole steps for requests with this sampling; returns the seconds it took, 0 if it existed.

    Raises NotCompiled if it can't be built.
    """
    began = time.perf_counter()
    try:
        whole = WholeSteps(target, drafter, 2, max(PROMPTS) + NEW, frozenset(), builds=True)
        whole.made([sampling], shared_noise=False)
    except NoStatic as reason:
        raise NotCompiled(str(reason)) from reason
    seconds = time.perf_counter() - began
    return seconds if seconds > LOADING_S else 0.0


LOADING_S = 10.0
"""Loading an existing package takes less."""


def wrong(target: Any, drafter: Drafter) -> str:
    """How captured steps of these two differ from plain ones; "" if they don't.  Tested once.

    Raises NoStatic if there can be none.
    """
    key: Any = drafter if drafter.limit else target
    target_ref, difference = _differences.get(key, (lambda: None, ""))
    if target_ref() is not target:
        difference = _tried(target, drafter)
        _differences[key] = weakref.ref(target), difference
    return difference


def _tried(target: Any, drafter: Drafter) -> str:
    requests, ways = _requests(target), _ways(target, drafter)
    plain = ways["several calls"]()
    try:
        whole = ways["whole"]()
    except RuntimeError as error:  # an operation that can't be captured
        return first_line(error)[:300]
    for request, expected, written in zip(requests, plain, whole, strict=True):
        both = enumerate(itertools.zip_longest(expected, written))
        at = next((i for i, (one, other) in both if one != other), None)
        if at is not None and not is_tie(target, [*request.prompt, *expected[:at]], expected[at], written[at]):
            return f"token {at} after a prompt of {len(request.prompt)} is {written[at]}, not {expected[at]}"
    return ""


def _pays(target: Any, drafter: Drafter) -> bool:
    """Whether whole steps are faster; timed once per machine."""
    question = f"a step of {target.spec.weights_hash} with {type(drafter).__name__} of {drafter.limit} nodes"
    return machine.fastest(question, lambda: _ways(target, drafter), margin=1.02, processes=1) == "whole"


def _requests(target: Any) -> list[Request]:
    """The test's requests."""
    words = plain_words(target, len(PROMPTS), max(PROMPTS))
    prompts = [text[:count] for text, count in zip(words, PROMPTS, strict=True)]
    return [Request(prompt, NEW, Sampling()) for prompt in prompts]


def _ways(target: Any, drafter: Drafter) -> dict[str, Callable[[], list[list[int]]]]:
    """What both runners generate for the test's requests."""
    policy, kernels, builds = named.policy("fixed", drafter), acceptance_kernels(target.device), _use.get() == "built"
    whole = WholeSteps(target, drafter, 2, max(PROMPTS) + NEW, frozenset(), kernels, builds=builds)

    def run(runner: WholeSteps | None) -> list[list[int]]:
        requests, texts = _requests(target), [list[int]() for _ in PROMPTS]
        for step in advance(target, requests, drafter, policy, _batch(target), fast=lambda _length: runner):
            texts[step.request] += step.tokens
        vars(drafter if drafter.limit else target).pop("whole", None)
        return texts

    return {"several calls": functools.partial(run, None), "whole": functools.partial(run, whole)}


def _batch(target: Any) -> DecodeState:
    judge = SamplingJudge()
    judge.kernels = acceptance_kernels(target.device)
    return DecodeState(2, target.spec.context, frozenset(), target.device, judge)


@torch.inference_mode()
def is_tie(target: Any, text: list[int], one: int, other: int) -> bool:
    """Whether two tokens after a text are equally likely up to rounding."""
    tokens = torch.tensor([text], device=target.device)
    logits = target.prefill(target.allocate(1, len(text) + 1), [0], tokens, [len(text)], ()).logits[0, -1].double()
    return float(abs(logits[one] - logits[other])) <= target.selftest.allowed
