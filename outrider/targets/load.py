"""Load a target: the demo, a checkpoint by name or folder, a GGUF file, or a module already in memory."""

from __future__ import annotations

import logging
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from outrider import machine
from outrider.errors import ConfigError, NotCompiled, OutriderError, TargetError, first_line
from outrider.hub import missing_path
from outrider.kernels import rounding
from outrider.kernels.quantized import Activations
from outrider.storage import cache
from outrider.targets import catalog, quantised
from outrider.targets.gguf import files as gguf_files
from outrider.targets.gguf import load as gguf
from outrider.targets.hf.anatomy import output_layer
from outrider.targets.hf.checkpoints.adapters import merged, without_wrapper
from outrider.targets.hf.checkpoints.classes import loader_of
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.identity import hash_stored, hash_weights, load_tokenizer
from outrider.targets.parallel import tensor_parallel as tensor_parallelism
from outrider.targets.parallel.spread import is_whole
from outrider.targets.progress import no_bars
from outrider.targets.sorts import special
from outrider.targets.text.generation import ends_of
from outrider.targets.text.prompts import unembedded
from outrider.targets.text.turns import closing_of, names_of

log = logging.getLogger(__name__)

Compile = bool | Literal["auto"] | None
"""Whether steps are compiled; see `load_target`."""


def load_target(
    target: str | Path | PreTrainedModel,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    device_map: Any = None,
    tensor_parallel: int = 1,
    quantize: str | None = None,
    quantization: Any = None,
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
    compile: Compile = None,
    activations: str | None = None,
) -> TransformersTarget:
    """Load a causal LM as a target: `demo`, a Hugging Face id, a local folder, a GGUF file, or a module in memory.

    A GGUF file is given by its path, by its folder, or as a file on the hub, OWNER/NAME:FILE.  Its weights stay
    quantised, on the CPU, and are multiplied in float32.  activations: `int8` rounds the activations that such weights
    are multiplied with, so that products are exact sums of integers; also those of `quantize` q8_0, q4_0 and q4_k.

    A folder with an `ensemble.json` is an ensemble (`lab.targets.ensemble`); the options apply to each member.

    dtype: default float32 on a CPU and the checkpoint's own on an accelerator; `auto` is the checkpoint's own if this
    machine multiplies it as fast as float32.  quantize: `q8_0`, `q4_0` and `q4_k` round the weights of the linear
    layers to blocks of GGUF files, including those of a module in memory; the target is then on the CPU and computes in
    float32.  `int8` needs torchao, and steps are not compiled.  quantization is passed to transformers as
    `quantization_config`; without it, checkpoints whose method would round activations are dequantised.  device_map is
    transformers': `auto`, or a device or `disk` for each part.  tensor_parallel: number of processes that share every
    layer; torchrun starts them all, and in all but the first this function does not return: they work until the first
    one finishes, then exit.  adapter: folder of a LoRA adapter, which peft merges into the weights; a peft model in
    memory is used as it is.  If the weights are not in one place, steps are not compiled.  A bare module has no
    tokenizer: its prompts are token ids.
    compile: None uses a compiled step of this model if one is on disk, and captures passes on a CUDA GPU; `auto`
    compiles one if possible (one to two minutes, once per machine); True does too, and raises NotCompiled if it can't;
    False never does.

    Raises TargetError if the model can't be found or loaded, if its plain decoding fails the self-test, or if it
    quantises activations, keys or values; ConfigError for an unknown `quantize` and for options that exclude each
    other.
    """
    if quantize is not None:
        quantised.check_mode(quantize)
    in_blocks, rounds = quantize in rounding.MODES, _rounding(activations)
    if in_blocks:
        _refuse_for_blocks(
            f"quantize {quantize!r}", device=device, dtype=dtype, device_map=device_map, quantization=quantization,
            tensor_parallel=tensor_parallel,
        )  # fmt: skip
        device, dtype = "cpu", torch.float32
    if isinstance(target, nn.Module):
        _refuse_adapter(adapter, "a module in memory")
        if not in_blocks:
            _refuse_activations(activations, type(target).__name__)
        model: Any = without_wrapper(target)
        model = model if device is None else model.to(device)
        model = model if dtype is None else model.to(dtype=_dtype(dtype, model.device, model.dtype))
        return _compiled(TransformersTarget(model, base_hash=_quantised(model, quantize, rounds)), compile)
    name = str(target)
    if (files := gguf_files.locate(catalog.checkpoint(name), revision)) is not None:
        _refuse_for_blocks(
            "weights in a GGUF file", device=device, dtype=dtype, device_map=device_map, quantize=quantize,
            quantization=quantization, tensor_parallel=tensor_parallel,
        )  # fmt: skip
        return _from_gguf(name, files, rounds, compile)
    if not in_blocks:
        _refuse_activations(activations, name)
    if (special_target := special(name)) is not None:
        _refuse_adapter(adapter, f"{name}, which consists of several models or is of another kind")
        sort, described = special_target
        made: TransformersTarget = sort.load(
            name, described, load_target, revision=revision, device=device, dtype=dtype, device_map=device_map,
            quantize=quantize, quantization=quantization, trust_remote_code=trust_remote_code, compile=compile,
            tensor_parallel=tensor_parallel,
        )  # fmt: skip
        return made
    options: dict[str, Any] = {
        "name": name, "dtype": dtype, "quantize": quantize, "quantization": quantization, "revision": revision,
        "trust_remote_code": trust_remote_code, "compile": compile, "activations": rounds,
    }  # fmt: skip
    if tensor_parallel == 1:
        return _from_checkpoint(**options, device=device, device_map=device_map, adapter=adapter)
    _refuse_adapter(adapter, f"tensor_parallel {tensor_parallel}")
    _refuse_with_parts(
        tensor_parallel, device=device, device_map=device_map, quantize=quantize, quantization=quantization
    )
    calls = tensor_parallelism.join(tensor_parallel)
    if calls.rank:
        tensor_parallelism.work(calls, _from_checkpoint)
    if dtype == "auto":  # decided here, since measurements on other machines may differ
        path = catalog.checkpoint(name)
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
        options["dtype"] = dtype_of(config, dtype, default_device())
    leader: Any = tensor_parallelism.lead(calls, _from_checkpoint, options | {"parts": tensor_parallel})
    return leader


def work_for_first(tensor_parallel: int) -> None:
    """In the first of the processes that share a target, do nothing; in the others, work for it and never return."""
    if tensor_parallelism.is_worker(tensor_parallel):
        tensor_parallelism.work(tensor_parallelism.join(tensor_parallel), _from_checkpoint)


def _refuse_adapter(adapter: str | Path | None, what: str) -> None:
    if adapter is not None:
        raise ConfigError(f"adapter {str(adapter)!r} can't be used with {what}; merge it first with merge_and_unload")


def _refuse_activations(activations: str | None, name: str) -> None:
    if activations is not None:
        raise ConfigError(
            f"activations {activations!r} is for weights in blocks, and {name} has none; give a GGUF file, set "
            f"quantize to {' or '.join(rounding.MODES)}, or leave it out"
        )


def _refuse_with_parts(count: int, **options: Any) -> None:
    """Raises ConfigError for options that exclude tensor_parallel."""
    if count < 1:
        raise ConfigError(f"tensor_parallel must be at least 1, got {count}")
    why = {
        "device": "each process has its own device", "device_map": "both place the weights",
        "quantize": "parts of a layer are not quantised", "quantization": "parts of a layer are not quantised",
    }  # fmt: skip
    for name, value in options.items():
        if value is not None:
            raise ConfigError(
                f"tensor_parallel {count} can't be used with {name} {value!r}: {why[name]}; leave one out"
            )


def _from_gguf(name: str, files: Sequence[Path], activations: Activations, compile: Compile) -> TransformersTarget:
    """The target of a GGUF file, whose weights stay quantised."""
    model, tokenizer, reason = gguf.load(name, files, activations)
    if reason:
        log.warning("no tokenizer for %s (%s): prompts must be token ids", name, reason)
    return _compiled(TransformersTarget(model, tokenizer, name), compile)


def _rounding(activations: str | None) -> Activations:
    """The type of activations.  Raises ConfigError for an unknown one."""
    if activations not in (None, "float32", "int8"):
        raise ConfigError(f"unknown activations {activations!r}; choose float32 or int8, or leave it out")
    return "int8" if activations == "int8" else "float32"


def _refuse_for_blocks(what: str, **options: Any) -> None:
    """Raises ConfigError for options that weights in blocks exclude."""
    fits = {"device": ("cpu",), "dtype": ("auto", "float32"), "tensor_parallel": ("1",)}
    why = {
        "device": "they are multiplied on the CPU", "dtype": "they are multiplied in float32",
        "tensor_parallel": "they can't be split",
    }  # fmt: skip
    for name, value in options.items():
        if value is not None and str(value).removeprefix("torch.") not in fits.get(name, ()):
            reason = why.get(
                name, "they are quantised already" if name.startswith("quant") else "they are already in one place"
            )
            raise ConfigError(f"{name} {value!r} can't be used with {what}: {reason}; leave it out")


def _from_checkpoint(
    *, name: str, device: str | torch.device | None = None, dtype: str | torch.dtype | None, device_map: Any = None,
    quantize: str | None, quantization: Any, revision: str | None, trust_remote_code: bool,
    compile: Compile, activations: Activations = "float32", adapter: str | Path | None = None, parts: int = 1,
) -> TransformersTarget:  # fmt: skip
    """The target of a checkpoint, like `load_target`.  parts: number of processes that share its layers."""
    if device is not None and device_map is not None:
        raise ConfigError(f"device {device!r} and device_map both place the weights; leave one out")
    path = catalog.checkpoint(name)
    device = default_device(device)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    spread: dict[str, Any] = {"device_map": device_map}
    rewritten: tempfile.TemporaryDirectory[str] | None = None
    if device_map is not None:  # accelerate rewrites some layers that stay on disk
        try:
            cache.folder().mkdir(parents=True, exist_ok=True)
            rewritten = tempfile.TemporaryDirectory(prefix="offload-", dir=cache.folder())
        except OSError as error:
            raise TargetError(f"layers can't be stored in {cache.folder()}: {error}; set OUTRIDER_CACHE") from None
        spread["offload_folder"] = rewritten.name
    if parts > 1:
        spread = {"distributed_config": DistributedConfig(tp_size=parts)}
    try:
        if (problem := missing_path(path)) is not None:
            raise OSError(problem)
        config = AutoConfig.from_pretrained(path, **options)
        weight_dtype: Any = "auto" if dtype is None and device.type != "cpu" else dtype_of(config, dtype, device)
        whole = None if quantization is not None else quantised.whole_weights(config, name, device, device_map)
        read_as = quantization if whole is None else whole
        # passing None would override the checkpoint's own quantization_config
        method = {} if read_as is None else {"quantization_config": read_as}
        with no_bars():
            loaded: Any = loader_of(config, name).from_pretrained(
                path, dtype=weight_dtype, output_loading_info=True, **options, **method, **spread
            )
        model, loading_info = loaded
        if whole is not None and isinstance(weight_dtype, torch.dtype):
            model = model.to(weight_dtype)  # dequantised weights are still in the dtype of their scales
        tokenizer, reason = load_tokenizer(path, **options)
        if adapter is not None and not loading_info["missing_keys"]:
            model = merged(model, adapter)
        if reason:
            log.warning("no tokenizer for %s (%s): prompts must be token ids", path, reason)
    except OutriderError:
        raise
    except Exception as error:  # every family and file format fails in its own way
        advice = (
            "give `demo`, `smollm2`, a folder with config.json and safetensors, a GGUF file, or a Hugging Face id "
            "(needs the network once)"
        )
        if isinstance(error, ImportError | RuntimeError):  # such as a missing quantisation library or device
            advice = "install what it names, use a device that supports it, or use an unquantised checkpoint"
        if "contains custom code" in str(error):
            advice = "review that code, then allow it with trust_remote_code"
        raise TargetError(f"can't load target {name!r}: {first_line(error)}; {advice}") from error
    if loading_info["missing_keys"]:  # transformers fills them with random numbers
        missing = sorted(loading_info["missing_keys"])
        raise TargetError(
            f"target {name!r} lacks {len(missing)} of its weights, such as {missing[0]}; copy it again, or use the "
            "checkpoint of a whole causal LM"
        )
    # some quantised models can't be moved, not even to the device they are on
    if device_map is None and parts == 1 and model.device != torch.empty(0, device=device).device:
        model = model.to(device)
    if rewritten is not None:
        weakref.finalize(model, rewritten.cleanup)
    hashed = None if is_whole(model) else hash_stored(path, revision, model) or None
    base = _quantised(model, quantize, activations)
    return _compiled(TransformersTarget(model, tokenizer, name, revision, base, weights_hash=hashed), compile)


def default_device(requested: str | torch.device | None = None) -> torch.device:
    """The requested device; by default a CUDA GPU if available, otherwise the CPU."""
    return torch.device(requested or ("cuda" if torch.cuda.is_available() else "cpu"))


def _quantised(model: Any, quantize: str | None, activations: Activations) -> str | None:
    """Quantise the model.  Returns the hash of the weights before quantisation; None without `quantize`."""
    if quantize is None:
        return None
    if (already := quantised.precision(model)) is not None:
        raise TargetError(f"the target's weights are already {already}; leave out quantize={quantize!r}")
    base = hash_weights(model)
    quantised.quantise(model, quantize, output_layer(model), activations)
    return base


def _compiled(target: TransformersTarget, compile: Compile) -> TransformersTarget:
    if not target.is_whole:
        log.warning(
            "%s: its weights are not all in one place, so its steps are not compiled and don't use our kernels",
            target.spec.name,
        )  # fmt: skip
        compile = False
    is_auto = compile == "auto" and target.step.is_possible
    if compile is True:
        target.compile()
    elif is_auto or (compile is not False and target.device.type == "cuda"):  # a GPU captures them in seconds
        with suppress(NotCompiled):
            target.compile()
    if compile is not False:
        target.step.look()
    _warn_if_slow(target)
    _warn_of_text(target)
    return target


def dtype_of(config: Any, dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype in which a checkpoint's weights are loaded.  config: the checkpoint's; dtype: as in `load_target`."""
    stored = config.get_text_config().dtype
    if dtype is None:
        return torch.float32 if device.type == "cpu" else stored or torch.float32
    return _dtype(dtype, device, stored)


def _dtype(dtype: str | torch.dtype, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """The requested dtype; for `auto`, the stored one if this device multiplies it fast, otherwise float32."""
    if dtype == "auto":
        stored = stored or torch.float32
        return machine.decoding_dtype(stored) if device.type == "cpu" else stored
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise TargetError(
            f"dtype {dtype!r} is not a floating-point type of torch; use float32, bfloat16, float16, float64 or auto"
        )
    return resolved


def _warn_if_slow(target: TransformersTarget) -> None:
    """Warn if this CPU multiplies the target's dtype much more slowly than another."""
    spec = target.spec
    is_fast = spec.dtype == "float32" and spec.quantised is None
    if target.device.type != "cpu" or is_fast or quantised.parts_in_blocks(target.model):
        return
    way = spec.dtype if spec.quantised is None else machine.INT8
    slow = machine.slow_type(way, column=str(machine.ROWS[1]))
    if slow is not None:
        advice = "dtype=float32 is faster" if spec.quantised is None else "it saves memory, not time"
        log.warning("%s in %s: %s; %s", spec.name, spec.precision, slow, advice)


def _warn_of_text(target: TransformersTarget) -> None:
    """Warn if generation_config, tokenizer and chat template name different end tokens, and about tokens without an
    embedding."""
    stops, tokenizer = ends_of(target.model), target.tokenizer
    named = getattr(target.model.config.get_text_config(), "eos_token_id", None)
    if named is not None and not target.ends:
        log.warning(
            "%s: its config names the end token %s, but its generation_config none, so texts run to their limit, as "
            "with model.generate; set model.generation_config.eos_token_id to end them there", target.spec.name, named,
        )  # fmt: skip
        return
    if tokenizer is None:
        return
    if more := unembedded(tokenizer, target.spec.vocabulary):
        log.warning(
            "%s: %d tokens of its tokenizer have no row in its embedding of %d rows, such as %r; texts with them are "
            "refused", target.spec.name, len(more), target.spec.vocabulary, next(iter(more)),
        )  # fmt: skip
    closing = closing_of(tokenizer)
    named_ends = {"tokenizer": tokenizer.eos_token_id, "chat template": None if closing is None else closing.end}
    missing = {place: end for place, end in named_ends.items() if end is not None and end not in stops}
    if missing:
        others = "; ".join(
            f"its {place} specifies the end token {names_of([end], tokenizer)}" for place, end in missing.items()
        )
        log.warning(
            "%s: %s, and its generation_config %s; texts end at %s.  Set target.ends for others", target.spec.name,
            others, names_of(sorted(stops), tokenizer), names_of(sorted(target.ends), tokenizer),
        )  # fmt: skip
