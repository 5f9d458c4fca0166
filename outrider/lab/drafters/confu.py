"""ConFu: contemplate rows in the verified pass say where the target is heading, and an EAGLE-3 head drafts by that.
(arXiv 2603.08899.)

Behind the anchor and every drafted node stand `rows` more, whose embeddings are learnt: a soft prompt, and last the
contemplate token.  They see what that row sees, and each other up to themselves; no row of the text sees them, and none
is cached, so the target's logits are its own.  The contemplate token's final state behind the last accepted token is
the future f of the next draft: every step of it, from the first on, adds what a small network makes of its own state
and f.

Training goes through the frozen target: at drawn positions the rows are read behind the text again, and the draft's
loss reaches their embeddings.  f of a position serves all steps of the rollout from there.  The rest is EAGLE-3's
(arXiv 2503.01840): three taps, one layer, its own output fed back.

Differs from the paper, whose code is not public: the soft prompt stands behind each row, not before the text; its
embeddings are the same everywhere, without experts chosen by the last state; f joins a step's output, not its input,
so keys of the text are the same for every draft; and there is none behind a prompt, so a text's first step drafts
nothing.

Use it where more rows in a pass cost nothing; on two cores they cost the most, and no more tokens were accepted than
of EAGLE-3's.

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
    """Target layers it reads, counted from 0; three, low, middle and high, unless given."""
    rows: PositiveInt = 2
    """Rows behind every row of the verified pass: a soft prompt of all but one, and the contemplate token."""


class Model(RecurrentModel, FusedTaps):
    """EAGLE-3's head, the embeddings of the rows, and the network that joins f to a step's output."""

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
        own = batch.documents.gather(1, at)[..., None] == batch.documents[:, None]
        probe = self.rows(own & (text <= at[..., None]), batch.positions.gather(1, at))
        return self.target.read_probe(batch.tokens, batch.documents, probe)[:, self.config.rows - 1 :: self.config.rows]

    def guided(self, states: Tensor, guide: Tensor | None) -> Tensor:
        assert guide is not None
        future = guide.to(states.dtype).expand(-1, states.shape[1], -1)
        return states + self.join(torch.cat([self.state_norm(states), future], -1))

    def rows(self, mask: Tensor, depths: Tensor) -> Probe:
        """The rows behind n others, which stand at depths [B, n] and see mask [B, n, K]; row for row, P = n * rows."""
        slots, count = depths.shape
        prompts = self.prompt.expand(slots, -1, -1).repeat(1, count, 1)
        return Probe(prompts, *rows_after(mask, depths, self.config.rows, causal=True))

    def drafter(self) -> Confu:
        return Confu(self)


build = Model.build


class Confu(Drafter):
    """Drafts as `RecurrentDrafter` does, which reads the pairs; asks the target's pass for f, and remembers it."""

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
        # no hidden state is 0 throughout, so 0 is the f of a slot that no pass has verified yet
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
