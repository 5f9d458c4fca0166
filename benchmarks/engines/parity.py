#!/usr/bin/env python3
"""Does vLLM keep what we keep?  Each drafter exported, loaded there, and compared with our own steps on the same token
ids.

    python benchmarks/engines/parity.py [--only ROW;ROW] [--prompts 40] [--engine-python
    benchmarks/engines/.venv/bin/python]

Rows lie in benchmarks/results/engines/, a file a row, written as soon as each is done: a run that was stopped goes on
behind them.  Together they are benchmarks/results/engines.json.  A row takes one to three minutes on two cores.
Checkpoints are those of the demo target in runs/methods, which benchmarks/methods.py leaves, and in runs/engines, made
like this:

    outrider train recipes/demo-eagle3.yaml name=engines/eagle3 train.steps=160 train.save_every=80
    outrider train recipes/demo-eagle3.yaml name=engines/eagle3-few train.steps=120 train.save_every=60
    drafter.vocabulary=1024 outrider train recipes/demo-peagle.yaml name=engines/peagle train.steps=160
    train.save_every=80 outrider train recipes/demo-dflash.yaml name=engines/dflash drafter.anchor_predicts=false
    "drafter.siblings=[]"
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE.parent / "results"
OWN, METHODS = ROOT / "runs" / "engines", ROOT / "runs" / "methods"

MENDED = ("dflash context norm",)
ROWS: dict[str, dict[str, Any]] = {
    "eagle3 as speculators": {"checkpoint": OWN / "eagle3", "to": "speculators"},
    "eagle3 as speculators, prefix cache on": {
        "checkpoint": OWN / "eagle3",
        "to": "speculators",
        "prefix_caching": True,
    },
    "eagle3, 1024 draft tokens, as speculators": {"checkpoint": OWN / "eagle3-few", "to": "speculators"},
    "eagle3 as sglang": {"checkpoint": OWN / "eagle3", "to": "sglang"},
    "peagle as speculators": {"checkpoint": OWN / "peagle", "to": "speculators"},
    "dflash as speculators": {"checkpoint": OWN / "dflash", "to": "speculators"},
    "dflash as speculators, vLLM mended": {"checkpoint": OWN / "dflash", "to": "speculators", "mend": MENDED},
    "dflash as sglang, vLLM mended": {"checkpoint": OWN / "dflash", "to": "sglang", "mend": MENDED},
    "medusa": {"checkpoint": METHODS / "medusa-0-minutes", "to": "medusa"},
    "small_model as transformers": {"checkpoint": METHODS / "small_model-0-minutes", "to": "transformers"},
    "dspark as speculators": {"checkpoint": METHODS / "dspark-1-minutes-trial", "to": "speculators"},
    "ngram": {
        "speculative": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    },
    "suffix": {"speculative": {"method": "suffix", "num_speculative_tokens": 16}},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=";".join(ROWS), help="rows, with ; between them")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=88)
    parser.add_argument("--engine-python", type=Path, default=HERE / ".venv" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=RESULTS / "engines.json")
    wanted = parser.parse_args()
    if not wanted.engine_python.exists():
        print(f"skipped: no {wanted.engine_python}; run install.py first", file=sys.stderr)
        return 3
    folder = wanted.out.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    from outrider.engines.verify.comparison import prompt_tokens
    from outrider.targets.load import load_target

    target = load_target("demo", dtype="float32", compile=False)
    prompts = prompt_tokens(target, "stdlib", wanted.prompts)
    for name in wanted.only.split(";"):
        place = folder / (name.replace(", ", "-").replace(" ", "-") + ".json")
        if place.exists():
            continue
        print(f"{name} ...", flush=True)
        began = time.perf_counter()
        found = row(name, target, prompts, wanted, folder / "exports")
        found["seconds"] = round(time.perf_counter() - began, 1)
        place.with_suffix(".part").write_text(json.dumps(found, indent=1), encoding="utf-8")
        place.with_suffix(".part").replace(place)
        print(f"  {found.get('error') or found}"[:400], flush=True)
    shutil.rmtree(folder / "exports", ignore_errors=True)
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    wanted.out.write_text(
        json.dumps({"target": "demo", "dtype": "float32", "rows": rows}, indent=1) + "\n", encoding="utf-8"
    )
    return 0


def row(name: str, target: Any, prompts: list[list[int]], wanted: Any, exports: Path) -> dict[str, Any]:
    from outrider.checkpoint import load_model
    from outrider.engines.verify.comparison import verified
    from outrider.errors import OutriderError
    from outrider.export.writing import export_folder

    how = ROWS[name]
    if "to" not in how:
        return {"row": name, **text_only(how["speculative"], target, prompts, wanted)}
    checkpoint, place = how["checkpoint"] / "checkpoint", exports / name.replace(" ", "-")
    try:
        shutil.rmtree(place, ignore_errors=True)
        export_folder(checkpoint, how["to"], place, target)
        model = load_model(checkpoint, target)
    except OutriderError as error:
        return {"row": name, "error": f"{type(error).__name__}: {error}"}
    found = verified(
        place, "vllm", str(wanted.engine_python), target, model, True, prompts, wanted.max_new_tokens,
        how.get("mend", ()), how.get("prefix_caching", False),
    )  # fmt: skip
    steps = json.loads((checkpoint / "outrider.json").read_text())["training"].get("step")
    said = asdict(found) | {"is_equal": found.is_equal, "texts_hold": found.texts_hold, "trained_steps": steps}
    return {"row": name, **said, "mended": list(how.get("mend", ()))}


def text_only(speculative: dict[str, Any], target: Any, prompts: list[list[int]], wanted: Any) -> dict[str, Any]:
    """The engine's own drafters: is the text the target's?"""
    from outrider.decoding.protocols import Drafter
    from outrider.engines.verify import parity
    from outrider.engines.verify.comparison import place_of

    job = {
        "target": place_of(target),
        "speculative": speculative,
        "prompts": prompts,
        "max_new_tokens": wanted.max_new_tokens,
    }
    answer = parity.asked(wanted.engine_python, job | {"slots": 8, "dtype": "float32"})
    about = {"engine": "vllm", "version": answer["version"], "kind": speculative["method"]}
    if "error" in answer:
        return about | {"error": answer["error"]}
    theirs = parity.side_of(answer)
    own = parity.ours(target, Drafter(), prompts, [text[:1] for text in theirs.tokens], wanted.max_new_tokens, 0)
    same = parity.compared(target, prompts, own, theirs, 0)
    accepted, steps = sum(map(sum, theirs.accepted)), sum(map(len, theirs.accepted))
    return about | {
        "prompts": len(prompts), "texts_equal": same["texts_equal"],
        "parted": [asdict(each) for each in same["parted"]],
        "engine_steps": steps, "engine_kept": accepted,
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
