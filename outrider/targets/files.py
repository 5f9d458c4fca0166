"""Checks of the files in a model's folder, before a library fails on them.  Imports no torch.

Common problems: incomplete files, Git LFS pointers instead of weights, a LoRA adapter instead of a model.
"""

from __future__ import annotations

from pathlib import Path

from outrider.storage.json_text import parse_json
from outrider.storage.trusted import FETCH, regular

ADAPTER = "adapter_config.json"
LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own limit."""
READ = (".safetensors", ".json", ".bin", ".jinja", ".model", ".gguf", ".txt")


def problem_of(name: str) -> str | None:
    """What is wrong with a folder's files, and what to do about it; None if nothing is wrong, or for a Hugging Face
    id."""
    folder = Path(name).expanduser()
    try:
        if not folder.is_dir():
            return None
    except OSError as error:
        return f"{name:.80}... can't be looked up: {error.strerror}; give the name of a folder"
    if (folder / ADAPTER).is_file() and not (folder / "config.json").is_file():
        return _adapter(folder)
    # a folder is not a file whatever its name ends in; only weights must be files
    files = sorted(path for path in folder.iterdir() if path.suffix in READ)
    files = [path for path in files if not path.is_dir() or path.suffix == ".safetensors"]
    return next((problem for path in files if (problem := file_problem(path)) is not None), None)


def unreadable(path: Path) -> str | None:
    """Why a file can't be read (it is not a regular file, or is a Git LFS pointer), and what to do about it; None if it
    can be read."""
    try:
        regular(path)
    except OSError as error:
        if str(error) == FETCH:
            return f"{path} {FETCH.removeprefix('it ')}"
        return f"{path} can't be read: {error.strerror or error}; copy it again"
    return None


def file_problem(path: Path) -> str | None:
    """What is wrong with one file, and what to do about it; None if nothing is."""
    if (problem := unreadable(path)) is not None:
        return problem
    if not (size := path.stat().st_size) and path.suffix != ".txt":
        return f"{path} is empty; copy it again"
    return _cut(path, size) if path.suffix == ".safetensors" else None


def _cut(path: Path, size: int) -> str | None:
    """What is wrong with a safetensors file that is shorter than its header says, or has no valid header."""
    with path.open("rb") as file:
        count = int.from_bytes(file.read(8), "little")
        if size >= 8 and count > min(LONGEST_HEADER, size - 8):
            what = "cut off within its header" if count <= LONGEST_HEADER else "not a safetensors file"
            return f"{path} is {what}: it has {size:,} bytes; copy it again"
        try:
            header = parse_json(file.read(count) if size >= 8 else b"")
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            end = 8 + count + max(map(int, ends), default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            return f"{path} is not a safetensors file, or damaged; copy it again"
    return None if end <= size else f"{path} is cut short: it has {size:,} bytes of {end:,}; copy it again"


def base_of(adapter: Path) -> str:
    """The base model that an adapter's config names; empty if it names none."""
    try:
        base = parse_json((adapter / ADAPTER).read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return base if isinstance(base, str) else ""


def _adapter(folder: Path) -> str:
    base = base_of(folder) or "BASE"
    how = f"`target: {{name: {base}, adapter: {folder}}}` or load_target({base!r}, adapter={str(folder)!r})"
    return f"{folder} is an adapter, not a whole model; load its base with it: {how}; or merge it first with peft"
