"""What the keys of a GGUF file say of its architecture, checked: counts, numbers, and what would be ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.targets.gguf.reader import shown

MOST = 2**31
"""Bound on every count."""
NEUTRAL: dict[str, Any] = {
    "attention.causal": True, "attention.clamp_kqv": 0.0, "attention.max_alibi_bias": 0.0, "attention.scale": 0.0,
    "attention.sliding_window": 0, "attention.temperature_scale": 0.0, "attn_logit_softcapping": 0.0,
    "embedding_length_per_layer_input": 0, "embedding_scale": 0.0, "expert_count": 0, "final_logit_softcapping": 0.0,
    "logit_scale": 0.0, "nextn_predict_layers": 0, "residual_scale": 0.0, "use_parallel_residual": False,
    "rope.scaling.type": "none",
}  # fmt: skip
"""Keys that change what a model computes, and the values with which they change nothing."""


class Refused(ValueError):
    """A model that can't be loaded as the file says; the message says what it has, and what works instead."""


class Keys:
    """The keys of one architecture; remembers which were read."""

    def __init__(self, keys: Mapping[str, Any]):
        self.all = keys
        self.architecture = str(keys.get("general.architecture"))
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """What the architecture's key says; None where it is missing."""
        self._read.add(name)
        return self.all.get(f"{self.architecture}.{name}")

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number above 0.  Raises Refused for anything else, and for a list of different ones, one a layer."""
        value = self.get(name)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MOST:
            raise Refused(f"{self._shown(name, value)}, and not a whole number above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number, as it was before it was stored in 32 bits: 1e-05 and not 9.999999747378752e-06."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refused(f"{self._shown(name, value)}, and not a finite number")
        return float(f"{value:.7g}")

    def refuse_ignored(self) -> None:
        """Raises Refused for a key that changes what is computed and that nobody has read."""
        for name, neutral in NEUTRAL.items():
            value = self.all.get(f"{self.architecture}.{name}", neutral)
            if name not in self._read and value != neutral:
                raise Refused(f"{self._shown(name, value)}, which is not supported for this architecture")

    def _shown(self, name: str, value: Any) -> str:
        key = f"{self.architecture}.{name}"
        return f"it lacks the key {key}" if value is None else f"its key {key} is {shown(str(value))}"
