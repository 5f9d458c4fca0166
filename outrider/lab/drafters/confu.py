"""ConFu: extra rows in the verified pass predict where the target is heading, and guide an EAGLE-3 head.  (arXiv
2603.08899.)

Every row of the verified pass, the anchor's and each drafted node's, is followed by one contemplate token, and one soft
prompt of `rows` rows serves them all.  The prompt stands beside the anchor: it sees the text before it and itself
causally.  A contemplate token sees what its node sees, the prompt and itself.  No row of the text sees either, and
neither is cached, so the target's logits do not change.  The contemplate token's embedding is a mixture of `experts`,
weighted by a router on the highest tap of the last token before the anchor.  Its final state after the last accepted
token is the future f of the next draft: a small network of the step's state and f is added to every step's output.

Training goes through the frozen target: at sampled positions, each a sampled number of tokens after its anchor, the
rows are read after the text again, and the draft's loss reaches prompt, experts and router.  f of a position serves all
steps of the rollout from there.  The rest is EAGLE-3's (arXiv 2503.01840): three taps, one layer, its own output fed
back.

Differs from the paper, whose code is not public: the prompt sees the text, since a pass's rows attend to the whole
cache, where the paper's stands before it; f is added to a step's output, not its input, so keys of the text are the
same for every draft; and prompts have no contemplate token, so a text's first step drafts nothing.

Use it if more rows in a pass are free.  On two cores they are the main cost, and the acceptance was no higher than
EAGLE-3's.

B live slots, N drafted nodes, A rollouts of a text, P rows of the soft prompt, E experts, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.nn.blocks import Attend, FusedTaps, PairLayer, RMSNorm
from outrider.nn.draft_model import Batch
from outrider.nn.drafting.recurrent import Memory, RecurrentConfig, RecurrentDrafter, RecurrentModel
from outrider.nn.shape import resolve_taps
from outrider.targets.protocol import Target


class Config(RecurrentConfig):
    kind: Literal["confu"] = "confu"
    taps: tuple[int, ...] | None = None
    """Target layers it reads, counted from 0; by default three: low, middle and high."""
    rows: PositiveInt = 2
    """Rows of the soft prompt, which all contemplate tokens of a pass see."""
    experts: PositiveInt = 4
    """Embeddings that the contemplate token is mixed of."""


class Model(RecurrentModel, FusedTaps):
    """EAGLE-3's head, soft prompt, experts and router, and the network that adds f to a step's output."""

    def __init__(self, config: Config, target: Target):
        target.check_probe()
        super().__init__(config, target, resolve_taps(config.taps, target.spec, 3))
        hidden = target.spec.hidden
        self.layers = nn.ModuleList([PairLayer(hidden, self.shape, norm_before_residual=False, qk_norm=False)])
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        words = target.embed(torch.arange(min(256, target.spec.vocabulary), device=target.device))
        shape, scale = (config.rows + config.experts, hidden), words.float().std()
        prompt, experts = (torch.randn(shape, device=words.device) * scale).split((config.rows, config.experts))
        self.prompt, self.experts = nn.Parameter(prompt), nn.Parameter(experts)
        """[P, H] and [E, H] embeddings."""
        self.router_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.router = nn.Linear(hidden, config.experts)
        self.state_norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        self.join = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden, bias=False))
        last: Any = self.join[-1]
        nn.init.zeros_(last.weight)

    def features(self, taps: Tensor) -> Tensor:
        return self.fused(taps)

    def step(self, module: int, words: Tensor, features: Tensor, angle: Tensor, attend: Attend) -> Tensor:
        return self.layers[0](words.to(features.dtype), features, angle, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return super().logits(self.norm(hidden))

    def guide(self, batch: Batch, at: Tensor, lag: Tensor | None = None) -> Tensor:
        """f [B, A, H] of positions `at`, which are the lag [B, A]th token after their anchors; by default sampled."""
        if lag is None:  # on the CPU, whose random state a checkpoint stores
            lag = batch.random(functools.partial(torch.randint, self.config.length + 1), *at.shape[1:]).to(at.device)
        lag = torch.minimum(lag, batch.positions.gather(1, at))
        anchor, text = at - lag, torch.arange(batch.tokens.shape[1], device=at.device)
        is_same_text = batch.documents.gather(1, at)[..., None] == batch.documents[:, None]
        before = (anchor - 1).clamp(min=0)
        states = self.target_states(batch)[torch.arange(len(at), device=at.device)[:, None], before, -1]
        states = states * (batch.positions.gather(1, anchor) > 0)[..., None]
        # every position has a prompt of its own
        group = torch.arange(at.shape[1], device=at.device).repeat_interleave(self.config.rows)
        prompt_mask = is_same_text & (text < anchor[..., None])
        probe = self.probe(
            self.contemplate(states), is_same_text & (text <= at[..., None]), batch.positions.gather(1, at),
            prompt_mask[:, group], batch.positions.gather(1, anchor)[:, group], group,
        )  # fmt: skip
        return self.target.read_probe(batch.tokens, batch.documents, probe)[:, len(group) :]

    def contemplate(self, states: Tensor) -> Tensor:
        """Embeddings of contemplate tokens, [.., H], for the highest taps [.., H] before their anchors."""
        weights = self.router(self.router_norm(states.to(self.dtype))).softmax(-1)
        return weights.to(self.experts.dtype) @ self.experts

    def guided(self, states: Tensor, guide: Tensor | None) -> Tensor:
        assert guide is not None
        future = guide.to(states.dtype).expand(-1, states.shape[1], -1)
        return states + self.join(torch.cat([self.state_norm(states), future], -1))

    def probe(
        self, contemplate: Tensor, mask: Tensor, depths: Tensor, prompt_mask: Tensor, prompt_depths: Tensor,
        group: Tensor,
    ) -> Probe:  # fmt: skip
        """Prompts, and a contemplate token after each of n rows: embeddings [B, n, H], mask [B, n, K], depths [B, n].

        prompt_mask [B, G, K] and prompt_depths [B, G] are of the anchors of G rows of prompts, each `rows` long; row i
        sees the prompt rows where group [G] is i, and if group is -1 all rows do.
        """
        (slots, count), rows = depths.shape, len(group)
        place = torch.arange(rows, device=depths.device) % self.config.rows
        row = torch.arange(count, device=depths.device)[:, None]
        sees_prompt = (group == row) | (group < 0)
        causal = (group[:, None] == group) & (place[:, None] >= place)
        among = torch.cat([
            torch.nn.functional.pad(causal, (0, count)),
            torch.cat([sees_prompt, torch.eye(count, dtype=torch.bool, device=depths.device)], 1),
        ])  # fmt: skip
        embeddings = [self.prompt[place].expand(slots, -1, -1), contemplate]
        return Probe(
            torch.cat(embeddings, 1),
            torch.cat([torch.cat([prompt_mask, mask], 1), among.expand(slots, -1, -1)], 2),
            torch.cat([prompt_depths + place, depths + 1], 1),
        )

    def drafter(self) -> Confu:
        return Confu(self)


build = Model.build


class Futures(NamedTuple):
    """The head's memory, whose guide is f, and what the router reads."""

    head: Memory
    before: Tensor
    """[slots, H], the highest tap of the last token that the target has read."""

    def keep(self, rows: Sequence[int], states: Tensor, at: Sequence[int]) -> None:
        """Store the taps of row at[b] of states [B, S, T, H]."""
        self.before[list(rows)] = states[range(len(rows)), list(at), -1].to(self.before)


class Confu(Drafter):
    """A `RecurrentDrafter` with a probe: it stores f from the target's pass for the next draft."""

    def __init__(self, model: Model):
        self.model, self.head = model, RecurrentDrafter(model)
        self.taps, self.limit, self.hidden = self.head.taps, self.head.limit, self.head.hidden
        self.probe_rows = self.limit + 1 + model.config.rows

    def refresh(self) -> None:
        self.head.refresh()

    def allocate(self, cache: Cache) -> Futures:
        memory = self.head.allocate(cache)
        memory.guide = torch.zeros_like(memory.outputs)
        return Futures(memory, torch.zeros_like(memory.outputs))

    def admit(
        self, memory: Futures, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self.head.admit(memory.head, rows, state, scores, lengths)
        assert scores.taps is not None
        memory.keep(rows, scores.taps, [length - 1 for length in lengths])

    def propose(self, memory: Futures, state: DecodeState, budget: Tensor) -> Draft:
        assert memory.head.guide is not None
        # a hidden state is never all 0, so 0 marks a slot without a verified pass
        return self.head.propose(memory.head, state, budget * memory.head.guide[state.rows].any(-1).cpu())

    @torch.inference_mode()
    def probe(self, memory: Futures, state: DecodeState, draft: Draft) -> Probe:
        mask, depths = draft.rows()
        slots, rows = len(state.rows), self.model.config.rows
        contemplate = self.model.contemplate(memory.before[state.rows])[:, None].expand(-1, depths.shape[1], -1)
        unseen = mask.new_zeros(slots, rows, mask.shape[2])
        every = torch.full((rows,), -1, device=mask.device)
        mask, depths = mask.expand(slots, -1, -1), depths.expand(slots, -1)
        return self.model.probe(contemplate, mask, depths, unseen, depths.new_zeros(slots, rows), every)

    def observe(self, memory: Futures, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        assert scores.probe is not None and scores.taps is not None and memory.head.guide is not None
        self.head.observe(memory.head, state, draft, accepted, scores)
        last = [accepted.rows(b)[-1] for b in range(len(state.rows))]
        contemplated = scores.probe[:, self.model.config.rows :]
        memory.head.guide[state.rows] = contemplated[range(len(last)), last].to(memory.head.guide)
        memory.keep(state.rows, scores.taps, last)

    def free(self, memory: Futures, rows: Sequence[int]) -> None:
        assert memory.head.guide is not None
        self.head.free(memory.head, rows)
        memory.head.guide[list(rows)] = memory.before[list(rows)] = 0
