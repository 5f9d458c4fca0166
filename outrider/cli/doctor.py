"""`outrider doctor`: what this machine supports."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any

import torch
import typer

from outrider import demo, fast, kernels, machine
from outrider.cli import console
from outrider.cli.console import sized
from outrider.cli.options import JsonTo
from outrider.errors import DataError
from outrider.fast import runner
from outrider.kernels import prebuilt
from outrider.runs.provenance import version_of


def doctor(
    json_to: JsonTo = None,
    again: Annotated[bool, typer.Option("--again", help="Repeat the timing of matrix products.")] = False,
) -> None:
    """Show what this machine supports, how fast it multiplies, and what else can be installed."""
    if again:
        machine.forget()
    checks = examine()
    table = console.table("what", "found", "what to do")
    for check in checks:
        table.add_row(check["what"], check["found"], check["advice"], style="" if check["ok"] else "yellow")
    console.present(json_to, checks, table, _speed_table())


def _speed_table() -> console.PlainTable:
    """Time of matrix products by number type and rows, and in training."""
    measured = machine.matmul_times().ms
    columns = [*map(str, machine.ROWS), machine.TRAINING]
    heads = [*(f"{rows} row{'s' * (rows != 1)}" for rows in machine.ROWS), machine.TRAINING]
    what = f"ms for {machine.LAYERS} products of {machine.WIDTH} x {machine.WIDTH}"
    table = console.table(what, *heads, right=heads)
    for way, times in measured.items():
        table.add_row(way, *(f"{times[column]:.3g}" if column in times else "" for column in columns))
    return table


def examine() -> list[dict[str, Any]]:
    """Checks of this machine: [{what, found, ok, advice}]."""
    checks: list[dict[str, Any]] = []

    def add(what: str, value: object, ok: bool = True, advice: str = "") -> None:
        checks.append({"what": what, "found": str(value), "ok": ok, "advice": "" if ok else advice})

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
        decoding = str(machine.decoding_dtype(torch.bfloat16)).removeprefix("torch.")
        add("a bfloat16 target", f"dtype=auto multiplies in {decoding}")
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    why = "install g++ for compiled steps, which take about half the time of plain ones on a CPU; it is optional"
    add("compiler", compiler or "none", compiler is not None, why)
    ready = prebuilt.path(kernels.source())
    add("kernels", f"prebuilt, {ready.stem}" if ready else "compiled on first use" if compiler else "none",
        ready is not None or compiler is not None, why)  # fmt: skip
    is_whole = "as whole steps where requests allow it" if cuda or runner.is_on_disk() else "of several calls"
    add("steps", is_whole if cuda else f"{is_whole}; `outrider compile --whole` builds packages of whole steps")
    packages = [path.stat().st_size for path in fast.folder().glob("[!.]*.pt2")]
    add("compiled steps", f"{len(packages)} packages, {sized(sum(packages))} in {fast.folder()}")
    for extra, module, gain in (
        ("tensorboard", "tensorboard", "training curves by --track tensorboard"),
        ("accelerate", "accelerate", "device_map and quantised targets"),
        ("quantize", "torchao", "targets and drafters with int8 weights"),
        ("grammar", "llguidance", "output that fits a JSON schema, a regex or a grammar"),
        ("eval", "lm_eval", "public tasks of lm-evaluation-harness with and without a drafter"),
        ("corpus", "pydivsufsort", "building corpora to draft from"),
    ):
        there = find_spec(module) is not None
        add(
            f"extra {extra}",
            "installed" if there else "not installed",
            there,
            f"pip install 'outrider[{extra}]' for {gain}",
        )
    shipped = (demo.TARGET / "config.json").exists() and (demo.SMALL_MODEL / "config.json").exists()
    add(
        "demo models",
        demo.TARGET.parent if shipped else "missing",
        shipped,
        "install Outrider from a wheel or a full clone",
    )
    try:
        pieces = sum(1 for _ in demo.modules("train"))
        add("library source", f"{pieces} modules to take prompts from")
    except DataError as error:
        add("library source", "missing", False, str(error))
    return checks


def _dtypes(device: str) -> Iterator[str]:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        try:
            torch.ones(2, 2, dtype=dtype, device=device) @ torch.ones(2, 2, dtype=dtype, device=device)
        except RuntimeError:
            continue
        yield str(dtype).removeprefix("torch.")
