"""Folders that others made: what is loaded, what is refused, and that one sentence says why."""

import json
import os
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import CONFIGS, Known
from safetensors.torch import load_file, save_file
from tiny import make_folder
from transformers import AutoConfig, AutoModelForCausalLM

import outrider
from outrider import demo
from outrider.errors import ConfigError, OutriderError, TargetError
from outrider.plan.paper.anatomy import anatomy
from outrider.targets import files, quantised
from outrider.targets.catalog import checkpoint
from outrider.targets.hf.checkpoints.classes import loader_of
from outrider.targets.load import load_target
from outrider.targets.sketch import sketch

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 25834496\n"
PROMPT = [[5, 6, 7, 8]]


def copied(path: Path) -> Path:
    shutil.copytree(demo.TARGET, path)
    return path


def text_of(target: Any) -> list[int]:
    return outrider.generate(target, PROMPT, max_new_tokens=4)[0].tokens


def break_weights(folder: Path, how: str) -> str:
    """Damage a folder; returns what is to be said."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    damaged = {
        "pointer": POINTER.encode(), "empty": b"", "cut": whole[: len(whole) // 2], "header": whole[:100],
        "short": whole[:5], "text": b"<html>not found</html>" * 10, "last byte": whole[:-1],
    }  # fmt: skip
    if how in damaged:
        path.write_bytes(damaged[how])
    elif how == "config":
        path = folder / "config.json"
        path.write_text(POINTER)
    elif how == "tokenizer":
        path = folder / "tokenizer.json"
        path.write_text(POINTER)
    said = {"pointer": "LFS pointer", "config": "LFS pointer", "tokenizer": "LFS pointer", "empty": "is empty",
            "cut": "cut short", "last byte": "cut short", "header": "cut off within its header"}  # fmt: skip
    return f"{path.name} is.*{said.get(how, 'not a safetensors file')}" if how != "empty" else f"{path.name} is empty"


@pytest.mark.parametrize(
    "how", ["pointer", "empty", "cut", "last byte", "header", "short", "text", "config", "tokenizer"]
)
def test_a_damaged_file_is_named_wherever_a_folder_is_read(how: str, tmp_path: Path) -> None:
    """Catches a traceback of safetensors or of json, from loading, sketching, planning or a tokenizer alone."""
    folder = copied(tmp_path / "target")
    said = break_weights(folder, how).replace("is.*is", "is")
    for read in (load_target, sketch, anatomy, checkpoint):
        with pytest.raises(TargetError, match=said if how != "empty" else "is empty"):
            read(str(folder))


NO_FILES = [("folder", "model.safetensors")]
NO_FILES += [
    (kind, name) for kind in ("pipe", "link") for name in ("model.safetensors", "tokenizer.json", "config.json")
]


@pytest.mark.parametrize(("kind", "name"), NO_FILES)
def test_what_is_no_file_is_named(kind: str, name: str, tmp_path: Path) -> None:
    """Catches weights that are read for ever, and a link to nowhere that passes for no weights."""
    path = copied(tmp_path / "target") / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("nowhere")
    for read in (load_target, sketch, anatomy):
        with pytest.raises(TargetError, match=f"{name} can't be read: (.*is not a regular file|No such file)"):
            read(str(path.parent))


@pytest.mark.parametrize("fields", [
    {"quantization_config": "fp8"}, {"quantization_config": ["fp8"]}, {"quantization_config": {"quant_method": [1]}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": ["a"]}}, {"text_config": "llama"},
    {"quantization_config": {"quant_method": "gguf"}}, {"num_hidden_layers": 0}, {"layer_types": [1, 2]},
])  # fmt: skip
def test_fields_of_another_kind_are_refused_in_a_sentence(fields: dict[str, Any], tmp_path: Path) -> None:
    """Catches an AttributeError of `plan`, and a reason that its first line only announces."""
    config = json.loads((demo.TARGET / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    for read in (anatomy, sketch):
        with suppress(OutriderError):
            read(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "fields"),
    [
        ("generation_config.json", {"eos_token_id": {"eos_token_id": 2}}),
        ("generation_config.json", {"eos_token_id": "</s>"}),
        ("generation_config.json", {"eos_token_id": 1e30}),
        ("generation_config.json", {"eos_token_id": -1}),
        ("tokenizer_config.json", {"model_max_length": {"model_max_length": 8}}),
    ],
)
def test_odd_values_beside_the_weights_are_met_when_loading(file: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """Catches a tokenizer that loads and can't encode, and ends that are no ids: both found by the fuzzer below."""
    path = copied(tmp_path / "target") / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if file == "tokenizer_config.json":
        assert load_target(str(path.parent)).tokenizer is None
        return
    if fields["eos_token_id"] == -1:
        assert min(load_target(str(path.parent)).ends) >= 0
        return
    with pytest.raises(TargetError, match="eos_token_id"):
        load_target(str(path.parent))


def test_a_name_that_no_file_can_have_is_refused() -> None:
    """Catches OSError 36."""
    for read in (load_target, sketch, anatomy):
        with pytest.raises(OutriderError):
            read("x" * 5000)


def test_a_whole_folder_has_no_problem(tmp_path: Path) -> None:
    """Catches a check that refuses what loads: shards, files besides, and a config alone, which is enough to plan."""
    folder = copied(tmp_path / "target")
    (folder / "merges.txt").write_text("")
    assert files.problem_of(str(folder)) is None
    (folder / "model.safetensors").unlink()
    assert files.problem_of(str(folder)) is None
    assert sketch(str(folder)).parameters > 1e6
    with pytest.raises(TargetError, match="can't load target"):
        load_target(str(folder))


def test_shards_and_tied_weights_are_the_same_target(tmp_path: Path) -> None:
    """Catches a shard that is missed, an index that is trusted over its files, and an output layer without a name."""
    whole = load_target("demo")
    folder = copied(tmp_path / "sharded")
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    parts = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert text_of(load_target(str(folder))) == text_of(whole)
    (folder / next(iter(parts))).unlink()
    with pytest.raises(TargetError, match="can't load target"):
        load_target(str(folder))


def test_both_words_for_the_type_mean_the_same(tmp_path: Path) -> None:
    """Catches `torch_dtype`, as all configs before 2025 have it, being read as float32."""
    for word in ("dtype", "torch_dtype"):
        folder = tmp_path / word
        folder.mkdir()
        fields = json.loads((demo.TARGET / "config.json").read_text())
        fields = {key: value for key, value in fields.items() if not key.endswith("dtype")} | {word: "bfloat16"}
        (folder / "config.json").write_text(json.dumps(fields))
        assert sketch(str(folder)).spec.dtype == "bfloat16"


# ── adapters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], Any]:
    """A LoRA adapter of the demo's target, the tokens of transformers with it, and peft's module."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(demo.TARGET, dtype=torch.float32)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.5)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    ids = model.generate(input_ids=torch.tensor(PROMPT), max_new_tokens=4, do_sample=False)
    return folder, ids[0, 4:].tolist(), model


def test_an_adapter_is_merged_into_its_base(adapter: tuple[Path, list[int], Any]) -> None:
    """Catches an adapter that has no effect, and a target that passes for its base."""
    folder, tokens, _ = adapter
    target = load_target("demo", adapter=folder)
    plain = load_target("demo")
    assert text_of(target) == tokens != text_of(plain)
    assert target.spec.weights_hash != plain.spec.weights_hash


def test_a_module_of_peft_is_taken_as_it_is(adapter: tuple[Path, list[int], Any]) -> None:
    """Catches the wrapper being refused for want of a cache."""
    assert text_of(load_target(adapter[2])) == adapter[1]


def test_an_adapter_alone_says_what_its_base_is(adapter: tuple[Path, list[int], Any], tmp_path: Path) -> None:
    """Catches 'Unrecognized model', in every place that reads a folder; and options that can't hold."""
    for read in (load_target, sketch, anatomy):
        with pytest.raises(TargetError, match=r"is an adapter.*adapter: "):
            read(str(adapter[0]))
    with pytest.raises(ConfigError, match="is not a folder with an adapter_config.json"):
        load_target("demo", adapter=tmp_path)
    with pytest.raises(ConfigError, match="can't be used with tensor_parallel 2"):
        load_target("demo", adapter=adapter[0], tensor_parallel=2)
    broken = tmp_path / "broken"
    shutil.copytree(adapter[0], broken)
    (broken / "adapter_model.safetensors").write_text(POINTER)
    with pytest.raises(TargetError, match="LFS pointer"):
        load_target("demo", adapter=broken)


def test_an_adapter_of_another_model_is_refused(adapter: tuple[Path, list[int], Any], tmp_path: Path) -> None:
    """Catches a traceback where shapes do not fit."""
    with pytest.raises(TargetError, match="can't be merged"):
        load_target(str(make_folder(tmp_path / "other")), adapter=adapter[0])


# ── configs ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def folder_of(known: Known, path: Path) -> str:
    (path / "config.json").write_text(json.dumps(known.fields))
    return str(path)


@pytest.mark.parametrize("known", CONFIGS, ids=lambda known: known.name)
def test_a_known_config_is_planned_or_refused_in_a_sentence(known: Known, tmp_path: Path) -> None:
    """Catches a traceback of `plan`, as every model that reads images once gave one."""
    name = folder_of(known, tmp_path)
    if known.plan != "plans":
        with pytest.raises(OutriderError, match=known.plan):
            anatomy(name)
        return
    found = anatomy(name)
    assert found.layers == 2 and found.hidden == 32 and found.vocabulary == 96
    assert found.parameters == sketch(name).parameters > 96 * 32


REFUSED = [known for known in CONFIGS if known.outcome not in ("loads", "dequantised")]
LOADED = [known for known in CONFIGS if known.outcome == "loads"]
IMAGES = ("Qwen2.5-VL 7B Instruct", "Mistral Small 3.1 24B")


@pytest.mark.parametrize("known", REFUSED, ids=lambda known: known.name)
def test_a_config_that_can_not_be_a_target_says_why(known: Known, tmp_path: Path) -> None:
    """Catches a traceback, and a refusal that names neither the method nor what to do."""
    with pytest.raises(TargetError, match=known.outcome):
        load_target(folder_of(known, tmp_path))


def test_quantised_configs_that_round_activations_are_read_whole(tmp_path: Path) -> None:
    """Catches FP8 and compressed-tensors run as they are stored, where a pass differs from single steps."""
    for known in (one for one in CONFIGS if one.outcome == "dequantised"):
        config = AutoConfig.from_pretrained(folder_of(known, tmp_path))
        assert quantised.whole_weights(config, known.name, torch.device("cpu")).dequantize, known.name


@pytest.mark.parametrize(
    "known",
    [pytest.param(one, marks=[] if one.name in IMAGES else pytest.mark.slow) for one in LOADED],
    ids=[one.name for one in LOADED],
)
def test_a_known_config_loads_and_gives_transformers_own_text(known: Known, tmp_path: Path) -> None:
    """Catches a family that is refused, and the text part of one that reads images being another model."""
    config = AutoConfig.from_pretrained(folder_of(known, tmp_path))
    torch.manual_seed(0)
    model = loader_of(config, known.name).from_config(config).eval()
    model.save_pretrained(tmp_path)
    given = torch.tensor(PROMPT)
    theirs = model.generate(input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=4, do_sample=False)
    assert text_of(load_target(str(tmp_path))) == theirs[0, 4:].tolist()


# ── whatever comes ────────────────────────────────────────────────────────────────────────────────────────────────────

DAMAGES = ("cut", "flip", "empty", "pointer", "missing", "key", "number", "nested", "text")


def damage(folder: Path, noise: random.Random) -> str:
    """Break one file of a folder in one of the ways files break; returns which and how."""
    path, how = noise.choice(sorted(folder.iterdir())), noise.choice(DAMAGES)
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how in ("key", "number", "nested") and path.suffix == ".json":
        value = json.loads(data)
        key = noise.choice(sorted(value))
        if how == "key":
            del value[key]
        else:
            value[key] = noise.choice([0, -1, None, "x", 1e30, [], True]) if how == "number" else {key: value[key]}
        path.write_text(json.dumps(value))
    elif how == "flip":
        data[noise.randrange(min(len(data), 4096))] ^= 1 << noise.randrange(8)
        path.write_bytes(data)
    else:
        made = {"empty": b"", "pointer": POINTER.encode(), "text": b"\xff\xfe{not json" * 9}
        path.write_bytes(made.get(how, bytes(data[: noise.randrange(len(data) + 1)])))
    return f"{path.name}: {how}"


def test_a_damaged_folder_loads_or_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Catches a traceback from whatever reads a folder: a dozen folders by --seed, 2,000 every night."""
    count = int(os.environ.get("OUTRIDER_FUZZ_FOLDERS", "12"))
    whole, seed = make_folder(tmp_path / "whole"), os.environ["OUTRIDER_TEST_SEED"]
    for number in range(count):
        noise, folder = random.Random(f"{seed} {number}"), tmp_path / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        how = damage(folder, noise)
        for read in (anatomy, sketch, load_target if number % 8 == 0 or count < 100 else sketch):
            try:
                read(str(folder))
            except OutriderError:
                continue
            except Exception as error:
                raise AssertionError(f"seed {seed}, folder {number}, {how}: {error!r}") from error
