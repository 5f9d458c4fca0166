"""Speculative Jacobi-Denoising (SJD2): guesses start as noise in the embeddings, which is reduced in every pass.
(arXiv 2510.08994; the loop without noise: `jacobi`.)

In the verified pass the last drafted node is followed by `window` noised embeddings, each of which sees the draft and
those before it.  The row before a place predicts its token; in the next pass the place has that token's embedding with
one level less noise.  A place without noise is drafted: its token is drawn from the row's distribution, which is q.
Places after the accepted part of the draft continue, and new ones start as pure noise.  A step is one pass.

`TargetModel` trains the target to predict what follows noised embeddings; the result is a new target, and the output is
exact relative to it.

Differs from the paper, which is about images: noise falls linearly (rectified flow), in `levels` steps; the noise of a
place is fixed, so that texts do not depend on the rest of the batch; windows in training follow sampled positions, with
the model's own guesses, right or wrong, and increasing noise, all as in serving; and the rows of text learn the
target's own distribution by KL (`ar`).

Use it for further research: on text, after a short training, it is slower than the target alone.

B live slots, N drafted nodes, W places of the window, m rows that predict, A drawn positions of a text, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.config import Config as Base
from outrider.decoding.accept import Accepted
from outrider.decoding.draft import Draft, to_device
from outrider.decoding.protocols import Cache, Drafter, Probe
from outrider.decoding.state import DecodeState, Scores
from outrider.lab import target_model
from outrider.lab.probe_rows import rows_after
from outrider.nn.drafting import serving
from outrider.targets.protocol import Target

ROWS = 2048
"""Rows of training whose logits are in memory at once."""


class Config(Base):
    kind: Literal["jacobi_denoising"] = "jacobi_denoising"
    window: PositiveInt = 8
    """Noised embeddings after the draft, and most tokens drafted per step."""
    levels: PositiveInt = 2
    """Passes from pure noise to a drafted token."""
    anchors: PositiveInt = 64
    """Most windows trained per text and step."""


class Window(NamedTuple):
    """The last pass's predictions for the places after a slot's anchor."""

    logits: Tensor
    """[m, V]; row j predicts the token at place j."""
    levels: list[int]
    """Noise levels of these places, not decreasing along the window; a place of level 0 can be drafted."""

    def noised(self, drafted: int, count: int, most: int) -> tuple[Tensor, list[int]]:
        """Tokens and levels of `count` places after the drafted ones.  A place without a prediction is pure noise."""
        tokens = self.logits[drafted : drafted + count].argmax(-1)
        levels = self.levels[drafted : drafted + count]
        missing = count - len(levels)
        return torch.nn.functional.pad(tokens, (0, missing)), [*levels, *[most] * missing]


class JacobiDenoising(Drafter):
    """Its memory is the `Window` of every slot, None before the first pass."""

    def __init__(self, target: Target, config: Config):
        target.check_probe()
        self.target, self.config = target, config
        self.limit = self.probe_rows = config.window
        words = target.embed(some(target.spec.vocabulary).to(target.device))
        noise = torch.randn(config.window, words.shape[-1], generator=torch.Generator().manual_seed(0))
        self.noise = noise.to(words) * spread(words)
        """[W, H]; a place uses the row of its position in the text, modulo W."""

    def allocate(self, cache: Cache) -> list[Window | None]:
        return [None] * cache.slots

    @torch.inference_mode()
    def propose(self, memory: list[Window | None], state: DecodeState, budget: Tensor) -> Draft:
        windows = [memory[row] for row in state.rows]
        clean = [0 if window is None else window.levels.count(0) for window in windows]
        sizes = torch.minimum(budget, torch.tensor(clean))
        if not sizes.any():
            return Draft.empty(len(windows), state.device)
        empty = next(window.logits for window in windows if window is not None)[:0]
        most = int(sizes.max())
        rows = [empty if window is None else window.logits[:most] for window in windows]
        logits = pad_sequence(rows, batch_first=True)
        return serving.possible(serving.side_by_side(logits, sizes, state), state)

    @torch.inference_mode()
    def probe(self, memory: list[Window | None], state: DecodeState, draft: Draft) -> Probe:
        window, device = self.config.window, state.device
        tokens, levels, positions = [], [], []
        for row, drafted in zip(state.rows, draft.live, strict=True):
            slot_tokens, slot_levels = self._noised(memory[row], drafted)
            tokens.append(slot_tokens)
            levels.append(slot_levels)
            positions.append([(len(state.tokens[row]) + drafted + j) % window for j in range(window)])
        mask, depths = draft.rows()
        last = to_device(draft.live, device)
        mask = mask[torch.arange(len(mask), device=device), last][:, None]
        words, noise = self.target.embed(torch.stack(tokens)), self.noise[to_device(positions, device)]
        shares = to_device(levels, device) / self.config.levels
        at = depths.gather(1, last[:, None])
        return Probe(noised(words, noise, shares), *rows_after(mask, at, window, causal=True))

    def observe(
        self, memory: list[Window | None], state: DecodeState, draft: Draft, accepted: Accepted, scores: Scores
    ) -> None:
        assert scores.probe is not None
        most, probed = self.config.levels, self.target.head(scores.probe)
        for b, row in enumerate(state.rows):
            count, drafted = len(accepted.paths[b]), draft.live[b]
            window = memory[row]
            old_levels = [] if window is None else window.levels[: drafted + self.limit]
            levels = [*old_levels, *[most] * (drafted + self.limit - len(old_levels))]
            logits = torch.cat([scores.logits[b, count + 1 : drafted + 1], probed[b]])
            # the next token takes the first place that was not accepted; the last row predicts a new one
            later = [max(0, level - 1) for level in [*levels[count + 1 :], most]]
            memory[row] = Window(logits[: 2 * self.limit], later[: 2 * self.limit])

    def _noised(self, window: Window | None, drafted: int) -> tuple[Tensor, list[int]]:
        count, most = self.config.window, self.config.levels
        if window is None:
            return torch.zeros(count, dtype=torch.int64, device=self.target.device), [most] * count
        return window.noised(drafted, count, most)

    def free(self, memory: list[Window | None], rows: Sequence[int]) -> None:
        for row in rows:
            memory[row] = None


def build(config: Config, target: Target) -> JacobiDenoising:
    return JacobiDenoising(target, config)


def noised(embeddings: Tensor, noise: Tensor, shares: Tensor) -> Tensor:
    """Embeddings [..., H] mixed with `shares` [...] of noise."""
    shares = shares.to(embeddings)[..., None]
    return (1 - shares) * embeddings + shares * noise


def some(vocabulary: int) -> Tensor:
    """Ids whose embeddings `spread` measures."""
    return torch.arange(min(vocabulary, 4096))


def spread(embeddings: Tensor) -> float:
    """Root mean square of embeddings, which the noise has too."""
    return float(embeddings.float().square().mean().sqrt())


# ── training ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class TargetModel(target_model.ProbedTargetModel):
    """A target that predicts from noised embeddings of its own guesses."""

    is_causal = True

    def __init__(self, config: Config, target: Target):
        super().__init__(config, target)
        target.check_probe()
        self.block = config.window

    def inputs(self, tokens: Tensor, documents: Tensor, at: Tensor) -> Tensor:
        """Noised embeddings of the model's own guesses, from a first pass over pure noise, as in serving."""
        words = self.words(some(self.target.spec.vocabulary).to(at.device)).detach()
        # on the CPU, whose random state a checkpoint stores
        noise = torch.randn(len(at), at.shape[1] * self.block, words.shape[-1]).to(words) * spread(words)
        levels = torch.randint(self.config.levels + 1, (*at.shape, self.block)).sort(-1).values.flatten(1)
        with torch.no_grad():
            guesses = self._guesses(self.read(tokens, documents, at, noise), tokens.shape[1], at)
        return noised(self.words(guesses.flatten(1)), noise, levels / self.config.levels)

    def _guesses(self, states: Tensor, length: int, at: Tensor) -> Tensor:
        """The likeliest token of every place of the windows [B, A, W], by the row before it."""
        first = states.gather(1, at[..., None].expand(-1, -1, states.shape[-1]))[:, :, None]
        later = states[:, length:].unflatten(1, (at.shape[1], self.block))[:, :, :-1]
        rows = torch.cat([first, later], 2)
        parts = [self.logits(part).argmax(-1) for part in rows.flatten(0, 2).split(ROWS)]
        return torch.cat(parts).view(rows.shape[:3])

    def drafter(self) -> JacobiDenoising:
        """A drafter with a copy of the weights as its target, `drafter().target`."""
        return JacobiDenoising(self.trained_target(), self.config)
