"""A transformers model whose matrices stay in the blocks of a GGUF file.

The model is built without values; then each tensor is read, repacked and put in its place, so that the file is in
memory once and only one matrix at a time twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from outrider.kernels.blocks import BLOCKS, PLAIN, dequantized, row_bytes
from outrider.kernels.quantized import Activations, QuantizedEmbedding, QuantizedLinear
from outrider.targets.gguf import architectures, reader, rotary, tokenizer
from outrider.targets.gguf.architectures import WHOLE, Architecture
from outrider.targets.gguf.keys import Keys, Refused
from outrider.targets.gguf.reader import Damaged, Info, shown

BROKEN = (
    AssertionError,
    AttributeError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    ZeroDivisionError,
)
"""What transformers' classes raise for unexpected sizes."""
FACTORS = (rotary.DIVISORS, rotary.SHORT, rotary.LONG)
HEAD = WHOLE["output"]


class GgufFiles:
    """The files of one model: its keys, and the bytes of its tensors."""

    def __init__(self, paths: Sequence[Path]):
        """Raises Damaged for files that don't belong together or contain a tensor twice; OSError."""
        headers = [reader.read_header(path) for path in paths]
        self.paths, self.keys = tuple(paths), headers[0].keys
        self.tensors: dict[str, Info] = {}
        self._place: dict[str, Path] = {}
        for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
            if (count := header.keys.get("split.count", 1)) not in (0, len(paths)) or (
                len(paths) > 1 and header.keys.get("split.no") != number
            ):
                raise Damaged(f"{path.name} says that it is number {header.keys.get('split.no')} of {count} files")
            if twice := self.tensors.keys() & header.tensors.keys():
                raise Damaged(f"{shown(min(twice))} is in two of its files")
            self.tensors |= header.tensors
            self._place |= dict.fromkeys(header.tensors, path)
        expected = self.keys.get("split.tensors.count", len(self.tensors))
        if len(paths) > 1 and expected != len(self.tensors):
            raise Damaged(f"its files have {len(self.tensors)} tensors, but declare {shown(str(expected))}")

    @property
    def weight_bytes(self) -> int:
        """Of all tensors."""
        return sum(info.size for info in self.tensors.values())

    def factors(self, name: str) -> list[float] | None:
        """The values of a vector; None if missing.  Raises Refused if it is not a vector of floats."""
        if name not in self.tensors:
            return None
        with reader.opened(self._place[name]) as file:
            numbers: list[float] = _vector(name, self.tensors[name], file).tolist()
        return numbers

    def in_order(self, names: Sequence[str], stack: ExitStack) -> list[tuple[str, Info, BinaryIO]]:
        """All tensors with their open files: the small vectors first, then matrices in the order of these names without
        suffix, so that matrices multiplied together are adjacent in memory."""
        files = {path: stack.enter_context(reader.opened(path)) for path in self.paths}
        rank = {name: i for i, name in enumerate(names)}
        order = sorted(self.tensors, key=lambda name: (len(self.tensors[name].shape), rank.get(stem_of(name), -1)))
        return [(name, self.tensors[name], files[self._place[name]]) for name in order]


def stem_of(name: str) -> str:
    """A tensor's name without `.weight` or `.bias`."""
    return name.rpartition(".")[0]


def config_of(parts: GgufFiles) -> Any:
    """The transformers config of a model.  Raises Refused, see `architectures.config`."""
    keys = Keys(parts.keys)
    fields = architectures.config(keys, parts.tensors, parts.factors)
    ends = tokenizer.ends(parts.keys)
    special: dict[str, Any] = {
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        **tokenizer.special_ids(parts.keys),
    }
    tokens = parts.keys.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > fields["vocab_size"]:
        raise Refused(f"it has {len(tokens)} tokens, but {fields['vocab_size']} rows in its embedding")
    with _refusing():
        return AutoConfig.for_model(**fields, **special, dtype=torch.float32)


def _without_values(config: Any) -> Any:
    with _refusing(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turns errors of transformers for its sizes into Refused."""
    try:
        yield
    except BROKEN as error:
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise Refused(f"transformers can't build a model of its sizes: {reason[0]}") from error


def build(parts: GgufFiles, activations: Activations = "float32") -> PreTrainedModel:
    """The model.  Raises Refused if it is not supported, Damaged for a file that is truncated in the meantime;
    OSError."""
    config, arch = config_of(parts), architectures.architecture(Keys(parts.keys))
    model: Any = _without_values(config)
    names = arch.names(config.num_hidden_layers)
    _check(parts.tensors, names, model, config.tie_word_embeddings)
    model.eval().requires_grad_(False)
    vectors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        for name, info, file in parts.in_order(list(names), stack):
            if name in FACTORS:
                continue
            path, leaf = names[stem_of(name)], name.rpartition(".")[2]
            if len(info.shape) == 1:
                _set_vector(model, path, leaf, _whole_vector(name, info, file, arch, config), vectors)
            else:
                _set_matrix(model, path, _matrix(name, info, file, arch, config), info, vectors, activations)
    _compute_buffers(model, config)
    ends = tokenizer.ends(parts.keys)
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, **tokenizer.special_ids(parts.keys), do_sample=False
    )
    built: PreTrainedModel = model
    return built


def _check(tensors: Mapping[str, Info], names: Mapping[str, str], model: nn.Module, is_tied: bool) -> None:
    """Raises Refused unless the file has exactly the model's weights, with its shapes, in readable types."""
    expected = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    if is_tied:
        expected.pop(f"{HEAD}.weight", None)
    for name, info in tensors.items():
        if name in FACTORS:
            continue
        shape = expected.pop(f"{names.get(stem_of(name))}.{name.rpartition('.')[2]}", None)
        if shape is None:
            raise Refused(f"it has the tensor {shown(name)}, which {type(model).__name__} does not have")
        if shape != info.shape:
            raise Refused(f"it has {shown(name)} with shape {info.shape}, but its keys require {shape}")
        if info.kind not in BLOCKS:
            raise Refused(f"it has {shown(name)} in {info.kind}, which is not supported; use {', '.join(BLOCKS)}")
    if expected:
        raise Refused(f"it lacks {len(expected)} of the model's weights, such as {min(expected)}")


# ── vectors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _vector(name: str, info: Info, file: BinaryIO) -> Tensor:
    """float32 [n]."""
    if len(info.shape) != 1 or info.kind not in PLAIN:
        raise Refused(f"it has {shown(name)} {info.shape} in {info.kind}; a vector must be in {', '.join(PLAIN)}")
    return dequantized(info.kind, reader.read_bytes(file, info)[None], info.shape[0])[0]


def _whole_vector(name: str, info: Info, file: BinaryIO, arch: Architecture, config: Any) -> Tensor:
    """In the class's order, without the converter's addition."""
    vector = _vector(name, info, file)
    if name.endswith("norm.weight"):
        return vector - arch.added_to_norms if arch.added_to_norms else vector
    return _ordered(name, vector[:, None], arch, config)[:, 0].contiguous()


def _set_vector(model: nn.Module, path: str, leaf: str, vector: Tensor, vectors: dict[str, Tensor]) -> None:
    if leaf == "bias":  # set together with its matrix, which may become another module
        vectors[path] = vector
        return
    model.get_submodule(path).register_parameter(leaf, _parameter(vector))


# ── matrices ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _matrix(name: str, info: Info, file: BinaryIO, arch: Architecture, config: Any) -> Tensor:
    """Rows of blocks, uint8 [R, bytes]."""
    rows, columns = info.shape
    return _ordered(name, reader.read_bytes(file, info).view(rows, row_bytes(info.kind, columns)), arch, config)


def _ordered(name: str, rows: Tensor, arch: Architecture, config: Any) -> Tensor:
    """Queries and keys with rows for rotating halves instead of adjacent pairs; whole rows of blocks are moved."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or not arch.rotates_pairs:
        return rows
    order = torch.arange(len(rows)).view(heads, -1, 2).transpose(1, 2).flatten()
    return torch.from_numpy(rows.numpy()[order.numpy()])  # numpy copies whole rows, torch single bytes


def _set_matrix(
    model: nn.Module, path: str, blocks: Tensor, info: Info, vectors: Mapping[str, Tensor], activations: Activations
) -> None:
    """Put a matrix in its place: float32 in torch's own module, all other types in a module that reads blocks."""
    module, bias = model.get_submodule(path), vectors.get(path)
    if isinstance(module, nn.Embedding):
        _set_embedding(model, path, blocks, info, activations)
    elif info.kind == "F32":
        module.weight = _parameter(dequantized("F32", blocks, info.shape[1]))
        if bias is not None:
            module.bias = _parameter(bias)
    else:
        made = QuantizedLinear.from_blocks(info.kind, blocks, info.shape[1], bias, activations)
        model.set_submodule(path, made)


def _set_embedding(model: Any, path: str, blocks: Tensor, info: Info, activations: Activations) -> None:
    """The embedding and a head tied to it, whose blocks are then in memory only once."""
    module, is_tied, columns = model.get_submodule(path), model.config.tie_word_embeddings, info.shape[1]
    # Gemma 3's own embedding class scales its output
    scale = float(columns**0.5) if hasattr(module, "embed_scale") else 1.0
    if info.kind == "F32" and scale == 1.0:
        module.weight = _parameter(dequantized("F32", blocks, columns))
        if is_tied:
            model.get_submodule(HEAD).weight = module.weight
        return
    if not is_tied:
        model.set_submodule(path, QuantizedEmbedding.from_blocks(info.kind, blocks, columns, scale))
        return
    head = QuantizedLinear.from_blocks(info.kind, blocks, columns, None, activations)
    model.set_submodule(HEAD, head)
    model.set_submodule(path, QuantizedEmbedding.of(head, scale))


def _parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


# ── computed buffers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _compute_buffers(model: nn.Module, config: Any) -> None:
    """Rebuild modules with computed buffers, such as rotary frequencies, with values."""
    for name, module in list(model.named_modules()):
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            made: Any = type(module)
            model.set_submodule(name, made(config))
    left = [name for name, weight in (*model.named_parameters(), *model.named_buffers()) if weight.is_meta]
    assert not left, left
