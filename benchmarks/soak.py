"""Speculation over random settings: with a seed, every text equals that of plain decoding, token for token, at any
temperature.

    python benchmarks/soak.py [--tokens 1000000] [--seed 0] [--compiled | --whole-step]
                              [--case NUMBER] [--out FILE]

A case samples a family of tiny random models in one of its real forms (or the demo target), its dtype, a batch of
requests with individual settings, including grammars over ids or over text, ends, a context, a drafter that replays the
coming text with some wrong tokens, and a policy.  In a third of the cases ids become text by byte fallback, in a third
the model has a random generation_config, and in a tenth four threads share the target, each with its own requests and
drafter.  The same engine continues the requests twice: without a drafter, and with it in other slots.  Unseeded
requests above temperature 0 share the batch and are not compared.  The end reason and the log probabilities must be
equal too; a text must be that of all its tokens, up to its first stop string; and the settings of a generation_config
must give the same text as `generate`.

In float64 a difference is a mismatch.  In float32, and in a family that computes in float32 whatever its dtype, it is a
tie if logits perturbed by four times the measured difference sample both tokens from the same noise.  The measured
difference is that between the one-row and the n-row pass, and between passes of the model alone, without a cache, over
the text and over longer ones: an index of keys with nearly equal scores may choose differently in a pass of another
shape.

With --whole-step every drafted step is a recorded one, whose operations stand in for a CUDA graph on machines without a
GPU; requests then only set a temperature, a seed and stop strings, and drafts use one tree per case.  Prints JSON;
exits with 1 on a mismatch.  A case depends only on --seed and its number.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from benchmarks.families import SMALL, built, forms, tiny
from benchmarks.families import continued as generated
from benchmarks.recording import HostRead, Recording
from benchmarks.replay import Replay, progress_bar, provenance, publish, spread
from benchmarks.static_replay import StaticReplay
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose
from outrider.decoding.protocols import NoStatic
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, TargetError
from outrider.fast.runner import wrong
from outrider.fast.whole.steps import WholeSteps
from outrider.generation import serve
from outrider.policies.fixed import Fixed
from outrider.sampling.grammar import Grammar
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.prefix import processed
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.text.detokenizer import detokenizer

FORMS = {f"{kind}, {form}": (kind, form) for kind, form in forms()}
THREADS, COMPILED = 4, "demo, compiled"
FLOAT64 = 1e-10
"""Largest difference between passes of different shapes that float64 explains."""

# ── a case ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:
    """Everything that is sampled before anything is computed."""

    number: int
    family: str
    dtype: str
    requests: list[Request]
    slots: int
    plain_slots: int
    context: int
    ends: frozenset[int]
    drafter: dict[str, Any]
    policy: str
    has_bytes: bool = False
    """Ids become text by byte fallback."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Settings of the model's generation_config."""
    defaults: frozenset[int] = frozenset()
    """Requests that ask for exactly these settings."""
    threads: int = 1
    is_whole: bool = False
    """Its drafted steps are recorded ones."""

    @property
    def target(self) -> TransformersTarget:
        found = target_of(self.family, self.dtype)
        assert found is not None
        return found

    @property
    def rounds(self) -> bool:
        """Whether its dtype is float32, or its family computes something in float32 whatever the dtype (an index of
        keys, a router)."""
        found = self.target.selftest
        return self.dtype == "float32" or max(found.errors.values()) > FLOAT64

    @property
    def settings(self) -> list[str]:
        """Names under which its tokens are counted."""
        mode, is_tree = self.target.spec.mode, self.drafter["width"] > 1
        named = {
            f"family {self.family}": True,
            "float32": self.dtype == "float32",
            "float64": not self.rounds,
            "float64, in part float32": self.rounds and self.dtype == "float64",
            "a chain drafted": not is_tree,
            "a tree drafted": is_tree,
            "a tree drafted for a target of chains": is_tree and mode == "chain",
            "drafts with q": self.drafter["soft"],
            "drafts longer than budget and room": not self.drafter["obeys"],
            f"policy {self.policy}": True,
            "end tokens": bool(self.ends),
            "a context that ends the text": self.context < min(self.target.spec.context, LONGEST),
            "more requests than slots": len(self.requests) > self.slots,
            "greedy beside sampled beside a grammar": self.is_mixed,
            "byte fallback": self.has_bytes,
            "a generation_config": bool(self.generation),
            "four threads share the target": self.threads > 1,
            "recorded steps": self.is_whole,
        }
        return [name for name, holds in named.items() if holds]

    @property
    def is_mixed(self) -> bool:
        samplings = [request.sampling for request in self.requests[: self.slots]]
        kinds = {"grammar" if s.grammar else "greedy" if s.temperature == 0 else "sampled" for s in samplings}
        return len(kinds) == 3


@functools.lru_cache(96)
def target_of(family: str, dtype: str) -> TransformersTarget | None:
    """None if a form can't be built in this dtype, or is refused."""
    if family in ("demo", COMPILED):
        return load_target("demo", dtype=dtype, compile=family == COMPILED)
    if family in FORMS:
        try:
            model = built(*FORMS[family], getattr(torch, dtype))
        except Exception:  # anything transformers raises for its own class
            return None
        try:
            return load_target(model)
        except TargetError:
            return None
    try:
        return load_target(tiny(family, "sdpa", getattr(torch, dtype)))
    except ValueError:
        return load_target(tiny(family, "eager", getattr(torch, dtype)))


def drawn(seed: int, number: int, compiled: bool = False) -> Case:
    """Case `number` of this seed; compiled: of the compiled demo target."""
    noise = random.Random(f"{seed} {number}")
    family, dtype, target = (COMPILED, "float32", target_of(COMPILED, "float32")) if compiled else _target(noise)
    assert target is not None
    vocabulary = target.spec.vocabulary
    context = noise.choice([min(target.spec.context, LONGEST)] * 3 + [64, 128])
    has_bytes = family not in ("demo", COMPILED) and noise.random() < 1 / 3
    generation = _generation(noise, vocabulary) if noise.random() < 1 / 3 else {}
    with configured(target, generation):
        ends = (
            frozenset(() if generation else noise.sample(range(vocabulary), noise.choice([0, 1, 3, 6]))) | target.ends
        )
        requests = _requests(noise, target, min(context - 2, 40), has_bytes)
        if noise.random() < 0.15:
            requests[:3] = _mixed(noise, target, requests[0])
        defaults = frozenset(n for n in range(min(10, len(requests))) if generation and noise.random() < 0.6)
        for n in defaults:
            sampling = target.default_sampling(requests[n].prompt, requests[n].max_new_tokens)
            requests[n] = replace(requests[n], sampling=sampling)
    return Case(
        number, family, dtype, requests, noise.choice([1, 3, 4, 6, 8, 12, 16, 24, 32]), noise.choice([12, 24, 40]),
        context,
        ends,
        {
            "depth": noise.randint(1, 6), "width": noise.choice([1, 2, 2, 3]), "right": noise.choice([0.3, 0.6, 0.8,
            0.95]),
            "eldest": noise.random() < 0.5, "soft": noise.random() < 0.4, "obeys": noise.random() < 0.8,
            "seed": noise.randrange(2**31),
        },
        noise.choice(["whole", "whole", "on and off", "small"]), has_bytes, generation, defaults,
        THREADS if noise.random() < 0.1 else 1,
    )  # fmt: skip


LONGEST = 2048
"""Tokens that fit into a cache; beyond the limits of every shrunken config."""


def _target(noise: random.Random) -> tuple[str, str, TransformersTarget]:
    while True:
        # the demo target is a hundred times larger: rare
        family = "demo" if noise.random() < 0.01 else noise.choice([*SMALL, *FORMS])
        dtype = noise.choice(["float64", "float64", "float32"])
        target = target_of(family, dtype)
        # slow ones are kept with probability one third
        if target is not None and (_is_fast(target) or noise.random() < 1 / 3):
            return family, dtype, target


def _is_fast(target: TransformersTarget) -> bool:
    """False if rows run one by one, or in steps, so that each costs as much as many rows in one pass."""
    return target.family.takes_uneven_rows and not target.family.is_recurrent


@contextmanager
def configured(target: TransformersTarget, generation: dict[str, Any]) -> Iterator[None]:
    """While this is open, the model has this generation_config."""
    before = target.model.generation_config
    if generation:
        target.model.generation_config = GenerationConfig(**generation)
    try:
        yield
    finally:
        target.model.generation_config = before


def _generation(noise: random.Random, vocabulary: int) -> dict[str, Any]:
    def some(count: int) -> list[int]:
        return noise.sample(range(vocabulary), count)

    chances: dict[str, Any] = {
        "repetition_penalty": lambda: noise.uniform(0.8, 1.6),
        "no_repeat_ngram_size": lambda: noise.choice([2, 3]),
        "encoder_repetition_penalty": lambda: noise.uniform(0.9, 1.3),
        "encoder_no_repeat_ngram_size": lambda: 3,
        "suppress_tokens": lambda: some(4),
        "begin_suppress_tokens": lambda: some(3),
        "bad_words_ids": lambda: [some(1), some(2)],
        "sequence_bias": lambda: [[some(1), noise.uniform(-3, 3)], [some(2), 4.0]],
        "min_new_tokens": lambda: noise.randint(1, 30),
        "min_length": lambda: noise.randint(1, 60),
        "forced_bos_token_id": lambda: some(1)[0],
        "forced_eos_token_id": lambda: some(1)[0],
        "exponential_decay_length_penalty": lambda: (noise.randint(1, 20), 1.1),
        "renormalize_logits": lambda: True,
        "remove_invalid_values": lambda: True,
        "temperature": lambda: 0.5,
        "top_p": lambda: 0.8,
        "top_k": lambda: 5,
    }
    asked = {key: draw() for key, draw in chances.items() if noise.random() < 0.25}
    # `generate` also refuses a forced token that is suppressed
    forced = {asked.get("forced_bos_token_id"), asked.get("forced_eos_token_id")}
    for key in ("suppress_tokens", "begin_suppress_tokens"):
        if key in asked:
            asked[key] = [token for token in asked[key] if token not in forced]
    ends = noise.choice([None, some(1)[0], some(4)])
    if ends is None:  # without ends `generate` itself fails
        asked.pop("exponential_decay_length_penalty", None)
    return asked | {"eos_token_id": ends, "pad_token_id": 0}


@functools.cache
def byte_fallback(vocabulary: int) -> Detokenizer:
    """Like Llama 2's: half of the ids are bytes, and two in a row often form one letter."""
    bytes_ = [*range(0xC2, 0xCA), 0xE3, 0xE4, 0xE5, 0xF0, *range(0x80, 0xB4)]
    names = [f"<0x{byte:02X}>" for byte in bytes_] + ["▁", "▁a", "\n", "。", "é", "▁the"]
    names = [*names, *(f"▁w{token}" if token % 3 else f"v{token}" for token in range(len(names), vocabulary))][
        :vocabulary
    ]
    tokenizer = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return detokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), vocabulary)


def _request(noise: random.Random, target: TransformersTarget, longest: int, has_bytes: bool = False) -> Request:
    prompt = [noise.randrange(target.spec.vocabulary) for _ in range(noise.choice([1, 2, noise.randint(3, longest)]))]
    count = noise.choice([1, 6, 60, 90, 120, 160])
    sampling = _sampling(noise, target.spec.vocabulary)
    sampling = replace(sampling, min_new_tokens=min(sampling.min_new_tokens, count))
    if noise.random() < 0.1:
        sampling = _with_grammar(sampling, target)
    own = byte_fallback(target.spec.vocabulary) if has_bytes else target.detokenizer
    return Request(prompt, count, sampling, (), own or Detokenizer(_letters, is_local=True))


def _requests(noise: random.Random, target: TransformersTarget, longest: int, has_bytes: bool) -> list[Request]:
    """Requests, some with bad words and stop strings that would otherwise occur in their texts."""
    count = noise.randint(*((12, 48) if _is_fast(target) else (4, 10)))
    found = [_request(noise, target, longest, has_bytes) for _ in range(count)]
    written = _written(target, found)
    for n, text in enumerate(written):
        if noise.random() < 0.2 and not (found[n].sampling.grammar and target.tokenizer):
            found[n] = replace_sampling(found[n], bad_words=_said(noise, text))
        if noise.random() < (0.5 if has_bytes else 0.2):
            found[n].stop = _stops(noise, found[n], text)
    return found


def _letters(tokens: Sequence[int]) -> str:
    """A text for models without a tokenizer: one or two letters per id."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[token % 26] + "." * (token % 3 == 0) for token in tokens)


def _with_grammar(sampling: Sampling, target: TransformersTarget) -> Sampling:
    """A grammar over ids or over text; over text, nothing else may forbid a token, since often only one is possible."""
    if target.tokenizer is None or not target.ends:  # a grammar over text has to end
        return replace(sampling, grammar=Turns(target.spec.vocabulary))
    grammar = Grammar.regex(r"(def [a-z_]+\(\):\n    return [0-9]+\n)+").compiled(target)
    return replace(sampling, grammar=grammar, processors=(), min_new_tokens=0)


@dataclass(frozen=True)
class Turns:
    """A grammar over ids: no id may follow one with the same remainder."""

    vocabulary: int

    def start(self) -> Turn:
        return Turn(torch.arange(self.vocabulary) % 3)


class Turn:
    """One request's position in it."""

    def __init__(self, remainders: Tensor):
        self.remainders, self.last = remainders, -1

    def push(self, tokens: Sequence[int]) -> None:
        self.last = tokens[-1] % 3

    def allowed(self, path: tuple[int, ...]) -> Tensor:
        turns = [self.last, *(token % 3 for token in path)]
        if any(one == other for one, other in itertools.pairwise(turns)):
            return torch.zeros(len(self.remainders), dtype=torch.bool)
        return self.remainders != turns[-1]


def replace_sampling(request: Request, **settings: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, **settings))


def _sampling(noise: random.Random, vocabulary: int) -> Sampling:
    temperature = noise.choice([0.0, 0.0, 0.3, 0.7, 1.0, 1.0, 1.6])
    is_company = temperature > 0 and noise.random() < 0.08
    given: dict[str, Any] = {
        "temperature": temperature,
        "seed": None if is_company else noise.randrange(-(2**63), 2**63),
    }
    chances: dict[str, Any] = {
        "top_k": lambda: noise.choice([1, 2, 5, 20, vocabulary + 5]),
        "top_p": lambda: noise.uniform(0.3, 0.99),
        "min_p": lambda: noise.uniform(0.01, 0.4),
        "typical_p": lambda: noise.uniform(0.2, 0.95),
        "repetition_penalty": lambda: noise.uniform(0.8, 1.6),
        "presence_penalty": lambda: noise.uniform(-1, 2),
        "frequency_penalty": lambda: noise.uniform(-0.5, 1),
        "logit_bias": lambda: {noise.randrange(vocabulary): noise.uniform(-6, 6) for _ in range(4)},
        "min_new_tokens": lambda: noise.randint(1, 30),
        "logprobs": lambda: noise.randint(0, 3),
        "processors": lambda: (_no_double,),
    }
    return Sampling(**given, **{name: draw() for name, draw in chances.items() if noise.random() < 0.15})


def _no_double(tokens: Tensor, scores: Tensor) -> Tensor:
    """A transformers-style processor: no token twice in a row."""
    return scores.index_fill(-1, tokens[0, -1:], -torch.inf)


def _said(noise: random.Random, text: list[int]) -> list[tuple[int, ...]]:
    """Bad words that the text would otherwise contain: one, two and three tokens long."""
    places = [noise.randrange(max(1, len(text) - 3)) for _ in range(3)]
    return [tuple(text[at : at + length]) for length, at in enumerate(places, start=1)]


def _stops(noise: random.Random, request: Request, tokens: list[int]) -> tuple[str, ...]:
    """Stop strings that occur in the text, or might."""
    text = request.detokenizer.decode(tokens)
    at = noise.randrange(max(1, len(text)))
    return tuple({word for word in (text[at : at + noise.randint(1, 6)], "return", "\n\n") if word})


def _written(target: TransformersTarget, requests: Sequence[Request]) -> list[list[int]]:
    """The first 40 tokens of each."""
    short = [
        replace_sampling(replace(request, max_new_tokens=40), min_new_tokens=0, seed=request.sampling.seed or 0)
        for request in requests
    ]
    found: list[list[int]] = [[] for _ in short]
    for progress in serve(target, short, slots=len(short)):
        found[progress.request] += progress.tokens
    return found


def _mixed(noise: random.Random, target: TransformersTarget, like: Request) -> list[Request]:
    """Temperature 0, temperature 1, and a grammar."""
    fresh = [
        replace(like, sampling=Sampling(temperature, seed=noise.randrange(2**40)))
        for temperature in (0.0, 1.0, noise.choice([0.0, 1.0]))
    ]
    return [*fresh[:2], replace(fresh[2], sampling=_with_grammar(fresh[2].sampling, target))]


class Moody:
    """A policy that speculates with all slots, with some, with small budgets, or not at all."""

    def __init__(self, kind: str, limit: int, seed: int):
        self.kind, self.limit, self.noise = kind, limit, random.Random(seed)

    def budget(self, state: DecodeState) -> Tensor:
        live = len(state.rows)
        if self.kind == "whole":
            return torch.full((live,), self.limit)
        if self.kind == "small":
            return torch.tensor([self.noise.randint(0, 2) for _ in range(live)])
        most = self.noise.choice([0, 0, self.limit])
        return torch.tensor([self.noise.choice([0, most, most]) for _ in range(live)])

    def keep(self, state: DecodeState, sizes: Tensor, confidence: Tensor | None) -> Tensor:
        return sizes

    def observe(self, state: DecodeState, sizes: Tensor, accepted: Accepted, timing: Any) -> None: ...


def recorded(case: Case) -> Case:
    """The case with whole steps wherever its requests and policy allow them."""
    width = 1 if case.target.spec.mode == "chain" else case.drafter["width"]
    return replace(
        case, threads=1, is_whole=True, drafter=case.drafter | {"soft": False, "obeys": True, "width": width},
    )  # fmt: skip


# ── the comparison ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Written:
    """The result of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)


@dataclass
class Outcome:
    """The result of a case."""

    tokens: int = 0
    by_setting: Counter[str] = field(default_factory=Counter)
    mismatches: list[dict[str, Any]] = field(default_factory=list)
    ties: list[dict[str, Any]] = field(default_factory=list)
    events: Counter[str] = field(default_factory=Counter)


def run(case: Case) -> Outcome:
    """Continue the requests both ways and compare."""
    with configured(case.target, case.generation):
        plain = continued(case, case.requests, None, case.plain_slots)
        texts = [request.prompt + written.tokens for request, written in zip(case.requests, plain, strict=True)]
        outcome = Outcome()
        if case.is_whole:
            drafter = StaticReplay(texts, case.target.spec.vocabulary, **case.drafter)
            drafted = continued(case, case.requests, drafter, case.slots)
        else:
            parts = _in_threads(case, texts)
            drafted = [written for part, _ in parts for written in part]
            for _, watched in parts:
                outcome.events.update(watched.events())
        for n, request in enumerate(case.requests):
            if request.sampling.temperature == 0 or request.sampling.seed is not None:
                _compare(case, n, plain[n], drafted[n], outcome)
        for n in case.defaults:
            _compare_generated(case, n, plain[n], outcome)
    return outcome


def _in_threads(case: Case, texts: list[list[int]]) -> list[tuple[list[Written], Watched]]:
    """The texts of threads that share the target, each with part of the requests and its own drafter."""

    def thread(n: int) -> tuple[list[Written], Watched]:
        drafter = Watched(texts, case.target.spec.vocabulary, **case.drafter | {"seed": case.drafter["seed"] + n})
        return continued(case, case.requests[cuts[n] : cuts[n + 1]], drafter, case.slots), drafter

    cuts = [len(case.requests) * n // case.threads for n in range(case.threads + 1)]
    if case.threads == 1:
        return [thread(0)]
    with ThreadPoolExecutor(case.threads) as pool:
        return list(pool.map(thread, range(case.threads)))


def tried(case: Case) -> Outcome:
    """Like `run`, but a case that crashes counts as a mismatch and the soak continues."""
    try:
        return run(case)
    except (NoStatic, HostRead) as error:
        return Outcome(events=Counter({f"cases of {case.family} that stay plain: {error}": 1}))
    except Exception as error:
        if isinstance(error, ConfigError) and case.generation and "makes a logit" in str(error):
            # such as a length penalty on an end that a minimum length forbids: `generate` continues with NaN
            return Outcome(events=Counter({"cases whose generation_config is refused": 1}))
        frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        where = next((frame for frame in reversed(frames) if "/outrider/" in frame), frames[-1])
        what = {"case": case.number, "family": case.family, "dtype": case.dtype}
        return Outcome(mismatches=[what | {"crash": f"{type(error).__name__}: {error}", "at": where}])


class Watched(Replay):
    """A replay that also counts what the loop did to its drafts."""

    def __init__(self, texts: Sequence[list[int]], vocabulary: int, **options: Any):
        super().__init__(texts, vocabulary, **options)
        self.cuts = self.reused = 0
        self.was_cut: set[int] = set()

    def admit(self, memory: None, rows: Sequence[int], state: DecodeState, scores: Any, lengths: Sequence[int]) -> None:
        self.reused += len(self.was_cut.intersection(rows))
        self.was_cut.difference_update(rows)

    def observe(self, memory: None, state: DecodeState, draft: Draft, accepted: Accepted, scores: Any) -> None:
        super().observe(memory, state, draft, accepted, scores)
        cut = [row for row, token in zip(state.rows, accepted.next_tokens, strict=True) if token < 0]
        self.cuts += len(cut)
        self.was_cut.update(cut)

    def events(self) -> Counter[str]:
        kept = {f"steps that kept {depth} drafted tokens": times for depth, times in self.kept.items()}
        return Counter(kept | {
            "paths that are no prefix of their tree": self.jumps,
            "texts that ended in mid-block": self.cuts,
            "slots used again after an end in mid-block": self.reused,
        })  # fmt: skip


def continued(case: Case, requests: list[Request], drafter: Replay | None, slots: int) -> list[Written]:
    target = case.target
    found = [Written() for _ in requests]
    judge = SamplingJudge()
    state = DecodeState(min(slots, max(len(requests), 1)), case.context, case.ends, target.device, judge)
    policy = None if drafter is None else Moody(case.policy, drafter.limit, case.number)
    if case.is_whole and drafter is not None:
        if reason := wrong(target, drafter):  # `generate` checks this before it captures
            raise NoStatic(reason)
        recorder = None if target.device.type == "cuda" else Recording()
        longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
        whole = WholeSteps(target, drafter, len(state.tokens), longest, state.ends, recorder=recorder)
        steps = advance(target, requests, drafter, policy or Fixed(0), state, fast=lambda _length: whole)
    else:
        steps = serve(target, requests, drafter, policy=policy, state=state)
    for progress in steps:
        written = found[progress.request]
        written.tokens += progress.tokens
        written.reason = progress.finish_reason
        written.logprobs += progress.logprobs
        written.text += progress.text
    return found


def _compare(case: Case, n: int, plain: Written, drafted: Written, outcome: Outcome) -> None:
    request = case.requests[n]
    pairs = enumerate(zip(plain.tokens, drafted.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), None)
    same = min(len(plain.tokens), len(drafted.tokens)) if at is None else at
    outcome.tokens += same
    for name in [*case.settings, *_asked(request)]:
        outcome.by_setting[name] += same
    what = {"case": case.number, "request": n, "family": case.family, "dtype": case.dtype}
    if at is not None:
        place = {"at": at, "wanted": plain.tokens[at], "found": drafted.tokens[at]}
        tie = case.rounds and audit(case, request, plain.tokens[:at], place["wanted"], place["found"])
        (outcome.ties if tie else outcome.mismatches).append(what | place | (tie or {}))
    elif (plain.tokens, plain.reason, plain.text) != (drafted.tokens, drafted.reason, drafted.text):
        ends = [(len(w.tokens), w.reason, w.text[-40:]) for w in (plain, drafted)]
        outcome.mismatches.append(what | {"ends": ends})
    elif not case.rounds and not _close(plain.logprobs, drafted.logprobs):
        outcome.mismatches.append(what | {"logprobs": "differ"})
    elif drafted.text != (whole := _text(request, drafted)):
        outcome.mismatches.append(what | {"text": drafted.text[-40:], "of_all_tokens": whole[-40:]})


def _text(request: Request, written: Written) -> str:
    """The text of all tokens at once, up to its first stop string."""
    whole = request.detokenizer.decode(written.tokens)
    return whole[: min((at for stop in request.stop if (at := whole.find(stop)) >= 0), default=len(whole))]


def _compare_generated(case: Case, n: int, plain: Written, outcome: Outcome) -> None:
    """Compare a request with the settings of a generation_config with the output of `model.generate`."""
    request = case.requests[n]
    wanted = generated(case.target.model, request.prompt, request.max_new_tokens)[len(request.prompt) :]
    if request.stop or case.context < len(request.prompt) + request.max_new_tokens:  # `generate` was not told
        wanted = wanted[: len(plain.tokens)]
    at = next((i for i, (a, b) in enumerate(zip(wanted, plain.tokens, strict=False)) if a != b), None)
    if at is None and len(wanted) == len(plain.tokens):
        outcome.events["tokens that `generate` writes too"] += len(wanted)
        return
    what: dict[str, Any] = {
        "case": case.number,
        "request": n,
        "family": case.family,
        "dtype": case.dtype,
        "of": "generate",
    }
    at = min(len(wanted), len(plain.tokens)) if at is None else at
    place = {"at": at, "wanted": wanted[at : at + 1], "found": plain.tokens[at : at + 1]}
    is_tie = case.rounds and place["wanted"] and place["found"]
    tie = is_tie and audit(case, request, plain.tokens[:at], *place["wanted"], *place["found"])
    (outcome.ties if tie else outcome.mismatches).append(what | place | (tie or {}))


def _close(one: list[Any], other: list[Any]) -> bool:
    """Whether tokens and log probabilities agree; alternatives with equal values may swap."""
    return len(one) == len(other) and all(
        a.token == b.token and abs(a.logprob - b.logprob) < 1e-5 and len(a.top) == len(b.top)
        and all(abs(x[1] - y[1]) < 1e-5 for x, y in zip(a.top, b.top, strict=True))
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _asked(request: Request) -> list[str]:
    """Names of the settings in a request."""
    sampling, idle = request.sampling, Sampling()
    names = ["temperature 0" if sampling.temperature == 0 else f"temperature {sampling.temperature:g}"]
    names += [
        name for name in (field.name for field in fields(Sampling))
        if name not in ("temperature", "seed", "processors") and getattr(sampling, name) != getattr(idle, name)
    ]  # fmt: skip
    names += ["processors"] * bool(sampling.processors) + ["stop strings"] * bool(request.stop)
    return names


def audit(case: Case, request: Request, tokens: list[int], wanted: int, found: int) -> dict[str, Any] | None:
    """The measurements where two texts diverge, if it is a tie: logits close enough to give both tokens.  None for a
    mismatch."""
    judge = SamplingJudge()
    state = DecodeState(1, case.context, case.ends, judge=judge)
    state.admit(0, request)
    for token in tokens:
        state.commit(Draft.empty(1), Accepted([[]], [token], [0]))
    text = request.prompt + tokens
    logits, difference = spread(case.target, text, len(request.prompt))
    difference = max(difference, beside_itself(case.target, text))
    noise = torch.Generator().manual_seed(0)
    tries = torch.rand(400, len(logits), generator=noise) * 2 - 1
    tries[0] = 0
    for row, (up, down) in enumerate([(wanted, found), (found, wanted)], start=1):
        tries[row] = 0
        tries[row, up], tries[row, down] = 1, -1
    drawn = set()
    for push in tries:
        moved = processed((logits + 4 * difference * push)[None, None], Draft.empty(1), judge.prefixes)
        p = judge.distribution(moved)[:, 0]
        drawn.add(int(state.streams.draw(p, 0, Purpose.TARGET)))
    return {"difference": difference, "drawn": sorted(drawn)} if {wanted, found} <= drawn else None


@torch.inference_mode()
def beside_itself(target: TransformersTarget, text: list[int]) -> float:
    """How much the model's own logits after a text change when a pass without a cache reads further."""

    def behind(longer: list[int]) -> Tensor:
        logits: Tensor = target.model(input_ids=torch.tensor([longer]), use_cache=False).logits[0, len(text) - 1]
        return logits

    alone = behind(text)
    return max(float((behind(text + text[:more]) - alone).abs().max()) for more in (1, 2, 5, 11, 40))


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Sum:
    """All cases so far."""

    found: Outcome = field(default_factory=Outcome)
    cases: Counter[str] = field(default_factory=Counter)
    """By setting."""
    count: int = 0

    def add(self, case: Case, one: Outcome) -> None:
        self.cases.update([*case.settings, *{name for request in case.requests for name in _asked(request)}])
        self.count += 1
        self.found.tokens += one.tokens
        self.found.by_setting.update(one.by_setting)
        self.found.events.update(one.events)
        self.found.mismatches += one.mismatches
        self.found.ties += one.ties

    def as_json(self, seed: int, seconds: float) -> dict[str, Any]:
        found = self.found
        names = ("of", "wanted", "ends", "logprobs", "text", "crash")
        kinds = Counter(next(key for key in names if key in one) for one in found.mismatches)
        counts = {"seed": seed, "cases": self.count, "tokens": found.tokens}
        return {
            "provenance": provenance(seconds),
            "totals": counts | {"mismatches": len(found.mismatches), "of_these": kinds, "ties": len(found.ties)},
            "settings": {
                name: {"cases": self.cases[name], "tokens": found.by_setting[name]} for name in sorted(self.cases)
            },
            "events": dict(sorted(found.events.items())),
            "mismatches": found.mismatches,
            "ties": found.ties,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="tokens to compare, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compiled", action="store_true", help="the demo target alone, compiled: the kernels' paths")
    parser.add_argument("--whole-step", action="store_true", help="recorded steps in place of plain ones")
    parser.add_argument("--case", type=int, help="only this one, with its settings on stderr")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    logging.set_verbosity_error()  # warnings about keys that greedy decoding does not use
    began, kept, total = time.perf_counter(), time.perf_counter(), Sum()
    first = options.case or 0
    # a stopped run still reports its results so far
    with progress_bar() as bar, suppress(KeyboardInterrupt):
        task = bar.add_task("tokens", total=options.tokens)
        for number in itertools.count(first):
            if total.found.tokens >= options.tokens or (options.case is not None and number > first):
                break
            case = drawn(options.seed, number, options.compiled)
            case = recorded(case) if options.whole_step else case
            if options.case is not None:
                bar.console.print(case)
            total.add(case, tried(case))
            what = f"case {number}, {len(total.found.mismatches)} mismatches"
            bar.update(task, completed=total.found.tokens, description=what)
            if time.perf_counter() - kept > 60:
                kept = time.perf_counter()
                publish(total.as_json(options.seed, kept - began), options.out, quiet=True)
    publish(total.as_json(options.seed, time.perf_counter() - began), options.out)
    sys.exit(bool(total.found.mismatches))


if __name__ == "__main__":
    main()
