"""Every family of models: the result of the self-test, and whether speculation generates what `generate` does.

    python benchmarks/families.py [--form NAME …] [--tokens 64] [--out benchmarks/results/every_family.json]
    python benchmarks/families.py --settings [--family NAME …] [--tokens 2000] [--out benchmarks/results/families.json]

Without --settings: every causal family that transformers knows, in its causal form and in the one that also reads
images, each built from its config class alone with its sizes made small.  A prompt that crosses every limit of its
config while being continued is read alone and next to a longer one; so is one beyond all limits.  A family is exact, or
refused with a reason.  With --out, forms that are already in the file are not tried again.

With --settings: tiny models with random weights, sdpa and eager if the family has both.  A tree drafter proposes what
the model itself generated before, with wrong branches next to it and occasional wrong tokens, so that every depth is
accepted and rejected.  Twenty prompts of unequal length share three slots. --tokens is the number compared in float64
with the first attention a family has; its other settings compare a quarter of that.  In float64 a differing token is a
mismatch; in float32 it is a tie if the model's two best logits are within four times the measured difference between
its one-row and its n-row pass there.  After a difference, the rest of the text is compared as a new request.  Prints
JSON; exits with 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES

from benchmarks.replay import Replay, progress_bar, provenance, publish, spread
from outrider.decoding.state import Request
from outrider.errors import TargetError
from outrider.generation import serve
from outrider.sampling.settings import Sampling
from outrider.targets.hf.proof.miniature import FIRST_CONTEXT, LIMIT, arguments, enlivened
from outrider.targets.hf.proof.selftest import plain_words
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

BASE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ALTERNATE = ["sliding_attention", "full_attention"] * 2
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 1}),
    "mistral-window": ("mistral", {"sliding_window": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 24}),
    "gemma2": ("gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ALTERNATE}),
    "gemma3": ("gemma3_text", {"sliding_window": 24, "query_pre_attn_scalar": 16, "layer_types": ALTERNATE}),
    "gemma4": ("gemma4_text", {"sliding_window": 24, "layer_types": ALTERNATE, "vocab_size_per_layer_input": 128}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
    "layer_types": ALTERNATE}),
    "llama4-chunks": (
        "llama4_text",
        {
            "attention_chunk_size": 24, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
            "no_rope_layers": [1, 1, 1, 0], "interleave_moe_layer_step": 2,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16, "num_key_value_heads": 4, "n_shared_experts": 1, "head_dim": 8,
        },
    ),
    "cohere2": ("cohere2", {"sliding_window": 24, "layer_types": ALTERNATE}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {"n_layer": 4, "n_head": 4}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "qwen3-next": ("qwen3_next", {**EXPERTS, "shared_expert_intermediate_size": 32, **DELTA}),
    "qwen3.5": ("qwen3_5_text", DELTA),
    "falcon-h1": (
        "falcon_h1",
        {
            "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
            "mamba_chunk_size": 16,
        },
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "hybrid_override_pattern": "M*M-", "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "jamba": (
        "jamba",
        {
            "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "full_attn_idxs": [1, 3]}),
}  # fmt: skip


def tiny(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, seed: int = 3) -> PreTrainedModel:
    """A random model of a family, with weights large enough for varied text.  Raises ValueError if it has no such
    attention."""
    kind, own = SMALL[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**own_sizes(kind), **own})
    # torch's grouped products do not support float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    return enlivened(model).to(dtype).eval()


def own_sizes(kind: str) -> dict[str, Any]:
    """The sizes in BASE that configs of this kind have: a config stores every size it is given, whether or not it has
    such a field."""
    of_class = CONFIG_MAPPING[kind]
    known = {field.name for field in dataclasses.fields(of_class)} | set(of_class.attribute_map)
    return {key: value for key, value in BASE.items() if key in known}


# ── every form ────────────────────────────────────────────────────────────────────────────────────────────────────────

MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}  # fmt: skip
ZAMBA = ["linear_attention"] * 2 + ["hybrid"] + ["linear_attention"] * 5 + ["hybrid"]
SHAPES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note": {"vision_config": {"adapter_out_dim": 128}, "audio_config": {"adapter_out_dim": 128}},
    "gemma3n_text": {"hidden_size": 128},
    "glm46v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v": {"text_config": {"rope_parameters": MROPE}},
    "glm4v_moe": {"text_config": {"head_dim": 128, "rope_parameters": MROPE}},
    "glmga": {"text_config": {"rope_parameters": MROPE}},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "inkling2": {"vision_config": {"text_hidden_size": 768}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "qwen3_omni_moe_thinker": {"text_config": {"head_dim": 128}},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [20, 64]},
    "rwkv": {"attention_hidden_size": 64},
    "step3p7": {"text_config": {"sliding_window": 24}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 9, "layers_block_type": ZAMBA},
    "zamba2": {"mamba_headdim": 80, "attention_hidden_size": 640, "attention_head_dim": 160},
}
"""Values that configs on the hub set and the class leaves open, or sizes that must match others made small."""
CAUSAL, NESTED = "causal", "with images"


def forms() -> list[tuple[str, str]]:
    """Every (config kind, form) that transformers maps to a model that generates text."""
    nested = [(kind, NESTED) for kind, name in WITH_IMAGES.items() if CAUSAL_LMS.get(kind) != name]
    return sorted([(kind, CAUSAL) for kind in CAUSAL_LMS] + nested)


def built(kind: str, form: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model of this kind from its config class alone, with its sizes made small.  Raises what transformers
    raises."""
    try:
        return _built(kind, form, dtype, narrow=True)
    except Exception:
        return _built(kind, form, dtype, narrow=False)


def merged(found: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A nested merge: a change within a part leaves the rest of the part unchanged."""
    parts = {
        key: merged(found[key], value) for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
    }  # fmt: skip
    return {**found, **changes, **parts}


def _built(kind: str, form: str, dtype: torch.dtype, narrow: bool) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**merged(arguments(CONFIG_MAPPING[kind](), narrow), SHAPES.get(kind, {})))
    auto = AutoModelForCausalLM if form == CAUSAL else AutoModelForImageTextToText
    torch.manual_seed(3)
    model = enlivened(auto.from_config(config, experts_implementation="eager")).to(dtype).eval()
    # if its own generate fails, there is nothing to compare with
    continued(model, list(range(3, FIRST_CONTEXT + 12)), 2)
    return model


def try_form(kind: str, form: str, tokens: int) -> dict[str, Any]:
    """One row of the table of all forms: exact, refused, wrong, or not built."""
    row: dict[str, Any] = {"family": kind, "form": form}
    for dtype in (torch.float64, torch.float32):
        try:
            model = built(kind, form, dtype)
            break
        except Exception as error:  # anything transformers raises for its own class
            reason = f"{type(error).__name__}: {error}"
    else:
        return row | {"outcome": "not built", "reason": reason[:300]}
    row |= {"model": type(model).__name__, "dtype": str(dtype).removeprefix("torch.")}
    began = time.perf_counter()
    try:
        target = load_target(model)
    except TargetError as error:
        return row | {"outcome": "refused", "reason": str(error)[:400]}
    target.ends = frozenset()
    row |= {
        "mode": target.spec.mode,
        "reason": target.selftest.failed,
        "loaded_s": round(time.perf_counter() - began, 1),
    }
    words = plain_words(target, 2, FIRST_CONTEXT + 10)
    texts = [continued(model, words[0][: LIMIT // 2], tokens), continued(model, words[1], tokens)]
    differ = 0
    for slots in (1, 2):
        drafter = Replay(texts, target.spec.vocabulary, eldest=target.spec.mode == "chain")
        requests = [Request(text[:-tokens], tokens, Sampling()) for text in texts]
        found: list[list[int]] = [[] for _ in requests]
        for progress in serve(target, requests, drafter, policy="fixed", slots=slots):
            found[progress.request] += progress.tokens
        differ += sum(
            a != b for text, got in zip(texts, found, strict=True) for a, b in zip(text[-tokens:], got, strict=False)
        )
        differ += sum(tokens - len(got) for got in found)
    return row | {
        "outcome": "wrong" if differ else "exact", "tokens": 4 * tokens, "mismatches": differ,
        "prompts": [len(text) - tokens for text in texts], "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def continued(model: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """The prompt and transformers' own greedy continuation of it."""
    given = torch.tensor([prompt])
    found: list[int] = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )[0].tolist()
    return found


# ── the comparison ────────────────────────────────────────────────────────────────────────────────────────────────────

PROMPTS = (3, 9, 17, 28, 40) * 4
"""Prompt lengths; two of five exceed every window.  Many, because the greedy text of random weights soon loops."""
SHARES = (0.6, 1.4, 1.0, 0.8, 1.2, 0.9, 1.1, 0.7, 1.3, 1.0) * 2
"""Relative to the mean continuation, so that slots end at different times."""
SLOTS = 3


def measure(family: str, attention: str, dtype: torch.dtype, tokens: int) -> dict[str, Any] | None:
    """One row of the table; None if the family has no such attention."""
    try:
        model = tiny(family, attention, dtype)
    except ValueError:
        return None
    row: dict[str, Any] = {"family": family, "attention": attention, "dtype": str(dtype).removeprefix("torch.")}
    try:
        target = load_target(model)
    except TargetError as error:
        return row | {"mode": "refused", "failed": str(error), "tokens": 0, "mismatches": [], "ties": []}
    began = time.perf_counter()
    texts = written(model, [math.ceil(share * tokens / sum(SHARES)) for share in SHARES])
    drafter = Replay(texts, 128, eldest=target.spec.mode == "chain")
    mismatches, ties = compared(target, texts, drafter)
    deepest = max((depth for depth, times in drafter.kept.items() if times), default=0)
    return row | {
        "mode": target.spec.mode,
        "failed": target.selftest.failed,
        "tokens": sum(len(text) - prompt for text, prompt in zip(texts, PROMPTS, strict=True)),
        "mismatches": mismatches,
        "ties": ties,
        "fresh_8grams": round(fresh_share(texts), 3),
        "deepest": deepest,
        "steps_by_kept": dict(sorted(drafter.kept.items())),
        "paths_that_jump": drafter.jumps,
        "tree_beyond_depth_1": target.spec.mode == "tree" and deepest > 1 and drafter.jumps > 0,
        "seconds": round(time.perf_counter() - began, 1),
    }


def written(model: PreTrainedModel, counts: list[int]) -> list[list[int]]:
    """Random prompts and transformers' own greedy continuations of them."""
    noise = torch.Generator().manual_seed(1)
    texts = []
    for length, count in zip(PROMPTS, counts, strict=True):
        prompt = torch.randint(128, (1, length), generator=noise)
        given = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": count,
            "do_sample": False,
            "pad_token_id": 0,
        }
        texts.append(model.generate(prompt, **given)[0].tolist())
    return texts


def fresh_share(texts: list[list[int]]) -> float:
    """Share of all 8-grams that occur for the first time; 1 is no repetition."""
    grams = [tuple(text[at : at + 8]) for text in texts for at in range(len(text) - 7)]
    return len(set(grams)) / max(1, len(grams))


def compared(target: TransformersTarget, texts: list[list[int]], drafter: Replay) -> tuple[list[dict], list[dict]]:
    """Mismatches and ties of all texts; after each, the rest of the text is a new request."""
    mismatches: list[dict[str, Any]] = []
    ties: list[dict[str, Any]] = []
    waiting = list(enumerate(PROMPTS))
    while waiting:
        asked, waiting = waiting, []
        requests = [Request(texts[n][:start], len(texts[n]) - start, Sampling()) for n, start in asked]
        found: list[list[int]] = [[] for _ in requests]
        for progress in serve(target, requests, drafter, policy="fixed", slots=SLOTS):
            found[progress.request] += progress.tokens
        for (n, start), tokens in zip(asked, found, strict=True):
            at = next((i for i, (a, b) in enumerate(zip(tokens, texts[n][start:], strict=True)) if a != b), None)
            if at is None:
                continue
            place = judged(target, texts[n], PROMPTS[n], start + at, tokens[at])
            is_tie = target.spec.dtype == "float32" and place["margin"] <= 4 * place["difference"]
            (ties if is_tie else mismatches).append({"text": n, **place})
            if start + at + 1 < len(texts[n]):
                waiting.append((n, start + at + 1))
    return mismatches, ties


def judged(target: TransformersTarget, text: list[int], prompt: int, at: int, token: int) -> dict[str, Any]:
    """The model's logits where two texts diverge: the margin of the two best ones, and how much they vary."""
    one, difference = spread(target, text[:at], prompt)
    first, second = one.topk(2).values.tolist()
    return {"at": at - prompt, "wanted": text[at], "found": token, "margin": first - second, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", action="store_true", help="compare some families in every attention and type")
    parser.add_argument("--family", action="append", choices=list(SMALL), help="with --settings; may be given again")
    parser.add_argument(
        "--form", action="append", help="a config kind, such as gemma3; may be given again; all without it"
    )
    parser.add_argument("--tokens", type=int, help="64, or 2000 with --settings, unless given")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    if options.settings:
        sys.exit(compare_settings(options))
    sys.exit(compare_forms(options))


def compare_forms(options: argparse.Namespace) -> bool:
    """Every form, or the requested ones; returns whether one is wrong."""
    began, tokens = time.perf_counter(), options.tokens or 64
    kept = json.loads(options.out.read_text()) if options.out is not None and options.out.exists() else {"rows": []}
    rows = {(row["family"], row["form"]): row for row in kept["rows"]}
    before = kept.get("provenance", {}).get("seconds", 0.0)
    asked = [form for form in forms() if not options.form or form[0] in options.form]
    with progress_bar() as bar:
        task = bar.add_task("families", total=len(asked))
        for kind, form in asked:
            bar.update(task, description=f"{kind} {form}")
            if (kind, form) not in rows or options.form:
                try:
                    rows[kind, form] = try_form(kind, form, tokens)
                except Exception as error:  # one row of many; it counts as wrong
                    traceback.print_exc()
                    rows[kind, form] = {"family": kind, "form": form, "outcome": "wrong", "reason": repr(error)[:300]}
                spent = before + time.perf_counter() - began
                publish(every(rows, spent), options.out, quiet=True)
            bar.advance(task)
    found = every(rows, before + time.perf_counter() - began)
    publish(found, options.out)
    return bool(found["totals"].get("wrong"))


def every(found: dict[tuple[str, str], dict[str, Any]], seconds: float) -> dict[str, Any]:
    rows = [row for _, row in sorted(found.items())]
    return {"provenance": provenance(seconds), "totals": dict(Counter(row["outcome"] for row in rows)), "rows": rows}


def compare_settings(options: argparse.Namespace) -> bool:
    """Some families in every attention and dtype; returns whether a token differs."""
    began, rows = time.perf_counter(), []
    names = options.family or list(SMALL)
    with progress_bar() as bar:
        task = bar.add_task("families", total=len(names))
        for family in names:
            bar.update(task, description=family)
            rows += every_setting(family, options.tokens or 2000)
            bar.advance(task)
    totals = {
        "tokens": sum(row["tokens"] for row in rows),
        "mismatches": sum(len(row["mismatches"]) for row in rows),
        "ties": sum(len(row["ties"]) for row in rows),
        "modes": dict(Counter(row["mode"] for row in rows)),
    }
    publish({"provenance": provenance(time.perf_counter() - began), "totals": totals, "rows": rows}, options.out)
    return totals["mismatches"] > 0


def every_setting(family: str, tokens: int) -> list[dict[str, Any]]:
    """A family in each attention and dtype; the first attention it has, in float64, gets the most tokens."""
    rows: list[dict[str, Any]] = []
    for attention in ("sdpa", "eager"):
        for dtype in (torch.float64, torch.float32):
            row = measure(family, attention, dtype, tokens // 4 if rows else tokens)
            if row is not None:
                rows.append(row)
    return rows


if __name__ == "__main__":
    main()
