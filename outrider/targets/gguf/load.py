"""Load a model from GGUF files, after a look at what is in them and whether it fits into memory."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from outrider import machine
from outrider.errors import TargetError
from outrider.kernels.quantized import Activations
from outrider.targets.gguf import model, tokenizer
from outrider.targets.gguf.keys import Refused
from outrider.targets.gguf.model import GgufFiles
from outrider.targets.gguf.reader import Damaged

log = logging.getLogger(__name__)


class LoadedGguf(NamedTuple):
    """A model that stays in its blocks, and its tokenizer."""

    model: Any
    tokenizer: Any
    why_none: str
    """Why there is no tokenizer; empty where there is one."""


class Described(NamedTuple):
    """A model without its weights."""

    config: Any
    """transformers'."""
    parts: GgufFiles


def load(name: str, paths: Sequence[Path], activations: Activations = "float32") -> LoadedGguf:
    """Raises TargetError for files that are damaged, not supported, or larger than the memory that is free."""
    with refusing(name), _without_collections():
        parts = GgufFiles(paths)
        say_what_fits(name, parts, model.config_of(parts))
        return LoadedGguf(model.build(parts, activations), *read_tokenizer(parts))


@contextmanager
def _without_collections() -> Iterator[None]:
    """No search for garbage, which a vocabulary's tuples start several times, over all objects of torch; 0.3 s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def described(name: str, paths: Sequence[Path]) -> Described:
    """What a file says; reads no weights.  Raises TargetError."""
    with refusing(name):
        parts = GgufFiles(paths)
        return Described(model.config_of(parts), parts)


def read_tokenizer(parts: GgufFiles) -> tuple[Any, str]:
    """The tokenizer; where there can be none, None and why."""
    try:
        return tokenizer.of_keys(parts.keys), ""
    except tokenizer.NoTokenizer as error:
        return None, str(error)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Raises TargetError in place of what reading a file raises."""
    try:
        yield
    except (OSError, Damaged) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TargetError(f"target {name!r} can't be read: {reason}; copy or download it again") from None
    except Refused as error:
        raise TargetError(
            f"can't load target {name!r}: {error}; take another file of the model, or its checkpoint in safetensors"
        ) from None


def say_what_fits(name: str, parts: GgufFiles, config: Any) -> None:
    """One line with what the weights take, what is free, and how long texts may be beside them.

    A warning where that is less than the model's context.  Raises TargetError where not even the weights fit.
    """
    free, weights, context = machine.free_memory(), parts.weight_bytes, config.max_position_embeddings
    if weights > free:
        raise TargetError(
            f"target {name!r} takes {_gb(weights)} of memory, and {_gb(free)} are free; take a file with fewer bits "
            "per weight, or a smaller model"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # keys and values in float32, in all layers
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    fits = min((free - weights) // token_bytes, context)
    level = logging.INFO if fits == context else logging.WARNING
    log.log(
        level, "%s: %s of weights in %s, %s free: texts of %s tokens fit, of a context of %s", name, _gb(weights),
        kinds(parts), _gb(free), f"{fits:,}", f"{context:,}",
    )  # fmt: skip


def kinds(parts: GgufFiles) -> str:
    """The types of its matrices, by bytes, such as `q4_1 and q8_0`."""
    sizes: Counter[str] = Counter()
    for info in parts.tensors.values():
        if len(info.shape) > 1:
            sizes[info.kind.lower()] += info.size
    return " and ".join(kind for kind, _ in sizes.most_common(3))


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
