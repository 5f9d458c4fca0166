"""Finds the GGUF files that a name refers to: a file, the parts of a split one, a folder with one model, or a file on
the hub."""

from __future__ import annotations

import re
from pathlib import Path

from outrider.errors import TargetError, first_line
from outrider.hub import HUB_FILE
from outrider.targets.gguf.reader import MAGIC, Damaged, opened, shown

SUFFIX = ".gguf"
SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MOST_PARTS = 1000
BESIDE = ("mmproj", "imatrix")
"""Name prefixes of image projectors and importance matrices, which are stored next to a model."""


def locate(name: str, revision: str | None = None) -> tuple[Path, ...] | None:
    """The files of a GGUF model, in order; None for any other name.

    Files on the hub are downloaded.  Raises TargetError for a missing file, for a folder with several models, and for a
    failed download.
    """
    path = Path(name).expanduser()
    if not path.exists() and (match := HUB_FILE.fullmatch(name)) is not None:
        return tuple(_fetched(match["repo"], part, revision) for part in _parts(match["file"]))
    if path.is_dir():
        return None if (path / "config.json").exists() else _in_folder(path)
    if path.suffix != SUFFIX and not _begins_as_gguf(path):
        return None
    return _all_there(path)


def _begins_as_gguf(path: Path) -> bool:
    """Whether it is a GGUF file without the suffix, as model stores keep them."""
    if not path.is_file():
        return False
    try:
        with opened(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except (OSError, Damaged):
        return False


def _in_folder(folder: Path) -> tuple[Path, ...] | None:
    """The one model of a folder, or `model.gguf` if there are several."""
    files = [path for path in sorted(folder.glob(f"*{SUFFIX}")) if not path.name.startswith(BESIDE)]
    models = {_parts(path.name)[0]: path for path in files}
    if not models:
        return None
    if len(models) > 1 and f"model{SUFFIX}" not in models:
        names = ", ".join(shown(name) for name in list(models)[:4])
        raise TargetError(f"{folder} has {len(models)} GGUF models: {names}; name one of them")
    return _all_there(models.get(f"model{SUFFIX}", files[0]))


def _all_there(path: Path) -> tuple[Path, ...]:
    """The file, with the other parts of a split one.  Raises TargetError if one is missing."""
    parts = tuple(path.with_name(name) for name in _parts(path.name))
    missing = [part for part in parts if not part.exists()]
    if missing:
        others = f"; {path.name} is one of {len(parts)} files, which must be in one folder" if len(parts) > 1 else ""
        raise TargetError(f"no such file: {missing[0]}{others}")
    return parts


def _parts(name: str) -> list[str]:
    """The names of a model's files, given one of them."""
    match = SPLIT.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MOST_PARTS:
        raise TargetError(f"{shown(name)} is not part of a split file: parts count from 1 to at most {MOST_PARTS}")
    return [f"{match['stem']}-{number:05}-of-{match['count']}{SUFFIX}" for number in range(1, count + 1)]


def _fetched(repository: str, file: str, revision: str | None) -> Path:
    """A file on the hub, downloaded unless it is in the cache."""
    import huggingface_hub  # takes a second to import, and only needed here

    try:
        return Path(huggingface_hub.hf_hub_download(repository, file, revision=revision))
    except (OSError, ValueError) as error:
        reason = first_line(error) or type(error).__name__
        raise TargetError(
            f"{file} of {repository} can't be downloaded from the hub: {reason}; check the name, or download it and "
            "give its path"
        ) from None
