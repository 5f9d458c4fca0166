"""The code that made what is stored: another one would make something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def code(*modules: Any) -> list[bytes]:
    """The source of these modules, for `settings`: what is traced may change with it."""
    return [Path(module.__file__ or "").read_bytes() for module in modules]
