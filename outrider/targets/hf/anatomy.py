"""The parts of a model: its sizes, trunk, layers and output layer, and what it does to embeddings and logits."""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.errors import TargetError
from outrider.targets.hf import hooks
from outrider.targets.parallel import spread

ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""Names of the cache argument: the first two up to transformers 5.23, the third since."""
BROKEN = (AssertionError, AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What a family raises if it can't be built or does not support something."""
UNBOUNDED = 2**20
"""Context of a family without a limit, whose positions are a bias or a state."""
CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "max_target_positions")


def sizes(model: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, hidden size and context of the part that reads text.  Raises TargetError if the config has none."""
    config = model.config.get_text_config(decoder=True)
    layers, hidden = (getattr(config, name, None) for name in ("num_hidden_layers", "hidden_size"))
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise TargetError(
            f"{type(model).__name__}: its {type(config).__name__} has no num_hidden_layers or no hidden_size; use "
            "transformers' own generate for it"
        )
    # some configs use -1 for no limit
    contexts = [value for name in CONTEXTS if isinstance(value := getattr(config, name, None), int) and value > 0]
    context = contexts[0] if contexts else UNBOUNDED
    rope = getattr(config, "rope_parameters", None) or {}
    if "dynamic" in str(rope.get("rope_type")):  # the config then has the pretraining context
        context = int(context * rope["factor"])
    return layers, hidden, context


def trunk(model: PreTrainedModel) -> nn.Module:
    """The model without its output layer; some families name it differently from what they declare."""
    base = model.base_model
    if base is not model:
        return base
    if hasattr(model, "model"):
        return model.model
    part = model.get_decoder()
    # models that read images may contain a whole causal LM
    return trunk(part) if part is not model and part.get_output_embeddings() is not None else part


def output_layer(model: PreTrainedModel) -> Any:
    """The module that turns hidden states into logits; if the model names none, that of a causal LM within it."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((head for part in parts if (head := part.get_output_embeddings()) is not None), None)


def head_transform(raw: Tensor, logits: Tensor, config: Any) -> Callable[[Tensor], Tensor] | None:
    """What the family does to the output layer's values: nothing, a factor or a soft cap; None if unknown."""
    cap = getattr(config, "final_logit_softcapping", None)
    # some families return logits in another dtype than the layer's
    if cap and torch.allclose((cap * torch.tanh(raw / cap)).double(), logits.double(), rtol=1e-3, atol=1e-5):
        return lambda values: cap * torch.tanh(values / cap)
    scale = _ratio(raw, logits)
    if scale is None:
        return None
    return (lambda values: values) if scale == 1.0 else (lambda values: values * scale)


def _ratio(before: Tensor, after: Tensor) -> float | None:
    """The factor between two tensors; None if it is not constant."""
    if before.shape != after.shape:
        return None
    before, after = before.double(), after.double()
    scale = float((before * after).sum() / (before * before).sum().clamp(min=1e-30))
    is_one = torch.allclose(before * scale, after, rtol=1e-2, atol=1e-3 * float(after.abs().max()))
    return (1.0 if abs(scale - 1) < 1e-3 else scale) if is_one else None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The layers that a pass over text runs, in order.  Raises TargetError if no list of them is found."""
    count, _, _ = sizes(model)
    # the text part first: a vision tower may have as many layers
    parts = (module for part in (model.get_decoder(), trunk(model)) for module in part.modules())
    lists = list(dict.fromkeys(part for part in parts if isinstance(part, nn.ModuleList) and len(part) == count))
    for layers in lists:
        if len(lists) == 1 or _reads_text(model, layers[0]):
            return layers
    # in some families a layer counts as two in the config
    declared: Any = getattr(model.get_decoder(), "layers", None)
    if isinstance(declared, nn.ModuleList):
        return declared
    raise TargetError(
        f"{type(model).__name__} has no list of {count} decoder layers to tap; use transformers' own generate for it"
    )


@torch.inference_mode()
def _reads_text(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Whether a pass over text runs this layer."""
    calls: list[bool] = []
    hook = layer.register_forward_pre_hook(hooks.of_this_thread(lambda *_: calls.append(True)))
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    finally:
        hook.remove()
    return bool(calls)


@torch.inference_mode()
def measure_ends(target: Any, text: list[int]) -> tuple[float, Callable[[Tensor], Tensor], Tensor]:
    """The factor on embeddings before the first layer, the transform of the output layer's values, and the logits [S,
    V].  target: a TransformersTarget whose parts are known."""
    tokens = torch.tensor([text], device=target.device)
    words: list[Tensor] = []
    record = hooks.of_this_thread(
        lambda _module, args, kwargs: words.append(args[0] if args else kwargs["hidden_states"])
    )
    hook = target._decoder_layers[0].register_forward_pre_hook(record, with_kwargs=True)
    with target._catching(()) as caught:
        logits = target.model(input_ids=tokens, use_cache=False).logits
    hook.remove()
    if not bool((logits < torch.inf).all()):
        raise TargetError(
            f"{target.spec.name}'s logits contain NaN or infinity; load it in float32 or bfloat16, since float16 "
            "overflows, and check for weights that are not finite"
        )
    finish = head_transform(
        target._head.forward(caught[target._model_head]), logits, target.model.config.get_text_config()
    )
    if finish is None:
        logging.getLogger(__name__).warning(
            "%s changes its logits after the output layer in an unknown way: drafters that use the target's head guess "
            "worse; the output is still the target's", target.spec.name,
        )  # fmt: skip
    scale = _ratio(target._embedding(tokens), words[0])  # None if they differ by more than a factor
    return 1.0 if scale is None else scale, finish or (lambda values: values), logits[0]


class PartialHead(nn.Module):
    """An output layer over some of its tokens: frozen copies of their rows, and what the family does to logits."""

    def __init__(
        self, rows: Tensor, bias: Tensor | None, finish: Callable[[Tensor], Tensor], dtype: torch.dtype
    ):  # fmt: skip
        """rows [n, H], bias [n]."""
        super().__init__()
        # without initialising weights: training may be in progress, whose random state must not change
        layer: Any = nn.utils.skip_init(
            nn.Linear, rows.shape[1], len(rows), bias=bias is not None, device=rows.device, dtype=dtype
        )
        self.rows = layer.requires_grad_(False)
        self.rows.weight.copy_(rows)
        if bias is not None:
            self.rows.bias.copy_(bias)
        self.finish = finish

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., H]; returns [..., n]."""
        return self.finish(self.rows(hidden.to(self.rows.weight.dtype)))


def copied(module: nn.Module, device: torch.device) -> Any:
    """A copy of a module without children on another device, without hooks and packed weights."""
    there = copy.copy(module)
    there.__dict__.pop("forward", None)
    there._forward_pre_hooks = OrderedDict()
    there._parameters = {
        name: None if weight is None else nn.Parameter(spread.weight_of(module, name).to(device), requires_grad=False)
        for name, weight in module._parameters.items()
    }
    there._buffers = {name: None if values is None else values.to(device) for name, values in module._buffers.items()}
    return there


def cache_argument(taken: Container[str]) -> str:
    """The first of ARGUMENTS that is in `taken`; the newest if there is none."""
    return next((name for name in ARGUMENTS if name in taken), ARGUMENTS[-1])


@torch.inference_mode()
def final_norm(target: Any, text: list[int]) -> nn.Module:
    """The module between the last layer and the output layer; an identity if there is none.

    target: a TransformersTarget.  Raises TargetError if no module reproduces the target's own passes.
    """
    hidden, taps = target.read(torch.tensor([text], device=target.device), (target.spec.layers - 1,))
    last = taps[:, :, 0]
    if torch.allclose(last, hidden):
        return nn.Identity()
    layers = target._decoder_layers
    owners = (part for part in target.model.modules() if any(child is layers for child in part.children()))
    for module in (child for part in owners for child in part.children() if child is not layers):
        try:
            output = module(last)
        except BROKEN:
            continue
        if (
            isinstance(output, Tensor)
            and output.shape == hidden.shape
            and torch.allclose(output, hidden, rtol=1e-2, atol=1e-3)
        ):
            return module
    raise TargetError(
        f"{target.spec.name} has no module that turns the states of its last layer into its final ones, so an engine's "
        "states can't be used; set prepare.features to live or cached"
    )
