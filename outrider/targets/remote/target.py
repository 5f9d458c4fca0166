"""A target behind HTTP: a server with OpenAI's completions API verifies local drafts.

The loop, drafters, policies, end tokens and stop strings are those of a local target; see `remote.rows` for how a
server verifies.  A round costs a round trip, and the server rereads the prompt unless it is cached.  So `plain`
sends the same requests without drafts, and `compare` says which was faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Never

import torch
from transformers import AutoConfig, GenerationConfig

from outrider.client import Client
from outrider.decoding.protocols import Drafter, Policy
from outrider.decoding.scheduler import advance
from outrider.decoding.state import DecodeState, Request
from outrider.errors import ConfigError, DataError, DrafterError, TargetError
from outrider.policies import named
from outrider.sampling.judge import SamplingJudge
from outrider.sampling.settings import Sampling, whole
from outrider.sampling.text import Detokenizer, with_stops
from outrider.targets.gguf import load as gguf
from outrider.targets.gguf.files import locate
from outrider.targets.gguf.tokenizer import ends as ends_in
from outrider.targets.identity import hash_tokenizer, load_tokenizer
from outrider.targets.protocol import TargetSpec
from outrider.targets.remote.rows import IDLE, DrawnRows, LogprobRows, RemoteRows, settings_of
from outrider.targets.text import detokenizer as detokenizers
from outrider.targets.text.prompts import Prompt, ids_of, is_chat, listed

Method = Literal["probes", "logprobs"]
UNLIMITED = 2**31 - 1
"""Context of a model whose context is unknown; the server refuses longer texts."""
AT_ONCE = 64
"""Most concurrent requests."""
ADVICE = "use a drafter that reads only tokens, such as ngram, suffix or small_model"


@dataclass(slots=True)
class Traffic:
    """Traffic with the server."""

    requests: int = 0
    attempts: int = 0
    """Requests, retries included."""
    sent: int = 0
    """Tokens of prompts."""
    received: int = 0
    """Number of answer tokens, whether used or not."""
    rounds: int = 0
    """Sequential round trips."""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s; rounds {self.rounds:,}, requests {self.requests:,}, tokens sent {self.sent:,}, "
            f"received {self.received:,}"
        )


@dataclass(slots=True)
class RemoteText:
    """One prompt's continuation."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "length"
    accepted: list[int] = field(default_factory=list)
    """Accepted drafted tokens, round by round; empty for a plain request."""


@dataclass(frozen=True, slots=True)
class RemoteTexts:
    """Continuations in the order of the prompts, and the traffic."""

    texts: list[RemoteText]
    traffic: Traffic

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


class RemoteTarget:
    """A model on a server, for drafters that read only tokens; can be passed to `load_drafter`."""

    def __init__(
        self, server: str | Client, tokenizer: Any = None, *, model: str | None = None, api_key: str | None = None,
        method: Method = "probes", logprobs: int = 20, vocabulary: int | None = None, context: int | None = None,
        ends: Iterable[int] | None = None,
    ):  # fmt: skip
        """server: the address of its API, such as http://127.0.0.1:8000/v1, or a client with its own limits.

        tokenizer: the model's own, or its folder or Hugging Face id, whose config then gives the defaults of
        vocabulary, context and ends; None if prompts are token ids.
        method: `probes`, one request of one token for the anchor and each drafted node, on any server that takes and
        returns token ids; or `logprobs`, one request for each text, on vLLM.  logprobs: number per row for the latter,
        at most the server's --max-logprobs; -1 for all.
        Raises TargetError if the tokenizer can't be loaded, ConfigError if the vocabulary is unknown.
        """
        if method not in ("probes", "logprobs"):
            raise ConfigError(f"method must be 'probes' or 'logprobs', got {method!r}")
        if whole("logprobs", logprobs) < 1 and logprobs != -1:
            raise ConfigError(f"logprobs must be at least 1, or -1 for all, got {logprobs}")
        self.method, self.logprobs, self.device, self.mask_token = method, logprobs, torch.device("cpu"), None
        self.tokenizer, described = _described(tokenizer)
        vocabulary = vocabulary or described.get("vocabulary")
        if vocabulary is None:
            raise ConfigError("the vocabulary of the server's model is unknown; pass vocabulary or a tokenizer")
        self.ends = frozenset(described.get("ends", ()) if ends is None else ends)
        self.client = server if isinstance(server, Client) else Client(server, model=model, api_key=api_key)
        self._is_own_client = self.client is not server
        self._pool = ThreadPoolExecutor(AT_ONCE, "outrider-remote")
        self.spec = TargetSpec(
            name=server if isinstance(server, str) else model or "the server", revision=None, layers=0, hidden=0,
            vocabulary=vocabulary, context=context or described.get("context") or UNLIMITED, dtype="float32",
            tokenizer_hash=None if self.tokenizer is None else hash_tokenizer(self.tokenizer), weights_hash="",
            mode="tree" if method == "probes" else "chain",
        )  # fmt: skip
        self.detokenizer: Detokenizer | None = None
        if self.tokenizer is not None:
            self.detokenizer = detokenizers.detokenizer(self.tokenizer, vocabulary)

    def __enter__(self) -> RemoteTarget:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a client passed to the constructor stays open."""
        self._pool.shutdown(cancel_futures=True)
        if self._is_own_client:
            self.client.close()

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a text or of chat messages (through the chat template); token ids are returned unchanged."""
        return ids_of(prompt, self.tokenizer, self.spec.vocabulary, {})

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, without special tokens; "" without a tokenizer."""
        return "" if self.detokenizer is None else self.detokenizer.decode(tokens)

    def read(self, tokens: Any, taps: Any) -> Never:
        """Raises DrafterError: a server sends no hidden states."""
        raise DrafterError(f"{self.spec.name} is a server, which does not send hidden states; {ADVICE}")

    def generate(
        self, prompts: Prompt | Iterable[Prompt], drafter: Drafter | None = None, *, max_new_tokens: int,
        sampling: Sampling | None = None, stop: Sequence[str] = (), policy: str | Policy | None = None, slots: int = 16,
    ) -> RemoteTexts:  # fmt: skip
        """Continue every prompt with drafts that the server verifies; the text follows the distribution of the server's
        model.

        sampling: default greedy.  With `probes` the server applies it, in its own order; with `logprobs` it is applied
        here, and a seed gives the same text as `outrider.generate`.  The other arguments are as in that function.
        Raises ConfigError for a sampling that the method does not support, DrafterError for a drafter that reads hidden
        states, TargetError for unusable answers, ClientError if a request fails.
        """
        _check_slots(slots)
        drafter, wire = drafter or Drafter(), _Wire(self.client, self._pool)
        _refuse_unfitting(drafter)
        rows = self._rows(sampling or IDLE, wire)
        requests = self._requests(prompts, max_new_tokens, rows.own_sampling, stop)
        judge = SamplingJudge()
        state = DecodeState(max(1, min(slots, len(requests))), self.spec.context, self.ends, judge=judge)
        texts = [RemoteText() for _ in requests]
        began = time.perf_counter()
        for progress in advance(rows, requests, drafter, named.policy(policy, drafter), state):
            text = texts[progress.request]
            text.tokens += progress.tokens
            text.text += progress.text
            text.accepted.append(progress.accepted)
            text.finish_reason = "stop" if progress.finish_reason == "stop" else "length"
        wire.traffic.seconds, wire.traffic.rounds = time.perf_counter() - began, rows.rounds
        return RemoteTexts(texts, wire.traffic)

    def plain(
        self, prompts: Prompt | Iterable[Prompt], *, max_new_tokens: int, sampling: Sampling | None = None,
        stop: Sequence[str] = (), slots: int = 16,
    ) -> RemoteTexts:  # fmt: skip
        """Continue every prompt with one request each, `slots` at once: the baseline for `generate`.

        A seed is passed to the server, so a sampled text differs from `generate`'s.
        """
        _check_slots(slots)
        sampling = sampling or IDLE
        DrawnRows.check(sampling)
        fields = {"max_tokens": max_new_tokens, "return_token_ids": True, **settings_of(sampling)}
        fields |= {} if sampling.seed is None else {"seed": sampling.seed}
        requests = self._requests(prompts, max_new_tokens, sampling, stop)
        if requests and requests[0].stop:
            fields["stop"] = list(requests[0].stop)
        bodies = [{"prompt": request.prompt, **fields} for request in requests if max_new_tokens]
        began = time.perf_counter()
        with ThreadPoolExecutor(slots) as pool:
            wire = _Wire(self.client, pool)
            choices = wire.ask(bodies)
        wire.traffic.seconds, wire.traffic.rounds = time.perf_counter() - began, -(-len(bodies) // slots)
        texts = [
            RemoteText(list(each.get("token_ids") or ()), each["text"], each.get("finish_reason") or "length")
            for each in choices
        ]
        return RemoteTexts(texts or [RemoteText() for _ in requests], wire.traffic)

    def _rows(self, sampling: Sampling, wire: _Wire) -> RemoteRows:
        """The loop's target for requests with this sampling."""
        sampling.check(self.spec.vocabulary)
        if self.method == "probes":
            DrawnRows.check(sampling)
            return DrawnRows(self.spec, self.ends, wire.ask, sampling)
        LogprobRows.check(sampling, self.logprobs)
        return LogprobRows(self.spec, self.ends, wire.ask, sampling, self.logprobs)

    def _requests(self, prompts: Any, max_new_tokens: int, sampling: Sampling, stop: Sequence[str]) -> list[Request]:
        if whole("max_new_tokens", max_new_tokens) < 0:
            raise ConfigError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if stops:
            with_stops(self.detokenizer, stops)
        requests = [
            Request(self.encode(p), max_new_tokens, sampling, stops, self.detokenizer, not is_chat(p))
            for p in listed(prompts)
        ]
        for i, request in enumerate(requests):
            if len(request.prompt) >= self.spec.context:
                size = f"prompt {i} has {len(request.prompt)} tokens"
                raise DataError(f"{size} and leaves no room in the context of {self.spec.context}; shorten it")
        return requests


def compare(drafted: RemoteTexts, plain: RemoteTexts) -> str:
    """The traffic of both, which was faster, and how many tokens per round break even.

    Tokens per round include all texts in the round.
    """
    with_drafts, without = drafted.traffic, plain.traffic
    lines = [f"drafted  {drafted.tokens:,} tokens in {with_drafts}", f"plain    {plain.tokens:,} tokens in {without}"]
    if not (with_drafts.rounds and drafted.tokens and plain.tokens and with_drafts.seconds and without.seconds):
        return "\n".join(lines)
    rate, brought = plain.tokens / without.seconds, drafted.tokens / with_drafts.rounds
    round_s = with_drafts.seconds / with_drafts.rounds
    ratio = drafted.tokens / with_drafts.seconds / rate
    how = "faster" if ratio > 1 else "slower"
    lines.append(
        f"drafts were {how} than plain requests, {ratio:.2f} times their speed: a round takes {1e3 * round_s:.0f} ms "
        f"and yields {brought:.1f} tokens; against {rate:.0f} tokens/s it breaks even at {rate * round_s:.1f}"
    )
    return "\n".join(lines)


# ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Wire:
    """Sends bodies of completions and counts them."""

    def __init__(self, client: Client, pool: ThreadPoolExecutor):
        self.traffic, self._client, self._pool = Traffic(), client, pool

    def ask(self, bodies: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The first choice of each answer, in order.  Raises ClientError for the first request that fails."""
        futures = [self._pool.submit(self._client.complete, **body) for body in bodies]
        try:
            answers = [one.result() for one in futures]
        finally:
            for one in futures:
                one.cancel()
        self.traffic.requests += len(bodies)
        self.traffic.attempts += sum(answer.attempts for answer in answers)
        self.traffic.sent += sum(len(body["prompt"]) for body in bodies)
        choices = [answer.raw["choices"][0] for answer in answers]
        self.traffic.received += sum(len(choice.get("token_ids") or ()) for choice in choices)
        return choices


def _described(tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and vocabulary, context and ends as far as it and the configs next to it specify them."""
    if tokenizer is None:
        return None, {}
    of_configs: dict[str, Any] = {}
    if isinstance(tokenizer, str | Path):
        name = str(tokenizer)
        tokenizer, reason = load_tokenizer(name)
        if tokenizer is None:
            raise TargetError(f"can't load the tokenizer of {name!r}: {reason}; give its folder or Hugging Face id")
        of_configs = _of_configs(name)
    end = tokenizer.eos_token_id
    of_tokenizer = {"vocabulary": max(tokenizer.get_vocab().values()) + 1, "ends": [] if end is None else [end]}
    return tokenizer, of_tokenizer | of_configs


def _of_configs(name: str) -> dict[str, Any]:
    """Vocabulary, context and ends from a GGUF file or a folder's configs; empty if these are missing."""
    if (files := locate(name)) is not None:
        config, parts = gguf.described(name, files)
        return {
            "vocabulary": config.vocab_size, "context": config.max_position_embeddings, "ends": ends_in(parts.keys),
        }  # fmt: skip
    fields: dict[str, Any] = {}
    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
        fields |= {"vocabulary": config.vocab_size, "context": getattr(config, "max_position_embeddings", None)}
        ends = GenerationConfig.from_pretrained(name).eos_token_id
        if ends is not None:
            fields["ends"] = torch.as_tensor(ends).flatten().tolist()
    except (OSError, ValueError, AttributeError):
        pass  # only a tokenizer
    return fields


def _check_slots(slots: int) -> None:
    if whole("slots", slots) < 1:
        raise ConfigError(f"slots must be at least 1, got {slots}")


def _refuse_unfitting(drafter: Drafter) -> None:
    if drafter.taps or drafter.hidden is not None or drafter.probe_rows:
        raise DrafterError(
            f"{type(drafter).__name__} reads the target's hidden states, which no server sends; {ADVICE}"
        )
