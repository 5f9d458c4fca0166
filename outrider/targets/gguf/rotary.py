"""Rotary positions as a GGUF file says them, in the words of a transformers config.

llama3's scaling is stored as a divisor for each frequency; the numbers that it was made from are found again, and must
give the same divisors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from outrider.targets.gguf.keys import Keys, Refused

Factors = Callable[[str], list[float] | None]
"""Gives the numbers of a vector of the file by its name; None where there is none."""
DIVISORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
PUBLISHED = {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of every Llama 3, where too few frequencies lie between the ends to tell."""
CLOSE = 1e-3
"""Relative difference of divisors that were stored in 32 bits from those of the numbers that they were made from."""


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
        raise Refused(f"its {SHORT} and {LONG} must have {rotated // 2} numbers each")
    scaling = {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
    }  # fmt: skip
    attention = keys.number("rope.scaling.attn_factor", 0.0)
    return scaling | ({"attention_factor": attention} if attention else {})


# ── llama3 ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _llama3(divisors: Sequence[float], theta: float) -> dict[str, Any]:
    """The numbers of llama3's scaling, with which these divisors come out again.

    Between the frequencies that stay and those that are divided by the factor, the reciprocal of the divisor is a line
    over the frequency; two points of it give the other two numbers.
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
    """The numbers of a line through the outermost points, with 1 for the low factor, since they are known up to a
    common factor; None where points are missing or are on no such line."""
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
