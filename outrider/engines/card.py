"""The model card of an exported drafter: README.md, with the metadata that the Hugging Face hub reads.  No torch.

Everything in it comes from the folder's outrider.json.  A card edited by hand is not overwritten.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from outrider.engines import commands
from outrider.engines.engine import ENGINES, Draft
from outrider.engines.template import rendered
from outrider.errors import ConfigError, ExportError
from outrider.export.manifest import read_manifest
from outrider.formats.keys import MANIFEST
from outrider.hub import is_local
from outrider.storage.atomic import replacing
from outrider.targets import catalog

NAME = "README.md"
LIBRARIES = {"speculators": "speculators", "transformers": "transformers", "gguf": "gguf"}
"""Format → the hub's name of the library that reads it; `outrider` for the others."""


def write(folder: Path) -> bool:
    """Write the card of an exported folder.  Returns False, and writes nothing, if the existing card was edited.

    outrider.json stores the hash of the card.  Raises ExportError for a folder that Outrider did not export.
    """
    manifest, path = read_manifest(folder), folder / NAME
    if path.exists() and _hash(path.read_text(encoding="utf-8")) != manifest.get("card"):
        return False
    text = card(folder)
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")
    with replacing(folder / MANIFEST) as part:
        part.write_text(json.dumps({**manifest, "card": _hash(text)}, indent=2) + "\n", encoding="utf-8")
    return True


def card(folder: Path) -> str:
    """The text of the card of an exported folder."""
    manifest = read_manifest(folder)
    if "format" not in manifest:
        raise ExportError(
            f"{folder} was not written by `outrider export`, so there are no facts for a card; export it first"
        )
    draft = commands.draft_of(folder, manifest["target"].get("name") or "TARGET")
    name = str(manifest["target"].get("name") or "")
    is_public = bool(name) and name not in catalog.NAMES and not is_local(name)
    is_placed = is_public or name in catalog.NAMES
    shown = name if is_placed else Path(name).name
    report = manifest.get("report") or {}
    about = {key: report[key] for key in ("made", "commit") if report.get(key)}
    text = rendered(
        "card.md", kind=draft.kind, target=shown, target_path=name if is_placed else "TARGET",
        facts=_facts(manifest, draft, shown), training=_training(manifest.get("training") or {}),
        rows=list(_rows(report)), measured=f" on {about['made'][:10]}" if "made" in about else "",
        verified=list(_verified(manifest)), engines=list(_engines(draft, name if is_public else "TARGET")),
    )  # fmt: skip
    head: dict[str, Any] = {"base_model": name} if is_public else {}
    head |= {"library_name": LIBRARIES.get(str(draft.format), "outrider")}
    head |= {"tags": ["speculative-decoding", "draft-model", draft.kind, "outrider"]}
    return f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{text}"


def _facts(manifest: Mapping[str, Any], draft: Draft, target: str) -> Iterator[tuple[str, str]]:
    revision = manifest["target"].get("revision")
    yield "kind", draft.kind
    yield "target", target + (f", revision {revision}" if revision else "")
    if draft.precision:
        yield "target's numbers in training", draft.precision
    if draft.length is not None:
        yield "tokens drafted per step", str(draft.length)
    if draft.taps:
        yield "layers of the target that it reads", f"{', '.join(map(str, draft.taps))}, counted from 0"
    yield "format", str(draft.format)


def _training(facts: Mapping[str, Any]) -> str:
    """The training section of outrider.json, as a sentence."""
    config = facts.get("config") or {}
    origin = ("started from", facts.get("from")) if facts.get("from") else ("imported from", facts.get("imported_from"))
    parts = [
        f"{facts['step']:,} steps" if isinstance(facts.get("step"), int) else "",
        f"{facts['tokens']:,} tokens" if facts.get("tokens") else "",
        f"batches of {config['batch']} texts" if config.get("batch") else "",
        f"learning rate {config['lr']:g} ({config.get('optimizer', 'adamw')})" if config.get("lr") else "",
        f"loss {', '.join(f'{weight:g} {name}' for name, weight in config['loss'].items())}"
        if config.get("loss")
        else "",
        f"{origin[0]} {Path(str(origin[1])).name}" if origin[1] else "",
    ]
    sentences = [part for part in parts if part]
    return f"{'; '.join(sentences)[:1].upper()}{'; '.join(sentences)[1:]}." if sentences else "Not known."


def _rows(report: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Measured acceptance, by task and temperature."""
    for row in report.get("rows") or ():
        depths = ", ".join(f"{share:.0%}" for share in row.get("accepted_by_depth") or ())
        yield {
            "task": Path(str(row["task"])).name, "temperature": f"{row.get('temperature', 0):g}",
            "prompts": str(row.get("prompts", "–")), "tokens_per_step": f"{row['tokens_per_step']:.2f}",
            "depths": depths or "–",
        }  # fmt: skip


def _verified(manifest: Mapping[str, Any]) -> Iterator[str]:
    """The results of `outrider verify-export`."""
    for engine, result in (manifest.get("verified") or {}).items():
        if result.get("error") is None:
            texts = f"{result['texts_equal']} of {result['prompts']} texts equal to Outrider's"
            steps = f"{result['steps']:,} steps, {result['steps_equal'] or 0:.1%} accept the same number"
            yield f"In {engine}: {texts}, {steps}."


def _engines(draft: Draft, target: str) -> Iterator[dict[str, Any]]:
    """The command for every engine that reads the folder."""
    moved = replace(draft, folder=Path("FOLDER"), target=target)
    for name, engine in ENGINES.items():
        method = engine.methods.get(draft.kind)
        if method is None or draft.format not in method.formats or name == "triton":
            continue
        served = replace(moved, target="TARGET.gguf") if name == "llamacpp" else moved
        try:
            command = commands.command(name, served)
        except ConfigError:  # this drafter is not supported, such as a head that the engine does not have
            continue
        yield {"title": engine.title, "before": command.before, "command": command.shell, "files": command.files}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
