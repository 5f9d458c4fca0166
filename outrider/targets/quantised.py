"""Quantised models: linear layers in int8 or in the blocks of GGUF files, and checkpoints that are already quantised.

q8_0, q4_0 and q4_k round the weights of linear layers to blocks (`kernels.rounding`), which our kernels multiply on a
CPU in float32.  A target's embedding and output layer become q8_0.

int8 is torchao's weight-only int8, symmetric, with one scale per row of a weight; it takes a quarter of float32's
memory.  The output is that of the quantised model.  Embedding and output layer are not quantised, since drafters borrow
them, nor are norms or anything other than `nn.Linear`, such as fused experts.  Products run in the dtype of the
activations, so a pass of many rows differs from single rows only by rounding, as without quantisation.

int8-dynamic, which also rounds activations, is refused.  There, a token's result does not depend on its neighbours, but
a difference of 1e-7 can move a value across a step of 1/127: on the demo target, logits of single steps and of a pass
over the same tokens differ by 0.2, at values of up to 15; those of float32 and int8 differ by 1e-5.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer

from outrider.config import Quantization
from outrider.errors import ConfigError, TargetError, first_line
from outrider.kernels import rounding
from outrider.kernels.blocks import BLOCKS
from outrider.kernels.quantized import Activations, QuantizedEmbedding, QuantizedLinear
from outrider.targets.parallel import spread

MODES: tuple[str, ...] = get_args(Quantization)
IN_BLOCKS = (QuantizedLinear, QuantizedEmbedding)
"""Modules whose weights are the blocks of a GGUF file."""
DEQUANTISED = {"compressed-tensors": (), "fp8": (), "mxfp8": (), "mxfp4": ("cpu",)}
"""Methods whose checkpoints are dequantised as they load, on these devices, or on all if none is named.  In their usual
mode they round activations, and with the first one, a pass of several tokens differs from single steps."""
ROUNDS_ACTIVATIONS = ("bitnet", "fbgemm_fp8", "fouroversix", "fp8", "fp_quant", "mxfp8", "nvfp4", "bitsandbytes_8bit")
"""Methods that always round activations."""


def quantise(model: nn.Module, mode: str, head: nn.Module | None = None, activations: Activations = "float32") -> None:
    """Quantise the linear layers of `model` in place.  Raises the errors of `check_mode`.

    head: a target's output layer; int8 leaves it unchanged, block types turn it and the embedding into q8_0.
    """
    check_mode(mode)
    chosen = [part for part in model.modules() if isinstance(part, nn.Linear) and part is not head]
    if not chosen:
        raise ConfigError(
            f"quantize={mode!r} has no effect on {type(model).__name__}, which has no linear layers; leave it out"
        )
    if mode in rounding.MODES:
        _in_blocks(model, mode, head, activations)
    else:
        _in_int8(model, chosen)


def _in_int8(model: nn.Module, chosen: Sequence[nn.Linear]) -> None:
    from torchao import quantization  # an extra

    doubles = [layer for layer in chosen if layer.weight.dtype == torch.float64]
    for layer in doubles:  # torchao does not read float64
        layer.weight = nn.Parameter(layer.weight.detach().float(), requires_grad=False)
    with torch.no_grad():
        quantization.quantize_(
            model, quantization.Int8WeightOnlyConfig(), filter_fn=lambda part, _: any(part is layer for layer in chosen)
        )
    for layer in doubles:
        made: Any = layer.weight
        layer.weight = nn.Parameter(
            type(made)(made.qdata, made.scale, made.block_size, torch.float64), requires_grad=False
        )


def _in_blocks(model: Any, mode: str, head: Any, activations: Activations) -> None:
    made: dict[nn.Module, QuantizedLinear] = {}
    embedding = None if head is None else model.get_input_embeddings()
    is_tied = embedding is not None and embedding.weight is head.weight
    for name, part in list(model.named_modules(remove_duplicate=False)):
        kind = rounding.kind_of(mode, part is head, part.in_features) if isinstance(part, nn.Linear) else None
        if kind is None:
            continue
        if part not in made:
            bias = None if part.bias is None else part.bias.detach()
            raw = rounding.rounded(kind, part.weight)
            made[part] = QuantizedLinear.from_blocks(kind, raw, part.in_features, bias, activations)
        model.set_submodule(name, made[part])
    # other classes scale what they look up
    if type(embedding) is not nn.Embedding or (kind := rounding.kind_of(mode, True, embedding.embedding_dim)) is None:
        return
    if is_tied and head in made:
        model.set_input_embeddings(QuantizedEmbedding.of(made[head]))
    else:
        raw = rounding.rounded(kind, embedding.weight)
        model.set_input_embeddings(QuantizedEmbedding.from_blocks(kind, raw, embedding.embedding_dim))


def check_mode(mode: str) -> None:
    """Raises ConfigError for an unknown mode, TargetError if torchao is needed but missing."""
    if mode == "int8-dynamic":
        raise ConfigError(f"quantize={mode!r} is refused: {_DYNAMIC}; choose 'int8', which rounds only weights")
    if mode not in MODES:
        raise ConfigError(f"quantize={mode!r} is not known; choose {' or '.join(map(repr, MODES))}, or leave it out")
    if mode in rounding.MODES:
        return
    try:
        import torchao.quantization  # noqa: F401
    except ImportError as error:
        raise TargetError(
            f"quantize={mode!r} needs torchao ({error}); pip install 'outrider[quantize]', take q8_0, or leave "
            "quantize out"
        ) from None


def is_quantised(weight: object) -> bool:
    """Whether it is a tensor subclass made of other tensors, such as torchao's int8 values and scales."""
    return isinstance(weight, Tensor) and is_traceable_wrapper_subclass(weight) and not spread.is_part(weight)


def precision(model: nn.Module) -> str | None:
    """The type of quantised weights: int8, that of most blocks of a GGUF file, or the name of another method; None if
    they are not quantised."""
    if blocks := parts_in_blocks(model):
        sizes: Counter[str] = Counter()
        for part in blocks:
            sizes[part.kind.lower()] += part.rows * part.columns
        rounds = any(isinstance(part, QuantizedLinear) and part.activations == "int8" for part in blocks)
        return sizes.most_common(1)[0][0] + " with int8 activations" * rounds
    types = {type(weight).__name__ for weight in model.parameters() if is_quantised(weight)}
    if types:
        return "int8" if types == {"Int8Tensor"} else "+".join(sorted(types))
    return _method(_settings_of(getattr(model, "config", None)))


def whole_weights(config: Any, name: str, device: torch.device, device_map: Any = None) -> Any:
    """The quantization_config with which transformers dequantises a checkpoint; None to load it as it is.

    config: the checkpoint's.  Reads no weights.  Raises TargetError for a method that transformers does not know, that
    rounds activations, or whose library or device is missing.
    """
    settings = _settings_of(config)
    method = _method(settings)
    if method is None:
        return None
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise TargetError(
            f"{name} is quantised with {method!r}, which transformers does not know, so it would use the stored "
            "numbers as the weights; use an unquantised checkpoint, or one quantised with "
            f"{', '.join(sorted(DEQUANTISED))} or torchao"
        )
    if method not in DEQUANTISED:
        _refuse_activations(settings, name)
        try:
            quantiser = AutoHfQuantizer.from_config(settings, pre_quantized=True)
            quantiser.validate_environment(device_map=device_map, weights_only=True)
        except (ImportError, RuntimeError, ValueError, TypeError) as error:
            raise TargetError(
                f"{name} is quantised with {method!r}, which can't be read here: {first_line(error)}; install what it "
                "names, use a device that supports it, or use an unquantised checkpoint"
            ) from error
        return None
    if DEQUANTISED[method] and device.type not in DEQUANTISED[method]:
        return None
    logging.getLogger(__name__).info("%s is quantised with %s; its weights are dequantised as they load", name, method)
    return AUTO_QUANTIZATION_CONFIG_MAPPING[method](dequantize=True)


def check(model: Any, name: str) -> None:
    """Raises TargetError if text would depend on the number of tokens in a pass, or if cached keys can't be undone."""
    settings = _settings_of(getattr(model, "config", None))
    generation = getattr(model, "generation_config", None)
    if getattr(generation, "cache_implementation", None) == "quantized" or settings.get("kv_cache_scheme"):
        raise TargetError(
            f"{name} is set to quantise keys and values (cache_implementation or kv_cache_scheme): they are rounded in "
            "groups, so a rejected token changes its neighbours and can't be undone exactly; remove that setting from "
            "generation_config.json or quantization_config, or quantise the weights with quantize='int8'"
        )
    _refuse_activations(settings, name, model.parameters())


def _refuse_activations(settings: Mapping[str, Any], name: str, weights: Iterable[Tensor] = ()) -> None:
    """Raises TargetError if the method, its settings or a weight says that activations are rounded."""
    groups = (settings.get("config_groups") or {}).values()
    if (
        _method(settings) in ROUNDS_ACTIVATIONS
        or any(isinstance(group, Mapping) and group.get("input_activations") for group in groups)
        or any(getattr(weight, key, None) is not None for weight in weights for key in _OF_ACTIVATIONS)
    ):
        raise TargetError(
            f"{name} quantises activations: {_DYNAMIC}; use weight-only quantisation, such as quantize='int8'"
        )


def values(weight: Tensor) -> Tensor:
    """A weight's values, dequantised if it is quantised."""
    whole: Any = weight
    return whole.dequantize(torch.float32).to(weight.dtype) if is_quantised(weight) else weight


def plain(module: nn.Module) -> nn.Module:
    """The module itself or, if any of its weights are quantised, a dequantised copy."""
    if not any(map(is_quantised, module.parameters())) and not parts_in_blocks(module):
        return module
    there = copy.deepcopy(module)
    for name, part in list(there.named_modules()):
        if isinstance(part, QuantizedLinear):
            there.set_submodule(name, _unpacked(part))
    for part in there.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            if is_quantised(weight):
                setattr(part, name, nn.Parameter(values(weight), requires_grad=False))
    return there


# ── weights in the blocks of a GGUF file ──────────────────────────────────────────────────────────────────────────────


def is_of_blocks(precision: str) -> bool:
    """Whether a `precision` is a block type of GGUF files."""
    return precision.split()[0].upper() in BLOCKS


def parts_in_blocks(model: nn.Module) -> list[QuantizedLinear | QuantizedEmbedding]:
    """Modules whose weights are blocks, without an embedding tied to the head."""
    parts = (part for part in model.modules() if isinstance(part, IN_BLOCKS))
    by_address = {part.packed.data_ptr(): part for part in parts}
    return list(by_address.values())


def rows_of(module: Any) -> int:
    """Number of rows in the weights of an embedding or a linear layer."""
    if isinstance(module, IN_BLOCKS):
        return module.rows
    return len(spread.weight_of(module))


def dtype_of(module: Any) -> torch.dtype:
    """The dtype in which an embedding or a linear layer computes."""
    if isinstance(module, IN_BLOCKS):
        return torch.float32
    dtype: torch.dtype = module.weight.dtype
    return dtype


def rows_at(module: Any, ids: Tensor) -> Tensor:
    """Values [n, columns] of these rows [n] of the weights of an embedding or a linear layer."""
    if isinstance(module, IN_BLOCKS):
        return module.values(ids)
    return values(spread.weight_of(module))[ids]


def _unpacked(part: QuantizedLinear) -> nn.Linear:
    """The layer, dequantised."""
    made: nn.Linear = nn.utils.skip_init(nn.Linear, part.columns, part.rows, bias=part.bias is not None)
    made.weight = nn.Parameter(part.dequantized(), requires_grad=False)
    if part.bias is not None:
        made.bias = nn.Parameter(part.bias.detach().clone(), requires_grad=False)
    return made


def parts(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """The plain tensors that a weight is made of, by name."""
    if not is_quantised(weight):
        return [(name, weight)]
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    return [inner for part in names for inner in parts(f"{name}.{part}", getattr(weight, part))]


_DYNAMIC = (
    "rounded activations turn the rounding differences of a pass of several tokens into whole steps of int8, so its "
    "tokens differ from decoding one by one"
)


_OF_ACTIVATIONS = ("act_quant_kwargs", "activation_quantization")
"""Attributes of torchao's tensors that say how activations are rounded."""


def _settings_of(config: Any) -> dict[str, Any]:
    """The quantization_config of a model's config; empty if it has none."""
    settings = getattr(config, "quantization_config", None)
    if settings is None or isinstance(settings, dict):
        return settings or {}
    as_dict: dict[str, Any] = settings.to_dict()
    return as_dict


def _method(settings: Mapping[str, Any]) -> str | None:
    """The name by which transformers knows the method."""
    for bits in (4, 8):
        if settings.get(f"load_in_{bits}bit"):
            return f"bitsandbytes_{bits}bit"
    method = settings.get("quant_method")
    return None if method is None else str(getattr(method, "value", method))
