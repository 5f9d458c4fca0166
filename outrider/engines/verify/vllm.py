"""Continue token ids greedily with vLLM and record how much of each draft was accepted; runs inside the engine's own
environment.

    VENV/bin/python vllm.py JOB.json ANSWER.json

JOB: {target, speculative (None, or vLLM's speculative config), prompts [[id]], max_new_tokens, slots, prefix_caching,
dtype, mend, stages}. mend: names of this engine's own faults to work around, as in `mend_dflash`.  stages: record the
outputs of the draft model's modules on the first prompt.

ANSWER: {engine, version, platform, tokens [[id]], accepted [[int]], drafted [[int]], stages}, one list per prompt; or
{engine, version, platform, error} if vLLM can't load the draft.  platform: cpu, cuda, …, since faults depend on it.
accepted and drafted: tokens of each verified step.  stages: {text [id], rows {stage: [[float]]}}, or {error}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

# this file is run by path, and the engine must not import its neighbours
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# a single process halves the start-up time, and errors show up here
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main() -> int:
    job, place = map(Path, sys.argv[1:])
    answer = run(json.loads(job.read_text(encoding="utf-8")))
    part = place.with_name(place.name + ".part")
    part.write_text(json.dumps(answer), encoding="utf-8")
    part.replace(place)
    return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    import vllm
    from vllm.platforms import current_platform

    about = {"engine": "vllm", "version": vllm.__version__, "platform": current_platform.device_type}
    if "dflash context norm" in job.get("mend", ()):
        mend_dflash()
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    longest = max(map(len, job["prompts"])) + job["max_new_tokens"] + 32
    try:
        model = vllm.LLM(
            model=job["target"], dtype=job.get("dtype", "float32"), enforce_eager=True, max_model_len=longest,
            max_num_seqs=job.get("slots", 1), enable_prefix_caching=job.get("prefix_caching", False),
            speculative_config=job.get("speculative"), disable_log_stats=False,
            per_request_spec_decode_metrics="detailed" if job.get("speculative") else "none",
        )  # fmt: skip
        params = vllm.SamplingParams(temperature=0, max_tokens=job["max_new_tokens"])
        answers = model.generate(prompts, params, use_tqdm=False)
    except Exception as error:
        return {**about, "error": f"{type(error).__name__}: {error}"}
    outputs = [each.outputs[0] for each in answers]
    steps = [getattr(output, "spec_decode_metrics", None) for output in outputs]
    return {
        **about,
        "tokens": [list(output.token_ids) for output in outputs],
        "accepted": [list(step.per_step_accepted) if step else [] for step in steps],
        "drafted": [list(step.per_step_drafted) if step else [] for step in steps],
        "stages": stages(model, job) if job.get("stages") else None,
    }


# ── outputs of its modules ────────────────────────────────────────────────────────────────────────────────────────────

ROWS = 8
"""Number of last rows recorded per stage."""


def stages(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Outputs of the draft model's own modules, under our reader's names, for its draft after the first prompt alone.

    Any failure becomes the answer's `error`, so that earlier measurements are not lost.
    """
    import vllm

    rows: dict[str, list[list[float]]] = {}
    prompt, held = job["prompts"][0], []
    try:
        held = hooked(drafter_of(model), rows)
        params = vllm.SamplingParams(temperature=0, max_tokens=2)
        answers = model.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        text = [*prompt, *answers[0].outputs[0].token_ids]
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        for handle in held:
            handle.remove()
    return {"text": text, "rows": rows} if rows else {"error": "no module of the draft model was called under its name"}


def drafter_of(model: Any) -> Any:
    """The draft model's module.  Raises AttributeError if this engine has it elsewhere, or in another process."""
    return model.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model


def hooked(draft: Any, rows: dict[str, list[list[float]]]) -> list[Any]:
    """Record each stage's first output.  Returns a function that removes the hooks.

    vLLM adds a layer's residual within the next norm, so a norm's second output is the state before it.
    """

    def note(name: str, value: Any) -> None:
        rows.setdefault(name, value.detach().reshape(-1, value.shape[-1])[-ROWS:].float().cpu().tolist())

    def hook(part: Any, record: Any) -> None:
        held.append(part.register_forward_hook(lambda _, inputs, out: record(inputs, out)))

    held: list[Any] = []
    inner = getattr(draft, "model", draft)
    if hasattr(inner, "fc"):
        hook(inner.fc, lambda inputs, out: note("fc", _first(out)))
    for n, layer in enumerate(getattr(inner, "layers", ())):
        name = f"layers.{n}"
        hook(layer.self_attn.qkv_proj, lambda inputs, out, name=name: note(f"{name} norms", inputs[0]))
        hook(layer.post_attention_layernorm, lambda inputs, out, name=name: note(f"{name} attention", out[1]))
        hook(layer, lambda inputs, out, name=name: note(f"{name} out", out[0] + out[1]))
    if hasattr(inner, "norm"):
        hook(inner.norm, lambda inputs, out: note("norm", _first(out)))
    for k, head in enumerate(getattr(inner, "blocks", ())):
        hook(head, lambda inputs, out, k=k: note(f"head {k}", out))
    return held


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def mend_dflash() -> None:
    """Normalise the context's keys of each layer with that layer's weights.

    vLLM's CPU kernel uses the first layer's for all: its `rms_norm` takes a single vector of weights, not one per
    layer.
    """
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, keys: Any) -> Any:
        scaled = torch.empty_like(keys)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(scaled[layer], keys[layer], weight.contiguous(), self._rms_norm_eps)
        return scaled

    DFlashQwen3Model._normalize_context_k = normed


if __name__ == "__main__":
    raise SystemExit(main())
