"""What a target offers beyond the decoding loop: its sizes, embedding, head, layers and tokenizer.

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
    """Sizes and rotary positions of a decoder layer."""

    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(default=None, hash=False)
    """Scaling of the rotary frequencies, as in the rope_parameters of a config.json; None if they are not scaled."""
    partial_rotary_factor: float = 1.0
    """Fraction of a head that is rotated."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What a drafter or a checkpoint needs to know about its target, and what identifies the target."""

    name: str
    revision: str | None
    layers: int
    """0 if they are on a server."""
    hidden: int
    vocabulary: int
    context: int
    dtype: str
    tokenizer_hash: str | None
    """SHA-256 over the sorted vocabulary, 16 hex digits; None without a tokenizer."""
    weights_hash: str
    """SHA-256 over shapes and a sample of the weights' values, 16 hex digits."""
    mode: Literal["tree", "chain", "off"] = "tree"
    """Which drafts it can verify."""
    quantised: str | None = None
    """Type of quantised weights, such as int8; None if they are not quantised."""
    base_hash: str | None = None
    """`weights_hash` before Outrider quantised the weights; None if it did not."""
    sizes: LayerSizes | None = None
    """Sizes of its decoder layers, the defaults for a drafter's; None if unknown."""
    unused: int | None = None
    """First row of the embedding without a token in the tokenizer; None if all rows have one."""

    @property
    def precision(self) -> str:
        """The quantised type if there is one, otherwise the dtype."""
        return self.quantised or self.dtype


def members_of(target: Any) -> Sequence[Any]:
    """The targets whose distributions an ensemble mixes; () for a single model."""
    members: Sequence[Any] = getattr(target, "members", ())
    return members


class Target(decoding.Target, Protocol):
    """The model that verifies drafts, with what drafters, training and requests need besides."""

    spec: TargetSpec
    mask_token: int | None
    """Id of the mask token, for tokens yet to be drafted; None if the tokenizer has none."""

    @property
    def detokenizer(self) -> Detokenizer | None:
        """Incremental `decode`, for streamed text; None without a tokenizer."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., H], with the family's scale."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., V], with the family's scale and soft cap."""

    def head_rows(self, tokens: Tensor) -> Tensor:
        """Rows [n, H] of the output embedding for these ids [n]; read-only."""

    def head_over(self, tokens: Tensor, dtype: torch.dtype) -> nn.Module:
        """A copy of `head` in this dtype, for these ids [n] only: hidden [..., H] → logits [..., n]."""

    def copy_to(self, device: torch.device) -> Target:
        """This target with embedding and head copied to another device, for a drafter there."""

    def layer(self, index: int) -> nn.Module:
        """Decoder layer `index`, counted from 0; its weights are read-only."""

    def read(self, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, S, H] after the final norm and taps [B, S, T, H] of whole right-padded texts, without a
        cache."""

    def check_probe(self) -> None:
        """Raises TargetError if the passes can't include a probe."""

    def read_probe(self, tokens: Tensor, documents: Tensor, probe: Probe) -> Tensor:
        """Hidden states [B, P, H] of a probe's rows after whole texts [B, S]; gradients flow to its embeddings.

        documents [B, S] as in `Batch`: a token attends to earlier tokens of its own text.  The probe's mask is [B, P,
        S + P], over text and probe, and its depths are positions.
        """

    def default_sampling(self, prompt: Sequence[int], max_new_tokens: int) -> Sampling:
        """The default for this prompt: greedy, with the settings of the model's generation_config."""

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of a text or of chat messages; token ids are returned unchanged."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""


@dataclass(frozen=True, slots=True)
class Skip:
    """Sublayers that a pass leaves out, by layer, counted from 0."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


@runtime_checkable
class SkipsLayers(Protocol):
    """A target that can run with some of its sublayers left out, and so draft for itself."""

    def skippable(self) -> Skip:
        """All sublayers that can be left out.  Raises TargetError if none can."""

    def skipping(
        self, skip: Skip, cache: Any, rows: Sequence[int]
    ) -> AbstractContextManager[Callable[[Tensor], Tensor]]:
        """Yields a function from tokens [R, n], appended to these slots, to logits [R, n, V], computed without `skip`.

        Each call continues from the previous one.  On exit, also after an error, model and slots are restored.
        """
