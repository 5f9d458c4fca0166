"""Our GGUF files beside those of llama.cpp's own converter: key by key and tensor by tensor.

    python benchmarks/engines/build_llama.py
    python benchmarks/engines/gguf_converter.py [--source LLAMA_CPP] [--types f32,f16,q8_0] [--out FILE]

Each kind of drafter for the demo target, with random weights, is exported in a layout that the converter reads and
converted there, and exported as GGUF here.  A difference is either on purpose, and `WHY` has the reason, or a fault.
Not compared is mtp: the converter has no class for a module that is not in its target's own checkpoint.

The converter knows tokenizers by the hash of a text and looks for a `sentencepiece` first.  Here it is told how the
target's tokenizer splits words, and that it is a byte-level BPE; run as `gguf_converter.py convert SOURCE SPLIT
ARGUMENTS…`, this file does that and nothing else.

Prints JSON; exits with 1 where a difference has no reason, with 3 where llama.cpp's source is not there.
"""

from __future__ import annotations

import argparse
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "convert_hf_to_gguf.py"
CANNOT = 3
BLOCK = {"layers": 2, "kv_heads": 2, "block": 4, "mask_token": 2}


class Case(NamedTuple):
    """One kind of drafter, and the layout in which the converter reads it."""

    kind: str
    layout: str
    settings: Mapping[str, Any]


CASES = {
    "dspark": Case("dspark", "deepspec", {**BLOCK, "rank": 64}),
    "dspark, no confidence": Case("dspark", "deepspec", {**BLOCK, "rank": 64, "confidence": False}),
    "dspark, a bonus anchor": Case("dspark", "speculators", {**BLOCK, "rank": 64, "anchor_predicts": False}),
    "dflash": Case("dflash", "sglang", {**BLOCK, "anchor_predicts": False}),
    "dflash, in the anchor's slot": Case("dflash", "deepspec", BLOCK),
    "eagle3": Case("eagle3", "speculators", {"kv_heads": 2}),
    "eagle3, 512 tokens": Case("eagle3", "speculators", {"kv_heads": 2, "vocabulary": 512}),
    "small_model": Case("small_model", "transformers", {"new": {"layers": 2, "hidden": 128, "intermediate": 256}}),
    "the target": Case("target", "its own folder", {}),
}
OURS, THEIRS = "only in ours", "only in theirs"
WHY = (
    ("key", "general.name", "the folder's name, for catalogues; ours are in outrider.json"),
    ("key", "general.*", "a label for catalogues; llama.cpp computes nothing with it"),
    ("key", "outrider.*", "ours: what a reader of ours needs to make the same drafter again"),
    ("key", "*.vocab_size", "llama.cpp counts the tokens; the key is written for all architectures alike"),
    ("key", "*.rope.dimension_count", "the default, all of a head, is written out"),
    ("tensor", "token_embd.weight", "a copy of the target's, which llama.cpp takes from the target's file"),
    ("tensor", "output.weight", "a copy of the target's, which llama.cpp takes from the target's file"),
    ("tensor", "markov_w?.weight", "zero: only a DSpark reads the anchor's slot, and a DSpark has a Markov head"),
)  # fmt: skip
"""(Key or tensor, pattern of its name, why it differs on purpose)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="llama.cpp's source; that of build_llama.py unless given")
    parser.add_argument("--types", default="f32,f16,q8_0", help="types of number")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from benchmarks.engines.build_llama import COMMIT, VERSION, server
    from benchmarks.replay import provenance, publish

    source = wanted.source or server().parents[2] / f"llama_cpp_python-{VERSION}" / "vendor" / "llama.cpp"
    if not (source / SCRIPT).exists():
        print(
            f"skipped: no {source / SCRIPT}; run benchmarks/engines/build_llama.py, or name it: --source",
            file=sys.stderr,
        )
        return CANNOT
    began, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory() as place:
        for name, case in CASES.items():
            if name.startswith(wanted.only):
                rows += compared_case(name, case, source, wanted.types.split(","), Path(place))
    found = {**provenance(time.monotonic() - began), "llama_cpp": COMMIT, "rows": rows}
    publish(found, wanted.out)
    return int(any(row["unexplained"] for row in rows))


def compared_case(name: str, case: Case, source: Path, types: list[str], place: Path) -> list[dict[str, Any]]:
    """A row for each type of number."""
    from outrider import demo, load_target
    from outrider.export.target import export_target
    from outrider.export.writing import export_folder
    from outrider.formats.gguf import layouts

    target = load_target("demo", dtype="float32", compile=False)
    split = layouts.header(target.model, target.tokenizer, "f32")["tokenizer.ggml.pre"]
    own = place / name.replace(", ", "-").replace(" ", "-").replace("'", "")
    folder = demo.TARGET
    if case.kind != "target":
        made(case, target, own)
        folder = export_folder(own, case.layout, own.with_name(f"{own.name}-{case.layout}"), target)
    rows = []
    for kind in types:
        out = own.with_name(f"{own.name}-{kind}")
        is_target = case.kind == "target"
        ours = export_target(target, out, kind) if is_target else export_folder(own, "gguf", out, target, kind)
        theirs = converted(folder, source, split, kind, out.with_name(f"{out.name}-theirs.gguf"))
        rows.append(
            {"case": name, "layout": case.layout, "type": kind, **compared(ours / layouts.FILE, theirs, case.kind)}
        )
    return rows


def made(case: Case, target: Any, place: Path) -> None:
    """A checkpoint with random weights, none at its initial value: norms of ones would hide a norm in another's
    place."""
    import torch

    from outrider.checkpoint import save
    from outrider.config import build
    from outrider.drafters import find

    module, noise = find(case.kind), torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    model = module.Model(build(module.Config, {"kind": case.kind, **case.settings}, "drafter"), target)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=noise)
        if case.settings.get("vocabulary"):
            model.begin(torch.randperm(target.spec.vocabulary, generator=noise))
    save(place, model, {})


def converted(folder: Path, source: Path, split: str, kind: str, path: Path) -> Path:
    """What llama.cpp's converter makes of a folder.  Raises ChildProcessError where it fails."""
    from outrider import demo

    command: list[Any] = [
        sys.executable, __file__, "convert", source, split, folder, "--outtype", kind, "--outfile", path,
        "--target-model-dir", demo.TARGET,
    ]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"{SCRIPT} failed on {folder.name}: " + " ".join(done.stderr.split())[-400:])
    return path


def compared(ours: Path, theirs: Path, kind: str) -> dict[str, Any]:
    """What is equal, what differs on purpose and why, and what differs without a reason."""
    import gguf as library

    differences: list[dict[str, Any]] = []
    mine, other = library.GGUFReader(ours), library.GGUFReader(theirs)
    keys, other_keys = _keys(mine), _keys(other)
    equal_keys = _differing("key", keys, other_keys, differences)
    tensors, other_tensors = _tensors(mine), _tensors(other)
    equal_tensors = _differing("tensor", tensors, other_tensors, differences)
    for one in differences:
        one["why"] = _why(one, kind)
    return {
        "equal_keys": equal_keys, "equal_tensors": equal_tensors,
        "on_purpose": [one for one in differences if one["why"]],
        "unexplained": [one for one in differences if not one["why"]],
    }  # fmt: skip


def _keys(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}


def _tensors(reader: Any) -> dict[str, Any]:
    """Name to (type, shape, bytes)."""
    return {
        one.name: (one.tensor_type.name, tuple(map(int, one.shape)), one.data.tobytes()) for one in reader.tensors
    }  # fmt: skip


def _differing(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], found: list[dict[str, Any]]) -> int:
    """Adds the differences to `found`; returns how many are equal."""
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            where = OURS if name not in theirs else THEIRS
            found.append({"what": what, "name": name, "difference": where})
        elif ours[name] != theirs[name]:
            found.append({"what": what, "name": name, "difference": f"{_short(ours[name])}, {_short(theirs[name])}"})
    return sum(name in theirs and ours[name] == theirs[name] for name in ours)


def _short(value: Any) -> str:
    if isinstance(value, tuple):  # a tensor
        return f"{value[0]} {value[1]}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}…"


def _why(one: Mapping[str, Any], kind: str) -> str | None:
    """The reason of a difference; None for a fault.  What both have must be equal, but for labels."""
    both = one["difference"] not in (OURS, THEIRS)
    if both and not one["name"].startswith("general."):
        return None
    if one["what"] == "tensor" and (one["difference"] == THEIRS) == one["name"].startswith("markov"):
        return None
    if one["name"].startswith("markov") and kind != "dflash":
        return None
    return next((why for what, name, why in WHY if what == one["what"] and fnmatch(one["name"], name)), None)


def convert() -> None:
    """Run the converter, told what it can't find out."""
    source, split, *arguments = sys.argv[2:]
    sys.path[0] = source  # in place of this folder
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: split
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(str(Path(source) / SCRIPT), run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1:2] == ["convert"]:
        convert()
    else:
        raise SystemExit(main())
