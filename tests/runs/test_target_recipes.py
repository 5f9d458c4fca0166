"""The run files of recipes/targets: a dry run with the shapes of each target, and two steps on a small random model of
its family.

The shapes are those of benchmarks/recipes.py.  Neither weights nor the network are needed.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import recipes
from outrider.checkpoint import manifest_of
from outrider.errors import ConfigError
from outrider.plan.paper import hardware
from outrider.runs.file import load
from outrider.runs.stages import plan, run

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes" / "targets").glob("*.yaml"))
SHAPES: dict[str, tuple[str, dict[str, Any], float]] = recipes.SHAPES
"""Model type, config and published number of parameters, by the name of the target in the file's."""

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
ALTERNATE = ["sliding_attention", "full_attention"] * 4
SMALL_OF: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 8, "layer_types": ALTERNATE},
    "gemma4_text": {
        "sliding_window": 24, "layer_types": ALTERNATE, "vocab_size_per_layer_input": 261,
        "hidden_size_per_layer_input": 8,
    },
    "gpt_oss": {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ALTERNATE},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"id": f"p{i}", "prompt": f"say {'ab' * (i % 7)} {i}"}) for i in range(64)]
    for name in ("prompts.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("\n".join(rows).replace("say", name[0]) + "\n")


def of(path: Path) -> tuple[str, dict[str, Any], float]:
    return SHAPES[path.stem.rpartition("-")[0]]


def here(folder: Path) -> list[str]:
    """Overrides: what would come from the hub is here."""
    return [
        f"target.name={folder}", "prepare.conversations=prompts.jsonl", "evaluate.tasks=[held_out.jsonl]",
        "prepare.folder=answers",
    ]  # fmt: skip


def test_every_target_has_a_recipe_for_dspark_and_for_eagle3() -> None:
    wanted = {f"{target}-{kind}" for target in SHAPES for kind in ("dspark", "eagle3")}
    assert {path.stem for path in RECIPES} == wanted
    for path in RECIPES:
        train = load(path)[0].train
        assert train is not None and train.batch * train.accumulate == 512, path.name


QUICKER = [path for n, path in enumerate(RECIPES) if n % 4 in (0, 3)]  # one kind of each target
ALL = [*QUICKER, *(pytest.param(path, marks=pytest.mark.slow) for path in RECIPES if path not in QUICKER)]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_dry_run_says_sizes_memory_disk_and_hours(path: Path, tmp_path: Path) -> None:
    """Catches a setting that does not fit its target, found after hours; and sizes that are not the target's."""
    kind, config, parameters = of(path)
    folder = tmp_path / "target"
    AutoConfig.for_model(kind, **config).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a plan reads no weights
    lines = plan(path, [*here(folder), "prepare.count=64", "target.device=cpu"])
    found = {(line.stage, line.what): line.value for line in lines}
    count = found["target", "parameters"]
    assert isinstance(count, int) and (math.isnan(parameters) or count == pytest.approx(parameters, rel=0.01))
    weights = next(line for line in lines if line.stage == "target" and line.unit == "bytes")
    assert weights.value == 4 * count or weights.value == 2 * count
    drafter = found["train", f"parameters of {path.stem.rpartition('-')[2]}"]
    assert isinstance(drafter, int) and 1e7 < drafter < 2.5e9 and drafter < count
    assert found["train", "memory of weights, gradients and moments"] == 16 * drafter
    assert found["train", f"disk, in runs/{path.stem}/checkpoint"] == 12 * drafter
    hours = [line for line in lines if line.unit == "minutes"]
    assert {line.what for line in hours} >= {"time to write them, at most", "features live: time of the target"}
    assert all(isinstance(line.value, float) and line.value > 0 for line in hours)
    assert not (tmp_path / "runs").exists()


def test_hours_on_accelerators_are_computed(tmp_path: Path) -> None:
    """Catches hours that do not fall with more accelerators, and a target that does not fit and is planned for."""
    path, folder = ROOT / "recipes" / "targets" / "qwen3-8b-dspark.yaml", tmp_path / "target"
    kind, config, _ = of(path)
    AutoConfig.for_model(kind, **config, dtype="bfloat16").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    changes = [*here(folder), "prepare.count=64"]
    of_one, of_eight = (
        {
            line.what: line.value
            for line in plan(path, changes, place=hardware.place("h100", count))
            if "h100" in line.stage
        }
        for count in (1, 8)
    )
    assert of_one["all of this"] == "computed, not measured"
    for what in ("time to train, at most", "time for the target to read them, at most"):
        assert of_one[what] == pytest.approx(8 * of_eight[what])
    small = hardware.place("l4")._replace(accelerator=hardware.find("l4")._replace(memory_bytes=16e9))
    with pytest.raises(ConfigError, match=r"takes 16 GB and 1 l4 have 16; give more --devices"):
        plan(path, changes, place=small)


def small_target(folder: Path, kind: str) -> Path:
    """A random model of a family, with the tokenizer of tests."""
    tokenizer = make_tokenizer()
    ends = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL | SMALL_OF.get(kind, {}) | ends))
    tokenizer.save_pretrained(folder)
    model.float().save_pretrained(folder)
    return folder


QUICK, SLOW = ("qwen3-0.6b-dspark",), ("gpt-oss-20b-eagle3", "gemma-3-4b-dspark", "gemma-4-e2b-eagle3")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_two_steps_train_on_a_small_model_of_the_family(name: str, tmp_path: Path) -> None:
    """Catches a file whose settings the stages refuse, and a family whose states or logits a drafter can't read."""
    path = ROOT / "recipes" / "targets" / f"{name}.yaml"
    small = [
        "prepare.count=6", "prepare.length=48", "prepare.max_new_tokens=8", "train.steps=2", "train.batch=2",
        "train.accumulate=2", "train.log_every=1", "train.probe_every=1", "train.calibrate=0", "train.dtype=float32",
        "evaluate.max_new_tokens=8", "evaluate.prompts=2", "target.device=cpu",
    ]  # fmt: skip
    if load(path)[0].drafter.get("intermediate"):
        small.append("drafter.intermediate=96")
    small.append("drafter.vocabulary=40" if path.stem.endswith("eagle3") else "drafter.rank=8")
    run(path, [*here(small_target(tmp_path / "target", of(path)[0])), *small], stages=["prepare", "train"])
    rows = [json.loads(line) for line in Path(f"runs/{path.stem}/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 2 and all(math.isfinite(loss) for loss in losses)
    assert [row["step"] for row in rows if "probe_tokens_per_step" in row] == [1, 2]
    assert manifest_of(f"runs/{path.stem}/checkpoint")["training"]["step"] == 2
