"""Requests over slots: a few slots serve any number of requests; one that ends gives its slot to the next."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from outrider.decoding.draft import padded
from outrider.decoding.loop import step
from outrider.decoding.protocols import Drafter, Policy, Target
from outrider.decoding.state import DecodeState, FinishReason, Request, Scores

PREFILL_CHUNK = 512  # prompt tokens read in one pass


class Progress(NamedTuple):
    """One slot's part of one step: its request's number, the slot, new tokens, how many of them were drafted (the first
    ones), and the draft's depth."""

    request: int
    row: int
    tokens: list[int]
    accepted: int
    reached: int
    finish_reason: FinishReason | None


def draft_columns(drafter: Drafter) -> int:
    """Columns of a slot's cache besides its text's: for the longest draft, its anchor, and a probe's rows."""
    return max(drafter.limit, 1) + 1 + drafter.probe_rows


def advance(
    target: Target, requests: Sequence[Request], drafter: Drafter, policy: Policy, state: DecodeState
) -> Iterator[Progress]:
    """Serve requests over the slots of `state`, one step at a time; `state` can be read between steps."""
    slots = len(state.tokens)
    queue = deque((i, request) for i, request in enumerate(requests) if request.max_new_tokens > 0)
    if not queue:
        return
    longest = min(max(len(request.prompt) + request.max_new_tokens for _, request in queue), state.context)
    cache = target.allocate(slots, longest + draft_columns(drafter))
    drafter.refresh()
    memory: Any = drafter.allocate(cache)
    state.judge.allocate(target, cache)
    serving: dict[int, int] = {}
    while queue or serving:
        free = [row for row in range(slots) if row not in serving][: len(queue)]
        for row in free:
            serving[row], request = queue.popleft()
            state.admit(row, request)
        prefill(target, drafter, cache, memory, state, free)
        rows, before = state.rows, [len(state.tokens[row]) for row in state.rows]
        accepted = step(target, drafter, policy, cache, memory, state)
        for b, row in enumerate(rows):
            tokens = state.tokens[row][before[b] :]
            yield Progress(serving[row], row, tokens, len(accepted.paths[b]), state.reached[b], state.finished[row])
        over = [row for row in rows if state.finished[row]]
        if over:
            drafter.free(memory, over)
            cache.free(over)
            for row in over:
                state.free(row)
                del serving[row]


def prefill(target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, rows: Sequence[int]) -> None:
    """Read these slots' prompts up to the last token, which is the anchor, in chunks; the drafter reads each chunk."""
    while left := {row: count for row in rows if (count := state.unread(row))}:
        read(target, drafter, cache, memory, state, {row: min(count, PREFILL_CHUNK) for row, count in left.items()})


def read(
    target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, counts: Mapping[int, int]
) -> Scores:
    """One pass over the next counts[row] prompt tokens of each of these slots."""
    rows, lengths = list(counts), list(counts.values())
    starts = [state.prefilled[row] for row in rows]
    pieces = [state.tokens[row][at : at + length] for row, at, length in zip(rows, starts, lengths, strict=True)]
    scores = target.prefill(cache, rows, padded(pieces, 0, state.device), lengths, drafter.taps)
    for row, length in counts.items():
        state.prefilled[row] += length
    began = perf_counter()
    drafter.admit(memory, rows, state, scores, lengths)
    if state.is_drafting:
        state.read_s, state.read_tokens = state.read_s + perf_counter() - began, state.read_tokens + sum(lengths)
    return scores
