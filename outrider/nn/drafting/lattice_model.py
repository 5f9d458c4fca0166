"""Draft models whose rows' candidates are scored in pairs, and how they are served: a walk, or with `nodes` a tree.

A tree has the likeliest paths at temperature 0, otherwise siblings sampled without replacement.  How pairs are scored
is up to the method: a `LatticeModel` returns the lattice of its states.

B live slots, K rows of a block, k candidates of a row, N nodes, H hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import DecodeState
from outrider.fast.static.step import Proposed, StaticRule, StaticSlots, sizes_of
from outrider.kernels import prepacked
from outrider.nn.drafting import lattice as lattices
from outrider.nn.drafting import serving, trees
from outrider.nn.drafting.block_drafter import BackboneDrafter, BlockDrafter, Inputs, StaticBackbone, is_greedy
from outrider.nn.drafting.block_model import BlockModel, Decoded, Pick
from outrider.nn.drafting.block_rows import BlockRows
from outrider.nn.drafting.lattice import Candidates, Lattice
from outrider.nn.drafting.serving import verifies_trees
from outrider.nn.memory import FeatureMemory
from outrider.targets.cache.slots import SlotCache


class LatticeModel(BlockModel):
    """A backbone and the scores of its rows' candidates.  Its config also has `candidates` and `nodes`."""

    has_confidence = True

    def candidates(self, logits: Tensor) -> tuple[Candidates, Tensor]:
        """The candidates of logits [..., D] with the target's ids, and their columns [..., k]."""
        best = Candidates.of(logits, self.config.candidates)
        return best._replace(ids=self.named(best.ids)), best.ids

    @abstractmethod
    def scored(self, states: Tensor, anchors: Tensor, best: Candidates, before: Tensor | None) -> Lattice:
        """The lattice of blocks of states [B, K, H] after anchors [B], with candidates [B, K, k]; before as in
        `before`."""

    @abstractmethod
    def scored_after(self, states: Tensor, previous: Tensor, best: Candidates, before: Tensor | None) -> Tensor:
        """Scores [B, K, k] of candidates, each row's given the text's own previous token, `previous` [B, K]."""

    def before(self, taps: Tensor, taps_at: Tensor, anchors_at: Tensor) -> Tensor | None:
        """What else the scores depend on: [B, H] from the token before the anchor; arguments as in `Backbone`."""
        return None

    def lattice(self, states: Tensor, anchors: Tensor, before: Tensor | None = None) -> Lattice:
        """The lattice of blocks of states [B, K, H] after anchors [B]."""
        return self.scored(states, anchors, self.candidates(self.logits(states))[0], before)

    def forward(
        self, taps: Tensor, taps_at: Tensor, anchors: Tensor, anchors_at: Tensor, mask: Tensor | None, cache: SlotCache,
        pick: Pick | None,
    ) -> Decoded:  # fmt: skip
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, cache)[:, 0]
        return self.decode(states, anchors, pick, self.before(taps, taps_at, anchors_at))

    def decode(self, states: Tensor, anchors: Tensor, pick: Pick | None, before: Tensor | None = None) -> Decoded:
        """As in `BlockModel`, but the returned logits are the rows' own, without the pairs."""
        logits = self.logits(states)
        best, columns = self.candidates(logits)
        lattice, tokens = self.scored(states, anchors, best, before), list[Tensor]()

        def choose(scores: Tensor, row: int) -> Tensor:
            if pick is None:
                chosen = lattices.likeliest(scores, row)
                tokens.append(best.ids[:, row].gather(1, chosen[:, None])[:, 0])
                return chosen
            tokens.append(pick(lattices.spread(scores, columns[:, row], logits.shape[-1]), row))
            # there is no match only if every candidate is banned; the draft then ends, or is deterministic
            return (best.ids[:, row] == tokens[-1][:, None]).long().argmax(-1)

        _, scores = lattices.walk(lattice, choose)
        return torch.stack(tokens, 1), logits, lattices.confidence(scores, lattice.rest)

    # ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def served(self, rows: BlockRows, part: slice, draft: Tensor) -> Tensor:
        best, columns = self.candidates(self.own_columns(draft))
        states, previous = rows.whole(rows.states[part], part)
        blocks = Candidates(*(each.unflatten(0, (-1, rows.slots)) for each in best))
        scores = self.scored_after(states, previous, blocks, rows.before_of(part)).flatten(0, 1)
        return lattices.spread(scores, columns, draft.shape[-1])

    def own_columns(self, draft: Tensor) -> Tensor:
        """Logits [m, D] of the tokens that it drafts, without the one that stands for all others."""
        return draft if self.reduced is None else draft[:, : len(self.reduced.ids)]

    def figures(self, rows: BlockRows, part: slice, draft: Tensor, target: Tensor) -> Mapping[str, Tensor]:
        """`recall`: share of rows with the target's choice among the candidates; `selector_accuracy`: share where it is
        the best after the text's tokens; expected tokens per step of the walk, of the rows' own choices (`unary`) and
        of the best possible path (`oracle`).

        Rows count up to the first whose token is not the target's choice, since verification stops there.
        """
        choice = target.argmax(-1).view(-1, rows.slots)
        states, previous = rows.whole(rows.states[part], part)
        best, columns = self.candidates(self.own_columns(draft).unflatten(0, (-1, rows.slots)))
        before = rows.before_of(part)
        chosen, _ = lattices.walk(self.scored(states, previous[:, 0], best, before), lattices.likeliest)
        scores = self.scored_after(states, previous, best, before)
        is_choice = lambda index: columns.gather(2, index[..., None])[..., 0] == choice
        goes_on = (rows.labels[part].view_as(choice) == choice).cumprod(-1)
        live = (rows.weight[part].view_as(choice) > 0) & pad(goes_on[:, :-1], (1, 0), value=1).bool()
        has_choice = (columns == choice[..., None]).any(-1)
        tokens = {"walk": is_choice(chosen), "unary": columns[..., 0] == choice, "oracle": has_choice}
        begun = live[:, 0]
        steps = {
            f"tokens_{name}": 1 + (is_right & live).long().cumprod(-1).sum(-1)[begun]
            for name, is_right in tokens.items()
        }
        return {"recall": has_choice[live], "selector_accuracy": is_choice(scores.argmax(-1))[live], **steps}

    def drafter(self) -> Drafter:
        config = self.config
        if config.nodes and verifies_trees(self.target, config.kind, f"a chain of {config.block}, as with nodes 0"):
            return LatticeDrafter(self)
        return BlockDrafter(self)


class LatticeDrafter(BackboneDrafter):
    """Drafts a tree of the config's `nodes` per slot."""

    def __init__(self, model: Any):
        """model: a `LatticeModel`."""
        config = model.config
        self.nodes = lattices.number_of_nodes(config.nodes, config.block, config.candidates)
        self.parents = trees.shape(config.candidates, config.block, self.nodes)
        """The shape of a drawn tree."""
        super().__init__(model, self.nodes)

    def lattice(self, inputs: Inputs) -> Lattice:
        """The lattice of one pass."""
        taps, taps_at, anchors, anchors_at, mask, cache = inputs
        states = self.backbone(taps, taps_at, anchors[:, None], anchors_at[:, None], mask, cache)[:, 0]
        lattice: Lattice = self.model.lattice(states, anchors, self.model.before(taps, taps_at, anchors_at))
        return lattice

    def spread(self, scores: Tensor, ids: Tensor) -> Tensor:
        """Scores of these tokens as logits [..., V] over the target's vocabulary."""
        return lattices.spread(scores, ids, self.model.target.spec.vocabulary)

    @torch.inference_mode()
    def propose(self, memory: FeatureMemory, state: DecodeState, budget: Tensor) -> Draft:
        rows, cache, most = state.rows, memory.kv_cache, int(budget.max())
        self.catch_up(memory, rows, state)
        taps, counts = memory.features.take(rows)
        cache.open(rows, taps.shape[1] + self.backbone.width)
        with prepacked.enabled():
            lattice = self.lattice(self.inputs(taps, counts, state, cache))
        cache.append(counts)
        if not most:
            return Draft.empty(len(rows), state.device)
        if is_greedy(state):
            tokens, parents = lattices.best_first(lattice, min(most, self.nodes))
            return Draft(tokens, parents, budget.clamp(max=tokens.shape[1]))
        first, expand = lattices.expand(lattice, self.spread)
        config = self.model.config
        shape: Any = {"width": config.candidates, "depth": config.block, "parents": self.parents}
        return serving.possible(serving.tree(first, expand, budget, state, **shape), state)

    def static(self, memory: FeatureMemory, is_greedy: bool) -> StaticLattice:
        return StaticLattice(self, memory, is_greedy)


class StaticLattice(StaticBackbone):
    """A `LatticeDrafter` in a static step."""

    def __init__(self, drafter: LatticeDrafter, memory: FeatureMemory, is_greedy: bool):
        super().__init__(drafter, memory)
        self.trees, self.varies, self.has_q = drafter, is_greedy, not is_greedy
        self.depth = min(drafter.block, drafter.nodes)
        if not is_greedy:
            self.parents = drafter.parents

    @property
    def nodes(self) -> int:
        return self.trees.nodes if self.varies else len(self.parents)

    def propose(self, slots: StaticSlots, rule: StaticRule) -> Proposed:
        lattice, sizes = self.trees.lattice(self.inputs(slots)), sizes_of(slots, self.nodes)
        self.read_all()
        if self.varies:
            tokens, parents = lattices.best_first(lattice, self.nodes)
            return Proposed(tokens, sizes, parents=parents)
        first, expand = lattices.expand(lattice, self.trees.spread)
        distribution = functools.partial(rule.distribution, slots=slots)
        tokens, q = trees.drawn(first, expand, self.parents, distribution, slots.streams)
        return Proposed(tokens, sizes, q)
