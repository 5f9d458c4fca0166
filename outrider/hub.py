"""Is a name a folder here, or a repository of the Hugging Face hub?  A folder that is missing is never asked of the
hub."""

import re
from pathlib import Path

ID = re.compile(r"(?!-|\.)[\w.-]{1,96}(?<!-|\.)(/(?!-|\.)[\w.-]{1,96}(?<!-|\.))?", re.ASCII)
"""A repository: NAME, or OWNER/NAME."""
HUB_FILE = re.compile(rf"(?P<repo>{ID.pattern}):(?P<file>[\w.-][\w./-]*\.gguf)", re.ASCII)
"""A GGUF file of a repository: OWNER/NAME:FILE."""
FILES = (".json", ".jsonl", ".txt", ".yaml", ".yml", ".safetensors", ".gguf", ".parquet", ".csv")


def is_local(name: str) -> bool:
    """Whether a name means a file or folder here, present or missing: `runs/x` does, also where only `runs` exists."""
    path = Path(name).expanduser()
    if HUB_FILE.fullmatch(name):
        return path.exists()
    owner = path.parts[0] if path.parts else ""
    return (
        path.exists() or not ID.fullmatch(name) or name.endswith(FILES) or owner == "runs"
        or ("/" in name and Path(owner).is_dir())
    )  # fmt: skip


def missing_path(name: str) -> str | None:
    """Why a file or folder can't be used: it is missing.  None where it exists, or may be a repository of the hub."""
    if not is_local(name) or Path(name).expanduser().exists():
        return None
    return f"no such {'file' if name.endswith(FILES) else 'folder'}: {name}"
