"""Targets in two processes, started by torchrun over gloo, and with layers on disk by a `device_map`."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import first, scaled
from targets.parts import TYPES, drafted, plainly, whole

from outrider.errors import ConfigError
from outrider.targets.load import load_target
from outrider.targets.parallel.tensor_parallel import is_worker

ROOT = Path(__file__).resolve().parents[2]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.1,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
FAMILIES: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "gemma3": (
        transformers.Gemma3TextConfig, {"sliding_window": 8, "query_pre_attn_scalar": 8, "pad_token_id": 0},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "olmo2": (transformers.Olmo2Config, {}),
}  # fmt: skip
"""Tied ends, windows and a scaled embedding, experts, and projections that are gathered."""


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target of each family."""
    folder = tmp_path_factory.mktemp("families")
    for name, (config, own) in FAMILIES.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(**(SIZES | own)))
        scaled(model.double()).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def plain(targets: Path) -> Callable[[str], Any]:
    """The target of a family in one piece."""
    return functools.cache(
        lambda name: load_target(targets / name, dtype=TYPES.get(name, "float64"), compile=False)
    )  # fmt: skip


@pytest.fixture(scope="module")
def shared(targets: Path) -> Mapping[str, Any]:
    """What two processes that have a part each decoded, by family."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, "-m", "targets.parts", str(targets)], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("its steps are not compiled") == len(FAMILIES), done.stderr
    found: dict[str, Any] = json.loads((targets / "texts.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_two_processes_decode_what_one_decodes(name: str, shared: Mapping[str, Any], plain: Any) -> None:
    """Token for token, in float64 but for experts. The processes have other seeds."""
    known, found = plain(name), shared[name]
    wanted = plainly(known)
    assert found["drafted"] == wanted | {"tree": wanted["greedy"]}
    assert found["generate"] == wanted["greedy"][0]
    assert (found["hash"], found["mode"]) == (known.spec.weights_hash, known.spec.mode)
    assert known.model.model.layers[0].self_attn.k_proj.weight.shape[0] == 2 * found["local"][0]
    assert found["whole"] == pytest.approx(whole(known), rel=1e-6)


def placed(model: Any, *on_disk: str) -> dict[str, str]:
    """Each part of a model on the CPU, but for these."""
    names = ["lm_head", *(f"model.{name}" for name, _ in model.model.named_children() if name != "layers")]
    names += [f"model.layers.{number}" for number in range(3)]
    return {name: "disk" if name in on_disk else "cpu" for name in names}


@pytest.mark.parametrize("name", first(["qwen3", "olmo2", "gemma3", "qwen3_moe"], 2))
def test_layers_on_disk_decode_what_layers_in_memory_decode(name, targets, plain, caplog):
    """accelerate's hooks fill each layer for its part of a pass."""
    known = plain(name)
    is_tied = known.model.config.tie_word_embeddings
    where = placed(known.model, "model.layers.1", "model.layers.2", *[] if is_tied else ["lm_head"])
    target = load_target(targets / name, dtype=known.spec.dtype, device_map=where)
    assert not target.is_whole and target.spec == known.spec
    assert caplog.text.count("its steps are not compiled") == 1
    wanted = plainly(known)
    assert drafted(target, wanted) == wanted | {"tree": wanted["greedy"]}
    tokens = torch.tensor([3, 5])
    assert torch.equal(target.head_rows(tokens), known.head_rows(tokens))
    pairs = zip(target.layer(1).state_dict().values(), known.layer(1).state_dict().values(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    there = target.copy_to(torch.device("cpu"))
    hidden = torch.ones(1, 32, dtype=known.model.dtype)
    assert torch.equal(there.head(hidden), known.head(hidden))


def test_options_that_exclude_each_other_are_refused(targets: Path) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"tensor_parallel": 2}, r"needs 2 processes, but there is one; start them with torchrun --nproc-per-node 2"),
        ({"tensor_parallel": 0}, "must be at least 1, got 0"),
        ({"tensor_parallel": 2, "device": "cpu"}, "can't be used with device 'cpu'"),
        ({"tensor_parallel": 2, "device_map": "auto"}, "can't be used with device_map 'auto'"),
        ({"tensor_parallel": 2, "quantize": "int8"}, "can't be used with quantize 'int8'"),
        ({"device": "cpu", "device_map": "auto"}, "both place the weights"),
    ]
    for options, problem in refused:
        with pytest.raises(ConfigError, match=problem):
            load_target(targets / "olmo2", **options)


def test_only_processes_after_the_first_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_worker(2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in (("0", False), ("1", True)):
        monkeypatch.setenv("RANK", rank)
        assert is_worker(2) is expected and not is_worker(1)
