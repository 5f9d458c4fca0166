"""Folders made to break the import: each is refused in one sentence, nothing is executed, fetched, half-written or
overrun."""

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_targets import fresh
from safetensors.torch import load_file, save_file

from outrider.checkpoint import load_model
from outrider.errors import ExportError
from outrider.export.reading import import_folder
from outrider.export.writing import export_folder
from outrider.weights import weights_of

LAYER = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("speculators", {**LAYER, "taps": [0, 1, 3], "vocabulary": 40}),
    "dflash": ("sglang", {**LAYER, "mask_token": 5, "layers": 2, "block": 3, "taps": [0, 2], "anchor_predicts": False}),
    "dspark": ("sglang", {**LAYER, "mask_token": 5, "layers": 2, "block": 3, "taps": [0, 2], "rank": 8,
    "confidence": True}),
    "small_model": ("transformers", {"new": {"layers": 1, "hidden": 16, "intermediate": 32, "heads": 2, "kv_heads": 1,
                                             "head_dim": 8}}),
}  # fmt: skip


@pytest.fixture(scope="module")
def good(target: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole folder of each kind."""
    place = tmp_path_factory.mktemp("good")
    for kind, (format, settings) in SETTINGS.items():
        export_folder(fresh(kind, settings, target, place / f"{kind}-checkpoint"), format, place / kind, target)
    return {kind: place / kind for kind in SETTINGS}


Spoil = Callable[[Path], None]


def _config(**values: Any) -> Spoil:
    """Sets keys of config.json; a__b is b within a."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for path, value in values.items():
            *above, key = path.split("__") if not path.startswith("_") else [path]
            place = config
            for name in above:
                place = place[name]
            place[key] = value
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def _manifest(**values: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "outrider.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return spoil


def _bytes(header: dict[str, Any], behind: int = 0) -> Spoil:
    said = json.dumps(header).encode()
    return lambda folder: (
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(said)) + said + bytes(behind)) and None
    )


def _twice(folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(text[:-1] + ', "block_size": 9}')


def _pipe(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")


def _shards(folder: Path) -> list[str]:
    """Two shards and their index; returns the names of the files."""
    found = load_file(folder / "model.safetensors")
    names, files = sorted(found), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: files[i % 2] for i, name in enumerate(names)}
    for file in files:
        save_file({name: found[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return files


def _unicode(folder: Path) -> None:
    found = load_file(folder / "model.safetensors") | {"ü\u202e\x1b[31m": torch.ones(1)}
    save_file(found, folder / "model.safetensors")


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Spoil:
    def spoil(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors")

    return spoil


def _weights(**change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    """Changes tensors; a__b is a.b."""
    names = {name.replace("__", "."): make for name, make in change.items()}
    return _tensors(lambda found: found.update({name: make(found[name]) for name, make in names.items()}))


class Trap:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("/tmp/outrider-was-tricked", "w")


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))


def _elsewhere(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    names = dict.fromkeys(load_file(folder / "model.safetensors"), "../elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


CASES: dict[str, tuple[str, Spoil, str]] = {
    "missing key": ("eagle3", _tensors(lambda w: w.pop("norm.weight")), "lacks the weights norm.weight"),
    "extra key": ("eagle3", _tensors(lambda w: w.update({"midlayer.extra": torch.ones(7)})),
                  "midlayer.extra .* this kind of drafter does not have"),
    "pickle": ("eagle3", _pickled, "a pickle, which can run code"),
    "path in an index": ("eagle3", _elsewhere, "not a safetensors file of this folder"),
    "d2t out of range": ("eagle3", _tensors(lambda w: w["d2t"][-1].fill_(10_000)), "outside the target's"),
    "stale t2d": ("eagle3", _weights(t2d=lambda w: ~w), "different tokens"),
    "NaN": ("eagle3", _tensors(lambda w: w["fc.weight"][0, 0].fill_(torch.nan)), "not finite in fc.weight"),
    "other width": ("eagle3", _config(transformer_layer_config={"hidden_size": 48}), "hidden_size is 48"),
    "no layer numbers": ("eagle3", _config(eagle_aux_hidden_state_layer_ids=None), "_layer_ids is missing"),
    "a layer as wide as all memory": ("dflash", _config(intermediate_size=10**12), "a model larger than"),
    "a wide plain model": ("small_model", _config(hidden_size=10**9), "a model larger than"),
    "a block longer than any text": ("dflash", _config(block_size=10**12), "drafts 999999999999 tokens"),
    "a billion tokens a step": (
        "eagle3", _config(speculators_config={"proposal_methods": [{"speculative_tokens": 10**9}]}), "drafts "
        "1000000000 tokens",
    ),
    "infinitely many tokens": (
        "eagle3", _config(speculators_config={"proposal_methods": [{"speculative_tokens": float("inf")}]}),
        "can't be read as eagle3",
    ),
    "a kind that is a list": ("eagle3", _config(speculators_model_type=["eagle3"]), "matches no drafter of"),
    "a method that is a list": ("dflash", _config(dflash_config__projector_type=["a"]), "matches no drafter of"),
    "layers in half steps": ("dflash", _config(dflash_config__target_layer_ids=[0.5, 2.2]), "a list of integers"),
    "a causal block": ("dflash", _config(dflash_config__causal=True), "causal is true"),
    "layers with a window": ("dflash", _config(dflash_config__use_swa=True), "use_swa is true"),
    "infinite rotation": ("dflash", _config(rope_theta=float("inf"), rope_parameters=None), "must be .*, got inf"),
    "code from a repository of kernels": ("small_model", _config(_attn_implementation="evil/repo"), "selects code "
    "to run"),
    "code that comes along": ("small_model", _config(auto_map={"AutoModel": "x.y"}), "would run code"),
    "a quantised model": ("small_model", _config(quantization_config={"quant_method": "awq"}), "has a "
    "quantization_config"),
    "a key that is there twice": ("dflash", _twice, "'block_size' is in it twice"),
    "a pipe for a config": ("dflash", _pipe, "is not a regular file"),
    "deep nesting": (
        "dflash",
        lambda folder: (folder / "config.json").write_text('{"a":' + "[" * 99_999 + "]" * 99_999 + "}") and None,
        "can't be read",
    ),
    "a missing shard": ("dflash", lambda folder: (folder / _shards(folder)[1]).unlink(), "model-00002-of-00002"),
    "a tensor of 2 GB that is not there": (
        "dflash", _bytes({"norm.weight": {"dtype": "F32", "shape": [2**29], "data_offsets": [0, 2**31]}}), "can't be "
        "read",
    ),
    "a shape whose product overflows": (
        "dflash", _bytes({"norm.weight": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, 16),
        "can't be",
    ),
    "an empty tensor": ("dflash", _weights(norm__weight=lambda w: w[:0]), r"norm.weight \(0,\), wanted \(32,\)"),
    "8 bits": ("dflash", _weights(norm__weight=lambda w: w.to(torch.float8_e4m3fn)), "8-bit weights in "
    "norm.weight"),
    "whole numbers for fractions": ("dflash", _weights(norm__weight=lambda w: w.to(torch.int8)), "norm.weight is int8"),
    "numbers too large for the target's type": (
        "dflash", _weights(norm__weight=lambda w: w.double().sign() * 1e300), "float32 can't hold",
    ),
    "d2t beyond 64 bits": ("eagle3", _weights(d2t=lambda w: w.index_fill(0, torch.tensor([39]), 2**63 - 1)), "outside"),
    "a name that moves the cursor": ("dflash", _unicode, r"has \\xfc\\u202e\\x1b\[31m"),
    "notes of another type": ("dflash", _manifest(target=[1]), r"target must be a mapping, got \[1\]"),
    "notes whose version is a truth": ("dflash", _manifest(version=True), "is of version True"),
    "notes with weights of another draft": ("dflash", _manifest(unmapped={"nope": [1]}), "this draft does not have"),
    "notes with weights over the real ones": (
        "dflash", _manifest(unmapped={"backbone.norm.weight": [float("nan")] * 32}), "that this draft does not have",
    ),
}  # fmt: skip


def test_a_hostile_folder_is_refused_in_one_sentence_and_nothing_is_left(target, good, tmp_path):
    """Each was seen to pass in silence, to end in a traceback, or to take memory without end, or guards against its
    return."""
    for case, (kind, spoil, said) in CASES.items():
        place = tmp_path / case
        shutil.copytree(good[kind], place / "there")
        spoil(place / "there")
        if not case.startswith("notes"):
            (place / "there" / "outrider.json").unlink()
        with pytest.raises(ExportError, match=said) as caught:
            import_folder(place / "there", place / "back", target)
        assert "\n" not in str(caught.value), case
        assert not (place / "back").exists() and not list(place.glob("*.part")), case
    assert not Path("/tmp/outrider-was-tricked").exists()


def _linked(folder: Path) -> None:
    """As the hub's cache keeps files."""
    shutil.move(folder / "model.safetensors", folder.parent / "blob")
    (folder / "model.safetensors").symlink_to(folder.parent / "blob")


HARMLESS: dict[str, tuple[str, Spoil]] = {
    "links, as in the hub's cache": ("dflash", _linked),
    "shards": ("dflash", lambda folder: _shards(folder) and None),
    "keys in other letters": ("dflash", _config(ключ="значение")),
    "d2t in 32 bits": ("eagle3", _weights(d2t=lambda w: w.int())),
    "t2d as numbers": ("eagle3", _weights(t2d=lambda w: w.long())),
    "halves": ("dflash", _weights(norm__weight=lambda w: w.half())),
}


def test_what_is_only_unusual_is_read(target, good, tmp_path):
    """Catches a guard that keeps out what released folders are."""
    for case, (kind, change) in HARMLESS.items():
        place = tmp_path / case
        shutil.copytree(good[kind], place / "there")
        change(place / "there")
        (place / "there" / "outrider.json").unlink()
        back = weights_of(import_folder(place / "there", place / "back", target))
        own = weights_of(load_model(good[kind].with_name(f"{kind}-checkpoint"), target))
        if case == "halves":
            own["backbone.norm.weight"] = own["backbone.norm.weight"].half().float()
        assert all(torch.equal(back[name], weight) for name, weight in own.items()), case
