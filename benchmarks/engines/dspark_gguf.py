"""A trained dspark for llama.cpp: exported as DeepSpec writes it, then through llama.cpp's own converter.

The converter knows tokenizers by the hash of a text and looks for a `sentencepiece` first.  Here it is told how the
target's tokenizer splits words, and that it is a byte-level BPE; run by its path, this file does that and nothing else:

    python benchmarks/engines/dspark_gguf.py SOURCE SPLIT ARGUMENTS…
"""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = "convert_hf_to_gguf.py"
DEMO = Path(__file__).resolve().parents[2] / "outrider" / "demo" / "target"


def main() -> None:
    source, split, *arguments = sys.argv[1:]
    sys.path[0] = source  # in place of this folder
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: split
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2
    sys.argv = [SCRIPT, *arguments]
    runpy.run_path(str(Path(source) / SCRIPT), run_name="__main__")


def written(checkpoint: Path, target: Any, source: Path, place: Path, kind: str) -> Path:
    """The drafter as a GGUF file in `place`, of `kind` f32 or f16; written once.  source: llama.cpp's.

    Raises FileNotFoundError where there is no checkpoint or no converter, ChildProcessError where that fails,
    ExportError where the drafter can't be said.
    """
    from outrider.export import gguf
    from outrider.export.writing import export_folder

    folder, path = place / "dspark", place / f"dspark-{kind}.gguf"
    if path.exists():
        return path
    for needed, how in ((checkpoint, "run `make demo`"), (source / SCRIPT, "run benchmarks/engines/build_llama.py")):
        if not needed.exists():
            raise FileNotFoundError(f"no {needed}: {how}")
    if not folder.exists():
        export_folder(checkpoint, "deepspec", folder, target)
    split = gguf.header(target.model, target.tokenizer, kind)["tokenizer.ggml.pre"]
    part = path.with_suffix(".part")
    command = [
        sys.executable,
        __file__,
        source,
        split,
        folder,
        "--target-model-dir",
        DEMO,
        "--outtype",
        kind,
        "--outfile",
        part,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"{SCRIPT} failed: " + " ".join(done.stderr.split())[-300:])
    return part.rename(path)


if __name__ == "__main__":
    main()
