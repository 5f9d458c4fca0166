"""`sources.json` next to the answers: their sources with counts, hashes of files and, if known, licences."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.data.overlap import questions
from outrider.data.sources.choosing import ScannedSource
from outrider.data.sources.mixture import Selection
from outrider.data.sources.readers import data_set, files_of
from outrider.errors import DataError
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json

NAME = "sources.json"
COMMIT = re.compile(r"@([0-9a-f]{40})")


def write(folder: Path, selection: Selection) -> Path:
    """Write `sources.json` into a folder atomically; returns the file."""
    config, path = selection.config, folder / NAME
    facts = {
        "sources": [_facts(part, config.seed) for part in selection.parts],
        "conversations": len(selection),
        "left_out": dict(selection.left_out),
        "seed": config.seed,
        "deduplicate": config.deduplicate,
        "contamination": {
            "is_checked": selection.evaluated > 0, "prompts": selection.evaluated, "rule": questions.RULE,
            "left_out": selection.left_out["contaminated"], "first": selection.contaminated,
        },
    }  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"can't write {path}: {error.strerror or error}; free some space and run again") from None
    return path


def read(folder: Path) -> dict[str, Any] | None:
    """The content of a folder's `sources.json`; None if it can't be read."""
    try:
        content = parse_json((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _facts(part: ScannedSource, seed: int) -> dict[str, Any]:
    settings = part.source.model_dump(mode="json", exclude_none=True)
    if part.source.path is not None:
        settings.pop("split")
    counts = {
        "read": len(part.keys), "unreadable": part.unreadable, "used": part.count, "left_out": dict(part.left_out),
    }  # fmt: skip
    files = [{"file": str(path), "size_bytes": path.stat().st_size, "sha256": _sha256(path)} for path in _files(part)]
    return settings | counts | ({"files": files} if files else {}) | _licence(part, seed)


def _files(part: ScannedSource) -> list[Path]:
    answers = [] if part.source.answers is None else [Path(part.source.answers).expanduser()]
    return files_of(part.source) + answers


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _licence(part: ScannedSource, seed: int) -> dict[str, Any]:
    """A data set's licence and the commit that was read; for files, the licence file next to them."""
    if part.source.name is None:
        nearby = [licence for path in _files(part) for licence in sorted(path.parent.glob("LICEN[CS]E*"))]
        return {"licence_file": str(nearby[0])} if nearby else {}
    facts: dict[str, Any] = {}
    with suppress(AttributeError, TypeError):  # a data set may lack any of this
        info = data_set(part.source, seed).info
        facts["licence"] = info.license or None
        commit = COMMIT.search(" ".join(info.download_checksums or ()))
        facts["commit"] = commit[1] if commit else None
    return {key: value for key, value in facts.items() if value}
