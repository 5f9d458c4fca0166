"""The source code that produced a stored file, since other code would produce another file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def code(*modules: Any) -> list[bytes]:
    """The source of these modules, as part of the settings of what is stored."""
    return [Path(module.__file__ or "").read_bytes() for module in modules]
