"""A DSpark's folder in vLLM's own config reader, module and loader: no engine runs it on a CPU, but this much of one
does."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_folder, randomise

from outrider import load_target
from outrider.checkpoint import save
from outrider.config import build
from outrider.drafters import find as find_drafter
from outrider.engines import readers
from outrider.export.writing import export_folder

ROOT = Path(__file__).parents[2]
VLLM = Path(os.environ.get("OUTRIDER_VLLM_PYTHON", ROOT / "benchmarks" / "engines" / ".venv" / "bin" / "python"))
TARGETS_OWN = {"model.embed_tokens.weight", "lm_head.weight", "model.mask_embedding"}
"""Parameters that vLLM takes from the target, and one that it never fills unless a folder has a file for it."""
SETTINGS = {
    "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 64, "layers": 2, "taps": [0, 2], "block": 3, "rank": 8,
    "mask_token": 5, "confidence": True, "rope_theta": 5e5,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(not VLLM.exists(), reason="vLLM is not installed (benchmarks/engines/install.py)")
def test_vllms_loader_fills_all_of_a_dspark_from_its_folder_and_reads_its_config_as_we_mean_it(tmp_path):
    """Catches a weight under a name that vLLM has no place for or passes over, one that is missing, a shape, a config
    key.

    A folder without one norm, and one whose tables are transposed, show that the check sees them.
    """
    target = load_target(make_folder(tmp_path / "target"))
    module = find_drafter("dspark")
    model = module.Model(build(module.Config, {"kind": "dspark", **SETTINGS}, "drafter"), target).to(torch.float32)
    save(tmp_path / "checkpoint", randomise(model), {})
    sound = tmp_path / "sound"
    export_folder(tmp_path / "checkpoint", "speculators", sound, target)
    written = load_file(sound / "model.safetensors")
    planted(sound, tmp_path / "few", {name: weight for name, weight in written.items() if name != "hidden_norm.weight"})
    tables = {
        f"markov_head.markov_w{n}.weight": written[f"markov_head.markov_w{n}.weight"].T.contiguous() for n in (1, 2)
    }
    planted(sound, tmp_path / "turned", written | tables)
    found, few, turned = loaded(tmp_path, sound, tmp_path / "few", tmp_path / "turned")
    assert found["architecture"] == "Qwen3DSparkForCausalLM"
    assert found["refused"] is None
    assert set(found["empty"]) == TARGETS_OWN
    assert found["square"] == pytest.approx(sum(float(weight.double().square().sum()) for weight in written.values()))
    assert set(few["empty"]) == TARGETS_OWN | {"model.hidden_norm.weight"}
    assert turned["refused"] is not None
    read, said = readers.of_folder(sound, "vllm"), found["config"]
    assert found["taps"] == [tap + 1 for tap in model.taps] and found["tokens"] == said["block_size"] == 3
    assert (said["mask_token_id"], said["sample_from_anchor"]) == (read.mask, read.skip == 0)
    assert (said["num_attention_heads"], said["num_key_value_heads"], said["head_dim"]) == read.heads
    assert (said["rms_norm_eps"], said["rope_parameters"]["rope_theta"]) == (read.eps, read.rotation.theta)
    assert said["enable_confidence_head"] and said["confidence_head_with_markov"] and said["markov_rank"] == 8


def planted(sound: Path, place: Path, weights: dict[str, torch.Tensor]) -> None:
    shutil.copytree(sound, place)
    save_file(weights, place / "model.safetensors")


def loaded(place: Path, *folders: Path) -> list[dict[str, Any]]:
    words = [
        VLLM,
        ROOT / "benchmarks" / "engines" / "load_dspark.py",
        place / "target",
        place / "answer.json",
        *folders,
    ]
    around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, cwd=place, env=around, timeout=1800)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads((place / "answer.json").read_text())
    assert not [one["error"] for one in found if "error" in one]
    return found
