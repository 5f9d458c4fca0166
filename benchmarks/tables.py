"""Writes the tables of benchmarks/results/*.json into benchmarks/pages/*.md, each between its own markers, goals and
results into RESULTS.md, and charts into charts/: `python benchmarks/tables.py`.

`TABLES` says what a page shows of a result file: where its rows are, and their columns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from charts import charts
from papers import papers

from outrider.drafters import methods as methods_of_drafters

HERE = Path(__file__).resolve().parent
PROVENANCE = ("command", "made", "measured", "cpu", "cpus", "threads", "torch", "transformers")


class Table(NamedTuple):
    """Rows of a result file: a list of objects, or an object of objects whose keys become the first column."""

    rows: str
    """Path of the rows, with dots."""
    columns: str
    """`path[/divisor][:format][=head]`, separated by `; `; a path within a row has dots too."""
    title: str = ""


TABLES: dict[str, list[Table]] = {
    "real_model": [
        Table("table", "way; kind; tokens_per_s:.0f=tokens/s"),
        Table("texts", "texts; equal=transformers' own; ties; faults; margin:.1e=largest margin"),
    ],
    "real_server": [
        Table("clients.1.tokens_per_s", "=tokens/s:.0f", "One request at a time"),
        Table("clients.16.tokens_per_s", "=tokens/s:.0f", "16 at a time"),
        Table("clients.1.ratios", "center:.2f=ratio; low:.2f; high:.2f", "One at a time, with 95 % intervals"),
        Table("clients.16.ratios", "center:.2f=ratio; low:.2f; high:.2f", "16 at a time, with 95 % intervals"),
    ],
    "long_texts": [
        Table("first", "170:.2f; 2000:.2f; 6400:.2f", "Seconds to the first token, by tokens of the prompt"),
        Table("depth", "170:.0f; 2000:.0f; 6400:.0f", "Tokens/s behind so many tokens"),
        Table("memory.prompts", "peak_over_idle/1e6:.0f=peak, MB; after_over_idle/1e6:.0f=after, MB; first_s:.1f",
              "Memory of a prompt of 297 MB of keys and values"),
    ],
    "pictures": [
        Table("jacobi", "method; temperature=T; tokens_per_step.value:.2f=tokens per step; "
              "tokens_per_step.low:.2f=low; tokens_per_step.high:.2f=high; of_codes.value:.2f=of codes; distance:.3f; "
              "recognised.value:.0%=recognised; thing.value:.0%=thing alone", "Pictures from captions"),
        Table("clips", "method; tokens_per_step.value:.2f=tokens per step; tokens_per_step.low:.2f=low; "
              "tokens_per_step.high:.2f=high; blocks_accepted:.2f=frames accepted; distance:.3f; "
              "recognised.value:.0%=recognised; thing.value:.0%=thing alone; moving.value:.0%=moves as said",
              "Clips of four frames"),
        Table("mixed", "method; temperature=T; tokens_per_step.value:.2f=tokens per step; "
              "tokens_per_step.low:.2f=low; "
              "tokens_per_step.high:.2f=high; of_letters.value:.2f=of letters; of_codes.value:.2f=of codes",
              "A picture, its caption, another picture"),
    ],
    "accuracy": [
        Table("rows", "path; dtype; context:,; rms:.1e; largest:.1e; rms_ratio:.2f=over transformers; "
              "largest_ratio:.2f=largest"),
    ],
    "serving": [Table("counts", "=count:,"), Table("settings", "=value", "Settings")],
    "products": [
        Table("rows", "shape; values; rows; ms:.2f=ms by way; bound_ms:.2f=bound, ms; set_by; times_bound:.2f"),
    ],
    "families": [
        Table("rows", "family; attention; dtype; mode; tokens:,; mismatches:n; ties:n; deepest=deepest path; "
              "failed=stopped at"),
    ],
    "every_family": [Table("rows", "family; form; dtype; mode; outcome; reason:reason=why")],
    "soak": [Table("settings", "cases:,; tokens:,"), Table("events", "=times:,")],
    "kills": [Table("stages", "kills; before_a_call=before a call that changes the disk; runs")],
    "bounds": [
        Table("rows", "drafter; temperature; way=steps of; rows:.1f; set_by; draft_ms:.2f; verify_ms:.2f; "
              "tokens_per_step:.2f; over_plain:.2f; bound:.2f; of_bound:.0%=of it"),
    ],
    "retrieval": [Table("rows", "name=drafter; task; tokens_per_step:.2f")],
    "corpus": [Table("search.warm_us", "p50:.1f=p50, µs; p99:.1f=p99, µs", "A search")],
    "gpu": [
        Table("rows.machine", "=value:.4g"),
        Table("rows.passes-8b.points", "batch=texts; context:,=tokens before; width=rows each; way=passes; ms:.1f; "
              "floor_ms:.1f=floor", "Passes of a Qwen3 of 8 B, bfloat16"),
        Table("rows.passes-0.6b.points", "batch=texts; context:,=tokens before; width=rows each; way=passes; ms:.1f; "
              "floor_ms:.1f=floor", "Passes of one of 0.6 B"),
        Table("rows.loop-8b.points", "way=drafts; captured; ms:.2f=ms a step; kernel_ms:.2f=kernels, ms; "
              "kernels_per_step=kernels a step; tokens_per_step:.2f; tokens_per_s:,.0f=tokens/s",
              "Steps of one text of the 8 B, plain and with seven replayed tokens, each right with probability 0.85"),
        Table("rows.step-8b.points", "drafter; batch=texts; temperature; seams_ms:.1f=ms a step; "
              "whole_ms:.1f=as one graph; same:.0%=same texts", "Whole steps of the 8 B, drafters of random weights"),
        Table("rows.acceptance.points", "way=drafts; batch=texts; plain_ms:.2f=as torch writes it, ms; "
              "kernels_ms:.2f=our kernels; floor_ms:.3f=floor; plain_peak_mb:,.1f=MB; kernels_peak_mb:,.1f=ours, MB",
              "Acceptance of eight drafts a text over 151,936 tokens, from logits to lists"),
        *(Table(f"rows.training-{size}.points", "drafter; s_per_step:.2f; tokens_per_s:,.0f=tokens/s; "
                "reading_share_of_products:.2f=target's share of products; peak_gib:.0f=GiB",
                f"Training on a target of {size.upper()}, 8 texts of 2,048 tokens a step") for size in ("4b", "8b")),
        Table("rows.exact.points", "dtype=type; captured; branches; kept:.2f=accepted a step; equal; tie=ties; "
              "bug=faults", "16 greedy texts of 96 tokens of the demo target compared with plain decoding"),
    ],
    "learning": [
        Table(f"users.{who}", "learning.p50_ms:.1f=median, ms; still.p50_ms:.1f=without; learning.p99_ms:.1f=p99, ms; "
              "still.p99_ms:.1f=without; p99_ratio.ratio:.2f=p99 ratio; p99_ratio.interval:.2f=95 %",
              f"Users of {who} text") for who in ("plain", "drafted")
    ],
    "best": [
        Table("rows", "drafter; temperature=T; tokens_per_step:.2f; accepted_by_depth:.2f; "
              "speedup:.2f=over plain, compiled; exact; compared_tokens:,"),
    ],
    "sources": [
        Table("stages", "per_second_and_core:,=conversations a second; peak_bytes/1e6:,.0f=peak, MB; count:,=left"),
    ],
    "contamination": [
        Table("texts.accuracy", "=right from texts:.3f"), Table("hashes.accuracy", "=right from hashes:.3f"),
    ],
    "training": [
        Table("speed", "target; kind=drafter; tokens_per_s.plain:,.0f=plain, tokens/s; tokens_per_s.ours:,.0f=ours; "
              "times:.2f; bound:.2f; worst_loss_error:.0e=losses differ"),
        Table("memory", "target; kind=drafter; peak_bytes.plain/1e6:,.0f=plain, peak MB; peak_bytes.ours/1e6:,.0f=ours;"
              " share:.0%"),
        Table("plan", "kind=drafter; rows; predicted.peak_bytes/1e6:,.0f=planned MB; found.peak_bytes/1e6:,.0f=found; "
              "predicted.seconds:.2f=planned s; found.seconds:.2f=found"),
    ],
    "pipeline": [
        Table("rows", "stages; right:.2f=of guesses right; equivalent_length:.2f=equivalent length; low:.2f; high:.2f; "
              "slowest_stage:.2f=slowest stage; drafter:.2f; own_devices:.2f=on own devices; "
              "two_processes:.2f=two processes; two_processes_over_two_threads:.2f=over two threads",
              "Times over that of a plain pass, speeds over a plain pass by the clock"),
    ],
    "local_head": [Table("rows", "way; tokens_per_step:.2f; over_base:.3f; low:.3f; high:.3f")],
    "recipes": [
        Table("rows", "recipe; devices=H100; answer_hours:.1f=to answer, h; read_hours:.1f=to read, h; "
              "train_hours:.1f=to train, h; tokens/1e6:,.0f=tokens, M; device_bytes/1e9:.0f=GB of each; "
              "disk_bytes/1e9:.0f=GB of disk"),
    ],
    "gate": [Table("cases", "times=pairs; stopped; warned; stops_by_rule=stopped by")],
    "engines": [
        Table("rows", "row=draft; texts_equal; prompts; steps=steps, ours and engine; steps_equal:.1%; error:reason"),
    ],
    "llama_cpp": [
        Table("drafters", "row=draft; fault; texts_equal; prompts; steps=steps, ours and server; steps_equal:.1%; "
              "accepted; is_equal=equal; causes; error:reason"),
    ],
    "plan": [
        Table("points", "name=published result; hardware; batch; published:.2f; predicted:.2f=planned; error:.1%; "
              "assumed"),
        Table("lacking", "name=not planned; lacks"),
    ],
}  # fmt: skip
ALIASES = {"products_avx2": "products", "corpus-100m": "corpus", "soak_compiled": "soak"}
"""Result files that show the same as another one."""


def main() -> None:
    results = {path.stem: json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))}
    sections = {name: section(results[name], TABLES[ALIASES.get(name, name)]) for name in (*TABLES, *ALIASES)}
    sections |= {"papers": papers(results), "methods": methods(results["methods"])}
    sections["engine_versions"] = engine_versions(results)
    for page in sorted((HERE / "pages").glob("*.md")):
        _put(page, sections)
    _put(HERE / "RESULTS.md", {"compared": compared(results), "same_text": same_text(results["same_text"])})
    _put(HERE.parent / "docs" / "decisions.md", {"glance": glance(results)})
    for name, drawing in charts(results).items():
        (HERE / "charts" / f"{name}.svg").write_text(drawing)


def _put(page: Path, sections: dict[str, str]) -> None:
    text = page.read_text()
    for name, section in sections.items():
        body = f"<!-- {name} -->\n{section}\n<!-- /{name} -->"
        text = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, body=body: body, text, flags=re.DOTALL)
    page.write_text(text)


# ── a page ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def section(result: dict[str, Any], tables: Sequence[Table]) -> str:
    """Where the result comes from, its tables, its promises."""
    parts = [provenance(result)]
    for each in tables:
        rows = at(result, each.rows)
        if rows:
            parts += [*([f"**{each.title}**"] if each.title else []), drawn(rows, each.columns)]
    return "\n\n".join([*parts, *([_promises(result)] if result.get("promises") else [])])


def provenance(result: dict[str, Any]) -> str:
    facts = result | result.get("machine", {}) | result.get("provenance", {})
    known = {name: facts[name] for name in PROVENANCE if facts.get(name)}
    command, when = known.pop("command", None), known.pop("made", None) or known.pop("measured", "")
    known.pop("measured", None)
    parts = [*([f"`{command}`"] if command else []), *([when[:10]] if when else [])]
    return ", ".join([*parts, *(f"{name} {value}" for name, value in known.items())]) + "."


def at(value: Any, path: str) -> Any:
    """The value at a path with dots; None where it is missing.  Keys may have dots themselves."""
    if not path:
        return value
    for end in sorted((match.start() for match in re.finditer(r"\.|$", path)), reverse=True):
        if isinstance(value, Mapping) and path[:end] in value:
            return at(value[path[:end]], path[end + 1 :])
    return None


def drawn(rows: Any, columns: str) -> str:
    """A Markdown table; numbers are aligned to the right."""
    parsed = [_column(text) for text in columns.split("; ")]
    named = rows.items() if isinstance(rows, Mapping) else [(None, row) for row in rows]
    lines = [
        [*([str(name)] if name is not None else []), *(_cell(at(row, path), divisor, form) for path, divisor, form, _ in
         parsed)] for name, row in named
    ]  # fmt: skip
    heads = [*([""] if isinstance(rows, Mapping) else []), *(head for *_, head in parsed)]
    return _table(heads, lines)


def _column(text: str) -> tuple[str, float, str, str]:
    """Path, divisor, format and head of a column."""
    match = re.fullmatch(r"([^/:=]*)(?:/([\de]+))?(?::([^=]*))?(?:=([^:]*)(?::(.*))?)?", text)
    assert match is not None, text
    path, divisor, form, head, other = match.groups()
    return path, float(divisor or 1), form or other or "", head or path.rpartition(".")[2].replace("_", " ")


def _cell(value: Any, divisor: float, form: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_cell(each, divisor, form)}" for name, each in value.items()) or "–"
    if form == "n":
        return str(len(value))
    if isinstance(value, list):
        return " ".join(_cell(each, divisor, form) for each in value) or "–"
    if value is None:
        return "–"
    if form == "reason":
        line = next((line for line in str(value).splitlines() if "Error, " in line), str(value))
        return " ".join(line.replace("|", "/").split())[:110]
    return f"{value / divisor:{form}}" if divisor != 1 else f"{value:{form if isinstance(value, int | float) else ''}}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    numbers = [all(re.fullmatch(r"[-+\d.,e%]+|–", line[n]) for line in lines) for n in range(len(heads))]
    ruler = ["---:" if is_number else "---" for is_number in numbers]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ruler, *lines))


def _promises(result: dict[str, Any]) -> str:
    return _table(["promise", "wanted", "found", "holds"], [
        [one["promise"], _number(one.get("wanted")), _number(one.get("found")), "yes" if one["holds"] else "**no**"]
        for one in promises(result)
    ])  # fmt: skip


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else _cell(value, 1, ".3g")


def promises(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The promises of a result; facts that hold or do not have no numbers."""
    listed = result.get("promises") or []
    return [{"promise": one, "holds": holds} for one, holds in listed.items()] if isinstance(listed, dict) else listed


def methods(found: dict[str, Any]) -> str:
    """A table per column of cells, the published orderings, and the drafts of a lattice side by side."""
    parts = [f"{found['cells']} cells (target, method, budget, seed). {provenance(found)}"]
    titles = {
        "minutes": f"Demo target, {found['training_minutes_of_one_core']:g} minutes of one core",
        "steps": f"Demo target, {found['training_steps']} steps",
    }
    heads = ["method", "seeds", "weights", "steps", "tokens per step, T = 0", "accepted by depth", "by kind", "T = 1"]
    for column in dict.fromkeys(row["column"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["column"] == column]
        rows.sort(key=lambda row: -row["temperature_0"]["tokens_per_step"])
        parts += [f"**{titles.get(column, column)}**", _table(heads, [_method(row) for row in rows])]
    orders = [
        [
            f"{one['better']} over {one['worse']}", one["column"], f"{one['temperature']:g}", str(one["seeds"]),
            f"{one['wanted']:g}", f"{one['ratio']:.3f}", _interval(one), "yes" if one["holds"] else "**no**",
        ]
        for one in found["orders"]
    ]  # fmt: skip
    named = ["tokens per step", "column", "T", "seeds", "wanted", "found", "95 % interval", "holds"]
    parts.append(_table(named, orders))
    if lines := [
        [one["method"], one["column"], f"{one['better']} over {one['worse']}", str(one["seeds"]),
         f"{one['ratio']:.3f}", _interval(one)]
        for one in found["lattices"]
    ]:  # fmt: skip
        heads = ["drafter", "column", "drafts", "seeds", "tokens per step", "95 % interval"]
        parts += ["**The same drafter at equal verified nodes**", _table(heads, lines)]
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


def _parted(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row with differing steps or none, and whose fault that is, as far as the rows tell."""
    same = [other for other in rows if (other["kind"], other["format"]) == (row["kind"], row["format"])]
    if row["error"]:
        return f"{row['row']} (refused)"
    return row["row"] + (" (equal with vLLM mended)" if any(other["steps_equal"] == 1 for other in same) else "")


def engine_versions(found: dict[str, dict[str, Any]]) -> str:
    """For each method, how far its drafts were verified in each engine."""
    vllm, llama, converted = found["engines"]["rows"], found["llama_cpp"], found["gguf_converter"]["rows"]
    versions = ", ".join(dict.fromkeys(row["version"] for row in vllm))
    heads = ["method", f"vLLM {versions}, CPU", llama["llama_cpp"]["package"], "SGLang", "TensorRT-LLM", "transformers"]
    lines = []
    for kind, method in sorted(methods_of_drafters().items()):
        rows = {
            "vllm": [row for row in vllm if row["kind"] == kind],
            "llamacpp": [row for row in llama["drafters"] if row["row"] == kind and row["fault"] is None],
        }
        cells = {name: _followed(rows[name]) for name in rows}
        if not cells["llamacpp"] and any(row["case"] == kind and not row["unexplained"] for row in converted):
            cells["llamacpp"] = "file equals its converter's"
        names = ("vllm", "llamacpp", "sglang", "trtllm", "transformers")
        line = [cells.get(name) or ("written" if name in method.engines else "–") for name in names]
        if set(line) != {"–"}:
            lines.append([kind, *line])
    return _table(heads, lines)


def _followed(rows: list[dict[str, Any]]) -> str:
    """The verdict on a method's rows in one unmodified engine; "" without rows."""
    rows = [row for row in rows if "mended" not in row["row"]]
    if not rows:
        return ""
    if all("steps_equal" not in row for row in rows):
        return f"{sum(row['texts_equal'] for row in rows)} of {sum(row['prompts'] for row in rows)} texts equal"
    best = max(row["steps_equal"] or 0.0 for row in rows)
    return "equal step by step" if best == 1 else f"{best:.1%} of steps equal" if best else "**refused**"


def compared(results: dict[str, Any]) -> str:
    """Every configuration on the real model by load, next to other engines: training, tokens/s, texts."""
    lines, alone, served = [], results["real_model"], results["real_server"]
    for row in alone["table"]:
        if row["kind"] == "all":
            texts = alone["texts"].get(row["way"])
            same = f"{texts['equal']} of {texts['texts']}" if texts else "–"
            lines.append([_engine(row["way"]), "one prompt at a time", f"{row['tokens_per_s']:.0f}", same])
    for clients, load in (("1", "one client"), ("16", "16 clients")):
        for way, rate in served["clients"][clients]["tokens_per_s"].items():
            if not way.startswith("generate"):
                lines.append([_engine(way), load, f"{rate:.0f}", "–"])
    return f"{provenance(alone)} {provenance(served)}\n\n" + _table(
        ["way", "training", "load", "tokens/s", "transformers' own texts"],
        [[name, _training(name), *rest] for name, *rest in lines],
    )


def _engine(way: str) -> str:
    return way if way.startswith("llama") else f"Outrider, {way.removeprefix('serve ')}"


def _training(name: str) -> str:
    return "15 minutes (`make demo`)" if "mix" in name else "none"


def same_text(result: dict[str, Any]) -> str:
    """Greedy texts by configuration and load that equal transformers' own, token for token."""
    load = lambda way: f"{result['slots']} clients" if way.startswith("server") else f"{result['slots']} slots"
    heads = ["way", "load", "texts", "tokens", "equal", "faults"]
    lines = [
        [row["way"], load(row["way"]), str(row["texts"]), f"{row['tokens']:,}", str(row["equal"]), str(row["faults"])]
        for row in result["rows"]
    ]
    return f"{provenance(result)}\n\n{_table(heads, lines)}"


# ── all pages ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def glance(results: dict[str, Any]) -> str:
    """One line per result: its goals, how many of them hold, and which is missed by most."""
    lines = [
        _line(name, promise, "0", f"{bad:,} of {every:,}", not bad) for name, promise, bad, every in counted(results)
    ]
    plan = results["plan"]
    lines.append(_line("plan", f"published speed-ups, planned within {plan['within']:.0%}", str(plan["of"]),
                       f"{plan['hits']} of {plan['of']}", plan["hits"] == plan["of"]))  # fmt: skip
    for name in (*TABLES, *ALIASES):
        if listed := promises(results[name]):
            short = [one for one in listed if not one["holds"]]
            worst = "; ".join(map(_promise, short[:2])) + (f"; {len(short) - 2} more" if len(short) > 2 else "")
            held = f"{len(listed) - len(short)} of {len(listed)}"
            lines.append(_line(name, worst and f"short: {worst}", f"all {len(listed)}", held, not short))
    orders = [order for order in results["methods"]["orders"] if order["holds"] is not None]
    against = sorted({f"{one['better']} over {one['worse']}" for one in orders if one["differs"] and one["ratio"] < 1})
    held = f"{sum(one['holds'] for one in orders)} of {len(orders)}"
    what = f"orders of the papers; the other way round here: {'; '.join(against)}"
    lines.append(_line("methods", what, f"{len(orders)} orders", held, not against))
    return _table(["page", "promise, or what falls short of it", "wanted", "found", "holds"], lines)


def counted(results: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    """What must never happen: result, goal, how often it did, out of how many."""
    families, soak = results["families"]["totals"], results["soak"]["totals"]
    forms, engines = (
        results["every_family"]["rows"],
        [row for row in results["engines"]["rows"] if "steps_equal" in row],
    )
    wrong = sum(row["outcome"] not in ("exact", "refused", "not built") for row in forms)
    parted = [_parted(row, engines) for row in engines if row["steps_equal"] != 1]
    version = ", ".join(dict.fromkeys(row["version"] for row in engines))
    by_engine = f"vLLM {version} (CPU) accepts what is accepted here, step by step; not: {', '.join(parted)}"
    return [
        ("families", "greedy text is `generate`'s: tokens that differ", families["mismatches"], families["tokens"]),
        ("every_family", "a form is exact or refused by name: neither", wrong, len(forms)),
        ("soak", "with a seed, text is plain decoding's: tokens that differ", soak["mismatches"], soak["tokens"]),
        ("engines", by_engine, len(parted), len(engines)),
    ]


def _line(name: str, promise: str, wanted: str, found: str, holds: bool) -> list[str]:
    page = next(page for page in sorted((HERE / "pages").glob("*.md")) if f"<!-- {name} -->" in page.read_text())
    return [
        f"[{name}](../benchmarks/pages/{page.name})",
        promise or "all hold",
        wanted,
        found,
        "yes" if holds else "**no**",
    ]


def _promise(one: dict[str, Any]) -> str:
    has_numbers = isinstance(one.get("wanted"), int | float)
    return one["promise"] + (f" ({one['found']:.3g}, wanted {one['wanted']:g})" if has_numbers else "")


if __name__ == "__main__":
    main()
