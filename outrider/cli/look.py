"""Verbs that change nothing: a run file resolved, the drafters there are, what this machine can do."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from outrider.cli import console
from outrider.cli.console import JsonTo, Overrides, Recipe, quiet, sized, write_json
from outrider.errors import ConfigError, DataError

if TYPE_CHECKING:
    from outrider.run import OnPaper, RunConfig


def show(recipe: Recipe, overrides: Overrides = None, json_to: JsonTo = None) -> None:
    """Print a run file with everything resolved, where each value came from, and how large its drafter will be."""
    quiet()
    from outrider.config import flatten
    from outrider.run import load, on_paper

    settings, origins = load(recipe, overrides or [])
    paper, chosen = on_paper(settings), _chosen(settings)
    sizes = _sizes(paper)
    values = flatten(settings.model_dump(mode="json")) | paper.values | sizes
    origins |= dict.fromkeys(paper.values, "target") | dict.fromkeys(sizes, "counted")
    beside = {key: f"{said} here" for key, said in chosen.items()}
    beside |= {key: sized(value) for key, value in sizes.items() if key.endswith("bytes")}
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("setting", "value", "from"):
            table.add_column(column, overflow="fold")
        for key, value in values.items():
            said = json.dumps(value) + (f" ({beside[key]})" if key in beside else "")
            table.add_row(key, said, origins[key], style="" if origins[key] != "default" else "dim")
        console.out.print(table)
    for note in paper.notes:
        console.note.print(f"[yellow]{escape(note)}[/]", highlight=False, soft_wrap=True)
    found = {key: {"value": value, "from": origins[key]} for key, value in values.items()}
    write_json(json_to, {key: own | ({"here": chosen[key]} if key in chosen else {}) for key, own in found.items()})


def _sizes(paper: OnPaper) -> dict[str, int]:
    """The drafter's weights, and the memory they take: when it serves, and with gradients and two moments of float32."""
    if paper.parameters is None:
        return {}
    serving = paper.parameters * paper.dtype.itemsize
    return {"sizes.parameters": paper.parameters, "sizes.serving_bytes": serving, "sizes.training_bytes": 16 * paper.parameters}


def _chosen(settings: RunConfig) -> dict[str, str]:
    """What this machine makes of settings that are left to it, by key path."""
    from outrider.targets.transformers import default_device
    from outrider.training.trainer import settled

    if settings.train is None or settings.train.dtype != "auto":
        return {}
    return {"train.dtype": settled(settings.train, settings.folder, default_device(settings.target.device)).dtype}


def drafters(json_to: JsonTo = None) -> None:
    """List the drafters there are, own and of other distributions."""
    quiet()
    found = drafter_list()
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("kind", "trains", "taps", "summary"):
            table.add_column(column)
        for entry in found:
            trains, taps = ("yes" if entry[key] else "no" for key in ("trains", "taps"))
            table.add_row(escape(entry["kind"]), trains, taps, escape(entry["summary"]))
        console.out.print(table)
    write_json(json_to, found)


def drafter_list() -> list[dict[str, Any]]:
    """[{kind, summary, trains, taps}], by kind.  The summary of a drafter that can't be used says why."""
    from outrider.drafters import find, kinds

    found = []
    for kind in sorted(kinds()):
        try:
            module = find(kind)
        except ConfigError as error:
            found.append({"kind": kind, "summary": str(error), "trains": False, "taps": False})
            continue
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        found.append(
            {"kind": kind, "summary": summary, "trains": hasattr(module, "Model"), "taps": "taps" in module.Config.model_fields}
        )
    return found


def doctor(
    json_to: JsonTo = None,
    again: Annotated[bool, typer.Option("--again", help="Time this machine's products again.")] = False,
) -> None:
    """Say what this machine can do, how fast it multiplies, and what to install for more."""
    quiet()
    if again:
        from outrider import machine

        machine.forget()
    checks = examine()
    if json_to != "-":
        table = Table(box=None, pad_edge=False)
        for column in ("what", "found", "what to do"):
            table.add_column(column, overflow="fold")
        for check in checks:
            table.add_row(check["what"], check["found"], escape(check["advice"]), style="" if check["ok"] else "yellow")
        console.out.print(table)
        console.out.print(_products_table())
    write_json(json_to, checks)


def _products_table() -> Table:
    """What products take here, by type and rows, and in training."""
    from outrider import machine

    measured = machine.products().ms
    columns = [*map(str, machine.ROWS), machine.TRAINING]
    table = Table(box=None, pad_edge=False)
    table.add_column(f"ms for {machine.LAYERS} products of {machine.WIDTH} x {machine.WIDTH}")
    for column in columns:
        table.add_column(column if column == machine.TRAINING else f"{column} row{'s' * (column != '1')}", justify="right")
    for way, own in measured.items():
        table.add_row(way, *(f"{own[column]:.3g}" if column in own else "" for column in columns))
    return table


def examine() -> list[dict[str, Any]]:
    """What this machine has: [{what, found, ok, advice}]."""
    import platform
    from importlib.util import find_spec

    import torch

    from outrider import compiled, demo, machine
    from outrider.run import version_of

    checks: list[dict[str, Any]] = []

    def add(what: str, found: object, ok: bool = True, advice: str = "") -> None:
        checks.append({"what": what, "found": str(found), "ok": ok, "advice": "" if ok else advice})

    add("python", platform.python_version(), sys.version_info >= (3, 11), "use Python 3.11 or later")
    for package in ("outrider", "torch", "transformers", "datasets", "safetensors"):
        add(package, version_of(package) or "missing", version_of(package) is not None, f"pip install {package}")
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
    add("accelerator", ", ".join(devices) or "none", True)
    add("cpu threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    add("dtypes", ", ".join(_dtypes("cuda" if cuda else "cpu")))
    if not cuda:
        add("arithmetic", machine.describe())
        add(
            "a bfloat16 target",
            f"dtype=auto multiplies in {str(machine.decoding_dtype(torch.bfloat16)).removeprefix('torch.')}",
        )
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    add(
        "compiler",
        compiler or "none",
        compiler is not None,
        "install g++ for compiled steps, which take about half the time of plain ones on a CPU; all else runs without",
    )
    packages = [path.stat().st_size for path in compiled.folder().glob("[!.]*.pt2")]
    add("compiled steps", f"{len(packages)} packages, {sized(sum(packages))} in {compiled.folder()}")
    for extra, module, gain in (
        ("tensorboard", "tensorboard", "training curves beside metrics.jsonl"),
        ("accelerate", "accelerate", "device_map and quantised targets"),
        ("quantize", "torchao", "targets and drafters with int8 weights"),
        ("grammar", "llguidance", "output that fits a JSON schema, a regex or a grammar"),
        ("eval", "lm_eval", "public tasks of lm-evaluation-harness with and without a drafter"),
        ("corpus", "pydivsufsort", "building corpora to draft from"),
    ):
        there = find_spec(module) is not None
        add(f"extra {extra}", "installed" if there else "not installed", there, f"pip install 'outrider[{extra}]' for {gain}")
    shipped = (demo.TARGET / "config.json").exists() and (demo.SMALL_MODEL / "config.json").exists()
    add("demo models", demo.TARGET.parent if shipped else "missing", shipped, "install Outrider from a wheel or a full clone")
    try:
        pieces = sum(1 for _ in demo.modules("train"))
        add("library source", f"{pieces} modules to take prompts from")
    except DataError as error:
        add("library source", "missing", False, str(error))
    return checks


def _dtypes(device: str) -> Iterator[str]:
    import torch

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        try:
            torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
        except RuntimeError:
            continue
        yield str(dtype).removeprefix("torch.")
