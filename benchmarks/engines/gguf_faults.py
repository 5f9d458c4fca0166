"""Faults planted in a draft's GGUF file, as an exporter could make them: each by its name, with the cause that it has.

A file is read and written again by llama.cpp's own library, with one thing changed.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy

Tensors = dict[str, numpy.ndarray[Any, Any]]


class Fault(NamedTuple):
    """One fault."""

    kinds: tuple[str, ...]
    cause: str
    """What `verify-export` calls it; empty where the server refuses the file itself."""
    keys: Callable[[dict[str, Any]], None] = lambda keys: None
    tensors: Callable[[Tensors], None] = lambda tensors: None


def taps_off(keys: dict[str, Any]) -> None:
    name = next(name for name in keys if name.endswith(".target_layers"))
    keys[name] = [layer - 1 for layer in keys[name]]


def turned(keys: dict[str, Any]) -> None:
    name = next(name for name in keys if name.endswith(".rope.freq_base"))
    keys[name] = 20.0


def transposed(tensors: Tensors) -> None:
    for name in ("markov_w1.weight", "markov_w2.weight"):  # the numbers of the transposed matrix, in the old shape
        tensors[name] = numpy.ascontiguousarray(tensors[name].T).reshape(tensors[name].shape)


def norm_of_others(tensors: Tensors) -> None:
    name = "enc.output_norm.weight" if "enc.output_norm.weight" in tensors else "blk.0.attn_norm_2.weight"
    slope = numpy.linspace(0.25, 2, len(tensors[name]), dtype=tensors[name].dtype)  # where training moved little too
    tensors[name] = tensors[name] * slope


def norm_left_out(tensors: Tensors) -> None:
    del tensors["output_norm.weight"]


def window_off(keys: dict[str, Any]) -> None:
    keys["dflash.attention.sliding_window"] = 8


def books_exchanged(tensors: Tensors) -> None:
    one, other = "selector_predecessor.weight", "selector_successor.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def taps_exchanged(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_conv_base")]:
        tensors[name] = numpy.ascontiguousarray(tensors[name][:, ::-1])


DRAFTS = ("dflash", "dflash2", "dspark", "eagle3")
FAULTS: Mapping[str, Fault] = {
    "taps one off": Fault(DRAFTS, "taps", keys=taps_off),
    "the rotation's base": Fault(DRAFTS, "RoPE", keys=turned),
    "Markov matrices transposed": Fault(("dspark",), "weights", tensors=transposed),
    "a window of 8 positions": Fault(("dflash2",), "block mask", keys=window_off),
    "the selector's codebooks exchanged": Fault(("dflash2",), "weights", tensors=books_exchanged),
    "the taps of a convolution exchanged": Fault(("dflash2",), "weights", tensors=taps_exchanged),
    "a norm of other weights": Fault(DRAFTS, "norm", tensors=norm_of_others),
    "a norm left out": Fault(DRAFTS, "", tensors=norm_left_out),
}


def planted(name: str, folder: Path, out: Path) -> Path:
    """An exported folder with a fault in its model.gguf, copied to `out`."""
    shutil.copytree(folder, out)
    rewritten(folder / "model.gguf", out / "model.gguf", FAULTS[name])
    return out


def rewritten(source: Path, path: Path, fault: Fault) -> None:
    """A GGUF file with one fault."""
    import gguf

    reader = gguf.GGUFReader(source)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    keys = {name: field.contents() for name, field in fields.items()}
    tensors = {one.name: one.data for one in reader.tensors}
    types = {one.name: one.tensor_type for one in reader.tensors}
    fault.keys(keys)
    fault.tensors(tensors)
    path.unlink(missing_ok=True)
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture"))
    for name, value in keys.items():
        kind = fields[name].types
        writer.add_key_value(name, value, kind[0], kind[-1] if kind[0] == gguf.GGUFValueType.ARRAY else None)
    for name, value in tensors.items():
        writer.add_tensor(name, value, raw_dtype=types[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
