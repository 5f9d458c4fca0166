"""The optimisers that train a drafter, stepped as one: AdamW for every weight, or Muon for the inner matrices beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

Kind = Literal["adamw", "muon"]


APART = frozenset({"lm_head", "queries", "level", "rank_head"})
"""Names of heads over a part of the vocabulary or over classes, and of learnt rows: matrices by shape, not by use."""


class Optimizers:
    """AdamW for all weights; or Muon (torch's, its step scaled to AdamW's size) for matrices that turn states into states.

    Embeddings, output layers, norms and biases stay with AdamW: a matrix with the vocabulary as one side, or named in `APART`,
    is none of Muon's.
    """

    def __init__(self, model: nn.Module, kind: Kind, vocabulary: int, weight_decay: float):
        weights = dict(model.named_parameters())
        inner = [w for name, w in weights.items() if kind == "muon" and _is_inner(name, w, vocabulary)]
        taken = set(map(id, inner))
        others = [w for w in weights.values() if id(w) not in taken]
        self.parts: list[torch.optim.Optimizer] = []
        if others:
            self.parts.append(torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=weight_decay))
        if inner:
            self.parts.append(torch.optim.Muon(inner, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))

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
        return next(part for part in self.parts if _holds(part.param_groups, weight)).state[weight]


def _is_inner(name: str, weight: Tensor, vocabulary: int) -> bool:
    is_apart = not APART.isdisjoint(name.split("."))
    return weight.dim() == 2 and min(weight.shape) > 1 and vocabulary not in weight.shape and not is_apart


def _holds(groups: Sequence[dict[str, Any]], weight: Tensor) -> bool:
    return any(weight is one for group in groups for one in group["params"])


def pack(model: nn.Module, optimizer: Optimizers) -> dict[str, Tensor]:
    """Optimiser moments by parameter name, and torch's random state."""
    packed = {"rng": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state_of(parameter).items():
            packed[f"{name}/{key}"] = torch.as_tensor(value)
    return packed


def unpack(state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizers) -> None:
    """Undo `pack`."""
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if name == "rng":
            torch.set_rng_state(value)
            continue
        owner, _, key = name.rpartition("/")
        parameter = parameters[owner]
        optimizer.state_of(parameter)[key] = value if key == "step" else value.to(parameter.device)
