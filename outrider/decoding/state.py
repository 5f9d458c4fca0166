"""The state of a batch of requests: their tokens, where each must end, and the judge of the drafts.

B live slots, in the order of `rows`; N drafted nodes, V vocabulary, T taps, H hidden size, P rows of a probe.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted, accept
from outrider.decoding.draft import Draft, to_device
from outrider.decoding.noise import Purpose, Streams

FinishReason = Literal["stop", "length", "context"]


@dataclass(slots=True)
class Request:
    """One text to continue."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Any
    """`sampling.Sampling`: temperature, seed, and the other settings that the judge reads."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of them; needs `detokenizer`."""
    detokenizer: Any = None
    """Turns its tokens into text (`sampling.text.Detokenizer`); None for a request without text."""
    continues: bool = False
    """Whether its text continues the prompt's, so that a space between the two belongs to it; False for an answer."""
    tenant: str = ""
    """Owner of the text: a drafter stores nothing across requests of different tenants."""
    drafter: str = ""
    """Name of the drafter to use, if a `mix` assigns each request to one; "" for any."""
    max_draft: int | None = None
    """Maximum number of nodes to draft for it in one step; 0 for plain decoding, None for the policy's choice."""
    prediction: Sequence[int] = ()
    """Token ids that its text is likely to repeat, for drafters that look text up."""


class Scores(NamedTuple):
    """The target's outputs for the rows of one pass."""

    logits: Tensor
    """[B, N+1, V]."""
    hidden: Tensor
    """[B, N+1, H] after the final norm."""
    taps: Tensor | None
    """[B, N+1, T, H]; tap i is the residual stream after decoder layer i, 0-based."""
    choice: Tensor | None = None
    """[B, N+1], most likely ids, if the pass computed them; -1 where the largest logit is not finite."""
    probe: Tensor | None = None
    """[B, P, H], hidden states of the probe's rows after the final norm; None without a probe."""

    def first(self, rows: int) -> Scores:
        """The first `rows` rows, without padding."""
        logits, hidden, taps, choice = (None if x is None else x[:, :rows] for x in self[:4])
        return Scores(logits, hidden, taps, choice, self.probe)  # type: ignore[arg-type]


def likeliest(logits: Tensor) -> Tensor:
    """`Scores.choice` of logits [..., V]."""
    best, choice = logits.max(-1)
    return torch.where(best.isfinite(), choice, -1)


class Stop(Protocol):
    """Ends drafts early, in chains that are sampled token by token."""

    @property
    def sizes(self) -> Tensor:
        """[B] int64 on the CPU, tokens drafted so far in each slot."""

    def draws(self, sure: Tensor) -> bool:
        """Called at each depth before its tokens are sampled: add 1 to `sizes` for each slot that drafts one, and
        return whether any does.  sure [B], probability of the most likely token."""

    def reads(self) -> bool:
        """Whether any slot might draft another token; if not, the drafter skips its pass."""


class Judge:
    """Decides what is accepted from the target's scores.  This one supports temperature only; `sampling.judge` supports
    every sampling setting."""

    bans = False
    """Whether a live slot forbids tokens depending on the tokens before them."""
    temperature: Tensor | None = None
    """[B], 0 for a greedy slot; None if every slot is greedy."""

    def allocate(self, target: Any, cache: Any) -> None:
        """Called once per batch, before its first request, for a judge that runs passes itself.  target and cache are
        the batch's; the judge must allocate another cache with as many slots for its passes."""

    def admit(self, row: int, request: Request, ends: frozenset[int], device: torch.device) -> None: ...
    def free(self, row: int) -> None: ...

    def select(self, requests: dict[int, Request], rows: list[int], device: torch.device) -> None:
        """Make these slots the live ones, in this order."""
        temperatures = [float(requests[row].sampling.temperature) for row in rows]
        self.temperature = torch.tensor(temperatures, device=device) if any(temperatures) else None

    def distribution(self, logits: Tensor) -> Tensor:
        """Distribution of each slot's next token, from logits [B, ..., V] of the target or a drafter; same shape."""
        greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.temperature is None:
            return greedy
        temperature = self.temperature.to(logits).view(-1, *[1] * (logits.dim() - 1))
        return torch.where(temperature == 0, greedy, (logits / temperature.where(temperature > 0, 1.0)).softmax(-1))

    def drawn(self, logits: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
        """The distribution q [B, V] of a drafter's logits [B, V], and one token per slot sampled from it, [B]."""
        q = self.distribution(logits)
        return q, streams.draw(q, depth, Purpose.DRAFT)

    def masked(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        """A drafter's logits [B, V], with -inf for tokens that may not follow the slot's text and these drafted tokens
        (each [B])."""
        return logits

    def prune(self, draft: Draft, seeded: Tensor | None, vocabulary: int) -> Draft:
        """The draft without nodes that can't be accepted.  seeded [B]: slots in which every node is deterministic."""
        return draft

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        return accept(draft, self.distribution(scores.logits), state.streams)

    def read(self, row: int, tokens: list[int], is_last: bool) -> tuple[int, bool]:
        """How many of these tokens, which are about to be committed, belong to the text, and whether it stops there."""
        return len(tokens), False

    def observe(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        """Called after the commit; texts: all tokens of each live slot.  Returns an error for each slot in which a
        forbidden token was committed."""
        return {}

    def take_output(self, row: int, count: int, takes_text: bool) -> tuple[str, tuple[Any, ...]]:
        """The text of a slot that became final since the last call ("" unless takes_text), and the log probabilities of
        its last `count` tokens."""
        return "", ()

    def on(self, device: torch.device) -> Judge:
        """This judge for a drafter on another device."""
        return self


@dataclass(slots=True)
class Timing:
    """Seconds of one step, by part."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def lap(self, part: Literal["draft", "verify", "other"]) -> None:
        """Add the time since the last lap to `part`."""
        since = time.perf_counter() - self.began - self.draft - self.verify - self.other
        setattr(self, part, getattr(self, part) + since)


class DecodeState:
    """Slots of one batch.  A slot is admitted, advances by `commit`, finishes, and is freed for the next request.

    Drafters and policies may read these attributes and must not change them:

    `rows`: list[int], the live slots.  A finished slot stays live until it is freed before the next step; a slot whose
    prompt is still being read is not live.
    `tokens[row]`: list[int], prompt and committed tokens; the last one is the anchor.  It only grows between admission
    and `free`.
    `requests[row]`: the slot's `Request`; absent for a free slot.
    `prefilled[row]`: number of prompt tokens that the target has read.
    `judge`: what the requests allow.  `device`: the target's.
    `noise_seeds` [B] int64.  `seeded` [B] bool: slots with shared noise, or None.
    `stop`: ends drafts of this step early, or None.

    shared_noise: a slot with a seed drafts with the target's noise and emits the target's draws, whatever was drafted.
    Without it, a seed only fixes the noise, and drafts are judged by their q as in other slots.
    """

    def __init__(
        self, slots: int, context: int, ends: frozenset[int] = frozenset(), device: torch.device | str = "cpu",
        judge: Judge | None = None, shared_noise: bool = True,
    ):  # fmt: skip
        self.context, self.ends, self.device = context, ends, torch.device(device)
        self.judge, self.shared_noise = Judge() if judge is None else judge, shared_noise
        self.requests: dict[int, Request] = {}
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.prefilled = [0] * slots
        self.finished: list[FinishReason | None] = [None] * slots
        self.seeds = [0] * slots
        self.reading: set[int] = set()  # slots whose prompt is still being read; they are not live
        self.reached: list[int] = []  # depth of each live slot's draft in the last step
        self.drafted: list[int] = []  # its number of nodes
        self.undrafted: set[int] = set()  # slots that are new to a `StepRunner`, which has no draft for them yet
        self.runner = "plain"  # runner of this step, or of its drafting counterpart
        self.is_drafting = (
            True  # whether the policy drafted in the last step with room for drafts; True before the first
        )
        self.read_s, self.read_tokens = 0.0, 0  # prompts read by the drafter while drafting: seconds and tokens
        self.invalid = 0  # nodes so far with an invalid id or q
        self.timing = Timing()
        self.stop: Stop | None = None
        self.rows: list[int] = []
        self._select()

    def admit(self, row: int, request: Request, is_live: bool = True) -> None:
        """Put a request into a free slot.  Unless is_live is set, it takes part in steps only after `start`."""
        assert row not in self.requests, f"slot {row} is taken"
        seed = request.sampling.seed
        self.requests[row], self.tokens[row] = request, list(request.prompt)
        self.prefilled[row], self.finished[row] = 0, None
        self.seeds[row] = secrets.randbits(63) if seed is None else seed
        self.judge.admit(row, request, self.ends, self.device)
        if is_live:
            self._select()
        else:
            self.reading.add(row)

    def start(self, rows: Sequence[int]) -> None:
        """Make these slots live: their prompts have been read."""
        self.reading.difference_update(rows)
        self._select()

    def unread(self, row: int) -> int:
        """Number of a slot's tokens that the target still has to read, excluding the anchor, which a step reads."""
        return len(self.tokens[row]) - 1 - self.prefilled[row]

    def wants_drafts(self, row: int) -> bool:
        return self.requests[row].max_draft != 0

    def free(self, row: int) -> None:
        del self.requests[row]
        self.reading.discard(row)
        self.judge.free(row)
        self._select()

    def _select(self) -> None:
        live = self.requests.keys() - self.reading
        stay = sum(row in live for row in self.rows)
        # gaps are filled from the end and new slots are appended, so that the cache moves few slots
        last = iter([row for row in self.rows[stay:] if row in live])
        ordered = [row if row in live else next(last) for row in self.rows[:stay]]
        self.rows = ordered + sorted(live.difference(ordered))
        self.judge.select(self.requests, self.rows, self.device)
        seeded = [self.shared_noise and self.requests[row].sampling.seed is not None for row in self.rows]
        self.seeded = torch.tensor(seeded, device=self.device) if any(seeded) else None
        self.noise_seeds = to_device([self.seeds[row] for row in self.rows], self.device)

    @property
    def anchor(self) -> Tensor:
        """[B], the last committed token of every live slot, not yet in the target's cache."""
        return to_device([self.tokens[row][-1] for row in self.rows], self.device)

    def replaced(self, **changed: Any) -> DecodeState:
        """A read-only copy of this state with some attributes replaced."""
        replica = copy.copy(self)
        vars(replica).update(changed)
        return replica

    @property
    def streams(self) -> Streams:
        """Noise of the live slots, starting at their next token."""
        index = [len(self.tokens[row]) - len(self.requests[row].prompt) for row in self.rows]
        return Streams(self.noise_seeds, to_device(index, self.device), self.seeded)

    @property
    def left(self) -> list[int]:
        """Number of tokens that each live slot may still add."""
        return [self.left_of(row) for row in self.rows]

    def left_of(self, row: int) -> int:
        return self._most(row) - len(self.tokens[row])

    @property
    def room(self) -> list[int]:
        """Maximum number of nodes that may be drafted for each live slot; the step itself adds one more token."""
        limits = (0 if row in self.undrafted else self.requests[row].max_draft for row in self.rows)
        slots = zip(self.left, limits, strict=True)
        return [left - 1 if limit is None else min(left - 1, limit) for left, limit in slots]

    def _most(self, row: int) -> int:
        return min(len(self.requests[row].prompt) + self.requests[row].max_new_tokens, self.context)

    def commit(self, draft: Draft, accepted: Accepted) -> Accepted:
        """Append accepted tokens up to an end id, a stop string, the limit or the context.  Returns what was committed:
        a slot that ended inside its block has a shorter path and -1 as its next token."""
        self.invalid += sum(accepted.invalid)
        self.reached, self.drafted = draft.reach(), list(draft.live)
        paths = list(accepted.paths)
        next_tokens = list(accepted.next_tokens)
        for b, row in enumerate(self.rows):
            block = [draft.ids[b][n] for n in paths[b]] + [next_tokens[b]]
            pushed = self.push(row, block)
            if pushed < len(block):
                paths[b], next_tokens[b] = paths[b][:pushed], -1
        return Accepted(paths, next_tokens, accepted.invalid)

    def push(self, row: int, block: list[int]) -> int:
        """Append tokens to a slot's text up to its end; returns how many were appended."""
        room, count = self.left_of(row), len(block)
        reason: FinishReason | None = None
        if count >= room:
            by_limit = len(self.requests[row].prompt) + self.requests[row].max_new_tokens <= self.context
            count, reason = room, "length" if by_limit else "context"
        end = next((i for i, token in enumerate(block[:count]) if token in self.ends), None)
        if end is not None:
            count, reason = end + 1, "stop"
        count, is_stopped = self.judge.read(row, block[:count], is_last=reason is not None)
        self.tokens[row] += block[:count]
        self.finished[row] = "stop" if is_stopped else reason
        return count
