"""What a batch of requests has become so far: committed tokens, anchors, settings, noise; and where each must end.

B live slots, in the order of `rows`.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.decoding.accept import Kept
from outrider.decoding.draft import Draft
from outrider.decoding.logprobs import TokenLogprob
from outrider.decoding.penalties import Prefix
from outrider.decoding.sampling import Sampling, Settings, Streams, salted
from outrider.decoding.text import Detokenizer, TextStream
from outrider.errors import ConfigError

FinishReason = Literal["stop", "length", "context"]


@dataclass(slots=True)
class Request:
    """One text to continue."""

    prompt: list[int]
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """The text ends before the first of these; needs `detokenizer`."""
    detokenizer: Detokenizer | None = None
    """How its tokens become text; None for a request that wants none."""
    tenant: str = ""
    """Whose text it is: what a drafter remembers across requests, where it does at all, stays within one tenant's."""
    drafter: str = ""
    """Which of several drafters it wants, where they take requests whole (see `mix`); any unless given."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a stop string that can never match."""
        if not self.stop:
            return
        if self.detokenizer is None:
            raise ConfigError(
                f"stop strings {list(self.stop)} need a tokenizer, and this target was loaded without one; load it by a "
                "name or a folder that has one, or leave them out"
            )
        for stop in self.stop:
            held = next((name for name in self.detokenizer.skipped.values() if name and name in stop), None)
            if held is not None:
                raise ConfigError(
                    f"stop string {stop!r} holds the special token {held!r}, which is left out of the text, so it can never "
                    "match; give a string of plain text (a text ends at the target's end tokens without one)"
                )


@dataclass(slots=True)
class Timing:
    """Seconds of the last step, by what they went into."""

    draft: float = 0.0
    verify: float = 0.0
    other: float = 0.0
    began: float = 0.0
    mark: float = 0.0

    def start(self) -> None:
        self.draft = self.verify = self.other = 0.0
        self.began = self.mark = time.perf_counter()

    def lap(self, part: Literal["draft", "verify", "other"]) -> None:
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + now - self.mark)
        self.mark = now


class DecodeState:
    """Slots of one batch.  A slot is admitted, advances by `commit`, is finished, and is freed for the next request."""

    def __init__(self, slots: int, context: int, ends: frozenset[int] = frozenset(), device: torch.device | str = "cpu"):
        self.context = context
        self.ends = ends
        self.device = torch.device(device)
        self.requests: dict[int, Request] = {}
        """By slot; a slot that is not there is free."""
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        """Prompt and committed tokens; the last one is the anchor."""
        self.prefilled = [0] * slots
        """Prompt tokens the target has read."""
        self.finished: list[FinishReason | None] = [None] * slots
        self.seeds = [0] * slots
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(slots)]
        """Of the committed tokens, where the request asks for them."""
        self.new_text = [""] * slots
        """Text that the last commit made certain, where the request has a detokenizer; see `text`."""
        self.shares_noise = True
        """Slots with a seed draft with the target's own noise; else a seed fixes the noise and drafts have their own."""
        self.reached: list[int] = []
        """Depth of each live slot's draft in the last step."""
        self.unlawful = 0
        """Nodes so far whose id or q was no lawful proposal."""
        self.timing = Timing()
        self.rows: list[int] = []
        """Live slots, ascending; a finished one stays until it is freed, before the next step."""
        self.settings = Settings(None, None, None)
        self.prefixes: list[tuple[int, Prefix]] = []
        """Place in the batch and text of each live slot whose logits change by what stands before; none by default."""
        self.wants_logprobs = False
        self.anchor = torch.empty(0, dtype=torch.int64, device=self.device)
        self._row_seeds = torch.empty(0, dtype=torch.int64, device=self.device)
        self._seeded: Tensor | None = None
        self._prefixes: dict[int, Prefix] = {}
        self._texts: dict[int, TextStream] = {}

    def admit(self, row: int, request: Request) -> None:
        """Put a request into a free slot."""
        assert row not in self.requests, f"slot {row} is taken"
        seed = request.sampling.seed
        self.requests[row] = request
        self.tokens[row] = list(request.prompt)
        self.prefilled[row] = 0
        self.finished[row] = None
        self.seeds[row] = secrets.randbits(63) if seed is None else seed
        self.logprobs[row], self.new_text[row] = [], ""
        if request.detokenizer is not None:
            self._texts[row] = TextStream(request.detokenizer, request.stop)
        if request.sampling.is_processed:
            self._prefixes[row] = Prefix(request.sampling, request.prompt, self.ends, self.device)
        self._select()

    def free(self, row: int) -> None:
        del self.requests[row]
        self._prefixes.pop(row, None)
        self._texts.pop(row, None)
        self._select()

    def on(self, device: torch.device) -> DecodeState:
        """This state for reading, its tensors on another device."""
        there = copy.copy(self)
        there.device, there.anchor, there._row_seeds = device, self.anchor.to(device), self._row_seeds.to(device)
        there.settings = Settings(*(None if column is None else column.to(device) for column in self.settings))
        there._seeded = None if self._seeded is None else self._seeded.to(device)
        return there

    @property
    def streams(self) -> Streams:
        """Noise of the live slots from their next token on."""
        index = [len(self.tokens[row]) - len(self.requests[row].prompt) for row in self.rows]
        return Streams(self._row_seeds, torch.tensor(index, device=self.device), self.seeded)

    def of_part(self, part: int) -> DecodeState:
        """This state for one of several drafters that share a draft, with noise of its own; slots with a seed keep theirs."""
        own = copy.copy(self)
        fresh = salted(self._row_seeds, part)
        own._row_seeds = fresh if self.seeded is None else torch.where(self.seeded, self._row_seeds, fresh)
        return own

    @property
    def seeded(self) -> Tensor | None:
        """[B] bool, slots whose text hangs on their seed alone; None where none is."""
        return self._seeded if self.shares_noise else None

    @property
    def left(self) -> list[int]:
        """Tokens each live slot may still grow by."""
        return [self._left(row) for row in self.rows]

    @property
    def room(self) -> Tensor:
        """[B] int64 on the CPU: most nodes worth drafting, since the step itself adds one token more."""
        return torch.tensor(self.left, dtype=torch.int64) - 1

    @property
    def bans(self) -> bool:
        """Some live slot makes tokens impossible by what stands before them; see `masked`."""
        return any(prefix.sampling.bans for _, prefix in self.prefixes)

    def masked(self, logits: Tensor, drafted: Sequence[Tensor] = ()) -> Tensor:
        """A drafter's logits [B, V] with -inf where no token may follow a slot's text and these drafted tokens, each [B].

        Bad words, least length and grammar, as in the target's own law: what is drawn from the result has the result as q.
        The same tensor where no slot bans anything.
        """
        if not self.bans:
            return logits
        paths = torch.stack(list(drafted), 1).tolist() if drafted else [[]] * len(self.rows)
        out = logits.clone()
        for b, prefix in self.prefixes:
            if not prefix.sampling.bans:
                continue
            possible = prefix.possible(tuple(paths[b]), logits.shape[-1])
            if possible.any():  # behind a token that can't be kept nothing may follow, and a row of -inf is no law
                out[b].masked_fill_(~possible.to(out.device), -torch.inf)
        return out

    def new_tokens(self, row: int) -> list[int]:
        return self.tokens[row][len(self.requests[row].prompt) :]

    def commit(self, draft: Draft, kept: Kept) -> Kept:
        """Append what is kept, token by token, and stop at an end id, a stop string, the limit or the context.

        Returns what was committed: a slot that ended inside its block has the shorter path and -1 for its next token.
        """
        self.unlawful += sum(kept.unlawful)
        self.reached = draft.reach()
        paths, following = list(kept.paths), list(kept.next_tokens)
        for b, row in enumerate(self.rows):
            block = [draft.ids[b][n] for n in paths[b]] + [following[b]]
            pushed = self._push(row, block)
            if pushed < len(block):
                paths[b], following[b] = paths[b][:pushed], -1
        self._anchors()
        return Kept(paths, following, kept.unlawful)

    def _push(self, row: int, block: list[int]) -> int:
        """Append tokens of `block` until the slot ends; returns how many were appended."""
        room = self._left(row)
        kept: int = len(block)
        reason: FinishReason | None = None
        if kept >= room:
            request = self.requests[row]
            by_limit = len(self.tokens[row]) - len(request.prompt) + room >= request.max_new_tokens
            kept, reason = room, "length" if by_limit else "context"
        for i, token in enumerate(block[:kept]):
            if token in self.ends:
                kept, reason = i + 1, "stop"
                break
        if row in self._texts:
            self.new_text[row], kept, is_stopped = self._texts[row].push(block[:kept], is_last=reason is not None)
            reason = "stop" if is_stopped else reason
        self.tokens[row] += block[:kept]
        if row in self._prefixes:
            self._prefixes[row].push(block[:kept])
        self.finished[row] = reason
        return kept

    def _left(self, row: int) -> int:
        """Tokens the slot may still grow by."""
        request = self.requests[row]
        grown = len(self.tokens[row]) - len(request.prompt)
        return min(request.max_new_tokens - grown, self.context - len(self.tokens[row]))

    def _select(self) -> None:
        """Find the live slots again, after one came or went."""
        self.rows = sorted(self.requests)
        samplings = [self.requests[row].sampling for row in self.rows]
        self.settings = Settings.of(samplings, self.device)
        self.prefixes = [(b, self._prefixes[row]) for b, row in enumerate(self.rows) if row in self._prefixes]
        self.wants_logprobs = any(sampling.logprobs is not None for sampling in samplings)
        seeded = [sampling.seed is not None for sampling in samplings]
        self._seeded = torch.tensor(seeded, device=self.device) if any(seeded) else None
        self._row_seeds = torch.tensor([self.seeds[row] for row in self.rows], dtype=torch.int64, device=self.device)
        self._anchors()

    def _anchors(self) -> None:
        self.anchor = torch.tensor([self.tokens[row][-1] for row in self.rows], dtype=torch.int64, device=self.device)
