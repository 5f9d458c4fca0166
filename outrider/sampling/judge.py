"""The full judge: evaluates every node on its own prefix with all settings of a request, and produces text, stop
strings and log probabilities.

B live slots, N drafted nodes, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted, Rule, accept_top1
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.state import DecodeState, Judge, Request, Scores, likeliest
from outrider.errors import ConfigError, TargetError
from outrider.sampling.distribution import Settings, distribution, log_probs
from outrider.sampling.fast import accept_chain, accept_greedy
from outrider.sampling.logprobs import TokenLogprob, token_logprobs
from outrider.sampling.prefix import Prefix, processed, pruned
from outrider.sampling.text import TextStream

NO_ERRORS: Mapping[int, Exception] = {}


class AcceptanceKernels(Protocol):
    """A device's kernels for accepting and sampling, for requests that set nothing but a temperature."""

    def accept(self, draft: Draft, logits: Tensor, temperature: Tensor, streams: Streams) -> Tensor:
        """The acceptance rule for logits [B, N+1, V].  [B, N+4] int64: path and padding, its length, the next token,
        invalid nodes, and whether all logits are finite."""

    def accept_greedy(self, draft: Draft, logits: Tensor, choice: Tensor | None) -> Tensor:
        """Like `accept`, for greedy slots."""

    def sample(self, logits: Tensor, temperature: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
        """Like `Judge.drawn`."""


class SamplingJudge(Judge):
    """Accepts by `rule`, or by the standard acceptance rule and its fast paths if it is None."""

    def __init__(self, rule: Rule | None = None):
        self.rule = rule
        self.kernels: AcceptanceKernels | None = None
        """Those of the target's device; None if it has none."""
        self.serves: Callable[[], DecodeState | None] | None = None
        """Weak reference to the batch that it serves; None before the first."""
        self.logprobs: dict[int, list[TokenLogprob]] = {}
        """By slot: log probabilities of the committed tokens, if the request asks for them."""
        self._prefixes: dict[int, Prefix] = {}
        self._texts: dict[int, TextStream] = {}
        self._logits = torch.empty(0)
        """[B, N+1, V] of the last pass, after penalties, bans and processors."""
        self._are_numbers = False
        """Whether they are known to contain no NaN."""
        self.select({}, [], torch.device("cpu"))

    def admit(self, row: int, request: Request, ends: frozenset[int], device: torch.device) -> None:
        """Raises ConfigError for stop strings of a request without a detokenizer."""
        self.free(row)  # left over from an earlier batch
        self.logprobs[row] = []
        if request.detokenizer is not None or request.stop:
            self._texts[row] = TextStream(
                request.detokenizer, request.stop, request.prompt if request.continues else ()
            )
        if request.sampling.is_processed:
            self._prefixes[row] = Prefix(request.sampling, request.prompt, ends, device)

    def free(self, row: int) -> None:
        self._prefixes.pop(row, None)
        self._texts.pop(row, None)

    def select(self, requests: dict[int, Request], rows: list[int], device: torch.device) -> None:
        self._requests = [(row, requests[row]) for row in rows]
        self.settings = Settings.of([request.sampling for _, request in self._requests], device)
        """Of the live slots."""
        self.temperature = self.settings.temperature
        self.prefixes = [(b, self._prefixes[row]) for b, row in enumerate(rows) if row in self._prefixes]
        """Index in the batch and prefix of each live slot whose logits depend on earlier tokens; none by default."""
        self.banning = [(b, prefix) for b, prefix in self.prefixes if prefix.sampling.bans]
        """The prefixes that make tokens impossible."""
        self.bans = bool(self.banning)

    def distribution(self, logits: Tensor) -> Tensor:
        return distribution(logits, self.settings)

    def drawn(self, logits: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
        if self.kernels is None or self.settings.has_cuts or self.temperature is None:
            return super().drawn(logits, streams, depth)
        return self.kernels.sample(logits, self.temperature, streams, depth)

    def masked(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        """Logits masked like the target's, by bad words, minimum length and grammar; the q of a sampled token is their
        softmax.

        Returns the same tensor if no slot bans anything.
        """
        if not self.bans:
            return logits
        paths = torch.stack(list(drafted), 1).tolist() if drafted else [[]] * len(logits)
        out = logits.clone()
        for b, prefix in self.banning:
            possible = prefix.possible(tuple(paths[b]), logits.shape[-1])
            if possible.any():  # a row of -inf is not a distribution; nothing may follow an impossible token
                out[b].masked_fill_(~possible.to(out.device), -torch.inf)
        return out

    def prune(self, draft: Draft, seeded: Tensor | None, vocabulary: int) -> Draft:
        return pruned(draft, self.banning, seeded, vocabulary)

    def on(self, device: torch.device) -> SamplingJudge:
        there = copy.copy(self)
        there.settings = self.settings.each(lambda column: column.to(device))
        there.temperature = there.settings.temperature
        there.kernels = self.kernels if device.type == "cuda" else None
        return there

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        logits = self._logits = processed(scores.logits, draft, self.prefixes)
        self._are_numbers = False
        accepted = self._by_kernels(draft, state)
        if accepted is not None:
            return accepted
        if self.rule is None and self.temperature is None:
            chosen = scores.choice if logits is scores.logits else None
            if chosen is None:
                chosen = likeliest(logits)
            choice = draft.read_with(chosen)
            self._are_numbers = min(map(min, choice)) >= 0
            if not self._are_numbers:  # non-finite values are refused after the commit, see `observe`
                choice = logits.argmax(-1).tolist()
            return accept_greedy(draft, choice, logits.shape[-1])
        streams = state.streams
        if self.rule is None and draft.q is None:
            slots = torch.arange(len(logits), device=logits.device)
            choose = lambda rows, depth: streams.draw(self.distribution(logits[slots, rows]), depth, Purpose.TARGET)
            return accept_top1(draft, logits.shape[-1], choose)
        return (self.rule or accept_chain)(draft, self.distribution(logits), streams)

    def _by_kernels(self, draft: Draft, state: DecodeState) -> Accepted | None:
        """What the device's kernels accept; None if they don't support the rule, the settings or the logits.  Greedy
        slots don't use them: outside a captured step, torch's argmax and a walk on the host take at most half the
        time."""
        if self.kernels is None or self.rule is not None or self.settings.has_cuts or self.temperature is None:
            return None
        rows = draft.read_with(self.kernels.accept(draft, self._logits, self.temperature, state.streams))
        self._are_numbers = all(row[-1] for row in rows)
        return Accepted.read([row[:-1] for row in rows]) if self._are_numbers else None

    def text(self, row: int) -> str:
        """This slot's text that has become final since the last call; "" if the request has no detokenizer."""
        return self._texts[row].take() if row in self._texts else ""

    def take_output(self, row: int, count: int, takes_text: bool) -> tuple[str, tuple[TokenLogprob, ...]]:
        logprobs = tuple(self.logprobs[row][-count:]) if self.logprobs[row] else ()
        # log probabilities are returned with their text
        return self.text(row) if takes_text or logprobs else "", logprobs

    def read(self, row: int, tokens: list[int], is_last: bool) -> tuple[int, bool]:
        count, is_stopped = len(tokens), False
        if row in self._texts:
            count, is_stopped = self._texts[row].write(tokens, is_last)
        if row in self._prefixes:
            self._prefixes[row].push(tokens[:count])
        return count, is_stopped

    def observe(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        """By slot, a TargetError or ConfigError if a token was chosen from logits that are NaN, infinite or all
        impossible."""
        errors = self._wrong_numbers(accepted, texts, scores)
        for b, (row, request) in enumerate(self._requests):
            if request.sampling.logprobs is not None and row not in errors:
                rows, one = _emitting_rows(accepted, b), slice(b, b + 1)
                logits = self._logits[one, rows]
                # at temperature 0, where the distribution is one-hot, the softmax of the logits
                is_cold = request.sampling.temperature == 0
                scored = log_probs(logits) if is_cold else distribution(logits, self.settings.of_slots(one)).log()
                self.logprobs[row] += token_logprobs(scored[0], texts[b][-len(rows) :], request.sampling.logprobs)
        return errors

    def _wrong_numbers(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        """Checks the largest logit of every row, which is NaN if any logit is."""
        if self._are_numbers:
            return NO_ERRORS
        best = self._logits.amax(-1)
        if all(math.isfinite(value) for row in best.tolist() for value in row):
            return NO_ERRORS
        errors: dict[int, Exception] = {}
        for b, ((row, request), text) in enumerate(zip(self._requests, texts, strict=True)):
            rows = _emitting_rows(accepted, b)  # the other rows don't matter
            wrong = next((at for at in rows if not math.isfinite(best[b, at])), None)
            if wrong is not None:
                where = f"after {len(text) - len(rows)} or more tokens"
                errors[row] = error_of(
                    float(best[b, wrong]), bool(scores.logits[b, wrong].amax().isfinite()), request, where
                )
        return errors


def error_of(value: float, is_target_finite: bool, request: Request, where: str) -> Exception:
    """The error for a row whose largest logit is `value`."""
    if value == -math.inf and request.sampling.forbids:
        return ConfigError(
            f"{where} bad_words, min_new_tokens, grammar or a processor leave no token possible; let at least one "
            "follow every prefix"
        )
    if is_target_finite:
        return ConfigError(f"a penalty, logit_bias or processor makes a logit {value} {where}; choose smaller values")
    return TargetError(
        f"the target's logits are {value} {where}, so there is no next token; load it in float32 or bfloat16, since "
        "float16 overflows, and look for weights that are not finite"
    )


def _emitting_rows(accepted: Accepted, b: int) -> list[int]:
    """The rows that predicted a slot's committed tokens: the row of each token's predecessor."""
    rows = accepted.rows(b)
    return rows if accepted.next_tokens[b] >= 0 else rows[:-1]
