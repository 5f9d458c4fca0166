"""Predictions of `outrider plan` compared with known values: published results, and timings of our own loop.

    python benchmarks/plan.py points [--out FILE]
    python benchmarks/plan.py measured [--drafters ngram,suffix,…] [--depths 1,2,4,7] [--batches 1,4,16] [--out FILE]

`points` needs no accelerator: configs, the published tokens per step, one set of constants for all points, fitted to
none of them.  `measured` times target and drafters, takes acceptance from prompts other than the ones it is judged on,
and decodes each cell; it needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.replay import provenance, publish
from outrider.plan.acceptance import Acceptance, even
from outrider.plan.paper import drafts, hardware
from outrider.plan.paper.anatomy import Anatomy, of_sketch, sketched
from outrider.plan.paper.weights import stored
from outrider.plan.predict import PaperCosts
from outrider.targets.sketch import Sketch

POINTS = Path(__file__).with_name("plan_points.yaml")
WITHIN = 0.2
OTHER = "h200"
"""Hardware to try if a source does not say what it used."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("points", "measured"))
    parser.add_argument("--drafters", default="ngram,suffix,small_model")
    parser.add_argument("--depths", default="1,2,4,7")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--prompts", type=int, default=48, help="to judge on; as many others tell the acceptance")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    if options.what == "points":
        found = points()
    else:
        from benchmarks import plan_measured

        numbers = lambda text: [int(part) for part in text.split(",")]
        found = plan_measured.measured(
            options.drafters.split(","), numbers(options.depths), numbers(options.batches), options.prompts,
            options.new_tokens,
        )  # fmt: skip
    publish({**provenance(time.perf_counter() - began), **found}, options.out)


# ── published results ─────────────────────────────────────────────────────────────────────────────────────────────────


def points() -> dict[str, Any]:
    """Every published point, predicted; hits, misses, and what can't be predicted."""
    table = yaml.safe_load(POINTS.read_text(encoding="utf-8"))
    rows = [point(each, table) for each in table["points"]]
    hits = [row for row in rows if row["hit"]]
    return {
        "within": WITHIN, "constants": hardware.efficiency()._asdict(), "points": rows, "lacking": table["lacking"],
        "hits": len(hits), "of": len(rows), "hits_by_model": sorted({row["model"] for row in hits}),
        "median_error": statistics.median(abs(row["error"]) for row in rows),
    }  # fmt: skip


def point(given: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """One point: the published and the predicted value, and the prediction on other hardware if none was named."""
    assumed = given.get("assumed", {})
    name = given.get("hardware") or assumed["hardware"]
    wanted, unit = (given["speedup"], "speedup") if "speedup" in given else (given["tokens_per_s"], "tokens_per_s")
    got = predicted(given, table, name)[unit]
    error = got / wanted - 1
    row = {
        "name": given["name"], "model": given["model"], "source": given["source"], "hardware": name,
        "devices": given["devices"], "batch": given["batch"], "assumed": sorted(assumed), "figure": unit,
        "published": wanted, "predicted": round(got, 3), "error": round(error, 3), "hit": abs(error) <= WITHIN,
    }  # fmt: skip
    if "hardware" in assumed:
        row[f"predicted_{OTHER}"] = round(predicted(given, table, OTHER)[unit], 3)
    if not row["hit"]:
        row["lacks"] = why(error, given, table)
    return row


def predicted(given: dict[str, Any], table: dict[str, Any], name: str) -> dict[str, float]:
    """Predicted speed-up and tokens per second of a single request."""
    sketch, model = known_model(given["model"])
    place, batch = hardware.place(name, given["devices"]), given["batch"]
    context, kind = given["assumed"]["context"], given.get("drafter")
    own = dict(table["drafters"][kind]) if kind else {}
    known = {kind: drafts.on_paper(own.pop("kind"), sketch, **own)} if kind else {}
    costs = PaperCosts(model, place, known)
    plain = costs.plain(batch, context)
    if not kind:
        return {"tokens_per_s": batch / plain}
    depth = given["depth"]
    curve = even(given["accepted"], depth, depth)
    tokens = Acceptance(curve, curve, curve, "published", given["source"]).tokens(depth)[1]
    step = costs.drafted(kind, batch, depth, (), context).seconds
    return {"speedup": tokens * plain / step, "tokens_per_s": batch * tokens / step}


def why(error: float, given: dict[str, Any], table: dict[str, Any]) -> str:
    """Why a point was missed, as far as the cost model can tell."""
    fields = table["models"][given["model"]]
    is_moe = any(key in fields for key in ("num_experts", "n_routed_experts"))
    if is_moe and error < 0:
        return "tokens of one text choose similar experts, so a draft uses fewer of them than independent choices would"
    return "the source names neither its version's overheads nor all of its settings"


@functools.cache
def known_model(name: str) -> tuple[Sketch, Anatomy]:
    """A point's model."""
    fields = yaml.safe_load(POINTS.read_text(encoding="utf-8"))["models"][name]
    sketch = sketched(fields, name)
    return sketch, of_sketch(sketch, stored(fields, None, name))


if __name__ == "__main__":
    main()
