"""What llama.cpp can't do with a drafter: refused, or left out with a note of what was measured with it."""

from __future__ import annotations

from typing import Any

from outrider.export import gguf_model, gguf_tokenizer, released
from outrider.export.layout import Answer, Source, only

TAPPED = ("qwen3", "llama", "mistral", "qwen3_moe", "gpt_oss")
"""transformers' names of targets whose layers' inputs llama.cpp gives out."""


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
    if kind not in gguf_model.SCALING:
        return f"its rotation is scaled by {kind}; written are default, linear and llama3, train with one of these"
    if source.sizes.partial_rotary_factor != 1 and (kind == "llama3" or source.settings.kind == "eagle3"):
        return "it rotates a part of each head, which is known for a DFlash without llama3's scaling only"
    return None


def three(source: Source) -> str | None:
    if (count := len(source.model.taps)) != 3:
        return f"llama.cpp's EAGLE-3 reads three layers, and this one reads {count}; train with three taps"
    return None


FIRST: tuple[Answer, ...] = (tokenizer, tapped, rotation)
DFLASH: tuple[Answer, ...] = (*FIRST, released.learnt_mask)
DSPARK: tuple[Answer, ...] = (
    *DFLASH, only("markov", "vanilla", "llama.cpp has no Markov head that is {}; train with markov: vanilla"),
)  # fmt: skip
EAGLE3: tuple[Answer, ...] = (
    *FIRST, three, *released.EAGLE3_REFUSES,
    only("qk_norm", False, "llama.cpp's EAGLE-3 has no norms of queries and keys; train with qk_norm: no"),
    only("fc_norm", False, "llama.cpp's EAGLE-3 has no norm of each tap; train with fc_norm: no"),
    only("norm_output", False, "llama.cpp's EAGLE-3 feeds back what its last norm reads; train with norm_output: no"),
)  # fmt: skip


# ── left out, with a note ────────────────────────────────────────────────────────────────────────────────────────────


def siblings(source: Source) -> str | None:
    own = list(source.settings.siblings)
    return f"siblings {own} are left out: llama.cpp drafts one chain{measured(source)}" if any(own) else None


def trees(source: Source) -> str | None:
    width = source.settings.width
    if width == 1:
        return None
    return f"its tree of width {width} is left out: llama.cpp drafts one chain{measured(source)}"


def calibration(source: Source) -> str | None:
    head: Any = source.model.confidence_head
    if head is None or (not head.shifts.any() and bool((head.temperatures == 1).all())):
        return None
    return "the calibration of its confidences is left out: --spec-draft-p-min compares them as they were trained"


def zero_head(source: Source) -> str | None:
    """A dflash that drafts in the anchor's slot."""
    if not source.settings.anchor_predicts:
        return None
    return "it is a draft-dspark to llama.cpp, whose Markov head is zero: its draft-dflash reads no anchor's slot"


def measured(source: Source) -> str:
    """The tokens per step that the checkpoint's report has with what is left out; empty where it has none."""
    rows = source.report.get("rows") or []
    found = [row for row in rows if row.get("tokens_per_step") and row.get("temperature") == 0]
    if not found:
        return ""
    return f"; with them {found[0]['tokens_per_step']:.2f} tokens per step were measured on {found[0].get('task')}"
