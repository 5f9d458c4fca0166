"""Random drafts, distributions and noise for tests of rules, and what every rule's answer must look like."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.noise import Streams
from outrider.decoding.protocols import Drafter, Target
from outrider.decoding.scheduler import read
from outrider.decoding.state import DecodeState

V = 4


@st.composite
def drafts(draw, with_q: bool = False):
    """Trees with ids outside the vocabulary and padding, and a seed for what belongs to them."""
    slots, nodes = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    parents = [[draw(st.integers(-1, n - 1)) for n in range(nodes)] for _ in range(slots)]
    tokens = [[draw(st.integers(-1, V)) for _ in range(nodes)] for _ in range(slots)]
    sizes = [draw(st.integers(0, nodes)) for _ in range(slots)]
    seed = draw(st.integers(0, 2**20))
    q = None
    if with_q and draw(st.booleans()):
        q = torch.rand(slots, nodes, V, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
        q = q / q.sum(-1, keepdim=True)
    as_tensor = lambda rows: torch.tensor(rows, dtype=torch.int64).view(slots, nodes)
    return Draft(as_tensor(tokens), as_tensor(parents), torch.tensor(sizes), q), seed


def streams_of(slots: int, seed: int, seeded: list[bool] | None = None) -> Streams:
    is_seeded = None if seeded is None else torch.tensor(seeded)
    return Streams(torch.arange(slots) + seed, torch.zeros(slots, dtype=torch.int64), is_seeded)


def distribution_of(draft: Draft, seed: int) -> torch.Tensor:
    """p [B, N+1, V]."""
    slots, nodes = draft.tokens.shape
    p = torch.randn(slots, nodes + 1, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * p).softmax(-1)


def slot_of(accepted: Accepted, b: int) -> Accepted:
    """What is kept in one slot."""
    return Accepted(*(part[b : b + 1] for part in accepted))


def well_formed(draft: Draft, accepted: Accepted) -> None:
    """Paths go down from the anchor over live nodes of the vocabulary; all that a reader derives agrees with them."""
    assert len(accepted.paths) == len(accepted.next_tokens) == len(accepted.invalid) == len(draft.sizes)
    assert accepted.counts == [len(path) for path in accepted.paths]
    for b, size in enumerate(draft.sizes.tolist()):
        at = -1
        for n in accepted.paths[b]:
            assert at < n < size
            assert int(draft.parents[b, n]) == at
            assert 0 <= int(draft.tokens[b, n]) < V
            at = n
        assert accepted.rows(b) == [0, *(n + 1 for n in accepted.paths[b])]
        assert 0 <= accepted.next_tokens[b] < V
        assert 0 <= accepted.invalid[b] <= size


def numbers(draft: Draft) -> torch.Tensor:
    """`origin` [B, N], spelt out where it is None."""
    every = torch.arange(draft.tokens.shape[1], device=draft.tokens.device)
    return every.expand(draft.tokens.shape) if draft.origin is None else draft.origin


def prefill(target: Target, drafter: Drafter, cache: Any, memory: Any, state: DecodeState, rows: Sequence[int]) -> None:
    """Read these slots' prompts, each in one pass, up to the anchor."""
    if left := {row: count for row in rows if (count := state.unread(row))}:
        read(target, drafter, cache, memory, state, left)
