"""The state of a batch of requests: their tokens, where each must end, and the judge of drafts.

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
from outrider.decoding.draft import Draft, sent
from outrider.decoding.noise import Purpose, Streams

FinishReason = Literal["stop", "length", "context"]


@dataclass(slots=True)
class Request:
    """One text to continue."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Any
    """`sampling.Sampling`: temperature and seed, and what more the judge knows."""
    stop: tuple[str, ...] = ()
    """Stop strings: the text ends before the first of these; needs `detokenizer`."""
    detokenizer: Any = None
    """How its tokens become text (`sampling.text.Detokenizer`); None for a request without text."""
    continues: bool = False
    """Whether its text goes on from the prompt's, so that a space between both belongs to it; not so for an answer."""
    tenant: str = ""
    """Owner of the text: what a drafter stores across requests stays within one tenant."""
    drafter: str = ""
    """Name of the member it wants, where a `mix` gives requests to one member; any unless given."""
    max_draft: int | None = None
    """Most nodes to draft for it in one step; 0 decodes plainly, None leaves that to the policy."""
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
    """[B, N+1], the likeliest ids, where the pass computed them; -1 where the largest logit is not finite."""
    probe: Tensor | None = None
    """[B, P, H], hidden states of the probe's rows after the final norm, where there was one."""

    def first(self, rows: int) -> Scores:
        """Without the padding after this many rows."""
        logits, hidden, taps, choice = (None if x is None else x[:, :rows] for x in self[:4])
        return Scores(logits, hidden, taps, choice, self.probe)  # type: ignore[arg-type]


def likeliest(logits: Tensor) -> Tensor:
    """The choice of `Scores` for logits [..., V]."""
    best, choice = logits.max(-1)
    return torch.where(best.isfinite(), choice, -1)


class Stop(Protocol):
    """Ends slots' drafts while they are drafted, in chains that are drawn token by token."""

    @property
    def sizes(self) -> Tensor:
        """[B] int64 on the CPU, tokens that each slot has drafted so far."""

    def draws(self, sure: Tensor) -> bool:
        """Asked at each depth, before its tokens are drawn: add 1 to `sizes` where a slot drafts one, and return
        whether any does.  sure [B], probabilities of the likeliest ones."""

    def reads(self) -> bool:
        """Whether any slot might draft another token, so that the pass which gives its probability is worth it."""


class Judge:
    """Decides what is accepted, from the target's scores.  This one knows temperature alone; `sampling.judge` has the
    rest."""

    bans = False
    """Some live slot makes tokens impossible because of the tokens before them."""
    temperature: Tensor | None = None
    """[B], 0 where a slot is greedy; None where every slot is."""

    def allocate(self, target: Any, cache: Any) -> None:
        """Called once a batch, before its first request, for a judge that has passes of its own.  target, cache: the
        batch's; what the judge reads needs a cache of its own, of as many slots."""

    def admit(self, row: int, request: Request, ends: frozenset[int], device: torch.device) -> None: ...
    def free(self, row: int) -> None: ...

    def select(self, requests: dict[int, Request], rows: list[int], device: torch.device) -> None:
        """These slots are live from now on, in this order."""
        temperatures = [float(requests[row].sampling.temperature) for row in rows]
        self.temperature = torch.tensor(temperatures, device=device) if any(temperatures) else None

    def distribution(self, logits: Tensor) -> Tensor:
        """Distribution of each slot's next token, from the target's logits or a drafter's.  [B, ..., V], the same
        shape."""
        greedy = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self.temperature is None:
            return greedy
        temperature = self.temperature.to(logits).view(-1, *[1] * (logits.dim() - 1))
        return torch.where(temperature == 0, greedy, (logits / temperature.where(temperature > 0, 1.0)).softmax(-1))

    def drawn(self, logits: Tensor, streams: Streams, depth: int) -> tuple[Tensor, Tensor]:
        """The distribution q [B, V] of a drafter's logits [B, V], and one token a slot drawn from it, [B]."""
        q = self.distribution(logits)
        return q, streams.draw(q, depth, Purpose.DRAFT)

    def masked(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        """A drafter's logits [B, V] with -inf where no token may follow a slot's text and these drafted tokens, each
        [B]."""
        return logits

    def prune(self, draft: Draft, seeded: Tensor | None, vocabulary: int) -> Draft:
        """The draft without nodes that can't be accepted.  seeded [B]: slots whose every node is deterministic."""
        return draft

    def __call__(self, draft: Draft, scores: Scores, state: DecodeState) -> Accepted:
        return accept(draft, self.distribution(scores.logits), state.streams)

    def read(self, row: int, tokens: list[int], is_last: bool) -> tuple[int, bool]:
        """Of these tokens, which are about to be committed: how many belong to the text, and whether it stops there."""
        return len(tokens), False

    def observe(self, accepted: Accepted, texts: list[list[int]], scores: Scores) -> Mapping[int, Exception]:
        """Called after the commit; texts: all tokens of each live slot.  Returns why, by slot, a committed token was
        impossible."""
        return {}

    def told(self, row: int, count: int, takes_text: bool) -> tuple[str, tuple[Any, ...]]:
        """What became final of a slot's text since this was last asked, if it is to be taken, and the log probabilities
        of its last `count` tokens."""
        return "", ()

    def on(self, device: torch.device) -> Judge:  # for a drafter on another device
        return self


@dataclass(slots=True)
class Timing:
    """Seconds of the last step, by part."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    def lap(self, part: Literal["draft", "verify", "other"]) -> None:
        since = time.perf_counter() - self.began - self.draft - self.verify - self.other
        setattr(self, part, getattr(self, part) + since)


class DecodeState:
    """Slots of one batch.  A slot is admitted, advances by `commit`, is finished, and is freed for the next request.

    Drafters and policies read these, and change none:
    `rows` list[int], the live slots; a finished one stays until it is freed, before the next step; one whose prompt is
    still being read is not live
    `tokens[row]` list[int], prompt and committed tokens, the last one the anchor; between admit and free it only grows
    `requests[row]` the slot's `Request`, absent where the slot is free; `prefilled[row]` prompt tokens the target has
    read `judge` what requests allow; `device` the target's; `noise_seeds` [B] int64; `seeded` [B] bool, or None, of
    shared noise; `stop` what may end the drafts of this step early, or None

    shared_noise: a slot with a seed drafts with the target's noise and emits the target's own draws, whatever was
    drafted. Without it, a seed only fixes the noise, and drafts are judged by their q as in other slots."""

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
        self.reading: set[int] = set()  # slots whose prompt is being read, which take no part in steps
        self.reached: list[int] = []  # depth of each live slot's draft in the last step
        self.drafted: list[int] = []  # number of nodes of each
        self.undrafted: set[int] = set()  # slots that joined others in a runner which has no draft of them yet
        self.runner = "plain"  # which takes this step, or would take one with drafts
        self.is_drafting = True  # the policy wanted drafts in the last step with room for any, or there was none
        self.read_s, self.read_tokens = 0.0, 0  # prompts that the drafter was given meanwhile: its seconds, and tokens
        self.invalid = 0  # nodes so far whose id or q was not valid
        self.timing = Timing()
        self.stop: Stop | None = None
        self.rows: list[int] = []
        self._select()

    def admit(self, row: int, request: Request, is_live: bool = True) -> None:
        """Put a request into a free slot; one that is not live takes part in steps after `start`."""
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
        """The prompts of these slots were read: they take part in steps from now on."""
        self.reading.difference_update(rows)
        self._select()

    def unread(self, row: int) -> int:
        """Tokens of a slot's prompt that the target has not read; the last one is the anchor, which a step reads."""
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
        # the last take the places of those that are gone, and new ones come last: a cache moves few slots together
        last = iter([row for row in self.rows[stay:] if row in live])
        ordered = [row if row in live else next(last) for row in self.rows[:stay]]
        self.rows = ordered + sorted(live.difference(ordered))
        self.judge.select(self.requests, self.rows, self.device)
        seeded = [self.shared_noise and self.requests[row].sampling.seed is not None for row in self.rows]
        self.seeded = torch.tensor(seeded, device=self.device) if any(seeded) else None
        self.noise_seeds = sent([self.seeds[row] for row in self.rows], self.device)

    @property
    def anchor(self) -> Tensor:
        """[B] the last committed token of every live slot, not yet in the target's cache."""
        return sent([self.tokens[row][-1] for row in self.rows], self.device)

    def replaced(self, **changed: Any) -> DecodeState:
        """A copy of this state for reading, with other values of some attributes."""
        there = copy.copy(self)
        vars(there).update(changed)
        return there

    @property
    def streams(self) -> Streams:
        """Noise of the live slots, from their next token on."""
        index = [len(self.tokens[row]) - len(self.requests[row].prompt) for row in self.rows]
        return Streams(self.noise_seeds, sent(index, self.device), self.seeded)

    @property
    def left(self) -> list[int]:
        """Tokens each live slot may still grow by."""
        return [self.left_of(row) for row in self.rows]

    def left_of(self, row: int) -> int:
        return self._most(row) - len(self.tokens[row])

    @property
    def room(self) -> list[int]:
        """Most nodes that may be drafted for each live slot: the step itself adds one more token."""
        most = (0 if row in self.undrafted else self.requests[row].max_draft for row in self.rows)
        return [left - 1 if own is None else min(left - 1, own) for left, own in zip(self.left, most, strict=True)]

    def _most(self, row: int) -> int:
        return min(len(self.requests[row].prompt) + self.requests[row].max_new_tokens, self.context)

    def commit(self, draft: Draft, accepted: Accepted) -> Accepted:
        """Append accepted tokens one by one; stop at an end id, a stop string, the limit or the context.  Returns what
        was committed: a slot that ended inside its block has the shorter path and -1 for its next token."""
        self.invalid += sum(accepted.invalid)
        self.reached, self.drafted = draft.reach(), list(draft.live)
        paths, following = list(accepted.paths), list(accepted.next_tokens)
        for b, row in enumerate(self.rows):
            block = [draft.ids[b][n] for n in paths[b]] + [following[b]]
            pushed = self.push(row, block)
            if pushed < len(block):
                paths[b], following[b] = paths[b][:pushed], -1
        return Accepted(paths, following, accepted.invalid)

    def push(self, row: int, block: list[int]) -> int:
        """Append tokens to a slot's text up to its end; returns how many belong to it."""
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
