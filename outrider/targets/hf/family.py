"""How a family of models must be called, inferred from the loaded model itself; there is no list of names.

Which masks it takes, how far each kind of layer attends, whether it takes positions, and which modules have a recurrent
state.  All of this is a guess until `selftest` confirms it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from outrider.targets.cache.attention_mask import AttentionLimit, Tree
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf import hooks
from outrider.targets.hf.anatomy import BROKEN, cache_argument, trunk
from outrider.targets.hf.rotary import Rotary, learn_rotary
from outrider.targets.hf.sparse_index import choose_earliest

KINDS = (
    "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv", "mamba", "attention",
    "indexed_attention",
)  # fmt: skip
"""Keys under which families look up the mask of a kind of layer; unused keys do no harm."""
Masks = Literal["by kind", "one", "none"]


@dataclass(frozen=True)
class Family:
    """What a model's passes take as arguments, and what they do."""

    masks: Masks
    """A mask for every kind of layer, one for all, or none; with none, rows are read one by one and the family masks
    them itself."""
    limits: Mapping[str, AttentionLimit | None]
    """Kinds of attention among its layers, and how far they attend."""
    cache: str
    """Name of the argument that takes the cache."""
    has_positions: bool
    is_recurrent: bool
    rotary: Rotary | None = None
    """Set if rotary factors depend on the length of a text."""
    one_by_one: bool = False
    """Whether rows of different lengths are read one by one, because the family counts columns of the longest for all.
    """
    past: str | None = None
    """Name of the argument that takes the family's own kind of cache, if slots can't hold what it stores."""
    has_patches: bool = False
    """Whether bytes are grouped into patches depending on their ids."""

    @property
    def follows_one_path(self) -> bool:
        """Whether cache or state belongs to one text: no tree can be verified, and padding would change it."""
        return self.is_recurrent or self.past is not None

    @property
    def takes_uneven_rows(self) -> bool:
        """Whether rows of different lengths can share a pass, with a mask and positions for each."""
        return self.masks != "none" and self.has_positions and not self.one_by_one and self.past is None

    def pass_arguments(self, cache: Any, tree: Tree | None, dtype: torch.dtype, context: int) -> dict[str, Any]:
        """Keyword arguments of the open pass, except its tokens.  tree: None for a chain."""
        if self.past is not None:
            arguments: dict[str, Any] = cache.pass_arguments()
            return arguments
        tree_mask, depths = tree or (None, None)
        # one token per row, all rows of equal length: nothing is masked, and passing no mask is fastest
        is_whole = cache.width == 1 and tree is None and cache.is_even
        bare = self.masks == "none" or (is_whole and self.masks == "by kind" and not any(self.limits.values()))
        masks = {} if bare else cache.masks(tree_mask, dtype, self.limits, depths)
        rows = len(cache.rows)  # some families refuse a single mask for all rows
        masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        # padding may extend past the context
        return self.arguments(
            cache, masks, cache.positions(depths).clamp(max=context - 1) if self.has_positions else None
        )

    def arguments(self, cache: Any, masks: Mapping[str, Tensor], positions: Tensor | None) -> dict[str, Any]:
        """Arguments of a pass from masks by kind of layer, and positions if the model takes them."""
        arguments: dict[str, Any] = {self.cache: cache, "use_cache": True, "attention_mask": None}
        if self.has_positions:
            arguments["position_ids"] = positions
        if self.masks == "by kind":
            arguments["attention_mask"] = {**dict.fromkeys(KINDS), **masks}
        elif self.masks == "one":
            [arguments["attention_mask"]] = masks.values()
        return arguments


def learn_family(
    model: PreTrainedModel, masks: Masks | None = None, one_by_one: bool = False, past: str | None = None
) -> Family:
    """Inspect the model, and test its masks on a single token.  Modules with a recurrent state are wrapped so that they
    can run in steps.

    masks: tested unless given; the others as in Family.
    """
    choose_earliest(model)
    config = model.config.get_text_config(decoder=True)
    kinds, _ = get_layer_types_and_kwargs(config)
    parameters = {*inspect.signature(model.forward).parameters, *inspect.signature(trunk(model).forward).parameters}
    masks = masks or _masks(model, "position_ids" in parameters)
    limits = {kind: _limit(kind, config) for kind in _attention_kinds(kinds)} or {"full_attention": None}
    if masks == "one" and len(limits) > 1:
        masks = "none"
    has_positions, is_recurrent, rotary = "position_ids" in parameters, _teach_steps(model), learn_rotary(model)
    cache, has_patches = cache_argument(parameters), getattr(model, "has_patches", False)
    return Family(masks, limits, cache, has_positions, is_recurrent, rotary, one_by_one, past, has_patches)


WINDOWS = (
    "sliding_window", "attention_chunk_size", "window_size", "local_attention", "attention_window_size",
    "sliding_window_size", "index_topk", "local_attn_chunk_length", "lsh_attn_chunk_length",
)  # fmt: skip
"""Names of how far a layer attends, in configs."""


def media_tokens(config: Any) -> dict[int, str]:
    """Ids of placeholders for images, videos or audio, and their names in the config."""
    names = [f"{kind}_token_{ending}" for kind in ("image", "video", "audio") for ending in ("id", "index")]
    by_id = {getattr(config, name, None): name for name in names}
    return {word: name for word, name in by_id.items() if isinstance(word, int)}


def _attention_kinds(kinds: list[str]) -> list[str]:
    """Kinds of mask that these layer types need."""
    aliases = {"hybrid": "full_attention", "attention": "full_attention", "hybrid_sliding": "sliding_attention"}
    named = [aliases.get(kind, kind) for kind in kinds]
    return sorted({kind for kind in named if kind.endswith("_attention") and kind != "linear_attention"})


def _limit(kind: str, config: Any) -> AttentionLimit | None:
    if kind == "sliding_attention":
        return AttentionLimit("window", config.sliding_window)
    if kind == "chunked_attention":
        return AttentionLimit("chunk", config.attention_chunk_size)
    return None


@torch.inference_mode()
def _masks(model: PreTrainedModel, has_positions: bool) -> Masks:
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    inputs: dict[str, Any] = {"input_ids": token, "use_cache": False}
    if has_positions:
        inputs["position_ids"] = token
    plain = model(**inputs).logits
    one = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)
    tries: dict[Any, Any] = {"by kind": dict.fromkeys(KINDS), "one": one}
    for name, mask in tries.items():
        try:
            masked = model(**inputs, attention_mask=mask).logits
        except BROKEN:
            continue
        if torch.equal(masked, plain):
            return name
    return "none"


def _teach_steps(model: nn.Module) -> bool:
    """Make every module with a recurrent state run position by position if the cache requires it."""
    modules = [module for module in model.modules() if _reads_states(module)]
    for module in modules:
        hooks.wrap(module, _in_steps)
    return bool(modules)


def _reads_states(module: nn.Module) -> bool:
    methods = [inspect.unwrap(method) for method in vars(type(module)).values() if inspect.isfunction(method)]
    names = {name for method in methods for name in method.__code__.co_names}
    return hasattr(module, "layer_idx") and ("get_conv_state" in names or "get_recurrent_state" in names)


def _in_steps(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The module's `forward`, position by position if the cache requires it."""
    signature = _signature(type(module).forward)
    bound = signature.bind(module, *args, **kwargs)
    cache = bound.arguments.get(cache_argument(signature.parameters))
    if not isinstance(cache, SlotCache) or not cache.in_steps:
        return forward(*args, **kwargs)
    hidden, layer = bound.arguments["hidden_states"], module.layer_idx
    if "attention_mask" in bound.arguments:
        bound.arguments["attention_mask"] = None
    outs = []
    for n in range(hidden.shape[1]):
        bound.arguments["hidden_states"] = hidden[:, n : n + 1]
        outs.append(forward(*bound.args[1:], **bound.kwargs))
        cache.states.note(layer)
    if isinstance(outs[0], tuple):
        return torch.cat([out[0] for out in outs], 1), *outs[0][1:]
    return torch.cat(outs, 1)


_signature = functools.cache(inspect.signature)
