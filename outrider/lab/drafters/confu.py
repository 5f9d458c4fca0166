"""ConFu: extra rows in the verified pass predict where the target is heading, and guide an EAGLE-3 head.  (arXiv
2603.08899.)

The anchor and every drafted node are followed by `rows` rows with learnt embeddings: a soft prompt and then the
contemplate token.  They see what their node sees and each other causally.  No row of the text sees them and they are
not cached, so the target's logits do not change.  The contemplate token's final state after the last accepted token is
the future f of the next draft: a small network of the step's state and f is added to the output of every step.

Training goes through the frozen target: at sampled positions the rows are read after the text again, and the draft's
loss reaches their embeddings.  f of a position serves all steps of the rollout from there.  The rest is EAGLE-3's
(arXiv 2503.01840): three taps, one layer, its own output fed back.

Differs from the paper, whose code is not public: the soft prompt follows each row and does not precede the text; its
embeddings are the same everywhere, without experts chosen by the last state; f is added to a step's output, not its
input, so keys of the text are the same for every draft; and prompts have none, so a text's first step drafts nothing.

Use it if more rows in a pass are free.  On two cores they are the main cost, and the acceptance was no higher than
EAGLE-3's.

B live slots, N drafted nodes, A rollouts of a text, P rows of a probe, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.lab.probe_rows import rows_after
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
    """Rows after every row of the verified pass: a soft prompt and, last, the contemplate token."""


class Model(RecurrentModel, FusedTaps):
    """EAGLE-3's head, the embeddings of the rows, and the network that adds f to a step's output."""

    def __init__(self, config: Config, target: Target):
        target.check_probe()
        super().__init__(config, target, resolve_taps(config.taps, target.spec, 3))
        hidden = target.spec.hidden
        self.layers = nn.ModuleList([PairLayer(hidden, self.shape, norm_before_residual=False, qk_norm=False)])
        self.norm = RMSNorm(hidden, self.shape.rms_norm_eps)
        words = target.embed(torch.arange(min(256, target.spec.vocabulary), device=target.device))
        self.prompt = nn.Parameter(torch.randn(1, config.rows, hidden, device=words.device) * words.float().std())
        """[1, rows, H] embeddings."""
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

    def guide(self, batch: Batch, at: Tensor) -> Tensor:
        text = torch.arange(batch.tokens.shape[1], device=at.device)
        is_same_text = batch.documents.gather(1, at)[..., None] == batch.documents[:, None]
        probe = self.rows(is_same_text & (text <= at[..., None]), batch.positions.gather(1, at))
        return self.target.read_probe(batch.tokens, batch.documents, probe)[:, self.config.rows - 1 :: self.config.rows]

    def guided(self, states: Tensor, guide: Tensor | None) -> Tensor:
        assert guide is not None
        future = guide.to(states.dtype).expand(-1, states.shape[1], -1)
        return states + self.join(torch.cat([self.state_norm(states), future], -1))

    def rows(self, mask: Tensor, depths: Tensor) -> Probe:
        """The rows after n others with depths [B, n] and mask [B, n, K], in their order; P = n * rows."""
        slots, count = depths.shape
        prompts = self.prompt.expand(slots, -1, -1).repeat(1, count, 1)
        return Probe(prompts, *rows_after(mask, depths, self.config.rows, causal=True))

    def drafter(self) -> Confu:
        return Confu(self)


build = Model.build


class Confu(Drafter):
    """A `RecurrentDrafter` with a probe: it stores f from the target's pass for the next draft."""

    def __init__(self, model: Model):
        self.model, self.head = model, RecurrentDrafter(model)
        self.taps, self.limit, self.hidden = self.head.taps, self.head.limit, self.head.hidden
        self.probe_rows = (self.limit + 1) * model.config.rows

    def refresh(self) -> None:
        self.head.refresh()

    def allocate(self, cache: Cache) -> Memory:
        memory = self.head.allocate(cache)
        memory.guide = torch.zeros_like(memory.outputs)
        return memory

    def admit(
        self, memory: Memory, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]
    ) -> None:
        self.head.admit(memory, rows, state, scores, lengths)

    def propose(self, memory: Memory, state: DecodeState, budget: Tensor) -> Draft:
        assert memory.guide is not None
        # a hidden state is never all 0, so 0 marks a slot without a verified pass
        return self.head.propose(memory, state, budget * memory.guide[state.rows].any(-1).cpu())

    @torch.inference_mode()
    def probe(self, memory: Memory, state: DecodeState, draft: Draft) -> Probe:
        return self.model.rows(*draft.rows())

    def observe(self, memory: Memory, state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores) -> None:
        assert scores.probe is not None and memory.guide is not None
        self.head.observe(memory, state, draft, accepted, scores)
        each = self.model.config.rows
        last = [accepted.rows(b)[-1] * each + each - 1 for b in range(len(state.rows))]
        memory.guide[state.rows] = scores.probe[range(len(last)), last].to(memory.guide)

    def free(self, memory: Memory, rows: Sequence[int]) -> None:
        assert memory.guide is not None
        self.head.free(memory, rows)
        memory.guide[list(rows)] = 0
