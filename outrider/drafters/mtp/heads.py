"""MTP modules that a target ships, as transformers builds them.  (arXiv 2412.19437.)

They run step by step with the caller's attention, so a draft may have more steps than modules, or be a tree.

B texts, n positions, H hidden size, h heads, d head size, V vocabulary.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.errors import DrafterError, first_line
from outrider.storage.json_text import parse_json
from outrider.storage.trusted import regular
from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.progress import no_bars
from outrider.targets.protocol import Target

ATTENTION = "outrider"
"""The name of our attention in transformers."""
Attend = Callable[..., Tensor]
"""(q, k, v, layer, sinks) → the attention's output, like `nn.blocks.Attend`."""


Causal = Callable[[Tensor, Sequence[AttentionLimit | None]], Attend]
"""(positions [1, n], limits of each layer) → causal attention over a text at these positions."""


class NativeModules:
    """The layers of a transformers MtpModel.  Raises DrafterError if Outrider can't run them."""

    def __init__(self, shipped: Any, target: Target, causal: Causal):
        self.target = target
        self.limits = limits_of(shipped.config, len(shipped.layers))
        self.layers: nn.ModuleList = shipped.layers.requires_grad_(True)
        self.shared_post_norm = shipped.shared_post_norm.requires_grad_(True) if shipped.use_shared_post_norm else None
        # the caller moves the layers, perhaps to bf16; the target's frequencies must keep their dtype
        self._rotary = copy.deepcopy(shipped.rotary_emb)
        self._kinds = shipped.config.layer_types if shipped.has_per_layer_rope else None
        self._prove(shipped, causal)

    def step(self, module: int, words: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """A module's output [B, n, H] for words and states, both [B, n, H], at positions [B or 1, n]."""
        cos_sin = None
        if self._rotary is not None:
            kind = {} if self._kinds is None else {"layer_type": self._kinds[module]}
            cos_sin = self._rotary.to(words.device)(words, position_ids=positions, **kind)
        # mask and cache are None, by position: their names differ between versions
        output = self.layers[module](words, states, cos_sin, None, positions, None, attend=attend)
        return output if self.shared_post_norm is None else self.shared_post_norm(output)

    @torch.no_grad()
    def _prove(self, shipped: Any, causal: Causal) -> None:
        """Run the modules with our attention and compare with transformers' own pass.

        Raises DrafterError if they differ, since a family may do something unusual.
        """
        from transformers import AttentionInterface
        from transformers.cache_utils import MtpCache

        target, first = self.target, shipped.layers[0].eh_proj.weight
        windows = [limit.size for limit in self.limits if limit]
        length = len(self.layers) + max([8, *(min(2 * size, 64) for size in windows)])
        tokens = (torch.arange(length) * 7 % target.spec.vocabulary)[None].to(first.device)
        noise = torch.randn(1, length, target.spec.hidden, generator=torch.Generator().manual_seed(0))
        begin = states = noise.to(first)
        positions = torch.arange(length, device=first.device)[None]

        cache, expected = MtpCache(config=shipped.config), []
        for number in range(len(self.layers)):
            states, at = states[:, : length - number - 1], positions[:, number + 1 :]
            states = shipped.forward_layer(number, states, at, cache, input_ids=tokens[:, number + 1 :])
            expected.append(shipped._project_to_logits(states))

        AttentionInterface.register(ATTENTION, attention)
        for part in [shipped, *self.layers.modules()]:
            if hasattr(part, "config"):
                part.config._attn_implementation = ATTENTION
        attend, states = causal(positions, self.limits), begin
        try:
            for number, expected_logits in enumerate(expected):
                states, at = states[:, : length - number - 1], positions[:, number + 1 :]
                words = target.embed(tokens[:, number + 1 :].to(target.device)).to(states)
                states = self.step(number, words, states, at, attend)
                logits = target.head(states.to(target.device)).to(first.device)
                allowed = 1e-3 if expected_logits.dtype.itemsize > 2 else 0.05
                if logits.shape != expected_logits.shape or _median_difference(logits, expected_logits) > allowed:
                    raise self._strange(number, "its logits differ from those of transformers' own pass")
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise self._strange(number, first_line(error)) from error

    def _strange(self, number: int, reason: str) -> DrafterError:
        return DrafterError(
            f"module {number} of {self.target.spec.name} can't be run by Outrider: {reason}; set native to no and "
            "train new modules"
        )


def native_modules(target: Target, is_required: bool, causal: Causal) -> NativeModules | None:
    """The modules of this target with their weights; None if it has none and they are not required.

    Raises DrafterError if they are required and missing, or can't be read.
    """
    model: Any = getattr(target, "model", None)
    text = None if model is None else model.config.get_text_config(decoder=True)
    count = 0 if text is None else getattr(text, "num_mtp_layers", None) or modules_on_disk(model)
    if not count:
        if is_required:
            raise DrafterError(
                f"{target.spec.name} ships no modules that transformers knows: its config has no num_mtp_layers "
                "(num_nextn_predict_layers in many checkpoints) above 0, and its checkpoint no weights mtp.layers; set "
                "native to no and train new modules"
            )
        return None
    from transformers.modeling_layers import MtpModel  # takes seconds to import

    _teach_names()
    model.config.dtype = model.dtype  # `save_pretrained` leaves a name there, with which transformers can't load
    try:
        with filled_in(text, count), no_bars():
            shipped = MtpModel.from_pretrained(model, device_map={"": model.device})
    except (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        looked = ", ".join(model._keys_to_ignore_on_load_unexpected or ["nothing: its class names no such weights"])
        problem = (
            f"the config of {target.spec.name} names {count} modules, but transformers can't load them from "
            f"{model.config.name_or_path or 'a model without a folder'} (weights looked for: {looked}): "
            f"{first_line(error)}"
        )
        if is_required:
            raise DrafterError(
                f"{problem}; load the target from its whole checkpoint, or set native to no and train new modules"
            ) from error
        logging.getLogger(__name__).warning("%s; untrained modules are used instead", problem)
        return None
    return NativeModules(shipped, target, causal)


def modules_on_disk(model: Any) -> int:
    """Modules in the model's checkpoint that its config does not mention, as with Qwen3-Next and Qwen3.5."""
    path = model.config.name_or_path
    if not path or not any("mtp" in pattern for pattern in model._keys_to_ignore_on_load_unexpected or ()):
        return 0
    names: list[str] = []
    if (index := _file(path, "model.safetensors.index.json")) is not None:
        names = list(parse_json(Path(index).read_text())["weight_map"])
    elif (single := _file(path, "model.safetensors")) is not None:
        with safe_open(regular(Path(single)), framework="pt") as file:
            names = list(file.keys())
    numbers = [int(match[1]) for name in names if (match := re.match(r"(?:model\.)?mtp\.layers\.(\d+)\.", name))]
    return 1 + max(numbers, default=-1)


def _file(path: str, name: str) -> str | None:
    """A file of a checkpoint, in a folder or the hub's cache."""
    from transformers.utils import cached_file

    file = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False, local_files_only=True,
    )  # fmt: skip
    return None if file is None else str(file)


NAMES = {"final_layernorm": "post_norm", "pre_mlp_layernorm": "post_attention_layernorm"}
"""Names of norms in MiMo-V2's checkpoints → those in transformers."""
KINDS = {"mimo_v2_flash": ("sliding_attention", "dense")}
"""Attention and MLP of a family's modules, if they differ from full attention and the MLP of the last layer."""


@functools.cache
def _teach_names() -> None:
    """Register names that transformers lacks."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import WeightRenaming

    more = [
        WeightRenaming(source_patterns=rf"\.{name}\.", target_patterns=f".{renamed}.")
        for name, renamed in NAMES.items()
    ]
    register_checkpoint_conversion_mapping(
        "MtpModel", [*more, *get_checkpoint_conversion_mapping("MtpModel")], overwrite=True
    )


@contextmanager
def filled_in(text: Any, count: int) -> Iterator[None]:
    """Within this context, fields of the config for the number and kind of modules are filled in if missing."""
    last = (getattr(text, "mlp_layer_types", None) or [None])[-1]
    attends, feeds = KINDS.get(text.model_type, ("full_attention", last))
    added = {"num_mtp_layers": count, "mtp_layer_types": [attends] * count}
    if last is not None:
        added["mtp_mlp_layer_types"] = [feeds] * count
    before = dict(vars(text))
    for name, value in added.items():
        if getattr(text, name, None) is None:
            setattr(text, name, value)
    try:
        yield
    finally:
        vars(text).clear()
        vars(text).update(before)


def limits_of(config: Any, count: int) -> tuple[AttentionLimit | None, ...]:
    """The attention limit of each module of an MtpModel's config.  Raises DrafterError for other kinds of layers."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * count
    strange = sorted(set(kinds[:count]) - {"full_attention", "sliding_attention"})
    if strange:
        raise DrafterError(
            f"the modules of {config.model_type} have layers of {', '.join(strange)}; only full_attention and "
            "sliding_attention are supported; set native to no and train new modules"
        )
    return tuple(
        AttentionLimit("window", config.sliding_window) if kind == "sliding_attention" else None
        for kind in kinds[:count]
    )


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    attend: Attend, scaling: float | None = None, s_aux: Tensor | None = None, **_kwargs: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention with the signature of transformers' layers; `attend` provides keys, masks and positions."""
    usual = query.shape[-1] ** -0.5
    if scaling is not None and not math.isclose(scaling, usual, rel_tol=1e-9):
        query = query * (scaling / usual)
    layer: Any = module.layer_idx
    return attend(query, key, value, layer, s_aux).transpose(1, 2).contiguous(), None


def _median_difference(logits: Tensor, expected: Tensor) -> float:
    """Median over positions of the relative difference, since single positions may be routed to another expert."""
    logits, expected = logits.double(), expected.double()
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)).median())
