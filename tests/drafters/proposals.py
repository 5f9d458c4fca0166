"""What a drafter proposes while texts are decoded, and whether the texts stay the target's own."""

from typing import Any, NamedTuple

import torch

from outrider.decoding.draft import Draft
from outrider.generation import Generation, generate


class Proposal(NamedTuple):
    texts: list[tuple[int, ...]]
    """What was committed before, of every slot that is drafted for."""
    budget: list[int]
    draft: Draft

    @property
    def tokens(self) -> list[list[int]]:
        return [ids[:size] for ids, size in zip(self.draft.ids, self.draft.live, strict=True)]


def watch(drafter: Any) -> list[Proposal]:
    """All that the drafter proposes from now on."""
    seen, propose = [], drafter.propose

    def watched(memory, state, budget):
        texts = [tuple(state.tokens[row]) for row in state.rows]
        seen.append(Proposal(texts, budget.tolist(), propose(memory, state, budget)))
        return seen[-1].draft

    drafter.propose = watched
    return seen


def by_text(seen: list[Proposal]) -> dict[tuple[int, ...], list[int]]:
    """What was drafted behind each text."""
    return {text: tokens for one in seen for text, tokens in zip(one.texts, one.tokens, strict=True)}


def eldest_paths(seen: list[Proposal]) -> dict[tuple[int, ...], list[int]]:
    """The likeliest path behind each text: the first child of every node."""
    return {
        text: [one.draft.ids[b][n] for n in one.draft.first_children(b)]
        for one in seen
        for b, text in enumerate(one.texts)
    }


def path_to(draft: Draft, slot: int, node: int) -> list[int]:
    """The tokens from the anchor down to a node."""
    path = []
    while node >= 0:
        path.insert(0, draft.ids[slot][node])
        node = draft.tree[slot][node]
    return path


def exact(target: Any, prompts: Any, drafter: Any, policy: Any = None, **settings: Any) -> list[Generation]:
    """Generations with this drafter; their texts are those without one."""
    found = generate(target, prompts, drafter, policy=policy, **settings)
    assert [one.tokens for one in found] == [one.tokens for one in generate(target, prompts, **settings)]
    return found


def misreadings(drafter: Any) -> list[float]:
    """How far each later reading of a small model is from that of its whole text, read anew.

    Catches a cache that is not what the text says, and one that holds more of it or less.
    """
    read, distances = drafter.read, []

    def watched(memory, rows, texts):
        logits = read(memory, rows, texts)
        for b, text in enumerate(texts):
            assert memory.cache.lengths[rows[b]] == len(text)
            hidden, _ = drafter.model.read(torch.tensor([text]))
            distances.append(float((logits[b] - drafter.model.head(hidden[0, -1])).abs().max()))
        return logits

    drafter.read = watched
    return distances
