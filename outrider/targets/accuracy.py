"""How much precision a model's dtype loses relative to float64 with the same weights: the tolerance for every fast
path.

No constant fits all models.  The logits of a toy model are off by 1e-6; those of a model whose states reach 26,000, as
in real checkpoints, by 1e-4, and a kernel that sums carelessly loses several times as much.  So the same passes run in
the model's dtype and in float64, over real text after a real prompt.

V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider import machine
from outrider.decoding.draft import Draft
from outrider.kernels import prepacked
from outrider.targets.hf.proof.selftest import PARENTS, chain_of, plain_words, tree_of

log = logging.getLogger(__name__)

PROMPT, NODES = 48, 8
"""Number of tokens in the prompt, and in the widest pass."""
ROWS = (1, 3)
SHARE = 0.5
"""Fraction of the free memory that a copy in float64 may take."""
RMS, LARGEST = 2.5, 4.0
"""How far two paths may differ, in multiples of the dtype's loss: the plain path loses it once, the fast one up to 1.5
times in root mean square and 3 times at most."""
UNITS = 4
"""Rounding units of the largest logit by which any logit may differ; the root mean square may differ by one."""


class Loss(NamedTuple):
    """Difference between logits."""

    rms: float
    largest: float

    @classmethod
    def between(cls, pairs: Iterable[tuple[Tensor, Tensor]]) -> Loss:
        """The difference over all these pairs of logits [..., V]; the root mean square weights all pairs equally."""
        differences = [(one.double() - other.double()).abs() for one, other in pairs]
        squares = torch.stack([each.square().mean() for each in differences])
        return cls(float(squares.mean().sqrt()), max(float(each.max()) for each in differences))


class Tolerance(NamedTuple):
    """Allowed difference between two paths' logits."""

    rms: float
    largest: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> Tolerance:
        """pairs: logits in `compared_with(dtype)` and in `dtype`, either first."""
        pairs = list(pairs)
        loss = Loss.between(pairs)
        eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        unit = eps * max(float(one.abs().max()) for one, _ in pairs)
        return cls(max(RMS * loss.rms, unit), max(LARGEST * loss.largest, UNITS * unit))

    def exceeded(self, loss: Loss) -> str:
        """Description of what is too large; "" if nothing is."""
        for name, value, most in (("root mean square", loss.rms, self.rms), ("largest", loss.largest, self.largest)):
            if not value <= most:
                return f"{value:.1e} ({name}), more than {most:.1e}"
        return ""


def compared_with(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compare `dtype` with: float64; for float64 itself, float32, in which families compute norms and
    rotary factors anyway."""
    return torch.float32 if dtype == torch.float64 else torch.float64


def texts(target: Any, rows: int, count: int) -> Tensor:
    """Token ids [rows, count] of real text if the target has a tokenizer, otherwise random ones."""
    if target.tokenizer is None:
        return torch.tensor(plain_words(target, rows, count))
    text = Path(__file__).read_text(encoding="utf-8")
    ids = target.tokenizer.encode(text, add_special_tokens=False, verbose=False)  # it may be longer than the context
    ids = [token for token in ids if token < target.spec.vocabulary]
    step = max(1, min(29, (len(ids) - count) // rows))
    ids *= -(-(count + rows * step) // max(1, len(ids)))
    return torch.tensor([ids[row * step : row * step + count] for row in range(rows)])


@torch.inference_mode()
def passes(target: Any) -> Iterator[tuple[Any, Tensor, Draft]]:
    """Passes of `target` after prompts of unequal length: its cache, anchors [B], and a draft.

    Single steps, chains and, if its mode allows them, trees; with one slot and with several.
    """
    prompt = max(max(ROWS) + 1, min(PROMPT, target.spec.context // 2))
    for rows in ROWS:
        text = texts(target, rows, prompt + NODES).to(target.device)
        cache, lengths = target.allocate(rows, prompt + 2 * NODES), [prompt - row for row in range(rows)]
        target.prefill(cache, range(rows), text[:, :prompt], lengths)
        rest = text[:, prompt:]
        drafts = [Draft.empty(rows, text.device)]
        if target.spec.mode != "off":
            drafts += [chain_of(rest[:, 1:2]), chain_of(rest[:, 1:])]
        if target.spec.mode == "tree":
            drafts.append(tree_of(rest[:, 1 : 1 + len(PARENTS)]))
        for draft in drafts:
            yield cache, rest[:, 0], draft


def logits(target: Any) -> Iterator[Tensor]:
    """The target's logits in these passes, [B, N+1, V] each."""
    for cache, anchors, draft in passes(target):
        yield target.verify(cache, range(len(anchors)), anchors, draft).logits


def recast(model: nn.Module, dtype: torch.dtype) -> Any:
    """A copy of a model in another dtype, on its device; None if its weights are not plain tensors, or if the copy
    would take more than half of the free memory."""
    weights = list(model.parameters())
    needed = dtype.itemsize * sum(weight.numel() for weight in weights) + sum(each.nbytes for each in model.buffers())
    is_plain = all(type(weight) is nn.Parameter for weight in weights)
    fits = is_plain and needed <= SHARE * machine.free_memory(weights[0].device)
    return copy.deepcopy(model).to(dtype) if fits else None


def converted(target: Any, dtype: torch.dtype) -> Any:
    """The same target computed in `dtype` by transformers' own modules; None if it can't be copied."""
    model = recast(target.model, dtype) if target.is_whole else None
    if model is None:
        return None
    made = type(target)(model, target.tokenizer, target.spec.name, tested=False)
    made.family, made.spec = target.family, replace(made.spec, mode=target.spec.mode)
    return made


def allowance(target: Any) -> Tolerance | None:
    """How much this target's logits may differ between two ways of computing them, measured once per model; None if it
    can't be measured."""
    question = f"rounding of {target.spec.weights_hash} in {target.spec.dtype}, {PROMPT} tokens of text"
    measured = machine.remembered(question, functools.partial(_measured, target))
    if not measured:
        return None
    return Tolerance(**measured["allowed"])


@torch.inference_mode()
def _measured(target: Any) -> dict[str, dict[str, float]]:
    dtype: torch.dtype = target.model.dtype
    other = converted(target, compared_with(dtype))
    if other is None:
        return {}
    with prepacked.disabled():
        allowed = Tolerance.of(zip(logits(target), logits(other), strict=True), dtype)
    log.info("logits of %s in %s may differ by %.1e, at most %.1e", target.spec.name, target.spec.dtype, *allowed)
    return {"allowed": allowed._asdict()}
