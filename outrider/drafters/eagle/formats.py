"""EAGLE and EAGLE-2 as their authors release them; read only, since engines take these folders as they are.

Weights are ours by name; the config is often only a Llama's, so it is known by its `fc`.  An embedding is stored and
must be the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.formats import released
from outrider.formats.layout import Config, Layout


def bias(config: Config, names: Collection[str]) -> dict[str, Any]:
    """The authors' code gives fc a bias unless config.json says otherwise, vLLM's never: without the key, the file
    decides."""
    return {"bias": config.get("bias", "fc.bias" in names)}


def is_of(config: Config, names: Collection[str]) -> bool:
    name = (config.get("architectures") or [""])[0]
    if name in ("LlamaForCausalLMEagle", "EagleModel"):
        return True
    # most are released as LlamaForCausalLM; fc over embedding and feature is what no plain model has
    is_plain = name.endswith("ForCausalLM") and not {"dflash_config", "eagle_config"} & config.keys()
    return is_plain and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names)


FORMATS = {
    "eagle": Layout([("fc.*", "fc.*"), ("layers.*", "layers.*")], None, released.read, inferred=bias, is_of=is_of)
}
