"""Features that llama.cpp lacks: refused, or left out with a note that says what was measured with them."""

from __future__ import annotations

from outrider.formats.gguf import model
from outrider.formats.gguf import tokenizer as gguf_tokenizer
from outrider.formats.layout import Answer, Source

PARTIAL = "it rotates a part of each head, which is known for a DFlash without llama3's scaling only"
TAPPED = ("qwen3", "llama", "mistral", "qwen3_moe", "gpt_oss")
"""transformers' names of targets whose layer inputs llama.cpp exposes."""


def tokenizer(source: Source) -> str | None:
    return gguf_tokenizer.refused(source.target.tokenizer)


def tapped(source: Source) -> str | None:
    name = source.target.model.config.model_type
    if name not in TAPPED:
        return f"llama.cpp does not give out the layers of a {name}; known are {', '.join(TAPPED)}"
    last = source.target.spec.layers - 1
    if last in source.model.taps:
        return f"it reads what comes out of the last layer, {last}, which llama.cpp does not give out; use other taps"
    return None


def rotation(source: Source) -> str | None:
    kind = (source.sizes.rope_scaling or {}).get("rope_type", "default")
    if kind not in model.SCALING:
        return f"its rotation is scaled by {kind}; written are default, linear and llama3, train with one of these"
    return PARTIAL if source.sizes.partial_rotary_factor != 1 and kind == "llama3" else None


FIRST: tuple[Answer, ...] = (tokenizer, tapped, rotation)


# ── left out, with a note ────────────────────────────────────────────────────────────────────────────────────────────


def siblings(source: Source) -> str | None:
    siblings = list(source.settings.siblings)
    return f"siblings {siblings} are left out: llama.cpp drafts one chain{measured(source)}" if any(siblings) else None


def trees(source: Source) -> str | None:
    width = source.settings.width
    if width == 1:
        return None
    return f"its tree of width {width} is left out: llama.cpp drafts one chain{measured(source)}"


def measured(source: Source) -> str:
    """Tokens per step with the omitted feature, from the checkpoint's report; empty if it has none."""
    rows = source.report.get("rows") or []
    greedy = [row for row in rows if row.get("tokens_per_step") and row.get("temperature") == 0]
    if not greedy:
        return ""
    return f"; with them {greedy[0]['tokens_per_step']:.2f} tokens per step were measured on {greedy[0].get('task')}"
