"""The optimisers of a training run, stepped as one: AdamW for every weight, or Muon for inner matrices and AdamW for
the rest."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from outrider.processes import Weights, Whole

Kind = Literal["adamw", "muon"]


ADAMW_ONLY = frozenset({"lm_head", "queries", "level", "rank_head", "ngram_table"})
"""Names of matrices that Muon must not optimise: heads over a reduced vocabulary or over classes, learnt embeddings,
and lookup tables."""


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic, which maximise the slope at 0 (Jordan et al. 2024); used for five iterations."""


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum, with the step scaled to AdamW's size.  With iterations in bfloat16 it equals
    torch.optim.Muon, which supports no other type; on a CPU without bfloat16 units those iterations would take two
    thirds of a step.
    """

    def __init__(
        self, weights: Sequence[Tensor], weight_decay: float, dtype: torch.dtype, layout: Weights,
        momentum: float = 0.95,
    ):  # fmt: skip
        """layout: how weights are distributed over processes; every process iterates on each whole matrix."""
        super().__init__(weights, {"lr": 1e-3, "weight_decay": weight_decay, "momentum": momentum})
        self.layout = layout
        self.dtype = dtype
        """Type of the iterations; weights and momentum keep their own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight.grad)
                momentum_buffer = state["momentum_buffer"].lerp_(weight.grad, 1 - group["momentum"])
                whole = self.layout.full(weight.grad.lerp(momentum_buffer, group["momentum"]))
                update = self.layout.like(orthogonal(whole, self.dtype).to(whole.dtype), weight)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix [m, n] with all its singular values near 1, by five Newton-Schulz iterations in `dtype`."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.to(dtype, copy=True)
    x = x.T if x.shape[0] > x.shape[1] else x
    x.div_(x.norm().clamp(min=1e-7))
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Optimizers:
    """AdamW for all weights; or Muon, with iterations in `dtype`, for matrices that map hidden states to hidden states.

    Embeddings, output layers, norms and biases stay with AdamW: Muon skips matrices with the vocabulary as one
    dimension, and those named in `ADAMW_ONLY`.
    """

    def __init__(
        self, model: nn.Module, kind: Kind, vocabulary: int, weight_decay: float, dtype: torch.dtype = torch.float32,
        layout: Weights | None = None,
    ):  # fmt: skip
        """layout: how the model is distributed over processes; by default, one process has all of it."""
        weights = dict(model.named_parameters())
        inner = [w for name, w in weights.items() if kind == "muon" and _is_inner(name, w, vocabulary)]
        taken = set(map(id, inner))
        others = [w for w in weights.values() if id(w) not in taken]
        self.parts: list[torch.optim.Optimizer] = []
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=weight_decay))
        if inner:
            self.parts.append(Muon(inner, weight_decay, dtype, layout or Whole()))
        self._part_of = {
            weight: part for part in self.parts for group in part.param_groups for weight in group["params"]
        }

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_of(self, weight: Tensor) -> dict[str, Any]:
        """This weight's moments by name, {} before the first step; writing to it sets them."""
        return self._part_of[weight].state[weight]


def _is_inner(name: str, weight: Tensor, vocabulary: int) -> bool:
    is_excluded = not ADAMW_ONLY.isdisjoint(name.split("."))
    return weight.dim() == 2 and min(weight.shape) > 1 and vocabulary not in weight.shape and not is_excluded


def pack(
    model: nn.Module, optimizer: Optimizers, layout: Weights | None = None, is_first: bool = True
) -> dict[str, Tensor]:  # fmt: skip
    """Optimiser moments by parameter name, and torch's random state.

    layout: how they are distributed over processes; by default, one process has all of them.  is_first: if False, the
    moments are left out, in a process that only contributes its part.
    """
    layout, prepacked = layout or Whole(), {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state_of(parameter).items()):  # the same order in all processes
            whole = layout.full(torch.as_tensor(value))
            if is_first:
                prepacked[f"{name}/{key}"] = whole
    return prepacked


def unpack(
    state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizers, layout: Weights | None = None
) -> None:  # fmt: skip
    """Restore an optimiser and the random state from the output of `pack`."""
    layout = layout or Whole()
    torch.set_rng_state(state["rng"])
    parameters = dict(model.named_parameters())
    for name in sorted(state.keys() - {"rng"}):
        owner, _, key = name.rpartition("/")
        place = "cpu" if key == "step" else parameters[owner].device
        optimizer.state_of(parameters[owner])[key] = layout.like(state[name].to(place), parameters[owner])
