"""Drafters that share one draft: each proposes nodes and observes what happened to its own.

A part observes a step as if it were alone: its own draft, the accepted nodes of it, and the next token as the
correction.  Later tokens, drafted by others, are observed as a second step: a chain that was fully accepted.  So its
caches may follow its own nodes, and it does not miss any token.  A part with `watches = True` observes the step as
it was, with the combined draft.

Parts must sample independently of each other; otherwise the q of a later sibling would be wrong once an earlier one was
rejected.  So every part, even a nested one, has its own noise.  In slots with a seed all parts sample with the target's
noise, and their nodes count as deterministic in the acceptance rule.

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
    """Every part's own memory, and its draft of the current step."""

    parts: list[Any]
    drafts: dict[int, Draft] = field(default_factory=dict)
    node_maps: dict[int, NodeMaps] = field(default_factory=dict)
    """By part and slot: the number of each of its nodes in the union of all."""


class Ensemble(Drafter):
    """Several drafters as one; a subclass decides how to combine their drafts, see `policies.merge`."""

    def __init__(self, drafters: Sequence[Drafter], limit: int):
        """Raises ConfigError for a drafter with a probe, which needs a pass over its own draft alone."""
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
        for drafter, part_memory in zip(self.drafters, memory.parts, strict=True):
            drafter.admit(part_memory, rows, state, self._tapped(drafter, scores), lengths)

    def ask(
        self, memory: EnsembleMemory, part: int, state: DecodeState, budget: Tensor, stop: Stop | None = None
    ) -> Draft:
        """One part's draft, at most budget[b] nodes and ended by `stop`.  budget [B] int64 on the CPU."""
        draft = Draft.empty(len(state.rows), state.device)
        if max(budget.tolist()):
            draft = self.drafters[part].propose(memory.parts[part], _for_part(state, part, stop), budget)
            draft = Draft.checked(draft, len(state.rows)).first(budget)
            # as in the loop, no decision may use a confidence that depends on the token; node numbers are this draft's
            confidence = draft.confidence if self.drafters[part].confidence_before_draw else None
            draft = replace(draft, confidence=confidence, origin=None)
        memory.drafts[part] = draft
        return draft

    def join(
        self, memory: EnsembleMemory, part: int, union: Draft, part_draft: Draft, most: Tensor, seeded: Tensor | None
    ) -> Draft:
        """The union of all drafts so far and of what a part proposed, possibly cut by the caller; see `merged`."""
        union, node_maps = merged(union, deterministic(part_draft, seeded), most)
        if part_draft.origin is not None:
            number = part_draft.origin.tolist()
            node_maps = [{number[b][n]: at for n, at in node_map.items()} for b, node_map in enumerate(node_maps)]
        memory.node_maps[part] = node_maps
        return union

    def tell(
        self, memory: EnsembleMemory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> list[tuple[list[dict[int, int]], list[list[int]]]]:
        """Have every part observe the step.  Returns for each part, by slot: a map from its verified nodes to those of
        `draft`, and its accepted nodes from the anchor down.
        """
        outcomes = []
        verified = _verified(draft)
        for part, drafter in enumerate(self.drafters):
            part_draft = memory.drafts.pop(part, None) or Draft.empty(len(state.rows), state.device)
            joined = memory.node_maps.pop(part, None) or [{} for _ in state.rows]
            node_maps = [
                {n: index[number] for n, number in node_map.items() if number in index}
                for node_map, index in zip(joined, verified, strict=True)
            ]
            paths = [_followed(part_draft, node_maps[b], accepted.paths[b], b) for b in range(len(state.rows))]
            outcomes.append((node_maps, paths))
            part_scores = self._tapped(drafter, scores)
            if drafter.watches:
                drafter.observe(memory.parts[part], state, draft, accepted, part_scores)
            else:
                _tell(drafter, memory.parts[part], state, draft, accepted, part_scores, part_draft, node_maps, paths)
        return outcomes

    def free(self, memory: EnsembleMemory, rows: Sequence[int]) -> None:
        for drafter, part_memory in zip(self.drafters, memory.parts, strict=True):
            drafter.free(part_memory, rows)

    def _tapped(self, drafter: Drafter, scores: Scores) -> Scores:
        """The scores with the taps of this part only."""
        if drafter.taps == self.taps or scores.taps is None:
            return scores
        taps = scores.taps[:, :, [self.taps.index(layer) for layer in drafter.taps]] if drafter.taps else None
        return scores._replace(taps=taps)


def _for_part(state: DecodeState, part: int, stop: Stop | None) -> DecodeState:
    """The state for one part, with its own stop and noise; slots with a seed keep theirs."""
    if state.judge.temperature is None:  # nothing is drawn
        return state if stop is None else state.replaced(stop=stop)
    own_seeds = Streams(state.noise_seeds, torch.zeros_like(state.noise_seeds)).key(part, Purpose.PART)
    seeds = own_seeds if state.seeded is None else torch.where(state.seeded, state.noise_seeds, own_seeds)
    return state.replaced(noise_seeds=seeds, stop=stop)


# ── what a part observes ──────────────────────────────────────────────────────────────────────────────────────────────


def _verified(draft: Draft) -> list[dict[int, int]]:
    """By slot: a node's number in the union before any cut → its number in the verified draft."""
    numbers = [range(size) for size in draft.live] if draft.origin is None else draft.origin.tolist()
    slots = zip(numbers, draft.live, strict=True)
    return [{number: n for n, number in enumerate(slot_numbers[:size])} for slot_numbers, size in slots]


def _followed(part_draft: Draft, node_maps: dict[int, int], path: Sequence[int], b: int) -> list[int]:
    """The part's own nodes along the accepted path, up to the first one it lacks."""
    nodes = [-1]
    for target_node in path:
        below = (n for n, index in node_maps.items() if index == target_node and part_draft.tree[b][n] == nodes[-1])
        node = next(below, None)
        if node is None:
            break
        nodes.append(node)
    return nodes[1:]


def _tell(
    drafter: Drafter, memory: Any, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores,
    part_draft: Draft, node_maps: list[dict[int, int]], paths: list[list[int]],
) -> None:  # fmt: skip
    """A part observes its own step, and a second one in the slots where other parts' nodes follow."""
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
    if [len(node_map) for node_map in node_maps] != part_draft.live:  # drop nodes that were not verified
        verified = [list(node_map) for node_map in node_maps]
        part_draft = part_draft.only(verified)
        paths = [[nodes.index(n) for n in path] for nodes, path in zip(verified, paths, strict=True)]
    part_scores = _scored(scores, [[0, *(index + 1 for index in node_map.values())] for node_map in node_maps])
    drafter.observe(
        memory, state.replaced(tokens=tokens), part_draft, Accepted(paths, following, accepted.invalid), part_scores
    )
    if rest:
        slots = list(rest)
        ids = [[draft.ids[b][n] for n in rest[b][1:]] for b in slots]
        ended = Accepted(
            [list(range(len(tokens))) for tokens in ids], [accepted.next_tokens[b] for b in slots], [0] * len(slots)
        )
        part_scores = _scored(scores, [[n + 1 for n in rest[b]] for b in slots], slots)
        chain = Draft.chain(padded(ids, 0, draft.tokens.device), torch.tensor([len(tokens) for tokens in ids]))
        drafter.observe(memory, state.replaced(rows=[state.rows[b] for b in slots]), chain, ended, part_scores)


def _scored(scores: Scores, rows: list[list[int]], slots: list[int] | None = None) -> Scores:
    """These rows of these slots, by default of all slots; leading slots are not copied."""
    width = max(map(len, rows))
    if slots is None and all(row == list(range(len(row))) for row in rows):
        return scores.first(width)
    device = scores.logits.device
    columns, slot_index = padded(rows, 0, device), torch.tensor(slots or range(len(rows)), device=device)[:, None]
    return Scores(*(None if x is None else x[slot_index, columns] for x in scores[:4]))  # type: ignore[arg-type]
