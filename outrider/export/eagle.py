"""SafeAILab's EAGLE and EAGLE-3, as their authors release them; read only, since engines take other folders.

EAGLE-1/2's weights are ours by name; its config is often only a Llama's, so it is known by its `fc`.  EAGLE-3's layer
is `midlayer`; its config does not name the taps: the authors' code takes the outputs of layers 1, n / 2 - 1 and n - 4
of n, counted from 0.  A folder that names them, at its top, is one for vLLM, where layer k is the state after k layers.
 An embedding is stored and must be the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from outrider.export import manifest, released
from outrider.export.layout import Config, Format, Layout
from outrider.targets.hf.transformers import TransformersTarget

EAGLE = [("fc.*", "fc.*"), ("layers.*", "layers.*")]


def read_eagle3(config: Config, target: TransformersTarget) -> dict[str, Any]:
    layers = target.spec.layers
    guessed = [1, layers // 2 - 1, layers - 4]
    taps = guessed if config.get(manifest.IDS) is None else released.taps(config, "eagle", "eagle3")
    return {**released.head(config, target), "taps": taps, "qk_norm": False}


def bias(config: Config, names: Collection[str]) -> dict[str, Any]:
    """The authors' code gives fc a bias unless config.json says otherwise, vLLM's never: without the key, the file
    decides."""
    return {"bias": config.get("bias", "fc.bias" in names)}


def _kind(config: Config, names: Collection[str]) -> str | None:
    name = (config.get("architectures") or [""])[0]
    if name == "LlamaForCausalLMEagle3" and "eagle_config" not in config:
        return "eagle3"
    if name in ("LlamaForCausalLMEagle", "EagleModel"):
        return "eagle"
    # most are released as LlamaForCausalLM; fc over embedding and feature is what no plain model has
    is_plain = name.endswith("ForCausalLM") and not {"dflash_config", "eagle_config"} & config.keys()
    return "eagle" if is_plain and {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= set(names) else None


LAYOUTS = {
    "eagle": Layout(EAGLE, None, released.read, inferred=bias),
    "eagle3": Layout(released.MIDLAYER, None, read_eagle3),
}
FORMAT = Format(LAYOUTS, _kind)
