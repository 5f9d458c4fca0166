"""Rows of a verified pass computed by a server, from log probabilities of its prompt or from the tokens it samples.

Everything is in token ids, since re-encoded text may have different tokens.  B live slots, N drafted nodes, V
vocabulary; row 0 follows the anchor, row n + 1 follows node n.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Probe
from outrider.decoding.state import Scores
from outrider.errors import ConfigError, TargetError
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import TargetSpec

Ask = Callable[[Sequence[dict[str, Any]]], Sequence[Mapping[str, Any]]]
"""Bodies of completion requests, all sent at once → the first choice of each answer, in the same order."""
TOKEN_ID = "token_id:"
"""vLLM's prefix of an id in place of a token's text."""
IDLE = Sampling()
"""Settings that change nothing."""
PREFIX = ("presence_penalty", "frequency_penalty", "bad_words", "min_new_tokens", "processors", "grammar")
"""Settings that depend on where the output begins, or are Python functions."""


class RemoteCache:
    """Every slot's text up to its anchor: each request contains all of it, and the server stores nothing for us."""

    def __init__(self, slots: int, length: int):
        self.slots, self.length = slots, length
        self.texts: list[list[int]] = [[] for _ in range(slots)]
        self._pass: list[tuple[int, list[int]]] = []
        """In the open pass, each live slot with its anchor and drafted tokens."""

    def read(self, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int]) -> None:
        """Add one chunk [R, S] of prompts, right-padded."""
        for row, piece, length in zip(rows, tokens.tolist(), lengths, strict=True):
            self.texts[row] += piece[:length]

    def begin(self, rows: Sequence[int], anchor: Tensor, draft: Draft) -> list[list[int]]:
        """Open a pass.  Returns each live slot's text, its anchor included."""
        self._pass = [(row, [last, *ids]) for row, last, ids in zip(rows, anchor.tolist(), draft.ids, strict=True)]
        return [[*self.texts[row], ids[0]] for row, ids in self._pass]

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        for (row, ids), path in zip(self._pass, paths, strict=True):
            self.texts[row] += [ids[0], *(ids[node + 1] for node in path)]

    def free(self, rows: Sequence[int]) -> None:
        for row in rows:
            self.texts[row] = []


class RemoteRows(ABC):
    """A server as the loop's target, for requests with one `Sampling`; subclasses define how rows are requested."""

    def __init__(self, spec: TargetSpec, ends: frozenset[int], ask: Ask, sampling: Sampling):
        self.spec, self.ends, self.device, self._ask, self.sampling = spec, ends, torch.device("cpu"), ask, sampling
        self.rounds = 0
        """Number of passes so far; the requests of each are sent at once."""

    @property
    @abstractmethod
    def own_sampling(self) -> Sampling:
        """The sampling that the judge applies here."""

    @abstractmethod
    def scores(self, texts: Sequence[list[int]], draft: Draft) -> tuple[Tensor, Tensor | None]:
        """Logits [B, N+1, V], and the tokens [B, N+1] if the server chose them.  texts: up to the anchor."""

    def allocate(self, slots: int, length: int) -> RemoteCache:
        return RemoteCache(slots, length)

    def prefill(
        self, cache: RemoteCache, rows: Sequence[int], tokens: Tensor, lengths: Sequence[int], taps: tuple[int, ...]
    ) -> Scores:
        """Sends no request: the server reads the prompt with the first pass.  The logits are unknown and set to 0."""
        cache.read(rows, tokens, lengths)
        return Scores(torch.zeros(()).expand(len(rows), 1, self.spec.vocabulary), torch.empty(len(rows), 1, 0), None)

    def verify(
        self, cache: RemoteCache, rows: Sequence[int], anchor: Tensor, draft: Draft, taps: tuple[int, ...],
        probe: Probe | None = None,
    ) -> Scores:  # fmt: skip
        logits, choice = self.scores(cache.begin(rows, anchor, draft), draft)
        self.rounds += 1
        return Scores(logits, torch.empty(*logits.shape[:2], 0), None, choice)

    def reached(self, draft: Draft, b: int) -> Iterator[tuple[int, list[int]]]:
        """A slot's relevant rows, and the drafted tokens down to each; none below an end token or an invalid id."""
        paths: dict[int, list[int]] = {-1: []}
        yield 0, []
        for n, token in enumerate(draft.ids[b][: draft.live[b]]):
            above = paths.get(draft.tree[b][n])
            if above is None or not 0 <= token < self.spec.vocabulary or token in self.ends:
                continue
            paths[n] = [*above, token]
            yield n + 1, paths[n]

    def token_of(self, choice: Mapping[str, Any]) -> int:
        """The one token that a server generated.  Raises TargetError if its id is missing or unusable."""
        tokens = choice.get("token_ids")
        if not tokens:
            raise TargetError(
                f"{self.spec.name} returned no token ids, which remote verification needs; use a server that supports "
                "return_token_ids, such as vLLM, SGLang or outrider serve"
            )
        token = int(tokens[0])
        if choice.get("finish_reason") == "stop" and token not in self.ends:
            raise TargetError(
                f"{self.spec.name} ends a text at token {token}, which is not among the end tokens "
                f"{sorted(self.ends)}; pass all of them as ends"
            )
        return self.checked(token)

    def checked(self, token: int) -> int:
        if not 0 <= token < self.spec.vocabulary:
            raise TargetError(
                f"{self.spec.name} returned token {token}, outside its presumed vocabulary of {self.spec.vocabulary}; "
                "pass the model's own size as vocabulary"
            )
        return token


# ── tokens drawn by the server ────────────────────────────────────────────────────────────────────────────────────────


class DrawnRows(RemoteRows):
    """One request of one token for each row; the token that the server samples is the target's.

    A drafted token is accepted if it equals the sampled one, and only sampled tokens are emitted.  That is exact if
    samples of different rows are independent of each other and of the draft.  One seed for all would make them
    dependent: rows with the same distribution would sample the same token.  So every position of a text has its own
    seed, and a seeded text is the same whatever was drafted.
    """

    @classmethod
    def check(cls, sampling: Sampling) -> None:
        """Raises ConfigError for settings that a server can't apply to one token after a prompt."""
        wrong = [name for name in (*PREFIX, "typical_p", "logprobs") if getattr(sampling, name) != getattr(IDLE, name)]
        if wrong:
            raise ConfigError(
                f"{' and '.join(wrong)} can't be used with probes, for which earlier output is part of the prompt; "
                "leave it out, or use the server without drafts"
            )

    @property
    def own_sampling(self) -> Sampling:
        """Greedy: the server's samples are used as they are, and the likeliest drafts match most often."""
        return IDLE

    def scores(self, texts: Sequence[list[int]], draft: Draft) -> tuple[Tensor, Tensor]:
        slots, nodes = draft.tokens.shape
        rows = [(b, n, [*texts[b], *path]) for b in range(slots) for n, path in self.reached(draft, b)]
        answers = self._ask([self._body(text) for _, _, text in rows])
        choice = torch.zeros(slots, nodes + 1, dtype=torch.int64)
        for (b, n, _), answer in zip(rows, answers, strict=True):
            choice[b, n] = self.token_of(answer)
        return torch.zeros(()).expand(slots, nodes + 1, self.spec.vocabulary), choice

    def _body(self, text: list[int]) -> dict[str, Any]:
        seed = self.sampling.seed
        seeded = {} if seed is None else {"seed": seed_at(seed, len(text))}
        return {"prompt": text, "max_tokens": 1, "return_token_ids": True, **settings_of(self.sampling), **seeded}


def settings_of(sampling: Sampling) -> dict[str, Any]:
    """All sampling fields of a completion request: a server takes missing ones from the model's generation_config."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    fields: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    if sampling.biases:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.biases}
    return fields


def seed_at(seed: int, position: int) -> int:
    """The seed of one position of a text, in [0, 2**63)."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()) >> 1


# ── log probabilities of the prompt ───────────────────────────────────────────────────────────────────────────────────


class LogprobRows(RemoteRows):
    """One request for each slot, with prompt and draft: the server's log probabilities are the rows' logits.

    They are the model's own, before any setting, so temperature and truncation are applied here, by the same judge as
    for a local target.  There are `count` per row: enough for greedy decoding and for top_k up to `count`; all of them
    (-1, if the server allows it) are enough for everything.
    """

    def __init__(self, spec: TargetSpec, ends: frozenset[int], ask: Ask, sampling: Sampling, count: int):
        super().__init__(spec, ends, ask, sampling)
        self.count = count

    @classmethod
    def check(cls, sampling: Sampling, count: int) -> None:
        """Raises ConfigError for settings that need more than the `count` likeliest tokens of a row, or the logits."""
        # a log probability is a logit minus an unknown constant, which would change the result of these two
        if sampling.repetition_penalty != 1 or sampling.processors:
            raise ConfigError(
                "repetition_penalty and processors need logits, but a server returns log probabilities; leave them "
                "out, or use method='probes' for a repetition_penalty"
            )
        if count == -1:
            return
        is_cut = sampling.temperature == 0 or 0 < sampling.top_k <= count
        if not is_cut or sampling.is_processed or sampling.logprobs is not None:
            raise ConfigError(
                f"{count} log probabilities per row are enough for greedy decoding and for top_k up to {count}, "
                "without penalties, biases, bans or log probabilities of the output; set logprobs to -1 and start vLLM "
                "with --max-logprobs -1, or use method='probes'"
            )

    @property
    def own_sampling(self) -> Sampling:
        return self.sampling

    def scores(self, texts: Sequence[list[int]], draft: Draft) -> tuple[Tensor, None]:
        slots, nodes = draft.tokens.shape
        paths = [list(self.reached(draft, b))[-1][1] for b in range(slots)]
        answers = self._ask([self._body([*text, *path]) for text, path in zip(texts, paths, strict=True)])
        logits = torch.full((slots, nodes + 1, self.spec.vocabulary), -torch.inf)
        logits[..., 0] = 0  # irrelevant rows: any token, so that they are distributions
        for b, answer in enumerate(answers):
            self.token_of(answer)
            for n, row in enumerate(rows_of(answer, len(texts[b]), len(paths[b]), self.spec.name)):
                logits[b, n, 0] = -torch.inf
                logits[b, n, [self.checked(token) for token in row]] = torch.tensor(list(row.values()))
        return logits, None

    def _body(self, text: list[int]) -> dict[str, Any]:
        fields = {"prompt_logprobs": self.count, "logprobs": self.count, "return_tokens_as_token_ids": True}
        return {"prompt": text, "max_tokens": 1, "return_token_ids": True, **settings_of(IDLE), **fields}


def rows_of(choice: Mapping[str, Any], begin: int, drafted: int, name: str) -> list[dict[int, float]]:
    """Log probabilities by token for the rows after the anchor and after each drafted token, in vLLM's format.

    begin: number of tokens before the draft.  Those for drafted tokens are among the prompt's, the last ones come with
    the generated token.  Raises TargetError if they are missing.
    """
    try:
        prompt = choice["prompt_logprobs"][begin : begin + drafted] if drafted else []
        rows = [{int(token): float(entry["logprob"]) for token, entry in row.items()} for row in prompt]
        last = choice["logprobs"]["top_logprobs"][0]
        rows.append({int(token.removeprefix(TOKEN_ID)): float(value) for token, value in last.items()})
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _unreadable(name, error) from error
    if len(rows) != drafted + 1:
        raise _unreadable(name, f"{len(rows)} rows instead of {drafted + 1}")
    return rows


def _unreadable(name: str, reason: object) -> TargetError:
    return TargetError(
        f"the log probabilities of {name} can't be read ({reason!r}); use a vLLM that supports prompt_logprobs and "
        "return_tokens_as_token_ids, or method='probes'"
    )
