#!/usr/bin/env python3
"""What vLLM makes of a DSpark's folder: its config as vLLM reads it, and which parameters its own loader fills.
Nothing runs.

    outrider export CHECKPOINT --to speculators --out FOLDER
    benchmarks/engines/.venv/bin/python benchmarks/engines/load_dspark.py TARGET ANSWER.json FOLDER [FOLDER ...]

vLLM's first model runner, the only one on a CPU, has no DSpark, so none is drafted here.  But config, module and loader
are those that a GPU gets: every parameter is emptied, the folder is loaded, and what is still empty was not in it.

ANSWER: a list, a folder an entry: {version, platform, folder, architecture, config, taps, tokens, parameters {name:
shape}, empty [name], square (sum of what was loaded, squared), refused (None, or what the loader said)}, or {…, error}.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
READ = (
    "mask_token_id", "markov_rank", "block_size", "sample_from_anchor", "dspark_bonus_anchor", "enable_confidence_head",
    "confidence_head_with_markov", "draft_vocab_size", "target_hidden_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "intermediate_size", "hidden_size", "rms_norm_eps", "rope_parameters",
)  # fmt: skip
"""What its config says behind vLLM's own reading of speculators' folders."""


def main() -> int:
    target, place, folders = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    found = [entry(target, folder) for folder in folders]
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def entry(target: str, folder: str) -> dict[str, Any]:
    import vllm
    from vllm.platforms import current_platform

    said = {"version": vllm.__version__, "platform": current_platform.device_type, "folder": Path(folder).name}
    try:
        return said | loaded(target, Path(folder))
    except Exception as error:
        return said | {"error": f"{type(error).__name__}: {error}"}


def loaded(target: str, folder: Path) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

    VllmConfig._validate_v2_model_runner = lambda self: None  # a CPU has no such runner, and none is started
    args = EngineArgs(
        model=target, dtype="float32", enforce_eager=True, max_model_len=256, skip_tokenizer_init=True,
        speculative_config={"method": "dspark", "model": str(folder.absolute())},
    )  # fmt: skip
    config = args.create_engine_config()
    spec = config.speculative_config
    model = made(config)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan if parameter.is_floating_point() else -1)
    refused = None
    try:
        model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    full = {name: value.data for name, value in model.named_parameters()}
    empty = [
        name for name, value in full.items() if bool((value.isnan() if value.is_floating_point() else value < 0).any())
    ]
    square = sum(float(value.double().square().sum()) for name, value in full.items() if name not in empty)
    return {
        "architecture": type(model).__name__,
        "config": {key: getattr(spec.draft_model_config.hf_config, key, None) for key in READ},
        "taps": list(get_eagle3_aux_layers_from_config(spec) or ()),
        "tokens": spec.num_speculative_tokens,
        "parameters": {name: list(value.shape) for name, value in full.items()},
        "empty": empty,
        "square": square,
        "refused": refused,
    }


def made(config: Any) -> Any:
    """The draft model's module, as vLLM's own `load_dspark_model` has it made, without weights."""
    from vllm.config import replace, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor.model_loader.utils import initialize_model

    config = replace(config, attention_config=replace(config.attention_config, use_non_causal=True))
    with set_current_vllm_config(config), tempfile.NamedTemporaryFile() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting.name}", 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        return initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)


if __name__ == "__main__":
    raise SystemExit(main())
