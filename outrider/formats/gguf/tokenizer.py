"""A tokenizer as a GGUF file stores it: tokens, merges, special tokens, and the name of its pre-tokenizer.

A tokenizer that splits text differently than llama.cpp would is refused.  llama.cpp does not apply NFC normalisation,
so text that is not normalised may be tokenised differently there.
"""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import ExportError
from outrider.targets.gguf.tokenizer import CONTROL, LLAMA3, NORMAL, QWEN2, UNUSED, USER_DEFINED

DIGITS = "digits one by one"
"""Stands for a step that splits digits one by one, before GPT-2's own pattern."""
SPLITS = {
    (QWEN2, False): "qwen2",
    (LLAMA3, True): "llama-bpe",
    (None, False): "gpt-2",
    (DIGITS, False): "smollm",
}
"""(Pattern that splits text, or None for GPT-2's own; whether a word that is a token ignores merges) to llama.cpp's
name."""


def keys(tokenizer: Any, size: int, lm: Any) -> dict[str, Any]:
    """Keys of a tokenizer for a head of `size` tokens.  lm: the model; its generation config lists the end tokens."""
    return {**_vocabulary(tokenizer, size), **_specials(lm, tokenizer)}


def refused(tokenizer: Any) -> str | None:
    """Why a tokenizer can't be written as GGUF; None if it can."""
    if tokenizer is None:
        return "its target has no tokenizer, and the file needs one; load the target from a folder that has it"
    return split(tokenizer)[1]


def split(tokenizer: Any) -> tuple[str, str | None]:
    """llama.cpp's name for a tokenizer's pre-tokenizer, and the reason if it has none, else None."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return "", "its tokenizer is not of the tokenizers library; only byte-level BPE can be written"
    tokenizer_json = json.loads(backend.to_str())
    model, normalizer = tokenizer_json["model"], tokenizer_json["normalizer"]
    before = tokenizer_json["pre_tokenizer"] or {}
    if model["type"] != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        return "", f"its tokenizer is {model['type']}; only byte-level BPE can be written"
    if normalizer is not None and normalizer.get("type") != "NFC":
        return "", f"its tokenizer normalises texts by {normalizer.get('type')}, which llama.cpp would not do"
    steps = before.get("pretokenizers", [before])
    last = steps[-1]
    patterns = [pattern for step in steps[:-1] if (pattern := _pattern(step)) is not None]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") or len(patterns) != len(steps) - 1:
        step_types = [step.get("type") for step in steps]
        return "", f"its tokenizer splits texts by {step_types}; only byte-level BPE can be written"
    splitter = SPLITS.get((patterns[0] if patterns else None, bool(model.get("ignore_merges"))))
    if not model["merges"]:
        return "", "its tokenizer has no merges, which llama.cpp needs"
    splits_again = not patterns or patterns == [DIGITS]
    if splitter is None or len(patterns) > 1 or bool(last.get("use_regex")) != splits_again:
        supported = ", ".join(SPLITS.values())
        return "", f"its tokenizer splits texts in a way that is not supported; supported are {supported}"
    return splitter, None


def _pattern(step: dict[str, Any]) -> str | None:
    """The pattern of a step before the byte-level one; None for an unsupported step."""
    if step.get("type") == "Digits" and step.get("individual_digits"):
        return DIGITS
    pattern: str | None = step.get("pattern", {}).get("Regex") if step.get("type") == "Split" else None
    return pattern


def _vocabulary(tokenizer: Any, size: int) -> dict[str, Any]:
    """Tokens, token types and merges.  Ids without a token, up to the `size` of the head, are marked unused."""
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {one["id"]: one for one in tokenizer_json["added_tokens"]}
    tokens, kinds = [f"[PAD{i}]" for i in range(size)], [UNUSED] * size
    for token, i in tokenizer.get_vocab().items():
        if i >= size:
            raise ExportError(
                f"the tokenizer has token id {i}, but the model has {size} tokens; use the tokenizer that belongs to "
                "this model"
            )
        tokens[i] = token
        kinds[i] = NORMAL if i not in added else CONTROL if added[i]["special"] else USER_DEFINED
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in tokenizer_json["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": split(tokenizer)[0], "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges,
    }  # fmt: skip


def _specials(lm: Any, tokenizer: Any) -> dict[str, Any]:
    """Special tokens from the tokenizer and the generation config, and the chat template."""
    ends = getattr(getattr(lm, "generation_config", None), "eos_token_id", None)
    ends = list(ends) if isinstance(ends, list | tuple) else [ends]
    ids = {
        "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else ends[0],
        "eot": next((i for i in ends if i not in (None, tokenizer.eos_token_id)), None),
        "padding": tokenizer.pad_token_id, "unknown": tokenizer.unk_token_id, "mask": tokenizer.mask_token_id,
    }  # fmt: skip
    begins = tokenizer.bos_token_id is not None and tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]
    template = tokenizer.chat_template
    return {
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None},
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": False,
        **({"tokenizer.chat_template": template} if isinstance(template, str) else {}),
    }
