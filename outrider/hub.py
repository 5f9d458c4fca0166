"""Whether a name is a local path or a Hugging Face repository.  Missing folders are never looked up on the hub."""

import re
from pathlib import Path

ID = re.compile(r"(?!-|\.)[\w.-]{1,96}(?<!-|\.)(/(?!-|\.)[\w.-]{1,96}(?<!-|\.))?", re.ASCII)
"""Repository: NAME or OWNER/NAME."""
HUB_FILE = re.compile(rf"(?P<repo>{ID.pattern}):(?P<file>[\w.-][\w./-]*\.gguf)", re.ASCII)
"""GGUF file in a repository: OWNER/NAME:FILE."""
FILES = (".json", ".jsonl", ".txt", ".yaml", ".yml", ".safetensors", ".gguf", ".parquet", ".csv")


def is_local(name: str) -> bool:
    """Whether a name means a local file or folder, existing or not: `runs/x` does, even if only `runs` exists."""
    path = Path(name).expanduser()
    if HUB_FILE.fullmatch(name):
        return path.exists()
    owner = path.parts[0] if path.parts else ""
    return (
        path.exists() or not ID.fullmatch(name) or name.endswith(FILES) or owner == "runs"
        or ("/" in name and Path(owner).is_dir())
    )  # fmt: skip


def missing_path(name: str) -> str | None:
    """An error message for a missing local file or folder; None if it exists or the name may be a repository."""
    if not is_local(name) or Path(name).expanduser().exists():
        return None
    return f"no such {'file' if name.endswith(FILES) else 'folder'}: {name}"
