"""What a machine is fast at is measured, kept, and obeyed: on one without bfloat16 units all goes on in float32."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model

from outrider import machine
from outrider.cli import console
from outrider.cli.console import Forecast, lasting
from outrider.machine import measurements
from outrider.machine.contention import Contention
from outrider.processes import Whole
from outrider.targets.load import load_target
from outrider.training.optimizers import Muon, orthogonal

QUICK = {"float32": {"1": 2.0, "8": 4.0, "64": 16.0, "training": 3.0}}
TABLES = {
    "with bfloat16 units": QUICK | {"bfloat16": {"1": 1.0, "8": 2.0, "64": 5.0, "training": 1.5}},
    "without": QUICK | {"bfloat16": {"1": 1.0, "8": 12.0, "64": 90.0, "training": 105.0}},
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, on a machine that is not busy."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(measurements, "_memory", {})
    monkeypatch.setattr(measurements, "is_busy", lambda: False)
    monkeypatch.setattr(measurements, "watched", lambda work: (work(), Contention(0.1, 0.0, 0.0, 0.0, 1.0)))
    return tmp_path


def given(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(machine, "matmul_times", lambda: machine.MatmulTimes(TABLES[kind]))


@pytest.mark.parametrize(("kind", "chosen"), [("with bfloat16 units", "bfloat16"), ("without", "float32")])
def test_what_was_measured_decides(kind: str, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a comparison that is turned round; one row alone, which bfloat16 wins on both, must not decide."""
    given(monkeypatch, kind)
    assert machine.training_dtype() == chosen
    assert machine.decoding_dtype(torch.bfloat16) == getattr(torch, chosen)
    assert machine.decoding_dtype(torch.float64) == torch.float64
    assert chosen in machine.describe()


def test_the_first_processes_measure_in_a_quiet_moment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a table that every process times anew, one that a busy machine leaves for good, and one that another
    number of threads takes over."""
    calls: list[int] = []
    monkeypatch.setattr(machine, "_time_matmuls", lambda: calls.append(torch.get_num_threads()) or TABLES["without"])
    monkeypatch.setattr(measurements, "is_busy", lambda: True)
    assert machine.matmul_times().ms == TABLES["without"]
    assert not machine._place("products").exists()
    monkeypatch.setattr(measurements, "is_busy", lambda: False)
    measurements._memory.clear()  # as in another process
    for _ in range(5):
        assert machine.matmul_times().ms == TABLES["without"]
        measurements._memory.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert machine.matmul_times().ms == TABLES["without"]
    assert calls == [1] * measurements.TRIES + [1] * measurements.PROCESSES + [3]
    machine.forget()
    machine.matmul_times()
    assert calls[-2:] == [3, 3]
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null/nowhere")
    measurements._memory.clear()
    assert machine.matmul_times().ms == TABLES["without"]


@pytest.mark.parametrize("text", ["{", '{"ms": 3}', '{"ms": {"float32": {"1": "x"}}}'])
def test_a_damaged_file_is_measured_again(text: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a half-written or foreign file that stops every command."""
    monkeypatch.setattr(machine, "_time_matmuls", lambda: TABLES["without"])
    path = machine._place("products")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert machine.matmul_times().ms == TABLES["without"]
    assert json.loads(path.read_text())["ms"] == TABLES["without"]


def test_a_time_that_load_made_long_is_corrected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice that a moment of load decides for good: SmolLM2's compiled step, taken for slower than plain."""
    slept = iter([0.02, 0.001, 0.001])
    for _ in range(2):
        naps = {"usual": next(slept), "other": 0.005}
        run = {way: lambda nap=nap: time.sleep(nap) for way, nap in naps.items()}
        found = machine.fastest("load", lambda run=run: run)
        measurements._memory.clear()
    assert found == "usual"


def test_the_quickest_way_is_taken_and_asked_for_once(place: Path) -> None:
    """Catches a slower way, ways that are built again though the answer is known, and a change for nothing."""
    asked: list[str] = []

    def ways(*names: str) -> Any:
        asked.append(" ".join(names))
        return {name: lambda name=name: time.sleep(0.02 if name == "slow" else 0.002) for name in names}

    assert machine.fastest("a", lambda: ways("slow", "quick")) == "quick"
    assert machine.fastest("a", lambda: ways("slow", "quick")) == "quick"
    assert asked == ["slow quick"] and machine._place("a").exists() and not machine._place("b").exists()
    # without a clear gain all stays as it is
    assert machine.fastest("b", lambda: ways("usual", "quick"), margin=3.0) == "usual"


def test_no_more_threads_than_the_containers_share(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches 64 threads on two cores' worth of time, and a number of the user's that is overruled."""
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(machine, "cpu_share", lambda: 1.5)
    monkeypatch.setattr(machine, "_linear", lambda dtype, rows: lambda: time.sleep(0.002 * threads[-1]))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert machine.set_up_threads() == 2 == threads[-1]
    threads[:] = [8]
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert machine.set_up_threads() == 8 and threads == [8]


def test_auto_is_the_checkpoints_own_type_where_that_is_fast(tmp_path, monkeypatch, caplog):
    """Catches a bfloat16 target whose verification takes six times as long as in float32."""
    folder = tmp_path / "target"
    tiny_model().bfloat16().save_pretrained(folder)
    for kind, dtype in (("with bfloat16 units", "bfloat16"), ("without", "float32")):
        given(monkeypatch, kind)
        assert load_target(tiny_model().bfloat16(), dtype="auto", compile=False).spec.dtype == dtype
        assert load_target(folder, dtype="auto", compile=False).spec.dtype == dtype
    assert load_target(folder, compile=False).spec.dtype == "float32"
    # a slow type is taken as asked and warned of, with the factor and what to do
    with caplog.at_level(logging.WARNING):
        assert load_target(tiny_model(), dtype="bfloat16", compile=False).spec.dtype == "bfloat16"
    assert "takes 3.0 times as long" in caplog.text and "dtype=float32" in caplog.text
    caplog.clear()
    given(monkeypatch, "with bfloat16 units")
    load_target(tiny_model(), dtype="bfloat16", compile=False)
    assert not caplog.text


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_muon_in_bfloat16_is_torchs_own(shape: tuple[int, int]) -> None:
    """Catches any difference from the published optimiser: weights after three steps are equal bit for bit."""
    noise = torch.Generator().manual_seed(3)
    start, gradients = torch.randn(shape, generator=noise), torch.randn(3, *shape, generator=noise)
    weights = [torch.nn.Parameter(start.clone()) for _ in range(2)]
    ours = Muon(weights[:1], 0.1, torch.bfloat16, Whole())
    theirs = torch.optim.Muon(weights[1:], weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for gradient in gradients:
        for weight, optimizer in zip(weights, (ours, theirs), strict=True):
            weight.grad = gradient.clone()
            optimizer.param_groups[0]["lr"] = 0.02
            optimizer.step()
    assert torch.equal(*weights)
    assert torch.equal(ours.state[weights[0]]["momentum_buffer"], theirs.state[weights[1]]["momentum_buffer"])


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)])
def test_muons_iterations_are_the_same_in_float32(shape: tuple[int, int]) -> None:
    """Catches iterations that lose the matrix: singular vectors stay, values come near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    result = orthogonal(matrix, torch.float32)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ result @ v.T
    assert (inner - inner.diag().diag()).abs().max() < 1e-4
    assert inner.diag().min() > 0.6 and inner.diag().max() < 1.3
    assert (result - orthogonal(matrix, torch.bfloat16).float()).abs().max() < 0.05


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def said(forecast: Forecast, clock: list[float], taken: list[float], done: int = 0) -> list[tuple[int, str]]:
    """(step, line) of what is said while steps take these seconds."""
    lines = []
    for seconds in taken:
        clock[0] += seconds
        done += 1
        if (line := forecast.update(done)) is not None:
            lines.append((done, line))
    return lines


FORECASTS = {
    # a forecast by the first step, which reads features too, and one that is said at every step
    "first steps": (("steps", 640, 0, True), [9.0, *[0.5] * 60], 0, 24, "about 5 min for 640 steps, 0.5 s each"),
    # steps of an earlier run that are taken for steps of no time
    "resumed": (("steps", 640, 0, True), [1.0] * 30, 600, None, "about 40 s for 40 steps, 1 s each"),
    # a forecast by the time between two answers that were written side by side
    "in bursts": (("answers", 100, 0, False), [20.0, *[0.0] * 30], 0, None, "about 7 min for 100 answers, 4 s each"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "taken", "done", "at", "text"), FORECASTS.values(), ids=FORECASTS)
def test_how_long_a_stage_takes_is_said_after_its_first_steps(given, taken, done, at, text, clock):
    [(step, line)] = said(Forecast(*given, None), clock, taken, done)
    assert line == text and at in (None, step)
    assert [lasting(seconds) for seconds in (0.2134, 9.9, 100, 7265)] == ["0.21 s", "9.9 s", "2 min", "2 h 1 min"]


def test_what_is_read_once_is_not_taken_for_every_step(clock):
    """Catches a forecast of 30 minutes for a training of 6, whose first pass reads the target's states."""
    forecast, lines = Forecast("steps", 400, 0, True, None), []
    for step in range(1, 41):
        clock[0] += 3.0
        lines.append(forecast.update(step, (2.0 * step, 2.0 * (60 - step))))
    [line] = filter(None, lines)
    assert line == "about 9 min for 400 steps, 1 s each"  # 400 s and 120 s


def test_free_memory_is_what_the_container_has_left(monkeypatch, tmp_path):
    """Catches a limit that is not looked at, one that is not there, and a system that does not say."""
    whole = machine.free_memory()
    assert 2**20 < whole < 2**50
    said = {"/sys/fs/cgroup/memory.max": "5000000", "/sys/fs/cgroup/memory.current": "1000000"}
    said["/proc/meminfo"] = "MemTotal: 9900 kB\nMemAvailable: 9000 kB\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda path: said[str(path)])
    assert machine.free_memory() == 4000000
    said["/sys/fs/cgroup/memory.max"] = "max"
    assert machine.free_memory() == 9000 * 1024
    said["/proc/meminfo"] = ""
    assert machine.free_memory() == machine.UNKNOWN_MEMORY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_is_timed_in_inference_mode_too(dtype):
    """Catches `element 0 of tensors does not require grad` where the first target of a machine is loaded in it."""
    with torch.inference_mode():
        step = machine._training_step(dtype)
        assert step().dtype == dtype
