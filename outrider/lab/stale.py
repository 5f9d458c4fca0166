"""Passes of a target of bytes and patches with its local layers alone, on the latent of the last patch.

For drafts beyond the end of a patch: no patch ends, so the global model does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from outrider.errors import DrafterError
from outrider.lab import byte_patches
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.protocol import Target


def patched(target: Target, kind: str) -> TransformersTarget:
    """The target, checked that it has patches and verifies drafts.  kind: of the drafter.  Raises DrafterError."""
    if not isinstance(target, TransformersTarget) or not target.family.has_patches:
        raise DrafterError(
            f"{kind} needs a target of bytes and patches, whose local layers can run alone, but {target.spec.name} "
            "is not one; choose another drafter, or a target such as `python benchmarks/byte_target.py` makes"
        )
    if target.spec.mode == "off":
        raise DrafterError(f"{target.spec.name} can't verify drafts (its mode is off); decode it without a drafter")
    return target


@contextmanager
def reading_on(target: TransformersTarget, cache: Any, rows: Sequence[int]) -> Iterator[Callable[..., Tensor]]:
    """As `TransformersTarget.reading_on`, without new latents."""
    with byte_patches.held(), target.reading_on(cache, rows) as read:
        yield read
