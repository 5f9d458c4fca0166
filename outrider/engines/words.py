"""How to serve a draft in each engine: its speculation settings and its command line.  No torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from outrider.drafters import method as of_kind
from outrider.engines.engine import Draft, Method, Settings, Wish, method_of
from outrider.engines.template import rendered
from outrider.engines.tuning import tune
from outrider.errors import ConfigError
from outrider.formats.keys import CONFIG

ADAPTIVE, TRTLLM_FILE, SNIPPET, REPOSITORY = "adaptive.json", "trtllm.yaml", "generate.py", "models"
"""Files that commands need, and Triton's folder."""
GGUF_FILE = "model.gguf"
"""The model in an exported folder."""
LAYER_FACTS = {"eagle3_layers_to_capture", "target_layer_ids"}
SEQUENTIAL = ("Draft_Target", "NGram")
"""TensorRT-LLM's decoding types that draft separately, so that steps can't overlap."""
ASSISTANT = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
"""Settings of transformers that belong to the draft model."""
Words = tuple[list[str], dict[str, str]]
"""(command, files it needs)"""


def _address(wish: Wish) -> list[str]:
    return ["--host", wish.host, "--port", str(wish.port)]


def _parallel(flag: str, wish: Wish) -> list[str]:
    return [flag, str(wish.tensor_parallel)] if wish.tensor_parallel > 1 else []


def candidates(tokens: int, width: int) -> int:
    """Number of candidate tokens of a tree of this depth: an engine exits if it is told to keep more than there are."""
    return width + (tokens - 1) * width**2


# ── vLLM ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _vllm(method: Method, draft: Draft, tokens: int, wish: Wish) -> Settings:
    settings: Settings = {"method": method.name}
    if draft.folder is not None:
        settings["model"] = draft.place
    settings["num_speculative_tokens"] = tokens
    settings |= {**method.taken(draft.settings, tokens), **method.more}
    return settings | ({"num_speculative_tokens_per_batch_size": tune.for_vllm(wish.schedule)} if wish.schedule else {})


def _vllm_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    # compact, since it is pasted into a shell
    compact = json.dumps(settings, separators=(",", ":"))
    argv = ["--speculative-config", compact, "--per-request-spec-decode-metrics", "summary"] if settings else []
    return ["vllm", "serve", draft.target, *argv, *_parallel("--tensor-parallel-size", wish), *_address(wish)], {}


# ── SGLang ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sglang(method: Method, draft: Draft, tokens: int, wish: Wish) -> Settings:
    settings: Settings = {"speculative-algorithm": method.name}
    if draft.folder is not None:
        settings["speculative-draft-model-path"] = draft.place
    if method.flag is not None:
        # without it the folder's own size applies; all but DSpark count the anchor's slot too
        is_default = draft.folder is not None and tokens == draft.length
        return settings if is_default else settings | {method.flag: tokens + (method.name != "DSPARK")}
    # a chain verifies one token more than it drafts, the anchor's slot
    nodes = tokens + 1 if wish.width == 1 else min(4 * wish.width, candidates(tokens, wish.width) + 1)
    settings |= {
        "speculative-num-steps": tokens, "speculative-eagle-topk": wish.width, "speculative-num-draft-tokens": nodes,
    }  # fmt: skip
    if wish.schedule:
        settings |= {"speculative-adaptive": True, "speculative-adaptive-config": f"{wish.files}/{ADAPTIVE}"}
    return settings


def _sglang_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    argv = ["python", "-m", "sglang.launch_server", "--model-path", draft.target]
    for key, value in settings.items():
        argv += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    argv += [*_parallel("--tp-size", wish), "--enable-metrics", *_address(wish)]
    return argv, {ADAPTIVE: json.dumps(tune.for_sglang(wish.schedule), indent=2) + "\n"} if wish.schedule else {}


# ── TensorRT-LLM ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _trtllm(method: Method, draft: Draft, tokens: int, wish: Wish) -> Settings:
    place = {} if draft.folder is None else {"speculative_model": draft.place}
    settings: Settings = {"decoding_type": method.name, "max_draft_len": tokens, **place}
    dflash = draft.config.get("dflash_config") or draft.config
    facts = {
        "eagle3_layers_to_capture": list(draft.taps), "target_layer_ids": list(draft.taps),
        "mask_token_id": dflash.get("mask_token_id"),
    }  # fmt: skip
    # the original EAGLE-3, which does not name its layers: TensorRT-LLM guesses them correctly
    if not draft.taps and LAYER_FACTS & set(method.facts) and draft.format not in of_kind(draft.kind).guessed:
        key = of_kind(draft.kind).layers[str(draft.format)][0]
        raise ConfigError(
            f"{draft.place} does not say which layers it reads; add {key} to its {CONFIG}, or export it again"
        )
    settings |= {name: facts[name] for name in method.facts if facts[name] not in (None, [])}
    settings |= method.taken(draft.settings, tokens)
    if wish.width > 1:
        most = min(4 * wish.width, candidates(tokens, wish.width))
        settings |= {"use_dynamic_tree": True, "dynamic_tree_max_topK": wish.width, "max_total_draft_tokens": most}
    return settings | ({"draft_len_schedule": tune.for_trtllm(wish.schedule)} if wish.schedule else {})


def _trtllm_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    body: Settings = {"return_perf_metrics": True} | ({"speculative_config": settings} if settings else {})
    if settings.get("decoding_type") in SEQUENTIAL:
        body["disable_overlap_scheduler"] = True
    argv = ["trtllm-serve", draft.target, "--config", f"{wish.files}/{TRTLLM_FILE}"]
    return [*argv, *_parallel("--tp_size", wish), *_address(wish)], {TRTLLM_FILE: yaml.safe_dump(body, sort_keys=False)}


# ── llama.cpp ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _llamacpp(method: Method, draft: Draft, tokens: int, wish: Wish) -> Settings:
    settings: Settings = {"spec-type": spec_type(draft.kind, draft.settings)}
    if method.takes:
        return settings | method.taken(draft.settings, tokens)
    if draft.folder is not None and not in_target(draft):
        settings["spec-draft-model"] = str(downloaded(draft) / GGUF_FILE)
    settings["spec-draft-n-max"] = tokens
    return settings if wish.cutoff is None else settings | {"spec-draft-p-min": wish.cutoff}


def spec_type(kind: str, settings: Mapping[str, Any]) -> str:
    """llama.cpp's name for a drafter.  settings: ours.  Raises ConfigError for a kind that it does not run."""
    method = method_of("llamacpp", kind)
    return (method.in_anchor if settings.get("anchor_predicts") else None) or method.name


def in_target(draft: Draft) -> bool:
    """Whether llama.cpp reads target and draft from one file, the draft's."""
    return draft.folder is not None and method_of("llamacpp", draft.kind).in_target


def downloaded(draft: Draft) -> Path:
    """The folder of a draft for an engine that reads only files: a hub model is first downloaded into a folder of its
    own name."""
    assert draft.folder is not None
    return draft.folder if draft.hub_id is None else Path(draft.hub_id.rpartition("/")[2])


def preparation(name: str, draft: Draft) -> str | None:
    """The command that downloads a draft from the hub for an engine that reads only files; None for others."""
    if name != "llamacpp" or draft.hub_id is None:
        return None
    return shlex.join(["hf", "download", draft.hub_id, "--local-dir", str(downloaded(draft))])


def _llamacpp_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    target = downloaded(draft) if in_target(draft) else Path(draft.target)
    if in_target(draft) or (target / GGUF_FILE).exists():
        target = target / GGUF_FILE
    if target.suffix != ".gguf":
        raise ConfigError(
            f"llama.cpp needs the target as GGUF, and {draft.target} is not a GGUF file; write it with "
            f"`outrider export {draft.target} --to gguf --out FOLDER` and name it with --target FOLDER"
        )
    if wish.tensor_parallel > 1:
        raise ConfigError(
            "--tensor-parallel has no effect on llama.cpp, which splits a model over devices by itself; leave it out"
        )
    argv = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    return ["llama-server", "-m", str(target), *argv, "--metrics", *_address(wish)], {}


# ── transformers, Triton ──────────────────────────────────────────────────────────────────────────────────────────────


def _transformers(method: Method, draft: Draft, tokens: int, wish: Wish) -> Settings:
    if draft.folder is None:
        return {**method.taken(draft.settings, tokens), **method.more}
    return {
        method.name: draft.place, "num_assistant_tokens": tokens, "num_assistant_tokens_schedule": "constant",
        # transformers' default of 0.4 would cut drafts short
        "assistant_confidence_threshold": wish.cutoff or 0.0,
    }  # fmt: skip


def _transformers_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    """A script instead of a server: assisted generation has no server and handles one prompt at a time."""
    model = settings.get("assistant_model")
    assistant = {key: value for key, value in settings.items() if key in ASSISTANT}
    plain = {key: repr(value) for key, value in settings.items() if key not in ASSISTANT}
    call = plain if model is None else plain | {"assistant_model": "draft"}
    arguments = "".join(f", {key}={value}" for key, value in call.items())
    text = rendered("generate.py.txt", target=draft.target, model=model, assistant=assistant, given=arguments)
    return ["python", f"{wish.files}/{SNIPPET}", "The prompt."], {SNIPPET: text}


def _triton_words(draft: Draft, wish: Wish, settings: Settings) -> Words:
    """Triton with vLLM as its backend; `manifests.triton` writes the repository."""
    return ["tritonserver", "--model-repository", f"{wish.files}/{REPOSITORY}", "--http-port", str(wish.port),
            "--http-address", wish.host, "--allow-grpc", "false"], {}  # fmt: skip


SETTINGS: Mapping[str, Callable[[Method, Draft, int, Wish], Settings]] = {
    "vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm, "llamacpp": _llamacpp, "transformers": _transformers,
    "triton": _vllm,
}  # fmt: skip
"""By engine: speculation settings, as it reads them.  Raises ConfigError if the draft lacks something they need."""
WORDS: Mapping[str, Callable[[Draft, Wish, Settings], Words]] = {
    "vllm": _vllm_words, "sglang": _sglang_words, "trtllm": _trtllm_words, "llamacpp": _llamacpp_words,
    "transformers": _transformers_words, "triton": _triton_words,
}  # fmt: skip
"""By engine: the command for these settings; empty settings mean no speculation.  Raises ConfigError for a target it
can't read."""
