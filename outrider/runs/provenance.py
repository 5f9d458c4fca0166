"""The resolved run file and the provenance of results, written into the run's folder."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from outrider import machine
from outrider.errors import masked
from outrider.runs.file import RunConfig


def write_config(run: RunConfig) -> None:
    """Write the resolved run file into the run's folder."""
    _write(run.folder, "config.yaml", yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False, allow_unicode=True))


def write_provenance(folder: Path, config: Mapping[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """Write versions, machine, the settings `config` and `facts` to a folder, and return them."""
    facts_of_run = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "outrider": version_of("outrider"),
        "commit": _commit(),
        "python": platform.python_version(),
        "library": f"CPython {sys.version_info.major}.{sys.version_info.minor} standard library",
        "torch": torch.__version__,
        "transformers": version_of("transformers"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else machine.cpu_name(),
        "products_ms": None if torch.cuda.is_available() else machine.matmul_times().ms,
        "command": " ".join(["outrider", *sys.argv[1:]]),
        "config": dict(config),
    } | facts
    text = masked(json.dumps(facts_of_run, indent=2, default=str))  # the command and addresses may contain passwords
    _write(folder, "provenance.json", text)
    written: dict[str, Any] = json.loads(text)
    return written


def _write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the running source, with `+` if files differ from it; None in an installed package."""
    root = Path(__file__).resolve().parents[2]
    words = ["git", "-C", str(root), "describe", "--always", "--dirty=+"]
    try:
        head = subprocess.run(words, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() or None if (root / ".git").exists() else None
