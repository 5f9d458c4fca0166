"""Continue prompts with a target and, where there is one, a drafter: whole (`generate`) or step by step (`stream`).

A few slots serve any number of prompts: a slot that ends is given to the next prompt while the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from outrider.decoding import lossy
from outrider.decoding.accept import accept
from outrider.decoding.confidence import OnlineConfidence
from outrider.decoding.grammar import Grammar
from outrider.decoding.logprobs import TokenLogprob
from outrider.decoding.loop import Rule, step
from outrider.decoding.parties import Drafter, Plain, Target, TargetSpec
from outrider.decoding.policy import ByConfidence, Fixed, Policy
from outrider.decoding.prompts import Prompt, listed
from outrider.decoding.sampling import Sampling, whole
from outrider.decoding.state import DecodeState, FinishReason, Request
from outrider.errors import ConfigError, DataError, DrafterError

PREFILL_CHUNK = 512
"""Prompt tokens read in one pass."""


@dataclass(slots=True)
class Generation:
    """One prompt's continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    steps: int = 0
    """Verified steps: passes of the target after the prompt was read."""
    accepted: list[int] = field(default_factory=list)
    """Drafted tokens kept, step by step."""
    finish_reason: FinishReason = "length"
    logprobs: list[TokenLogprob] | None = None
    """One for each of `tokens`, where `Sampling.logprobs` asks for them."""
    lossless: bool = True
    """False where a lossy rule was asked for."""
    distance: float = 0.0
    """Mean total variation of an emitted token from the target's law, as measured on this text; 0 under the law."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one prompt; unpacks into prompt, tokens, text and drafted."""

    prompt: int
    tokens: list[int]
    text: str
    drafted: int
    """How many of the tokens, from the first on, were drafted; the rest is the target's own."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of the tokens, where `Sampling.logprobs` asks for them."""
    lossless: bool = True
    distance: float = 0.0
    """As in `Generation`, of this piece's tokens."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.prompt, self.tokens, self.text, self.drafted))


class Progress(NamedTuple):
    """One slot's share of one step, with what a measurement wants to know."""

    request: int
    tokens: list[int]
    accepted: int
    reached: int
    """Depth of the draft."""
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of the tokens, where the request asks for them."""
    strayed: float = 0.0
    """Total variation from the target's law, added over the tokens; 0 under the law."""
    text: str = ""
    """What has become certain of the text, where the request has a detokenizer."""


def generate(
    target: Target,
    prompts: Prompt | Iterable[Prompt],
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    stop: Sequence[str] = (),
    slots: int = 16,
    rule: str | None = None,
    allow_lossy: bool = False,
    shared_noise: bool = True,
) -> list[Generation]:
    """Continue every prompt; the text is what the target alone would have written, unless a lossy rule is asked for.

    prompts: one or many of text, token ids (in a list or an array, or as a tokenizer returns them), or chat messages.
    A stop string ends `text` before itself and `tokens` at the token that completed it.  At most `slots` prompts share the
    batch, further ones wait.
    sampling: greedy by default, as the model's own generation_config says; one that is given takes the place of all of that but
    its end tokens.
    rule: `typical` or `relaxed` (see `lossy`), only with allow_lossy=True; each generation then says how far it strayed.
    shared_noise: a seed fixes the text, whatever drafts for it; False keeps more of a sampled draft, and a seed then fixes the
    noise alone, as it does under a lossy rule.
    Raises DataError for a prompt that is empty or does not fit the context, ConfigError for a stop string that can never match,
    before anything is computed.
    """
    law, is_shared = lossy.choose(rule, allow_lossy), shared_noise and rule is None
    requests = _requests(target, prompts, max_new_tokens, sampling, stop)
    found = [Generation(logprobs=None if r.sampling.logprobs is None else [], lossless=rule is None) for r in requests]
    for progress in advance(target, requests, drafter, policy=policy, slots=slots, rule=law, shared_noise=is_shared):
        generation = found[progress.request]
        generation.tokens += progress.tokens
        generation.text += progress.text
        generation.steps += 1
        generation.accepted.append(progress.accepted)
        generation.finish_reason = progress.finish_reason or "length"
        if generation.logprobs is not None:
            generation.logprobs += progress.logprobs
        generation.distance += (progress.strayed - generation.distance * len(progress.tokens)) / len(generation.tokens)
    return found


def stream(
    target: Target,
    prompts: Prompt | Iterable[Prompt],
    drafter: Drafter | None = None,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    policy: Policy | None = None,
    stop: Sequence[str] = (),
    slots: int = 16,
    rule: str | None = None,
    allow_lossy: bool = False,
    shared_noise: bool = True,
) -> Iterator[Piece]:
    """As `generate`, step by step: (prompt index, new tokens, new text, how many of the tokens were drafted)."""
    law, is_shared = lossy.choose(rule, allow_lossy), shared_noise and rule is None
    requests = _requests(target, prompts, max_new_tokens, sampling, stop)

    def pieces() -> Iterator[Piece]:
        for progress in advance(target, requests, drafter, policy=policy, slots=slots, rule=law, shared_noise=is_shared):
            distance = progress.strayed / len(progress.tokens)
            yield Piece(
                progress.request, progress.tokens, progress.text, progress.accepted, progress.logprobs, rule is None, distance
            )

    return pieces()


def _fitting(drafter: Drafter, spec: TargetSpec) -> None:
    """Raises DrafterError for a drafter that was built for a target of another shape."""
    wrong = [tap for tap in drafter.taps if not 0 <= tap < spec.layers]
    if wrong:
        raise DrafterError(
            f"the drafter taps layer {wrong[0]}, {spec.name} has layers 0 to {spec.layers - 1}; it was built for another "
            "target, build it for this one"
        )
    hidden = getattr(drafter, "hidden", None)
    if hidden not in (None, spec.hidden):
        raise DrafterError(
            f"the drafter reads hidden states of {hidden} numbers, {spec.name}'s have {spec.hidden}; it was built for another "
            "target, build it for this one"
        )


def advance(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    *,
    policy: Policy | None = None,
    slots: int = 16,
    rule: Rule = accept,
    shared_noise: bool = True,
    state: DecodeState | None = None,
) -> Iterator[Progress]:
    """Serve requests over slots, a step at a time.  `state`, where given, is used and can be watched between the steps.

    shared_noise: see `step`.  Under a `lossy.Meter` every piece of progress says how far its tokens strayed.
    """
    if whole("slots", slots) < 1:
        raise ConfigError(f"slots must be at least 1, got {slots}")
    if isinstance(drafter, str):
        raise ConfigError(f"drafter must be a drafter, got {drafter!r}; give load_drafter({drafter!r}, target)")
    waiting = deque((i, request) for i, request in enumerate(requests) if request.max_new_tokens > 0)
    if not waiting:
        return
    drafter = Plain() if drafter is None else drafter
    _fitting(drafter, target.spec)
    policy = Fixed(drafter.limit) if policy is None else policy
    if isinstance(policy, ByConfidence) and not getattr(drafter, "is_confident", False):
        drafter = OnlineConfidence(drafter)
    slots = min(slots, len(waiting))
    longest = max(len(request.prompt) + request.max_new_tokens for _, request in waiting)
    cache = target.allocate(slots, min(longest, target.spec.context) + max(drafter.limit, 1) + 1)
    memory: Any = drafter.allocate(cache)
    state = DecodeState(slots, target.spec.context, target.ends, target.device) if state is None else state
    serving: dict[int, int] = {}
    while waiting or serving:
        fresh = [row for row in range(slots) if row not in serving][: len(waiting)]
        for row in fresh:
            serving[row], request = waiting.popleft()
            state.admit(row, request)
        prefill(target, drafter, cache, memory, state, fresh)
        rows, before = state.rows, [len(state.tokens[row]) for row in state.rows]
        kept = step(target, drafter, policy, cache, memory, state, rule, shared_noise)
        for b, row in enumerate(rows):
            tokens = state.tokens[row][before[b] :]
            reported = tuple(state.logprobs[row][-len(tokens) :])
            strayed = rule.strayed(b, len(tokens)) if isinstance(rule, lossy.Meter) else 0.0
            yield Progress(
                serving[row], tokens, len(kept.paths[b]), state.reached[b], state.finished[row], reported, strayed,
                state.new_text[row],
            )  # fmt: skip
        over = [row for row in rows if state.finished[row]]
        if over:
            drafter.free(memory, over)
            cache.free(over)
            for row in over:
                state.free(row)
                del serving[row]


def prefill(target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, rows: Sequence[int]) -> None:
    """Read these slots' prompts up to the last token, which is the anchor, in chunks; the drafter sees each chunk."""
    while rows := [row for row in rows if state.prefilled[row] < len(state.tokens[row]) - 1]:
        pieces = [state.tokens[row][state.prefilled[row] : -1][:PREFILL_CHUNK] for row in rows]
        lengths = [len(piece) for piece in pieces]
        padded = [piece + [0] * (max(lengths) - len(piece)) for piece in pieces]
        scores = target.prefill(cache, rows, torch.tensor(padded, device=state.device), lengths, drafter.taps)
        for row, length in zip(rows, lengths, strict=True):
            state.prefilled[row] += length
        drafter.admit(memory, rows, state, scores)


def _requests(
    target: Target, prompts: Any, max_new_tokens: int, sampling: Sampling | None, stop: Sequence[str]
) -> list[Request]:
    if whole("max_new_tokens", max_new_tokens) < 0:
        raise ConfigError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if sampling is not None:
        sampling = _settled(sampling, target, max_new_tokens)
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    if not all(isinstance(text, str) for text in stops):
        raise ConfigError(f"stop must be a text or several, got {stop!r}")
    if "" in stops:
        raise ConfigError("an empty stop string would end every text at once; leave it out")
    requests = []
    for i, prompt in enumerate(listed(prompts)):
        tokens = target.encode(prompt)
        if len(tokens) >= target.spec.context:
            raise DataError(
                f"prompt {i} has {len(tokens)} tokens and leaves no room in the target's context of {target.spec.context}; "
                "shorten it"
            )
        own = sampling or _settled(target.default_sampling(tokens, max_new_tokens), target, max_new_tokens)
        requests.append(Request(tokens, max_new_tokens, own, stops, target.detokenizer))
    return requests


def _settled(sampling: Sampling, target: Target, max_new_tokens: int) -> Sampling:
    """This sampling, checked against the target, its grammar compiled for it."""
    if not isinstance(sampling, Sampling):
        raise ConfigError(f"sampling must be a Sampling, got {sampling!r}; write such as Sampling(temperature=0.7)")
    if sampling.min_new_tokens > max_new_tokens > 0:
        raise ConfigError(f"min_new_tokens {sampling.min_new_tokens} is more than max_new_tokens {max_new_tokens}; lower it")
    sampling.check(target.spec.vocabulary)
    if isinstance(sampling.grammar, Grammar):
        sampling = replace(sampling, grammar=sampling.grammar.compiled(target))
    return sampling
