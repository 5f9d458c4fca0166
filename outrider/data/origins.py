"""The texts behind a drafter: what its checkpoint was trained on, and the corpora that it draws from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.config import build
from outrider.data.contamination import Source
from outrider.drafters import find, kinds
from outrider.retrieval import corpora


def sources_of(choice: str | Mapping[str, Any]) -> list[Source]:
    """The texts behind a drafter: a checkpoint's, those of its corpora, and those behind its parts.

    choice: as a run file names one, a kind, a kind with its settings, or a checkpoint.  None for a drafter that only reads the
    request.  What the target was trained on is not asked for.
    """
    if isinstance(choice, str):
        if choice not in kinds():
            return [Source(choice, Path(choice))]
        choice = {"kind": choice}
    settings = build(find(choice["kind"]).Config, dict(choice), "drafter").model_dump(mode="json")
    found = [Source(f"corpus {name}", corpora.place(name)) for name in settings.get("corpora", ())]
    model = settings.get("model")
    if model and not settings.get("new"):
        found.append(Source(model, Path(model)))
    for part in (settings.get("base"), settings.get("retriever"), *settings.get("parts", ())):
        found += sources_of(part) if part else []
    return list(dict.fromkeys(found))
