"""Whether captured steps write what plain steps write, tried on a few words before they are used."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from outrider.compiled.whole_step import WholeStep
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import Progress, advance
from outrider.decoding.state import DecodeState, Request
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
    plain = _texts(requests, advance(target, requests, drafter, named.policy("fixed", drafter), _batch(target)))
    whole = WholeStep(target, drafter, _batch(target))
    whole.open(requests)
    try:
        by_graphs = _texts(requests, whole.advance(requests))
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
