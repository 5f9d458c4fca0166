"""An ensemble on disk: a folder whose `ensemble.json` names its members, loaded as other targets are.

    {"members": ["Qwen/Qwen3-1.7B", "../coder", "demo"], "weights": [0.5, 0.3, 0.2]}

A member is a folder, relative to this one, a Hugging Face id or `demo`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from outrider.config import Config, build, read_object
from outrider.errors import ConfigError

FILE = "ensemble.json"


class Description(Config):
    members: Annotated[tuple[str, ...], Field(min_length=2)]
    """Folders or Hugging Face ids; the first one's tokenizer writes."""
    weights: tuple[float, ...] | None = None
    """Of the members' distributions, in the same order; equal unless given."""
    positions: Literal["all", "disputed"] = "all"
    """Where members are averaged; see `lab.averaging`."""
    sharpen: bool = False
    """Whether the probability of a piece is added to that of the token it begins; see `lab.averaging`."""


def described(name: str | Path) -> Description | None:
    """What the folder of this name says of an ensemble, its members as `load_target` takes them; None for any other.

    Raises ConfigError for an `ensemble.json` that can't be read.
    """
    folder = Path(name).expanduser()
    if not (folder / FILE).is_file():
        return None
    try:
        values = read_object(folder / FILE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FILE} can't be read: {error}; give it `members`, and `weights` or none") from None
    description = build(Description, values, str(folder / FILE))
    folders = [folder / member for member in description.members]
    members = zip(description.members, folders, strict=True)
    return description.model_copy(
        update={"members": tuple(str(path) if path.is_dir() else name for name, path in members)}
    )
