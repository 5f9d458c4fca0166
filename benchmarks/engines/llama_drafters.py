"""The part of `llama_cpp.py` that runs our trained drafters in the server: each kind, sound and with planted faults."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.engines.gguf_faults import FAULTS, planted
from outrider.checkpoint import load_model
from outrider.engines.verify.comparison import verified
from outrider.engines.verify.parity import Parity
from outrider.errors import OutriderError
from outrider.export.writing import export_folder

CHECKPOINTS = {
    "dspark": "demo", "dflash in the anchor's slot": "demo-dflash", "dflash": "engines/dflash",
    "eagle3": "engines/eagle3", "mtp": "engines/mtp",
}  # fmt: skip
"""Row → run of the demo target: of `make demo`, as `parity.py` says, and of recipes/demo-mtp.yaml."""
FAULTY_PROMPTS, FAULTY_TOKENS = 2, 48
WITHIN = 0.02
"""Share by which accepted tokens may differ from our own."""


def rows(
    target: Any, runs: Path, small: Path, place: Path, binary: Path, prompts: list[list[int]], new: int,
    names: tuple[str, ...],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a kind, then one a fault.  small: checkpoint of the demo's small model."""
    checkpoints = {"small_model": small} | {kind: runs / run / "checkpoint" for kind, run in CHECKPOINTS.items()}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        checkpoint, folder = checkpoints[name], place / name.replace(" ", "-")
        if not checkpoint.exists():
            yield {"row": name, "fault": None, "error": f"no checkpoint runs/{CHECKPOINTS[name]}"}
            continue
        try:
            export_folder(checkpoint, "gguf", folder, target, "f32")
        except OutriderError as error:
            yield {"row": name, "fault": None, "error": f"{type(error).__name__}: {error}"}
            continue
        model = load_model(checkpoint, target)
        trained = json.loads((checkpoint / "outrider.json").read_text()).get("training", {}).get("step")
        compared = partial(verified, engine="llamacpp", python=None, target=target, model=model, is_original=True)
        found = compared(folder, prompts=prompts, max_new_tokens=new, server=str(binary))
        yield row(name, None, found) | {"trained_steps": trained}
        for fault in (fault for fault, one in FAULTS.items() if name in one.kinds):
            wrong = planted(fault, folder, place / "wrong")
            some = prompts[:FAULTY_PROMPTS]
            found = compared(wrong, prompts=some, max_new_tokens=FAULTY_TOKENS, server=str(binary))
            yield row(name, fault, found) | {"is_caught": caught(fault, found)}
            shutil.rmtree(wrong)


def row(name: str, fault: str | None, found: Parity) -> dict[str, Any]:
    ours, theirs = ([depth.ours for depth in found.depths], [depth.engine for depth in found.depths])
    return {
        "row": name, "fault": fault, "prompts": found.prompts, "texts_equal": found.texts_equal,
        "ties": sum(each.is_tie for each in found.parted), "texts_hold": found.texts_hold, "length": found.length,
        "steps": list(found.steps), "steps_equal": found.steps_equal,
        "depths": [list(pair) for pair in zip(ours, theirs, strict=True)],
        "accepted": [round(sum(side) * steps) for side, steps in zip((ours, theirs), found.steps, strict=True)],
        "is_equal": found.is_equal, "causes": [cause.name for cause in found.causes], "error": found.error,
        "warnings": list(found.warnings),
    }  # fmt: skip


def caught(fault: str, found: Parity) -> bool:
    """Whether the fault has its name: from the reader, or as an error of the server, which refuses the file."""
    cause = FAULTS[fault].cause
    return cause in [one.name for one in found.causes] if cause else found.error is not None


def promises(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is promised of the rows."""
    sound = [one for one in found if one["fault"] is None and not one["error"]]
    faulty = [one for one in found if one["fault"] is not None]
    held, named = sum(bool(one["texts_hold"]) for one in sound), sum(one["is_caught"] for one in faulty)
    apart = [abs(theirs - ours) / max(ours, 1) for ours, theirs in (one["accepted"] for one in sound)]
    return [
        {"promise": "llama-server: kinds whose texts are ours, of all that are exported", "wanted": len(sound),
         "found": held, "holds": held == len(sound) > 0},
        {"promise": "llama-server: accepted tokens differ from ours by at most", "wanted": WITHIN,
         "found": max(apart, default=1.0), "holds": bool(apart) and max(apart) <= WITHIN},
        {"promise": "llama-server: planted faults that are found and named", "wanted": len(faulty),
         "found": named, "holds": named == len(faulty) > 0},
    ]  # fmt: skip
