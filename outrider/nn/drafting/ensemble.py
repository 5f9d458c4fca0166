"""Drafters that share one draft: each proposes, and each observes what became of its own nodes.

A part observes a step as if it were alone: its own draft with those of its nodes that were accepted, and the next token
as the correction.  What others drafted after that it observes as a second step, a chain that was accepted whole.  So it
may hold caches by its own nodes, and misses no token.  A part with `watches = True` reads any draft and observes the
step as it was.

Parts must draw independently of each other, or a younger sibling's q is not what it was drawn from once the elder was
rejected: every part has noise of its own, nested parts too.  In slots with a seed all draw the target's noise; their
nodes are deterministic to the acceptance rule.

B live slots, N drafted nodes, T taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, padded
from outrider.decoding.noise import Purpose, Streams
from outrider.decoding.protocols import Cache, Drafter
from outrider.decoding.state import DecodeState, Scores, Stop
from outrider.errors import ConfigError
from outrider.policies.merge import NodeMaps, deterministic, merged


@dataclass(kw_only=True)
class EnsembleMemory:
    """Every part's own memory, and what it proposed for the step that is open."""

    parts: list[Any]
    drafts: dict[int, Draft] = field(default_factory=dict)
    node_maps: dict[int, NodeMaps] = field(default_factory=dict)
    """By part: the index of each of its nodes in the union of all."""


class Ensemble(Drafter):
    """Several drafters as one; a subclass decides how their drafts are combined, see `policies.merge`."""

    def __init__(self, drafters: Sequence[Drafter], limit: int):
        """Raises ConfigError for a drafter with a probe, which belongs to a pass over its own draft alone."""
        if any(drafter.probe_rows for drafter in drafters):
            raise ConfigError(
                "this drafter adds rows to the target's pass (a probe), so it can't be a member of mix or graft; "
                "use it alone"
            )
        self.drafters, self.limit = tuple(drafters), limit
        self.taps = tuple(sorted({layer for drafter in drafters for layer in drafter.taps}))
        self.hidden = next((drafter.hidden for drafter in drafters if drafter.hidden is not None), None)
        self.limits = [drafter.limit for drafter in drafters]
        self.steps = tuple(step for drafter in drafters for step in drafter.steps)
        self.learns = any(drafter.learns for drafter in drafters)

    def refresh(self) -> None:
        for drafter in self.drafters:
            drafter.refresh()

    def allocate(self, cache: Cache) -> EnsembleMemory:
        return EnsembleMemory(parts=[drafter.allocate(cache) for drafter in self.drafters])

    def admit(
        self, memory: EnsembleMemory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        for drafter, own in zip(self.drafters, memory.parts, strict=True):
            drafter.admit(own, rows, state, self._tapped(drafter, scores), lengths)

    def ask(
        self, memory: EnsembleMemory, part: int, state: DecodeState, budget: Tensor, stop: Stop | None = None
    ) -> Draft:
        """One part's draft, at most budget[b] nodes, ended by `stop`.  budget [B] int64 on the CPU."""
        draft = Draft.empty(len(state.rows), state.device)
        if max(budget.tolist()):
            draft = self.drafters[part].propose(memory.parts[part], _for_part(state, part, stop), budget)
            draft = Draft.checked(draft, len(state.rows)).first(budget)
            # as in the loop, no decision may use a confidence that knows the token; node numbers are those of this
            # draft
            known = draft.confidence if self.drafters[part].confidence_before_draw else None
            draft = replace(draft, confidence=known, origin=None)
        memory.drafts[part] = draft
        return draft

    def join(
        self, memory: EnsembleMemory, part: int, union: Draft, own: Draft, most: Tensor, seeded: Tensor | None
    ) -> Draft:
        """The union of all drafts so far with what a part proposed, or with what its caller left of that; see
        `merged`."""
        union, node_maps = merged(union, deterministic(own, seeded), most)
        if own.origin is not None:
            number = own.origin.tolist()
            node_maps = [{number[b][n]: at for n, at in found.items()} for b, found in enumerate(node_maps)]
        memory.node_maps[part] = node_maps
        return union

    def tell(
        self, memory: EnsembleMemory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> list[tuple[list[dict[int, int]], list[list[int]]]]:
        """Have every part observe the step.  Returns for each part, by slot: its verified nodes as indices in `draft`,
        and its accepted nodes, from the anchor down.
        """
        found = []
        verified = _verified(draft)
        for part, drafter in enumerate(self.drafters):
            own = memory.drafts.pop(part, None) or Draft.empty(len(state.rows), state.device)
            joined = memory.node_maps.pop(part, None) or [{} for _ in state.rows]
            node_maps = [
                {n: at[number] for n, number in ours.items() if number in at}
                for ours, at in zip(joined, verified, strict=True)
            ]
            paths = [_followed(own, node_maps[b], accepted.paths[b], b) for b in range(len(state.rows))]
            found.append((node_maps, paths))
            own_scores = self._tapped(drafter, scores)
            if drafter.watches:
                drafter.observe(memory.parts[part], state, draft, accepted, own_scores)
            else:
                _tell(drafter, memory.parts[part], state, draft, accepted, own_scores, own, node_maps, paths)
        return found

    def free(self, memory: EnsembleMemory, rows: Sequence[int]) -> None:
        for drafter, own in zip(self.drafters, memory.parts, strict=True):
            drafter.free(own, rows)

    def _tapped(self, drafter: Drafter, scores: Scores) -> Scores:
        """With the taps of one part alone."""
        if drafter.taps == self.taps or scores.taps is None:
            return scores
        taps = scores.taps[:, :, [self.taps.index(layer) for layer in drafter.taps]] if drafter.taps else None
        return scores._replace(taps=taps)


def _for_part(state: DecodeState, part: int, stop: Stop | None) -> DecodeState:
    """The state for one part, with a stop and noise of its own; slots with a seed keep theirs."""
    if state.judge.temperature is None:  # nothing is drawn
        return state if stop is None else state.replaced(stop=stop)
    own_seeds = Streams(state.noise_seeds, torch.zeros_like(state.noise_seeds)).key(part, Purpose.PART)
    seeds = own_seeds if state.seeded is None else torch.where(state.seeded, state.noise_seeds, own_seeds)
    return state.replaced(noise_seeds=seeds, stop=stop)


# ── what a part observes ──────────────────────────────────────────────────────────────────────────────────────────────


def _verified(draft: Draft) -> list[dict[int, int]]:
    """Slot by slot: the number of a node in the union, however it was cut, to its number in what was verified."""
    numbers = [range(size) for size in draft.live] if draft.origin is None else draft.origin.tolist()
    return [{number: n for n, number in enumerate(own[:size])} for own, size in zip(numbers, draft.live, strict=True)]


def _followed(own: Draft, node_maps: dict[int, int], path: Sequence[int], b: int) -> list[int]:
    """The part's own nodes along the accepted path, as far as they go."""
    found = [-1]
    for wanted in path:
        below = (n for n, index in node_maps.items() if index == wanted and own.tree[b][n] == found[-1])
        node = next(below, None)
        if node is None:
            break
        found.append(node)
    return found[1:]


def _tell(
    drafter: Drafter, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores, own: Draft,
    node_maps: list[dict[int, int]], paths: list[list[int]],
) -> None:  # fmt: skip
    """A part's own step, and a second one in the slots where others went on."""
    tokens, following, rest = list(state.tokens), list(accepted.next_tokens), {}
    for b, row in enumerate(state.rows):
        others = accepted.paths[b][len(paths[b]) :]
        if not others:
            continue
        following[b] = draft.ids[b][others[0]]
        later = len(others) - 1 + (accepted.next_tokens[b] >= 0)
        if later:
            tokens[row] = tokens[row][:-later]
            rest[b] = others
    if [len(found) for found in node_maps] != own.live:  # without what was not verified
        verified = [list(found) for found in node_maps]
        own, paths = (
            own.only(verified),
            [[nodes.index(n) for n in path] for nodes, path in zip(verified, paths, strict=True)],
        )
    own_scores = _scored(scores, [[0, *(index + 1 for index in found.values())] for found in node_maps])
    drafter.observe(
        memory, state.replaced(tokens=tokens), own, Accepted(paths, following, accepted.invalid), own_scores
    )
    if rest:
        slots = list(rest)
        ids = [[draft.ids[b][n] for n in rest[b][1:]] for b in slots]
        ended = Accepted(
            [list(range(len(own))) for own in ids], [accepted.next_tokens[b] for b in slots], [0] * len(slots)
        )
        own_scores = _scored(scores, [[n + 1 for n in rest[b]] for b in slots], slots)
        chain = Draft.chain(padded(ids, 0, draft.tokens.device), torch.tensor([len(own) for own in ids]))
        drafter.observe(memory, state.replaced(rows=[state.rows[b] for b in slots]), chain, ended, own_scores)


def _scored(scores: Scores, rows: list[list[int]], slots: list[int] | None = None) -> Scores:
    """These rows of these slots, all slots unless given; the first ones without a copy."""
    width = max(map(len, rows))
    if slots is None and all(own == list(range(len(own))) for own in rows):
        return scores.first(width)
    device = scores.logits.device
    at, which = padded(rows, 0, device), torch.tensor(slots or range(len(rows)), device=device)[:, None]
    return Scores(*(None if x is None else x[which, at] for x in scores[:4]))  # type: ignore[arg-type]
