"""EAGLE and EAGLE-2 as their authors release them; read only, since engines load these folders directly.

Weights have the same names as in Outrider.  The config is often only a Llama's, so the format is recognised by its
`fc`.  The stored embedding must be the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.formats import released
from outrider.formats.layout import Config, Layout


def bias(config: Config, names: Collection[str]) -> dict[str, Any]:
    """Whether fc has a bias.  Without the key in config.json, the weights decide: the authors' code has a bias by
    default, vLLM's never."""
    return {"bias": config.get("bias", "fc.bias" in names)}


def is_of(config: Config, names: Collection[str]) -> bool:
    name = (config.get("architectures") or [""])[0]
    if name in ("LlamaForCausalLMEagle", "EagleModel"):
        return True
    # most are released as LlamaForCausalLM; no plain model has fc
    is_plain = name.endswith("ForCausalLM") and not {"dflash_config", "eagle_config"} & config.keys()
    return is_plain and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names)


FORMATS = {
    "eagle": Layout([("fc.*", "fc.*"), ("layers.*", "layers.*")], None, released.read, inferred=bias, is_of=is_of)
}
