"""Put the tables of benchmarks/results/*.json into benchmarks/pages/*.md, each between its own markers, promises and
results into RESULTS.md, and charts into charts/: `python benchmarks/tables.py`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from charts import charts
from papers import papers

HERE = Path(__file__).resolve().parent


def main() -> None:
    found = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    drawn = {name: section(found[name]) for name, section in SECTIONS.items() if name in found}
    drawn["papers"] = papers(found)
    for page in sorted((HERE / "pages").glob("*.md")):
        _put(page, drawn)
    _put(HERE / "RESULTS.md", {"glance": glance(found)})
    for name, drawing in charts(found).items():
        (HERE / "charts" / f"{name}.svg").write_text(drawing)


def _put(page: Path, sections: dict[str, str]) -> None:
    text = page.read_text()
    for name, section in sections.items():
        body = f"<!-- {name} -->\n{section}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.DOTALL)
    page.write_text(text)


def glance(found: dict[str, Any]) -> str:
    """One line per page: what was promised, how much of it holds, and what is furthest from it."""
    families, soak = found["families"]["totals"], found["soak"]["totals"]
    wrong = sum(row["outcome"] not in ("exact", "refused", "not built") for row in found["every_family"]["rows"])
    engines = [row for row in found["engines"]["rows"] if row.get("steps_equal")]
    parted = [row["row"] for row in engines if row["steps_equal"] < 1]
    orders = [order for order in found["methods"]["orders"] if order["holds"] is not None]
    against = [one for one in orders if one["differs"] and one["ratio"] < 1]
    pairs = sorted({"{better} over {worse}".format(**one) for one in against if "the d" not in one["better"]})
    at_most_none = [
        ("families", "greedy text is `generate`'s: tokens that differ", families["mismatches"], families["tokens"]),
        ("every_family", "a form is exact or refused by name: neither", wrong, len(found["every_family"]["rows"])),
        ("soak", "with a seed, text is plain decoding's: tokens that differ", soak["mismatches"], soak["tokens"]),
    ]  # fmt: skip
    lines = [_line(name, promise, "0", f"{bad:,} of {every:,}", not bad) for name, promise, bad, every in at_most_none]
    by_engine = f"vLLM accepts what is accepted here, step by step; not, by faults of its own: {', '.join(parted)}"
    lines.append(_line("engines", by_engine, "all", f"{len(engines) - len(parted)} of {len(engines)}", not parted))
    plans = found["plan"]
    lines.append(_line("plan", f"published speed-ups, planned within {plans['within']:.0%}", str(plans["of"]),
                       f"{plans['hits']} of {plans['of']}", plans["hits"] == plans["of"]))  # fmt: skip
    for name in SECTIONS:
        promises = found.get(name, {}).get("promises")
        if isinstance(promises, dict):  # facts that hold or do not
            promises = [{"promise": one, "holds": holds} for one, holds in promises.items()]
        if promises:
            short = [one for one in promises if not one["holds"]]
            worst = "; ".join(_promise(one) for one in short[:2]) + (
                f"; {len(short) - 2} more" if len(short) > 2 else ""
            )
            held = f"{len(promises) - len(short)} of {len(promises)}"
            wanted = "1 promise" if len(promises) == 1 else f"{len(promises)} promises"
            lines.append(_line(name, worst and f"short: {worst}", wanted, held, not short))
    lines.append(
        _line("methods", f"orders of the papers; the other way round here: {'; '.join(pairs)}", f"{len(orders)} orders",
              f"{sum(one['holds'] for one in orders)} of {len(orders)}", not against)
    )  # fmt: skip
    return _table(["page", "promise, or what falls short of it", "wanted", "found", "holds"], lines, right=slice(2, 4))


def _line(name: str, promise: str, wanted: str, found: str, holds: bool | str) -> list[str]:
    page = next(page for page in sorted((HERE / "pages").glob("*.md")) if f"<!-- {name} -->" in page.read_text())
    said = holds if isinstance(holds, str) else "yes" if holds else "**no**"
    return [f"[{name}](pages/{page.name})", promise or "all hold", wanted, found, said]


def _promise(one: dict[str, Any]) -> str:
    has_numbers = isinstance(one.get("wanted"), int | float)
    return one["promise"] + (f" ({one['found']:.3g}, wanted {one['wanted']:g})" if has_numbers else "")


def families(found: dict[str, Any]) -> str:
    """One line per family: its settings combined, tokens compared in each dtype."""
    by_family: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        by_family.setdefault(row["family"], []).append(row)
    lines = []
    for family, rows in by_family.items():
        tokens = {
            dtype: sum(row["tokens"] for row in rows if row["dtype"] == dtype) for dtype in ("float64", "float32")
        }
        lines.append([
            family, " ".join(dict.fromkeys(row["attention"] for row in rows)),
            " ".join({row["mode"]: 0 for row in rows}),
            f"{tokens['float64']:,}", f"{tokens['float32']:,}", str(sum(len(row["mismatches"]) for row in rows)),
            str(sum(len(row["ties"]) for row in rows)), str(max(row.get("deepest", 0) for row in rows)),
            "; ".join(dict.fromkeys(row["failed"].split(":")[0] for row in rows if row["failed"])) or "–",
        ])  # fmt: skip
    totals = found["totals"]
    heads = ["family", "attention", "mode", "float64", "float32", "mismatches", "ties", "deepest path", "stopped at"]
    said = f"{totals['tokens']:,} tokens compared, {totals['mismatches']} mismatches, {totals['ties']} ties."
    return f"{said} {_source(found)}\n\n{_table(heads, lines, right=slice(3, 8))}"


def every_family(found: dict[str, Any]) -> str:
    """Two counts, then one line per form: what was tried, and the result."""
    tried = [row for row in found["rows"] if row["outcome"] != "not built"]
    exact = [row for row in tried if row["outcome"] == "exact"]
    refused = [row for row in tried if row["outcome"] == "refused"]
    kinds = {row["family"] for row in exact}
    said = (
        f"{len(tried)} forms of {len({row['family'] for row in tried})} config classes could be built: {len(exact)} "
        f"({len(exact) / len(tried):.0%}) exact, of {len(kinds)} classes, {len(refused)} refused by name, "
        f"{len(tried) - len(exact) - len(refused)} wrong; {sum(row['tokens'] for row in exact):,} tokens compared. "
        f"{len(found['rows']) - len(tried)} forms are not built from their class alone. {_source(found)}"
    )
    lines = [
        [row["family"], row["form"], row.get("dtype", "–"), row.get("mode", "–"), row["outcome"], _why(row)]
        for row in found["rows"]
    ]
    return f"{said}\n\n{_table(['family', 'form', 'type', 'mode', 'outcome', 'why'], lines, right=slice(0, 0))}"


def _why(row: dict[str, Any]) -> str:
    """The reason of a row, as a table cell."""
    reason = (row.get("reason") or "–").split("; use transformers")[0].split("decoded here: ")[-1]
    return " ".join(reason.replace("|", "/").split())[:110]


def kills(found: dict[str, Any]) -> str:
    counts: dict[str, list[int]] = {}
    for kill in found["spent"]:
        what = "at a random time" if kill["before_call"] is None else f"in a save, at `{kill['before_call']}`"
        counts.setdefault(what, []).append(kill["saved_step"] - kill["from_step"])
    lines = [[what, str(len(steps)), str(sum(steps))] for what, steps in sorted(counts.items())]
    ends = "equal the undisturbed one, bit for bit" if found["identical"] else "DIFFER from the undisturbed one"
    said = (
        f"{found['kills']} kills of {found['trainings']} trainings of {found['steps']} steps, saved every "
        f"{found['save_every']}; all ends {ends}."
    )
    heads = ["killed", "times", "steps saved between start and kill"]
    return f"{_source(found)}\n\n{said}\n\n{_table(heads, lines, right=slice(1, 3))}"


def distributed(found: dict[str, Any]) -> str:
    speed, memory = found["speed"], found["memory"]
    said = (
        f"Throughput of two processes, by rounds: {', '.join(f'{one:.2f}' for one in speed['ratios'])} of one's. "
        f"One of two FSDP2 processes holds {memory['held_bytes_share']:.2f} of one's weights and moments; its peak of "
        f"resident memory is {memory['peak_bytes_share']:.2f} of one's."
    )
    return f"{_source(found)}\n\n{said}\n\n{_promises(found)}"


def plan(found: dict[str, Any]) -> str:
    def line(point: dict[str, Any]) -> list[str]:
        off = 100 * (point["predicted"] / point["published"] - 1)
        figures = [f"{point['published']:.2f}", f"{point['predicted']:.2f}", f"{off:+.0f}"]
        return [point["name"], point["hardware"], str(point["batch"]), *figures, ", ".join(point["assumed"]) or "–"]

    lines = [line(point) for point in found["points"]]
    said = f"{found['hits']} of {found['of']} within {found['within']:.0%}; median error {found['median_error']:.1%}."
    heads = ["published result", "hardware", "batch", "published", "planned", "off, %", "assumed"]
    lacking = "Not planned, and what each lacks: " + "; ".join(
        f"{one['name']} ({one['lacks']})" for one in found["lacking"]
    )
    table = _table(heads, lines, right=slice(2, 6))
    return "\n\n".join([f"`{found['command']}`, {found['made'][:10]}.", said, table, f"{lacking}."])


def soak(found: dict[str, Any]) -> str:
    totals = found["totals"]
    families = [counts for name, counts in found["settings"].items() if name.startswith("family ")]
    lines = [
        [name, f"{counts['cases']:,}", f"{counts['tokens']:,}"]
        for name, counts in found["settings"].items() if not name.startswith("family ")
    ]  # fmt: skip
    lines.append(
        [
            f"families, in {len(families)} forms",
            *(f"{sum(one[of] for one in families):,}" for of in ("cases", "tokens")),
        ]
    )
    events = [[name, f"{times:,}"] for name, times in found["events"].items()]
    said = (
        f"{totals['tokens']:,} tokens compared in {totals['cases']:,} cases (seed {totals['seed']}), "
        f"{totals['of_these'].get('wanted', 0)} differ, {totals['ties']} ties. {_source(found)}"
    )
    others = {
        "of": "other texts than `generate`'s", "ends": "other ends", "logprobs": "other log probabilities",
        "text": "other texts than those of all tokens", "crash": "crashes",
    }  # fmt: skip
    told = [f"{totals['of_these'][kind]} {name}" for kind, name in others.items() if kind in totals["of_these"]]
    cases = ", ".join(str(one["case"]) for one in found["mismatches"])
    said += f" Besides: {', '.join(told)} (cases {cases})." if told else ""
    tables = [
        _table(["setting", "cases", "tokens"], lines, right=slice(1, 3)),
        _table(["event", "times"], events, slice(1, 2)),
    ]
    return "\n\n".join([said, *tables])


def overhead(found: dict[str, Any]) -> str:
    lines = [
        [row["path"], str(row["batch"]), row["drafter"], f"{row['ms_per_step']:.2f}", f"{100 * row['overhead']:.1f} %"]
        for row in found["loop"]
    ]
    loop = _table(["path", "batch", "drafter", "ms a step", "loop overhead"], lines, slice(3, 5))
    return "\n\n".join([_machine(found), loop, _promises(found)])


def bounds(found: dict[str, Any]) -> str:
    """One line per drafter, with the temperatures side by side."""
    own = {(row["drafter"], row["way"], row["temperature"]): row for row in found["rows"]}
    lines = []
    for name, way in dict.fromkeys((name, way) for name, way, _ in own if name != "plain"):
        both = [own[name, way, temperature] for temperature in (0.0, 1.0) if (name, way, temperature) in own]
        parts = [f"{one[part]:.2f}" for one in both[:1] for part in ("draft_ms", "verify_ms") if part in one]
        cells = [
            cell for one in both for cell in (
                f"{one['tokens_per_step']:.2f}", f"{one['over_plain']:.2f}", f"{one['bound']:.2f}",
                f"{100 * one['of_bound']:.0f} %",
            )
        ]  # fmt: skip
        rows = f"{both[0]['rows']:.1f}" if "rows" in both[0] else ""
        cells += [""] * (8 - len(cells))
        cells += [step_of_models(own, name, way, temperature) for temperature in (0.0, 1.0)]
        lines.append([name, way, rows, both[0].get("set_by", ""), *(parts or ["", ""]), *cells])
    heads = ["drafter", "steps of", "rows", "set by", "draft, ms", "verify, ms"]
    heads += [
        f"{head} at {temperature}" for temperature in (0, 1)
        for head in ("tokens per step", "over plain", "bound", "of it")
    ]  # fmt: skip
    heads += ["a step over models at 0", "a step over models at 1"]
    speeds = f"reads {found['read_gb_s']:.0f} GB/s, multiplies {found['peak_gflop_s']:.0f} GFLOP/s"
    plain = "; ".join(
        f"{way}, temperature {temperature:g}: {row['ms_per_step']:.2f} ms, {100 * row['overhead']:.0f} % of it the loop"
        for (name, way, temperature), row in own.items() if name == "plain"
    )  # fmt: skip
    short = [one for one in found["promises"] if not one["holds"]]
    said = f"{_machine(found)} The machine {speeds}. A plain step of {plain}."
    held = f"{len(found['promises']) - len(short)} of {len(found['promises'])} reach what was wanted."
    return "\n\n".join([said, _table(heads, lines, slice(4, 16)), held])


def step_of_models(own: dict[Any, dict[str, Any]], name: str, way: str, temperature: float) -> str:
    """A step's time relative to that within the models' calls, if there are several."""
    step, models = own.get((name, way, temperature)), own.get((name, "several calls", temperature))
    return f"{step['ms_per_step'] / models['model_ms_per_step']:.2f}" if step and models else ""


def retrieval(found: dict[str, Any]) -> str:
    tasks = list(dict.fromkeys(row["task"] for row in found["rows"]))
    by_name: dict[str, list[str]] = {}
    for row in found["rows"]:
        cells = [f"{row['tokens_per_step']:.2f}", f"{row['speedup']:.2f}"]
        by_name.setdefault(row["name"], []).extend(cells)
    heads = ["drafter", *(f"{task}: {what}" for task in tasks for what in ("tokens per step", "speed-up"))]
    lines = [[name, *cells] for name, cells in by_name.items()]
    said = f"{found['texts_that_differ']} texts differ from plain decoding's; {found['path']} path. {_machine(found)}"
    return "\n\n".join([said, _table(heads, lines, slice(1, len(heads))), _promises(found)])


def corpus(found: dict[str, Any]) -> str:
    build, warm, cold = found["build"], found["search"]["warm_us"], found["search"]["cold_us"]
    lines = [[way, f"{times['p50']:.1f}", f"{times['p99']:.1f}"] for way, times in (*warm.items(), ("cold", cold))]
    said = (
        f"{build['tokens']:,} tokens: tokenised in {build['tokenise_seconds']:.0f} s, sorted in "
        f"{build['sort_seconds']:.1f} s, "
        f"{build['peak_bytes'] / 1e6:.0f} MB at most, {build['disk_bytes'] / 1e6:.0f} MB on disk. {_machine(found)}"
    )
    return "\n\n".join([said, _table(["a search", "p50, µs", "p99, µs"], lines, slice(1, 3)), _promises(found)])


PASSES = ["plain", "captured", "kernels"]


def _passes(points: list[dict[str, Any]]) -> str:
    """Milliseconds of passes, and their floor, by texts, context and way."""
    known = {(one["batch"], one["context"], one["way"], one["width"]): one for one in points if "ms" in one}
    lines = []
    for batch, context, way in sorted({at[:3] for at in known}, key=lambda at: (at[:2], PASSES.index(at[2]))):
        cells = [known.get((batch, context, way, width)) for width in (1, 8, 16, 64)]
        times = ["" if one is None else f"{one['ms']:.1f} ({one['floor_ms']:.1f})" for one in cells]
        lines.append([str(batch), f"{context:,}", way, *times])
    heads = ["texts", "tokens before", "passes", *(f"{width} rows each: ms (floor)" for width in (1, 8, 16, 64))]
    return _table(heads, lines, slice(3, 7))


def gpu(found: dict[str, Any]) -> str:
    """The device, passes, attention, waits, training, exactness."""
    rows = found["rows"]
    machine = rows["machine"]
    said = (
        f"{machine['gpu']}, {machine['memory_gib']:.0f} GiB; copies {machine['copied_gb_per_s']:,.0f} GB/s, multiplies "
        f"{machine['bf16_tflops']:.0f} TFLOP/s in bfloat16; {found['cpu']}, torch {found['torch']}, transformers "
        f"{found['transformers']}, {found['made'][:10]}."
    )
    attention = [
        [str(one["batch"]), f"{one['context']:,}", str(one["width"]),
         *(f"{one[way]['ms']:.3f}" for way in ("repeated", "grouped, cudnn", "two products", "gqa flag, cudnn"))]
        for one in rows["attention"]["points"]
    ]  # fmt: skip
    ways = ["texts", "tokens before", "rows", "copied keys, ms", "grouped", "two products", "enable_gqa"]
    loop = [
        [one["way"], "kernels" if one["captured"] else "plain", f"{one['ms']:.2f}", f"{one['kernel_ms']:.2f}",
         str(one["kernels_per_step"]), f"{one['tokens_per_step']:.2f}", f"{one['tokens_per_s']:,.0f}"]
        for one in rows["loop-8b"]["points"]
    ]  # fmt: skip
    earlier = {(one["drafter"], one["captured"]): one["ms"] for one in rows["syncs"].get("before", [])}
    waits: dict[str, dict[bool, Any]] = {}
    for one in rows["syncs"]["points"]:
        waits.setdefault(one["drafter"], {})[one["captured"]] = one
    steps = [
        [drafter, f"{own[False]['waits_per_step']:.1f}",
         *(f"{own[kind]['ms']:.1f}" if "ms" in own[kind] else "failed" for kind in (False, True)),
         *(f"{earlier[drafter, kind]:.1f}" if earlier else "" for kind in (False, True))]
        for drafter, own in waits.items()
    ]  # fmt: skip
    trained = rows["training-4b"]
    before = {
        (size, one["drafter"]): one["s_per_step"]
        for size in ("4b", "8b") for one in rows[f"training-{size}"].get("before", [])
    }  # fmt: skip
    training = [
        [one["drafter"], size.upper(), f"{one['s_per_step']:.2f}",
         f"{before[size, one['drafter']]:.2f}" if (size, one["drafter"]) in before else "",
         f"{one['tokens_per_s']:,.0f}", f"{one['reading_share_of_products']:.2f}", f"{one['peak_gib']:.0f}"]
        for size in ("4b", "8b") for one in rows[f"training-{size}"]["points"] if "s_per_step" in one
    ]  # fmt: skip
    exact = [
        [one["dtype"], "captured" if one["captured"] else "plain", "tree" if one["branches"] > 1 else "chain",
         f"{one['kept']:.2f}", *(str(one.get(verdict, 0)) for verdict in ("equal", "tie", "bug"))]
        for one in rows["exact"]["points"]
    ]  # fmt: skip
    whole = [
        [one["drafter"], str(one["batch"]), f"{one['temperature']:g}", f"{one['seams_ms']:.1f}",
         f"{one['whole_ms']:.1f}", f"{one['seams_ms'] / one['whole_ms']:.2f}", "yes" if one["same"] == 1 else "**no**"]
        for one in rows["step-8b"]["points"] if "same" in one
    ]  # fmt: skip
    judged = [
        [one["way"], str(one["batch"]), f"{one['plain_ms']:.2f}", f"{one['kernels_ms']:.2f}", f"{one['floor_ms']:.3f}",
         f"{one['plain_peak_mb']:,.1f}", f"{one['kernels_peak_mb']:,.1f}"]
        for one in rows["acceptance"]["points"]
    ]  # fmt: skip
    return "\n\n".join([
        said, _promises(found), "**Passes** of a Qwen3 of 8 B, bfloat16.", _passes(rows["passes-8b"]["points"]),
        "**Passes** of one of 0.6 B.", _passes(rows["passes-0.6b"]["points"]),
        "**Steps** of one text of the 8 B, plain and with seven replayed tokens, each right by a chance of 0.85.",
        _table(["drafts", "passes", "ms a step", "kernels, ms", "kernels a step", "tokens a step", "tokens/s"], loop,
               slice(2, 7)),
        "**Whole steps** of the 8 B, drafters of random weights: Python between the pass and the draft, or one graph.",
        _table(["drafter", "texts", "temperature", "ms a step", "as one graph", "times", "same texts"], whole,
               slice(1, 6)),
        "**Acceptance** of eight drafts a text over 151,936 tokens, from logits to lists; *draw*: one token.",
        _table(["drafts", "texts", "as torch writes it, ms", "our kernels", "floor", "MB", "our kernels, MB"], judged,
               slice(1, 7)),
        "**Attention** of one layer of the 8 B, captured, by torch's kernels.", _table(ways, attention, slice(0, 7)),
        "**Steps** of one text of the demo target, drafters untrained.",
        _table(["drafter", "waits a step", "plain, ms", "captured, ms", "plain, before", "captured, before"], steps,
               slice(1, 6)),
        f"**Training** on targets of 4 B and 8 B, {trained['batch']} texts of {trained['length']:,} tokens a step.",
        _table(
            ["drafter", "target", "s a step", "before", "tokens/s", "target's share of products", "GiB"], training,
            slice(2, 7),
        ),
        "**Exactness**: 16 greedy texts of 96 tokens of the demo target beside plain decoding.",
        _table(["type", "passes", "drafts", "accepted a step", "equal", "ties", "faults"], exact, slice(3, 7)),
    ])  # fmt: skip


def learning(found: dict[str, Any]) -> str:
    """What was learnt, and the cost for users of plain text."""
    gain, users = found["gain"], found["users"]
    lines = [
        [who, what, f"{own['learning']['p50_ms']:.1f}", f"{own['still']['p50_ms']:.1f}",
         f"{own['learning']['p99_ms']:.1f}", f"{own['still']['p99_ms']:.1f}", _ratio(own["p99_ratio"])]
        for who, both in users.items() for what, own in both.items()
    ]  # fmt: skip
    heads = ["users", "", "median, learning", "without", "p99, learning", "without", "p99 ratio (95 %)"]
    ratio, low, high = gain["new_over_old"]
    said = (
        f"Version {gain['version']} over the one that was given: {ratio:.2f} ({low:.2f} to {high:.2f}) times the "
        f"tokens per step on {gain['prompts']} held-out prompts. {_source(found)}"
    )
    return "\n\n".join([said, _promises(found), _table(heads, lines, slice(2, 7))])


def _ratio(found: dict[str, Any]) -> str:
    return f"{found['ratio']:.2f} ({found['interval'][0]:.2f} to {found['interval'][1]:.2f})"


def remote(found: dict[str, Any]) -> str:
    """Texts, requests and speed of each way."""
    lines = [
        [way, f"{own['equal']} of {own['texts']}", f"{own['requests']:,}", f"{own['tokens_sent']:,}",
         f"{own['speed_beside_plain']:.2f}"]
        for way, own in found["greedy"].items()
    ]  # fmt: skip
    server = found["server"]
    said = f"{server['engine']} ({server['version']}), {server['dtype']}; {found['cpu']}, {found['made'][:10]}."
    heads = ["way", "equal texts", "requests", "tokens sent", "speed beside plain"]
    return "\n\n".join([said, _promises(found), _table(heads, lines, slice(1, 5))])


def methods(found: dict[str, Any]) -> str:
    """A table per column of cells, the published orders, and the drafts of a lattice beside each other."""
    parts = [f"{found['cells']} cells (target, method, budget, seed). {_machine(found)}"]
    titles = {
        "minutes": f"Demo target, {found['training_minutes_of_one_core']:g} minutes of one core",
        "steps": f"Demo target, {found['training_steps']} steps",
    }
    heads = ["method", "seeds", "weights", "steps", "tokens per step, T = 0", "accepted by depth", "by kind", "T = 1"]
    for column in dict.fromkeys(row["column"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["column"] == column]
        rows.sort(key=lambda row: -row["temperature_0"]["tokens_per_step"])
        parts += [f"**{titles.get(column, column)}**", _table(heads, [_method(row) for row in rows], slice(1, 8))]
    orders = [
        [
            f"{one['better']} over {one['worse']}", one["column"], f"{one['temperature']:g}", str(one["seeds"]),
            f"{one['wanted']:g}", f"{one['ratio']:.3f}", _interval(one), "yes" if one["holds"] else "**no**",
        ]
        for one in found["orders"]
    ]  # fmt: skip
    named = ["tokens per step", "column", "T", "seeds", "wanted", "found", "95 % interval", "holds"]
    parts.append(_table(named, orders, slice(2, 7)))
    if lines := [
        [one["method"], one["column"], f"{one['better']} over {one['worse']}", str(one["seeds"]),
         f"{one['ratio']:.3f}", _interval(one)]
        for one in found["lattices"]
    ]:  # fmt: skip
        heads = ["drafter", "column", "drafts", "seeds", "tokens per step", "95 % interval"]
        parts += ["**The same drafter at equal verified nodes**", _table(heads, lines, slice(3, 6))]
    return "\n\n".join(parts)


def _interval(one: dict[str, Any]) -> str:
    return f"{one['interval'][0]:.3f} to {one['interval'][1]:.3f}"


def _method(row: dict[str, Any]) -> list[str]:
    cold, hot = row["temperature_0"], row["temperature_1"]

    def per_step(side: dict[str, Any] | None) -> str:
        """Tokens per step, with their spread over seeds."""
        if side is None:
            return "not measured"
        spread = "" if side["spread"] is None else f" ± {side['spread']:.2f}"
        return f"{side['tokens_per_step']:.2f}{spread}"

    return [
        row["method"], str(row["seeds"]), f"{row['parameters'] / 1e6:.1f} M", str(row["training_steps"]),
        per_step(cold), " ".join(f"{share:.2f}" for share in cold["accepted_by_depth"]),
        " ".join(f"{kind} {value:.2f}" for kind, value in sorted(cold["by_kind"].items())), per_step(hot),
    ]  # fmt: skip


def best(found: dict[str, Any]) -> str:
    minutes = found["cpu_minutes"]
    lines = [
        [
            row["drafter"], f"{row['temperature']:g}", f"{row['tokens_per_step']:.2f}",
            " ".join(f"{share:.2f}" for share in row["accepted_by_depth"]), f"{row['speedup']:.2f}",
            f"{row['tokens_per_s'] / row['generate_tokens_per_s']:.2f}",
            {True: f"yes, {row['compared_tokens']:,} tokens", False: "**no**", None: "–"}[row["exact"]],
        ]
        for row in found["rows"]
    ]  # fmt: skip
    heads = ["drafter", "T", "tokens per step", "accepted by depth", "over plain, compiled", "over generate", "exact"]
    said = (
        f"{minutes['answers']} minutes of one core for answers, {minutes['training']} for training, beside other work. "
    )
    return "\n\n".join([said + _machine(found), _table(heads, lines, slice(1, 6))])


def training(found: dict[str, Any]) -> str:
    peaks = {(row["target"], row["kind"]): row for row in found["memory"]}

    def line(row: dict[str, Any]) -> list[str]:
        peak = peaks[row["target"], row["kind"]]
        return [
            row["target"], row["kind"], *(f"{row['tokens_per_s'][way]:,.0f}" for way in ("plain", "ours")),
            f"{row['times']:.2f}", f"{row['bound']:.2f}",
            *(f"{peak['peak_bytes'][way] / 1e6:,.0f}" for way in ("plain", "ours")),
            f"{100 * peak['share']:.0f}", f"{row['worst_loss_error']:.0e}",
        ]  # fmt: skip

    heads = ["target", "drafter", "plain, tokens/s", "ours", "times", "bound", "plain, peak MB", "ours", "share, %"]
    heads.append("losses differ")
    tables = [_table(heads, [line(row) for row in found["speed"]], slice(2, 10))]
    plans = [
        [row["kind"], str(row["rows"]), *(f"{row[way]['peak_bytes'] / 1e6:,.0f}" for way in ("predicted", "found")),
         *(f"{row[way]['seconds']:.2f}" for way in ("predicted", "found"))]
        for row in found["plan"]
    ]  # fmt: skip
    if plans:
        heads = ["drafter", "rows", "planned MB", "found", "planned s", "found"]
        tables.append(_table(heads, plans, slice(1, 6)))
    return "\n\n".join([_machine(found), *tables, _promises(found)])


def gate(found: dict[str, Any]) -> str:
    lines = [
        [name, str(case["times"]), str(case["stopped"]), str(case["warned"]),
         ", ".join(f"{rule} {times}" for rule, times in case["stops_by_rule"].items()) or "–"]
        for name, case in found["cases"].items()
    ]  # fmt: skip
    table = _table(["simulated", "pairs", "stopped", "warned", "stopped by"], lines, right=slice(1, 4))
    return f"{_command(found)}\n\n{table}"


def replay(found: dict[str, Any]) -> str:
    schedule, death = found["schedule"], found["death"]
    late, memory = schedule["sent_after_due_ms"], schedule["memory_mib"]
    said = [
        f"{schedule['calls']:,} calls at {schedule['rate_per_s']:g} a second: sent {late['p50']:.1f} ms after they "
        f"were due "
        f"(p50), {late['p99']:.1f} ms (p99); {schedule['cpu_ms_per_call']['replay']:.2f} ms of CPU a call; the process "
        f"waited "
        f"{schedule['waited_for_a_core_s']:.0f} s for a core; memory {memory['after_a_quarter']} MiB after a quarter, "
        f"{memory['at_the_end']} at the end.",
        f"The server killed and started again: of {death['calls']:,} calls {death['answered']:,} answered, "
        f"{sum(death['cut_off'].values())} cut off, {sum(death['failed'].values())} failed, "
        f"{death['not_accounted_for']} lost.",
    ]
    lines = [[name, f"{one['cpu_ms_per_call']:.2f}"] for name, one in found["readers"].items()]
    table = _table(["reader of a streamed answer of 8 pieces", "CPU, ms a call"], lines, right=slice(1, 2))
    return "\n\n".join([_command(found), *said, table])


def engines(found: dict[str, Any]) -> str:
    """One line per row: the engine's steps next to ours."""
    lines = []
    for row in found["rows"]:
        depths = [(one["ours"], one["engine"]) for one in row.get("depths") or []]
        kept = " ".join(f"{ours:.3f}" if ours == theirs else f"{ours:.3f}/{theirs:.3f}" for ours, theirs in depths)
        steps = row.get("steps") or ["–", "–"]
        equal = row.get("steps_equal")
        lines.append([
            row["row"], "–" if row.get("error") else f"{row['texts_equal']} of {row['prompts']}",
            f"{steps[0]} / {steps[1]}",
            "–" if equal is None else f"{100 * equal:.1f} %", kept or "–", _short(row.get("error")),
        ])  # fmt: skip
    heads = ["draft", "texts equal", "steps, ours / engine", "steps equal", "kept by depth, ours/engine", "error"]
    return _table(heads, lines, right=slice(1, 4))


def llama_cpp(found: dict[str, Any]) -> str:
    """One line per kind and planted fault: the server's steps and accepted tokens, and ours."""
    lines = []
    for row in found["drafters"]:
        if row["error"] and row["fault"] is None:
            lines.append([row["row"], "–", "–", "–", "–", "–", _short(row["error"])])
            continue
        equal = row["steps_equal"]
        refused = "the server refuses the file" if row["error"] else ""
        lines.append([
            row["row"] + (f", {row['fault']}" if row["fault"] else ""), f"{row['texts_equal']} of {row['prompts']}",
            " / ".join(map(str, row["steps"])), "–" if equal is None else f"{100 * equal:.1f} %",
            " / ".join(map(str, row["accepted"])), "yes" if row["is_equal"] else "no",
            ", ".join(row["causes"]) or refused or "–",
        ])  # fmt: skip
    heads = ["draft", "texts equal", "steps, ours / server", "steps equal", "accepted, ours / server", "equal", "cause"]
    return f"{_table(heads, lines, right=slice(1, 5))}\n\n{_promises(found)}"


def _short(error: str | None) -> str:
    """The sentence of an error that names the problem."""
    return (
        "–"
        if error is None
        else next((line for line in error.splitlines() if "Error, " in line), error).split(" [")[0].strip()
    )


def _command(found: dict[str, Any]) -> str:
    return f"`{found['command']}`, {found['measured'][:10]}, beside other work."


def _machine(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return (
        f"`{found['command']}`, {machine['cpus']} shared CPUs, torch {machine['torch']}, "
        f"transformers {machine['transformers']}, "
        f"{found['measured'][:10]}."
    )


def _promises(found: dict[str, Any]) -> str:
    lines = [
        [one["promise"], f"{one['wanted']:g}", f"{one['found']:.3g}", "yes" if one["holds"] else "**no**"]
        for one in found["promises"]
    ]
    return _table(["promise", "wanted", "found", "holds"], lines, slice(1, 3))


def _source(found: dict[str, Any]) -> str:
    """The provenance: what was run, with what, when."""
    facts = found["provenance"]
    return (
        f"`{facts['command']}`, {facts['seconds'] / 60:.0f} minutes on {facts['cpus']} shared CPUs, torch "
        f"{facts['torch']}, "
        f"transformers {facts['transformers']}, {facts['made'][:10]}."
    )


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], right: slice) -> str:
    ruler = ["---"] * len(heads)
    ruler[right] = ["---:"] * len(ruler[right])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ruler, *lines))


def _processor(found: dict[str, Any]) -> str:
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}; flags: {machine['flags']}."


def peers(found: dict[str, Any]) -> str:
    """One line per way, the fastest single-request one first: tokens/s at each batch, time to the first token at batch
    1, and texts equal to ours."""
    batches = sorted({row["batch"] for row in found["rows"]})
    by_way: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in found["rows"]:
        by_way[row["way"]][row["batch"]] = row
    lines = []
    for way, rows in sorted(by_way.items(), key=lambda each: -each[1][min(each[1])]["tokens_per_s"]):
        speeds = [f"{rows[batch]['tokens_per_s']:.0f}" if batch in rows else "–" for batch in batches]
        first = f"{rows[1]['first_ms']:.0f}" if 1 in rows else "–"
        equal, texts = (sum(row[name] for row in rows.values()) for name in ("equal", "texts"))
        lines.append([way, *speeds, first, f"{equal} of {texts}"])
    head = ["way", *(f"tokens/s, {batch} at a time" for batch in batches), "first token, ms", "texts equal"]
    said = (
        f"{_processor(found)} Prompts of about {found['prompt_tokens']:.0f} tokens, {found['new']} new ones; llama.cpp "
        f"{found['llama_cpp']['commit']}, {found['openvino']}, {found['vllm']}."
    )
    out = [f"- Left out: {one['way']}: {one['why']}" for one in found["left_out"]]
    parts = [said, _table(head, lines, slice(1, len(head) - 1)), _kept(found), *(["\n".join(out)] if out else [])]
    return "\n\n".join(parts)


def products(found: dict[str, Any]) -> str:
    """One line per model, kind of values and number of rows."""
    lines = [
        [f"{row['shape']}, {row['values']}", str(row["rows"]), *(f"{row['ms'][way]:.2f}" for way in row["ms"]),
         f"{row['bound_ms']:.2f}", row["set_by"], f"{row['times_bound']:.2f}"]
        for row in found["rows"]
    ]  # fmt: skip
    ways = list(found["rows"][0]["ms"])
    heads = ["layers of, values", "rows", *(f"{way}, ms" for way in ways), "bound, ms", "set by", "best / bound"]
    return "\n\n".join([_processor(found), _table(heads, lines, slice(1, 3 + len(ways)))])


def contexts(found: dict[str, Any]) -> str:
    """One line per context, with steps of every width side by side; then prompts."""
    own = {(row["context"], row["rows"]): row for row in found["steps"]}
    widths = sorted({rows for _, rows in own})
    lines = [
        [f"{context:,}", f"{own[context, 1]['mb_of_keys_and_values']:.0f}", f"{own[context, 1]['bound_ms']:.1f}",
         *(f"{own[context, rows][key]:.1f}" for rows in widths for key in ("ms", "over_context_ms"))]
        for context in sorted({context for context, _ in own})
    ]  # fmt: skip
    heads = ["context", "keys and values, MB", "one reading, ms"]
    heads += [head for rows in widths for head in (f"step of {rows}, ms", "of it context, ms")]
    prompts = [
        [f"{row['tokens']:,}", f"{row['seconds']:.2f}", f"{row['ms_per_token']:.2f}"] for row in found["prompts"]
    ]
    said = _table(["prompt", "first token, s", "ms a token"], prompts, slice(1, 3))
    return "\n\n".join([_processor(found), _table(heads, lines, slice(0, len(heads))), said, _kept(found)])


def serving(found: dict[str, Any]) -> str:
    """Every part that was measured, then all promises."""
    facts, parts = found["provenance"], found["parts"]
    said = (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, transformers {facts['transformers']}; "
        f"flags: {facts['flags']}."
    )
    drawn = [SERVING[name](part) for name, part in parts.items() if part["is_done"]]
    out = [f"- Left out: {one['way']}: {one['why']}" for part in parts.values() for one in part["left_out"]]
    return "\n\n".join([said, *drawn, *(["\n".join(out)] if out else []), _promises(found)])


def _serving_soak(part: dict[str, Any]) -> str:
    counts, windows, settings = part["counts"], part["memory_mib"]["windows"], part["settings"]
    ties = sum(one["is_tie"] for one in part["partings"])
    return (
        f"**Soak**, {part['measured'][:10]}: {settings['clients']} clients, {settings['seconds'] / 60:g} minutes, "
        f"{settings['dtype']}: {counts['requests']:,} requests ({counts.get('left', 0)} left in the middle) and "
        f"{counts.get('malformed', 0)} malformed ones; {counts['tokens compared']:,} tokens compared, "
        f"{counts.get('differ', 0)} answers differ, {ties} at a tie; {counts.get('5xx', 0)} answers with 5xx; resident "
        f"memory {min(windows):,.0f} to {max(windows):,.0f} MiB; {part['slots_in_use']} slots in use at the end."
    )


def _serving_scheduler(part: dict[str, Any]) -> str:
    rows = part["rows"]
    ways = list(dict.fromkeys(way for row in rows for way in row["ways"]))
    at = [str(row["concurrency"]) for row in rows]

    def by_way(cell: Callable[[dict[str, Any], str], str], of: Sequence[str] = ways) -> list[list[str]]:
        return [[way, *(cell(row, way) if way in row["ways"] else "–" for row in rows)] for way in of]

    def over_plain(row: dict[str, Any], way: str) -> str:
        return f"{row['over_plain'][way]['ratio']:.3f}"

    def over_best(row: dict[str, Any], way: str) -> str:
        one = row["over_best"][way]
        return f"{one['ratio']:.3f} ({one['interval'][0]:.3f} to {one['interval'][1]:.3f})"

    policies = [way for way in ways if not way.startswith(("plain", "depth")) and not way.endswith(": plain")]
    shown = ["plain", *policies]
    drafted = [way for way in ways if way != "plain" and not way.endswith(": plain")]
    right, turns = slice(1, 1 + len(at)), [row["turns"] for row in rows]
    parts = [
        f"**Scheduler**, {part['measured'][:10]}: by clients at a time, {min(turns)} to {max(turns)} turns a way. Over "
        "plain: beside plain requests to the same server, since processes that do the same differ: see the next table. "
        "Over the best: that, over the same of the best of plain and every depth, with its 95 % interval.",
        _table(["tokens/s", *at], by_way(lambda row, way: f"{row['ways'][way]['tokens_per_s']:.0f}"), right),
        _table(["over plain", *at], by_way(over_plain, drafted), right),
        _table(
            ["plain, over a server without drafter", *at],
            [[way, *(f"{row['waiting'][way]['ratio']:.3f}" for row in rows)] for way in rows[0]["waiting"]],
            right,
        ),
        _table(["over the best", *at], by_way(over_best, policies), right),
    ]
    for what, title in (("first_ms", "first token, ms"), ("gap_ms", "between pieces, ms")):
        p50_p99 = lambda row, way, what=what: "{p50:.1f} / {p99:.1f}".format(**row["ways"][way][what])
        parts.append(_table([f"{title}, p50 / p99", *at], by_way(p50_p99, shown), right))
    share = by_way(lambda row, way: f"{100 * row['ways'][way]['goodput']:.0f} %", shown)
    parts.append(_table(["within twice the unloaded times", *at], share, right))
    own = ", ".join(f"{one['policy']} {100 * one['share']:.2f} % ({one['batch']})" for one in part["policies"])
    return "\n\n".join([*parts, f"What policies take of a step (of so many texts): {own}."])


def _serving_overhead(part: dict[str, Any]) -> str:
    lines = [
        [row["way"], f"{row['generate_ms']:.2f}", f"{row['server_ms']:.2f}",
         f"{row['ratio']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})"]
        for row in part["rows"]
    ]  # fmt: skip
    heads = ["one client", "`generate`, ms a token", "server, ms a token", "server over `generate`"]
    return f"**Overhead**, {part['measured'][:10]}.\n\n{_table(heads, lines, slice(1, 4))}"


def _serving_peers(part: dict[str, Any]) -> str:
    clients = sorted({row["concurrency"] for row in part["rows"]})
    own = {(row["way"], row["concurrency"]): row for row in part["rows"]}
    lines = []
    for way in dict.fromkeys(row["way"] for row in part["rows"]):
        rows = [own[way, count] for count in clients if (way, count) in own]
        speeds = [f"{own[way, count]['tokens_per_s']:.0f}" if (way, count) in own else "–" for count in clients]
        equal, texts = (sum(row[name] for row in rows) for name in ("texts_equal", "texts"))
        first = f"{rows[0]['first_ms']['p50']:.0f}"
        others = f"{sum(row['ties'] for row in rows)} of {sum(row['audited'] for row in rows)}"
        lines.append([way, *speeds, first, f"{equal} of {texts}", others])
    lines.sort(key=lambda line: -float(line[1].replace("–", "0")))
    heads = ["server", *(f"tokens/s, {count} clients" for count in clients), "first token, ms", "texts equal",
             "others at a tie"]  # fmt: skip
    said = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    return f"**Peers**, {part['measured'][:10]}; {said}.\n\n{_table(heads, lines, slice(1, len(heads)))}"


def _serving_fuzz(part: dict[str, Any]) -> str:
    statuses = ", ".join(f"{count:,} with {status}" for status, count in sorted(part["statuses"].items()))
    return (
        f"**Fuzz**, {part['measured'][:10]}: schemathesis {part['schemathesis']}, {part['cases']:,} cases over "
        f"{part['operations']} operations: {statuses}."
    )


def _serving_chaos(part: dict[str, Any]) -> str:
    lines = [
        [row["fault"], f"{row['answers'] - len(row['partings'])} of {row['answers']}", row["health"],
         ", ".join(f"{kind} {count:,}" for kind, count in row["alarms"].items() if count) or "none"]
        for row in part["rows"]
    ]  # fmt: skip
    heads = ["what the drafter does", "answers as without it", "health", "alarms"]
    return f"**Chaos**, {part['measured'][:10]}.\n\n{_table(heads, lines, slice(1, 2))}"


SERVING: dict[str, Callable[[dict[str, Any]], str]] = {
    "soak": _serving_soak, "scheduler": _serving_scheduler, "overhead": _serving_overhead, "peers": _serving_peers,
    "fuzz": _serving_fuzz, "chaos": _serving_chaos,
}  # fmt: skip
"""By part of `serving.py`."""


def _kept(found: dict[str, Any]) -> str:
    """The promises of this file, and the results."""
    lines = [
        [one["promise"], f"{one['wanted']:g}", f"{one['found']:.2f}", "yes" if one["holds"] else "no"]
        for one in found["promises"]
    ]
    return _table(["promise", "wanted", "found", "holds"], lines, slice(1, 3))


def sources(found: dict[str, Any]) -> str:
    """One line per stage: conversations per second of one core, and the peak memory of its process."""
    lines = [
        [name, f"{one['per_second_and_core']:,.0f}", f"{one['peak_bytes'] / 2**20:,.0f}", f"{one['count']:,}"]
        for name, one in found["stages"].items()
    ]
    heads = ["stage", "conversations a second", "peak, MiB", "conversations that are left"]
    said = f"{found['conversations']:,} conversations, a file of {found['file_bytes'] / 1e9:.1f} GB."
    return "\n\n".join([_machine(found), said, _table(heads, lines, slice(1, 4)), _promises(found)])


def contamination(found: dict[str, Any]) -> str:
    """One line per kind of pairs: how many there are, and the share that is right from texts and from stored hashes."""
    texts, hashes = found["texts"], found["hashes"]
    lines = [
        [kind, str(count), *(f"{way['accuracy'][kind]:.3f}" for way in (texts, hashes))]
        for kind, count in texts["counts"].items()
    ]
    size = f"{found['pairs']} pairs, {found['prompts']} prompts in nine layouts."
    heads = ["kind", "pairs", "right from texts", "right from hashes"]
    return "\n\n".join([_machine(found), size, _table(heads, lines, slice(1, 4)), _promises(found)])


def regeneration(found: dict[str, Any]) -> str:
    """The promises of this file, and the results."""
    made = f"`{found['command']}`, {found['seconds'] / 60:.0f} minutes, {found['made'][:10]}."
    return f"{made}\n\n{_promises(found)}"


def versus_speculators(found: dict[str, Any]) -> str:
    """One line per method: both trainers' speeds, the bound set by products, and their peaks."""
    peaks = {row["kind"]: row["peak_bytes"] for row in found["memory"]}
    lines = [
        [row["kind"], *(f"{row['tokens_per_s'][way]:,.0f}" for way in ("ours", "uncounted", "one", "packed")),
         *(f"{row['times'][way]:.2f}" for way in ("one", "packed")), f"{row['bound']['one']:.2f}",
         *(f"{peaks[row['kind']][way] / 2**20:,.0f}" for way in ("ours", "one", "packed"))]
        for row in found["speed"]
    ]  # fmt: skip
    heads = ["method", "ours, tokens/s", "uncounted", "theirs, one text", "theirs, packed", "times one text",
             "times packed", "bound", "our peak, MiB", "theirs, one text", "packed"]  # fmt: skip
    return "\n\n".join([_machine(found), _table(heads, lines, slice(1, 11)), _promises(found)])


def real_model(found: dict[str, Any]) -> str:
    kinds = list(dict.fromkeys(row["kind"] for row in found["table"]))
    ways = list(dict.fromkeys(row["way"] for row in found["table"]))
    speed = {(row["way"], row["kind"]): row["tokens_per_s"] for row in found["table"]}
    lines = [[way, *(f"{speed[way, kind]:.0f}" for kind in kinds)] for way in ways]
    texts = "; ".join(
        f"{way}: {own['equal']} of {own['texts']} texts are transformers' own"
        + (f", {own['ties']} part at a tie of at most {own['margin']:.1e}" if own["ties"] else "")
        for way, own in found["texts"].items()
    )
    said = f"Tokens/s of whole requests, {found['prompts']} prompts of each kind x {found['new']} tokens. {texts}. "
    table = _table(["way", *kinds], lines, slice(1, len(kinds) + 1))
    return "\n\n".join([said + _machine(found), table, _promises(found)])


def real_server(found: dict[str, Any]) -> str:
    every = found["clients"]
    ways = list(dict.fromkeys(way for own in every.values() for way in own["tokens_per_s"]))
    lines = [[way, *(f"{own['tokens_per_s'][way]:.0f}" for own in every.values())] for way in ways]
    heads = ["way", *(f"{clients} at a time" for clients in every)]
    differ = sum(own["texts_that_differ"] for own in every.values())
    said = f"Tokens/s, {found['prompts']} prompts x {found['new']} tokens; {differ} of our texts differ. "
    ratios = [
        [f"{clients} at a time: {name}", f"{one['center']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"]
        for clients, own in every.items() for name, one in own["ratios"].items()
    ]  # fmt: skip
    tables = [_table(heads, lines, slice(1, len(heads))), _table(["ratio", "with its interval"], ratios, slice(1, 2))]
    return "\n\n".join([said + _machine(found), *tables, _promises(found)])


def long_texts(found: dict[str, Any]) -> str:
    ways = list(found["first"])
    depths = list(found["first"][ways[0]])
    rate = lambda way, depth: f"{found['depth'][way][depth]:.0f}" if way in found["depth"] else ""
    lines = [
        [way, *(f"{found['first'][way][depth]:.2f}" for depth in depths), *(rate(way, depth) for depth in depths)]
        for way in ways
    ]
    heads = ["way", *(f"first token at {depth}, s" for depth in depths), *(f"tokens/s behind {n}" for n in depths)]
    held = found["memory"]
    first = held["prompts"][0]
    said = (
        f"One prompt of {held['keys_and_values_bytes'] / 1e6:.0f} MB of keys and values to a server of "
        f"{found['slots']} slots: memory rises by {first['peak_over_idle'] / 1e6:.0f} MB and stays "
        f"{first['after_over_idle'] / 1e6:.0f} above where it was, which later prompts that begin alike share. "
    )
    return "\n\n".join([said + _machine(found), _table(heads, lines, slice(1, len(heads))), _promises(found)])


def accuracy(found: dict[str, Any]) -> str:
    rows = [row for row in found["rows"] if "rms_ratio" in row]
    paths, contexts = list(dict.fromkeys(row["path"] for row in rows)), sorted({row["context"] for row in rows})
    by = {(row["path"], row["context"]): row for row in rows}
    cell = lambda row: f"{row['rms_ratio']:.2f}, {row['largest_ratio']:.2f}"
    lines = [
        [path, *(cell(by[path, context]) if (path, context) in by else "" for context in contexts)] for path in paths
    ]
    base = [row for row in found["rows"] if row["path"] == "transformers"]
    lines.append(
        ["transformers: root mean square, largest", *(f"{row['rms']:.1e}, {row['largest']:.1e}" for row in base)]
    )
    held = sum(one["holds"] for one in found["promises"])
    said = f"{held} of {len(found['promises'])} hold at most 1.5 and 3 times what transformers loses. "
    heads = ["path", *(f"{context:,} tokens" for context in contexts)]
    return "\n\n".join([said + _machine(found), _table(heads, lines, slice(1, len(heads)))])


SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "real_model": real_model, "real_server": real_server, "long_texts": long_texts,
    "accuracy": accuracy, "serving": serving, "peers": peers, "peers_nearest": peers, "peers_avx2": peers,
    "products": products, "products_avx2": products, "contexts": contexts, "contexts_avx2": contexts,
    "families": families, "every_family": every_family, "soak": soak, "soak_compiled": soak, "kills": kills,
    "distributed": distributed, "plan": plan, "bounds": bounds, "overhead": overhead, "overhead_avx2": overhead,
    "retrieval": retrieval, "corpus": corpus, "corpus-100m": corpus, "gpu": gpu, "learning": learning,
    "remote": remote, "methods": methods, "best": best, "sources": sources, "contamination": contamination,
    "regeneration": regeneration, "regeneration_outrider": regeneration, "regeneration_vllm": regeneration,
    "training": training, "versus_speculators": versus_speculators, "gate": gate, "replay": replay,
    "engines": engines, "llama_cpp": llama_cpp,
}  # fmt: skip
"""By the name of the result file and of the markers."""

if __name__ == "__main__":
    main()
