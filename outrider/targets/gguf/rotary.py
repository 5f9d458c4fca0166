"""Rotary positions of a GGUF file as rope_parameters of a transformers config.

llama3's scaling is stored as a divisor for each frequency; its parameters are recovered from these, and must reproduce
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from outrider.targets.gguf.keys import Keys, Refused

Factors = Callable[[str], list[float] | None]
"""Returns the values of a vector of the file by its name; None if missing."""
DIVISORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
PUBLISHED = {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Parameters of every Llama 3, used if too few frequencies lie between the limits to determine them."""
CLOSE = 1e-3
"""Relative tolerance between stored divisors, in 32 bits, and those of the recovered parameters."""


def parameters(keys: Keys, head_dim: int, factors: Factors) -> dict[str, Any]:
    """`rope_parameters` of a config.  Raises Refused for a scaling that is not supported."""
    theta = keys.number("rope.freq_base", 10_000.0)
    if theta <= 0:
        raise Refused(f"its rope.freq_base is {theta}")
    kind = keys.get("rope.scaling.type") or "none"
    divisors = factors(DIVISORS)
    if divisors is not None:
        scaling = _llama3(divisors, theta)
    elif factors(LONG) is not None or kind == "longrope":
        scaling = _longrope(keys, head_dim, factors)
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": keys.number("rope.scaling.factor")}
    elif kind == "yarn":
        scaling = _yarn(keys)
    elif kind == "none":
        scaling = {"rope_type": "default"}
    else:
        raise Refused(f"its rotary scaling is {kind!r}; supported are none, linear, yarn, longrope and llama3's")
    return {"rope_theta": theta, **scaling}


def _yarn(keys: Keys) -> dict[str, Any]:
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    others = {ours: keys.number(f"rope.scaling.{key}") for key, ours in names.items()
              if keys.get(f"rope.scaling.{key}") is not None}  # fmt: skip
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if keys.number(f"rope.scaling.{name}", 1.0) not in (1.0, -1.0):
            raise Refused(f"its rope.scaling.{name} is not 1, which is not supported")
    return {
        "rope_type": "yarn", "factor": keys.number("rope.scaling.factor"),
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"), **others,
    }  # fmt: skip


def _longrope(keys: Keys, head_dim: int, factors: Factors) -> dict[str, Any]:
    rotated = keys.count("rope.dimension_count", head_dim)
    long, short = factors(LONG), factors(SHORT)
    if long is None or short is None or len(long) != rotated // 2 or len(short) != rotated // 2:
        raise Refused(f"its {SHORT} and {LONG} must have {rotated // 2} values each")
    scaling = {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }  # fmt: skip
    attention = keys.number("rope.scaling.attn_factor", 0.0)
    return scaling | ({"attention_factor": attention} if attention else {})


# ── llama3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _llama3(divisors: Sequence[float], theta: float) -> dict[str, Any]:
    """The parameters of llama3's scaling that produce these divisors.

    Between the frequencies that are unchanged and those divided by the factor, the reciprocal of the divisor is linear
    in the frequency; two points determine the other two parameters.
    """
    waves = [2 * math.pi * theta ** (2 * i / (2 * len(divisors))) for i in range(len(divisors))]
    factor = float(f"{max(divisors):.6g}")
    if factor <= 1 or min(divisors) < 1:
        raise Refused(f"its {DIVISORS} are no scaling of llama3's")
    shares = [(factor / divisor - 1) / (factor - 1) for divisor in divisors]
    between = [(1 / wave, share) for wave, share in zip(waves, shares, strict=True) if 1e-4 < share < 1 - 1e-4]
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, **(_line(between) or PUBLISHED)}
    if not all(math.isclose(*pair, rel_tol=CLOSE) for pair in zip(_divisors(scaling, waves), divisors, strict=True)):
        raise Refused(f"its {DIVISORS} are no scaling of llama3's")
    return scaling


def _line(points: Sequence[tuple[float, float]]) -> dict[str, Any] | None:
    """The parameters of a line through the outermost points, with a low factor of 1, since they are determined up to a
    common factor; None if there are too few points or no such line."""
    if len(points) < 2:
        return None
    (first, low), (last, high) = points[0], points[-1]
    slope = (high - low) / (last - first)
    begin = low - slope * first  # -1 / (high_freq_factor - 1)
    if begin >= 0:
        return None
    upper = round(1 - 1 / begin, 3)
    return {"high_freq_factor": upper, "original_max_position_embeddings": round(slope * (upper - 1))}


def _divisors(scaling: dict[str, Any], waves: Sequence[float]) -> list[float]:
    """The divisor of each frequency, by wave length."""
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    shares = [(scaling["original_max_position_embeddings"] / wave - low) / max(high - low, 1e-9) for wave in waves]
    return [factor / (1 + min(max(share, 0.0), 1.0) * (factor - 1)) for share in shares]
