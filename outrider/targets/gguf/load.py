"""Load a model from GGUF files, after checking their contents and the memory."""

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
    """A model whose weights stay quantised, and its tokenizer."""

    model: Any
    tokenizer: Any
    why_none: str
    """Why there is no tokenizer; empty if there is one."""


class Described(NamedTuple):
    """A model without its weights."""

    config: Any
    """transformers'."""
    parts: GgufFiles


def load(name: str, paths: Sequence[Path], activations: Activations = "float32") -> LoadedGguf:
    """Raises TargetError for files that are damaged, not supported, or larger than the free memory."""
    with refusing(name), _without_collections():
        parts = GgufFiles(paths)
        say_what_fits(name, parts, model.config_of(parts))
        return LoadedGguf(model.build(parts, activations), *read_tokenizer(parts))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disables garbage collection, which a vocabulary's tuples trigger several times over all of torch's objects: 0.3
    s."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def described(name: str, paths: Sequence[Path]) -> Described:
    """Reads no weights.  Raises TargetError."""
    with refusing(name):
        parts = GgufFiles(paths)
        return Described(model.config_of(parts), parts)


def read_tokenizer(parts: GgufFiles) -> tuple[Any, str]:
    """The tokenizer and ""; if it can't be built, None and the reason."""
    try:
        return tokenizer.of_keys(parts.keys), ""
    except tokenizer.NoTokenizer as error:
        return None, str(error)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turns errors of reading a file into TargetError."""
    try:
        yield
    except (OSError, Damaged) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise TargetError(f"target {name!r} can't be read: {reason}; copy or download it again") from None
    except Refused as error:
        raise TargetError(
            f"can't load target {name!r}: {error}; use another file of the model, or its safetensors checkpoint"
        ) from None


def say_what_fits(name: str, parts: GgufFiles, config: Any) -> None:
    """Log the size of the weights, the free memory, and the maximum length of texts.

    Logged as a warning if that is less than the model's context.  Raises TargetError if not even the weights fit.
    """
    free, weights, context = machine.free_memory(), parts.weight_bytes, config.max_position_embeddings
    if weights > free:
        raise TargetError(
            f"target {name!r} takes {_gb(weights)} of memory, but {_gb(free)} are free; use a file with fewer bits "
            "per weight, or a smaller model"
        )
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # keys and values in float32, in all layers
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    fits = min((free - weights) // token_bytes, context)
    level = logging.INFO if fits == context else logging.WARNING
    log.log(
        level, "%s: %s of weights in %s, %s free: texts of %s tokens fit, out of a context of %s", name, _gb(weights),
        kinds(parts), _gb(free), f"{fits:,}", f"{context:,}",
    )  # fmt: skip


def kinds(parts: GgufFiles) -> str:
    """The types of its matrices, largest share first, such as `q4_1 and q8_0`."""
    sizes: Counter[str] = Counter()
    for info in parts.tensors.values():
        if len(info.shape) > 1:
            sizes[info.kind.lower()] += info.size
    return " and ".join(kind for kind, _ in sizes.most_common(3))


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"
