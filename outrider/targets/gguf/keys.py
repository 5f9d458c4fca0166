"""The keys of a GGUF file about its architecture, checked: counts, numbers, and keys that would be ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.targets.gguf.reader import shown

MOST = 2**31
"""Upper bound of every count."""
NEUTRAL: dict[str, Any] = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0,
    "attention.sliding_window": 0, "attention.temperature_scale": 0.0, "attn_logit_softcapping": 0.0,
    "embedding_length_per_layer_input": 0, "embedding_scale": 0.0, "expert_count": 0, "final_logit_softcapping": 0.0,
    "logit_scale": 0.0, "nextn_predict_layers": 0, "residual_scale": 0.0, "use_parallel_residual": False,
    "rope.scaling.type": "none",
}  # fmt: skip
"""Keys that change what a model computes, and the values for which they change nothing."""


class Refused(ValueError):
    """A model can't be loaded; the message says why, and what to use instead."""


class Keys:
    """The keys of one architecture; records which were read."""

    def __init__(self, keys: Mapping[str, Any]):
        self.all = keys
        self.architecture = str(keys.get("general.architecture"))
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value of the architecture's key; None if missing."""
        self._read.add(name)
        return self.all.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer.  Raises Refused for anything else, and for a list of different values, one per layer."""
        value = self.get(name)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MOST:
            raise Refused(f"{self._shown(name, value)}, not an integer above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, with the rounding to 32 bits undone: 1e-05, not 9.999999747378752e-06."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(f"{self._shown(name, value)}, not a finite number")
        return float(f"{value:.7g}")

    def refuse_ignored(self) -> None:
        """Raises Refused for a key that changes what is computed but was not read."""
        for name, neutral in NEUTRAL.items():
            value = self.all.get(f"{self.architecture}.{name}", neutral)
            if name not in self._read and value != neutral:
                raise Refused(f"{self._shown(name, value)}, which is not supported for this architecture")

    def _shown(self, name: str, value: Any) -> str:
        key = f"{self.architecture}.{name}"
        return f"it lacks the key {key}" if value is None else f"its key {key} is {shown(str(value))}"
