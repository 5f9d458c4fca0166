"""SGLang and SpecForge: the folders that `sglang.launch_server` loads as a draft model.

EAGLE-3's layer is called `midlayer` and its taps are in `eagle_config`; block drafters have theirs in `dflash_config`,
where `projector_type` names the method.  Layers are counted from 0, as in Outrider; vLLM counts the same key from 1.
Embedding and head are taken from the target, except for EAGLE-3's head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from outrider.errors import ExportError
from outrider.formats import released
from outrider.formats.layout import Config, Source, only
from outrider.method import Method
from outrider.targets.hf.transformers import TransformersTarget

NAME = "sglang"
EAGLE3 = "LlamaForCausalLMEagle3"
"""The architecture of its EAGLE-3."""
# SGLang 0.5.23 reads the rotated share of a head from a key that transformers does not write
WHOLE_HEADS = only("partial_rotary_factor", 1, "it rotates whole heads of a draft; train with partial_rotary_factor: 1")


def is_eagle3(config: Config, names: Collection[str] = ()) -> bool:
    """Whether a config.json describes an EAGLE-3 of this format."""
    return (config.get("architectures") or [""])[0] == EAGLE3 and isinstance(config.get("eagle_config"), dict)


def is_of(projector: str) -> Callable[[Config, Collection[str]], bool]:
    """A check whether a config.json describes the block drafter with this `projector_type`."""

    def fits(config: Config, names: Collection[str]) -> bool:
        block = config.get("dflash_config")
        if not isinstance(block, dict) or is_eagle3(config):
            return False
        if "selector_rank" in block or "lilicorr_num_layers" in block:  # another scorer of candidates
            return False
        return bool(block.get("projector_type", "dflash") == projector)

    return fits


def eagle3(source: Source) -> dict[str, Any]:
    settings, spec = source.settings, source.target.spec
    return released.whole(source, EAGLE3, 1, "llama") | {
        "draft_vocab_size": settings.vocabulary or spec.vocabulary, "target_hidden_size": spec.hidden,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(source.model.taps), "use_aux_hidden_state": True},
        "fc_norm": settings.fc_norm, "norm_output": settings.norm_output,
    }  # fmt: skip


def block(source: Source, architecture: str = "DFlashDraftModel") -> dict[str, Any]:
    """The config that all block drafters share."""
    backbone: Any = source.model.backbone
    return released.whole(source, architecture, source.settings.layers, "qwen3") | {
        "block_size": backbone.width,
        "num_target_layers": source.target.spec.layers,
        "dflash_config": {"mask_token_id": source.mask_token, "target_layer_ids": list(source.model.taps)},
    }


def read_block(config: Config, target: TransformersTarget, method: Method) -> dict[str, Any]:
    """The settings of a block drafter, except for its head."""
    block = config["dflash_config"]
    if block.get("causal") or config.get("is_causal"):
        raise ExportError(
            "causal is true, but in Outrider's blocks each slot also attends to later ones; "
            "use a draft with causal: false"
        )
    if block.get("use_swa"):
        raise ExportError(
            "use_swa is true (sliding-window attention), but Outrider's drafts have full attention only; use a "
            "draft that has it"
        )
    return released.block(config, NAME, method, target)
