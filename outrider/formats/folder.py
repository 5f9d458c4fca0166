"""A folder of weights as engines load it: config.json and safetensors (one file or shards), or one GGUF file.

Nothing in it is ever executed.  It is checked first: no pickles, no file names outside the folder, no weights that are
not finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import machine
from outrider.errors import ExportError
from outrider.formats.gguf import reading
from outrider.formats.keys import CONFIG, read_json
from outrider.storage.trusted import regular
from outrider.weights import not_finite, rounded

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def has_config(folder: Path) -> bool:
    """Whether a folder has a config.json or GGUF file, or the path is a GGUF file."""
    return (folder / CONFIG).exists() or reading.find(folder) is not None


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, or the keys of a GGUF file.  Raises ExportError if there is neither, or it can't be read."""
    if (folder / CONFIG).exists() or (path := reading.find(folder)) is None:
        return read_json(folder / CONFIG)
    return reading.read_config(path)


def read_names(folder: Path) -> frozenset[str]:
    """Names of a folder's tensors, from the file headers only.  Raises ExportError for pickles and damaged files."""
    if not (folder / CONFIG).exists() and (path := reading.find(folder)) is not None:
        return frozenset(reading.read_header(path).tensors)
    names: set[str] = set()
    for path in _files(folder):
        try:
            with safe_open(regular(path), framework="pt") as file:
                names |= set(file.keys())
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path} can't be read: {error}; copy it again") from None
    return frozenset(names)


def rounded_heads(folder: Path) -> set[str]:
    """Which of embedding and head a folder stores in 8 bits; empty for safetensors."""
    path = None if (folder / CONFIG).exists() else reading.find(folder)
    return set() if path is None else reading.rounded_heads(path)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, on the CPU.  Raises ExportError for pickles, damaged files, and weights that are
    quantised or not finite."""
    weights: dict[str, Tensor] = {}
    files = _files(folder)
    if why := machine.fits(sum(path.stat().st_size for path in files if path.exists())):
        raise ExportError(f"{folder} can't be loaded: {why}; copy it again, or use a smaller draft")
    for path in files:
        try:
            tensors = load_file(regular(path))
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{path} can't be read: {error}; copy it again") from None
        if twice := tensors.keys() & weights.keys():
            raise ExportError(
                f"{path} holds {min(twice)}, which another file of {folder} holds too; copy the folder again"
            )
        weights |= tensors
    if small := rounded(weights):
        raise ExportError(f"{folder} has 8-bit weights in {_few(small)}; use a draft with weights of 16 or 32 bits")
    if broken := not_finite(weights):
        raise ExportError(
            f"{folder} has values that are not finite in {_few(broken)}; "
            "its training went wrong: use an earlier checkpoint"
        )
    return weights


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX).get("weight_map")
        if not isinstance(index, Mapping) or not all(isinstance(name, str) for name in index.values()):
            raise ExportError(f"{folder / INDEX} has no weight_map of file names; copy it again")
        names = sorted(set(index.values()))
        if outside := [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ExportError(
                f"{folder / INDEX} names {outside[0]!r}, which is not a safetensors file of this folder; copy the "
                "folder again from a source you trust"
            )
        return [folder / name for name in names]
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if len(others := list(folder.glob("*.safetensors"))) == 1:  # such as medusa_lm_head.safetensors
        return others
    if pickled := [path.name for pattern in PICKLED for path in folder.glob(pattern)]:
        raise ExportError(
            f"{folder} has its weights in {pickled[0]}, a pickle, which can run code when it is opened; convert it to "
            "safetensors where you trust it (torch.load with weights_only=True, then safetensors.torch.save_file)"
        )
    raise ExportError(f"{folder} has no {WEIGHTS}; name the folder of a draft model")


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # a tensor with two names is written twice: safetensors refuses shared memory
    duplicates = {name: weight.detach().cpu().contiguous().clone() for name, weight in weights.items()}
    save_file(duplicates, folder / WEIGHTS, metadata={"format": "pt"})


def _few(names: list[str]) -> str:
    return ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
