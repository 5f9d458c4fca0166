"""The mask token of draft models: one of the target's tokens, or a learnt vector."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import Field, NonNegativeInt
from torch import Tensor, nn

from outrider.config import Config as Base
from outrider.errors import DrafterError
from outrider.targets.protocol import Target

C = TypeVar("C", bound=Base)
LEARNT: Literal["learnt"] = "learnt"
"""Value of `mask_token` for a vector that is trained with the draft model."""
MaskToken = Annotated[
    NonNegativeInt | Literal["learnt"] | None,
    Field(
        description="Id of the target's token whose embedding fills masked slots, or `learnt` for a trained vector.  "
        "Defaults to the tokenizer's mask token, otherwise to the first unused row of the embedding, otherwise to "
        "`learnt`."
    ),
]
"""Type of the setting `mask_token`."""


def with_mask(config: C, target: Target) -> C:
    """The config with its mask token filled in, so that a checkpoint stores it; see `MaskToken` for the default.

    Raises DrafterError for an id outside the target's vocabulary.
    """
    mask_token: MaskToken = config.mask_token  # type: ignore[attr-defined]
    if isinstance(mask_token, int) and mask_token >= target.spec.vocabulary:
        raise DrafterError(
            f"mask_token {mask_token} is not a token id of {target.spec.name}, which has {target.spec.vocabulary}; "
            "choose a lower one"
        )
    candidates = (mask_token, target.mask_token, target.spec.unused, LEARNT)
    return config.model_copy(update={"mask_token": next(token for token in candidates if token is not None)})


def trained_mask(config: Any, target: Target) -> int:
    """The mask token of a target that was trained with masks.  Raises DrafterError if it has none."""
    mask: MaskToken = with_mask(config, target).mask_token
    if isinstance(mask, int):
        return mask
    raise DrafterError(
        f"{target.spec.name} has no token that can serve as mask; name the one it was trained with as "
        "drafter.mask_token"
    )


class MaskedModule(nn.Module):
    """A module that reads masks: one of the target's tokens, or its parameter `mask`."""

    config: Any
    target: Target
    mask_token: int | None

    def choose_mask(self) -> None:
        """Set the mask that the config names; `with_mask` has filled it in."""
        self.mask_token = None if self.config.mask_token == LEARNT else self.config.mask_token
        if self.mask_token is None:
            self.mask = nn.Parameter(torch.randn(self.target.spec.hidden) * 0.02)

    def words(self, tokens: Tensor, masks: int, dtype: torch.dtype | None = None) -> Tensor:
        """Embeddings [..., n + masks, H] of tokens [..., n] and of masks after them; by default in the target's
        dtype."""
        if self.mask_token is not None:
            return self.target.embed(nn.functional.pad(tokens, (0, masks), value=self.mask_token)).to(dtype=dtype)
        words = self.target.embed(tokens).to(dtype=dtype)
        return torch.cat([words, self.mask.to(words.dtype).expand(*tokens.shape[:-1], masks, -1)], -2)
