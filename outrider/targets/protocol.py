"""What a target offers beyond the loop: its sizes, embedding, head, layers and tokenizer.

B slots, S sequence, T taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from outrider.decoding import protocols as decoding
from outrider.decoding.protocols import Probe
from outrider.sampling.settings import Sampling
from outrider.sampling.text import Detokenizer


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a decoder layer, and its rotary positions."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    """How rotary frequencies are scaled, as in the rope_parameters of a config.json; None where they are not."""
    partial_rotary_factor: float = 1.0
    """Share of a head that is rotated."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a drafter or a checkpoint must know of its target, and what distinguishes two targets."""

    name: str
    revision: str | None
    layers: int
    """0 where they are out of reach, on a server."""
    hidden: int
    vocabulary: int
    context: int
    dtype: str
    tokenizer_hash: str | None
    """SHA-256 over the sorted vocabulary, 16 hex digits; None without a tokenizer."""
    weights_hash: str
    """SHA-256 over shapes and a sample of the weights' values, 16 hex digits."""
    mode: Literal["tree", "chain", "off"] = "tree"
    quantised: str | None = None
    """What its weights are quantised to, such as int8; None where they are not."""
    base_hash: str | None = None
    """`weights_hash` of the weights that were quantised; None where nothing was, or where it came quantised."""
    sizes: LayerSizes | None = None
    """Of its own decoder layers, which are a drafter's defaults; None where they are not known."""
    unused: int | None = None
    """First row of the embedding that is not a token of the tokenizer; None where there is none."""

    @property
    def precision(self) -> str:
        """int8 or the like, else the type of its weights."""
        return self.quantised or self.dtype


def members_of(target: Any) -> Sequence[Any]:
    """The targets whose distributions a target mixes; () where it is one model."""
    members: Sequence[Any] = getattr(target, "members", ())
    return members


class Target(decoding.Target, Protocol):
    """The model that verifies, with what drafters, training and requests ask of it besides."""

    spec: TargetSpec
    mask_token: int | None
    """Id that stands for a token yet to be drafted; None where the tokenizer has none."""

    @property
    def detokenizer(self) -> Detokenizer | None:
        """How its ids become text, as `decode` does it, for texts that grow; None without a tokenizer."""

    def embed(self, tokens: Tensor) -> Tensor:
        """[..., H], the family's scale applied."""

    def head(self, hidden: Tensor) -> Tensor:
        """[..., V], the family's soft-cap and scale applied."""

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]; for reading."""

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        """`head` over these ids [n] alone, its weights copied and of this type: hidden [..., H] to logits [..., n]."""

    def copy_to(self, device: torch.device) -> Target:
        """This target for a drafter on another device: embedding and head are copied there."""

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are for reading."""

    def read(self, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a
        cache."""

    def check_probe(self) -> None:
        """Raises TargetError where the passes take no probe."""

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        """Hidden states [B, P, H] of a probe's rows behind whole texts [B, S], for training: the gradient reaches its
        embeddings.

        documents [B, S] as in `Batch`: a token attends to its own text's up to itself.  The probe's mask is [B, P,
        S + P], over text and probe, and its depths are positions.
        """

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """How a prompt is continued where no `Sampling` is given: greedily, with what the model itself asks for."""

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a text, of chat messages, or of ids given as they are."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids; special tokens are left out."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Sublayers that a pass leaves out, by layer, counted from 0."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


@runtime_checkable
class SkipsLayers(Protocol):
    """A target that can read on with some of its sublayers left out, and so draft for itself."""

    def skippable(self) -> Skip:
        """All that may be left out.  Raises TargetError where nothing may."""

    def skipping(
        self, skip: Skip, cache: Any, rows: Sequence[int]
    ) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Gives a function from tokens [R, n] to logits [R, n, V]: it reads them after what these slots hold, without
        `skip`.

        One call goes on where the last ended.  Afterwards model and slots are what they were before, errors included.
        """
