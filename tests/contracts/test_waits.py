"""A step waits once for the device: what came from the device's weights is read by the host in one place.

On a CPU everything is in the host's memory, so tensors that would be on a device are marked, results of marked ones are
marked, and reading one is a wait.
"""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import FEW, cases, first
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import outrider
from outrider import generation
from outrider.decoding.scheduler import advance
from outrider.decoding.state import Request
from outrider.fast.static import step as static
from outrider.fast.whole.graphs import StepGraphs, rerunning
from outrider.fast.whole.steps import WholeSteps
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling

MORE = {"jacobi": 2, "recycle": 2, "graft": 2, "mix": 2, "specblock": 3, "layer_skip": 5}
"""Waits a step of drafters that learn from what was verified, or go on as far as they are sure."""
BORN = (F.linear, F.embedding)
"""What weights are multiplied by or looked up with: its results are on the device."""
READS = {
    "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "numpy", "cpu", "nonzero", "argwhere", "unique",
    "masked_select", "equal", "allclose", "is_nonzero", "repeat_interleave", "bincount", "__contains__",
}  # fmt: skip
"""Functions whose results the host needs to go on."""


class OnDevice(Tensor):
    """A tensor that would be on a device."""


class Waits(TorchFunctionMode):
    """Counts, by line of ours, where the host reads a marked tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    @staticmethod
    def is_masked(name, args, kind=Tensor) -> bool:
        """Whether it is indexed with a mask, of which the host must know how many rows it has."""
        return name in ("__getitem__", "__setitem__") and any(
            isinstance(leaf, kind) and leaf.dtype == torch.bool for leaf in pytree.arg_tree_leaves(args[1])
        )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self.is_masked(name, args, OnDevice) or (
            name in READS and any(isinstance(leaf, OnDevice) for leaf in leaves)
        ):
            self.lines[line_of_ours()] += 1
        found = function(*args, **(kwargs or {}))
        if function in BORN:
            return found.as_subclass(OnDevice)
        return found.as_subclass(Tensor) if name == "cpu" else found


def line_of_ours() -> str:
    """The file and line of the package that called."""
    frame, folder = sys._getframe(2), str(Path(outrider.__file__).parent)
    while frame.f_back and not frame.f_code.co_filename.startswith(folder):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def waits_of(target, prompts, drafter) -> tuple[int, Counter[str]]:
    """Steps of two texts after their first, and where they waited."""
    state = generation.batch(target, 2, ends=frozenset())
    requests = [Request(prompt, 28, Sampling()) for prompt in prompts[:2]]
    steps, last, found = 0, None, Waits()
    progress = generation.serve(target, requests, drafter, policy="fixed", state=state)
    with found:
        for _ in progress:
            if state.timing is not last:
                last, steps = state.timing, steps + 1
                if steps == 1:  # prompts are read in it
                    found.lines.clear()
    return steps - 1, found.lines


CASES = {case.kind: case for case in cases() if not case.is_variant}


@pytest.mark.parametrize("name", first(["none", *FEW, "mix", *sorted(CASES.keys() - {*FEW, "mix"})], 8))
def test_a_step_waits_once(name, target, prompts, drafter_of):
    """Or as often as `MORE` says: catches a drafter, a rule or a cache that asks the device for a number of its own."""
    drafter = None if name == "none" else drafter_of(CASES[name])
    steps, lines = waits_of(target, prompts, drafter)
    assert steps > 3
    assert lines.total() <= MORE.get(name, 1) * steps, f"{steps} steps wait at {dict(lines)}"


STATIC = ("dspark", "dflash", "eagle3", "mtp", "medusa", "small_model")
MAKES = {"arange", "zeros", "ones", "full", "empty", "eye"}
"""Functions that make a tensor on the host unless they are given a device."""


class InStep(Waits):
    """Counts, by line of ours, where a static step reads any tensor, or makes one that it would have to send."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, given = getattr(function, "__name__", ""), kwargs or {}
        is_ours = sys._getframe(1).f_code.co_filename.startswith(str(Path(outrider.__file__).parent))
        is_sent = name in ("tensor", "as_tensor", "from_numpy") or (name in MAKES and "device" not in given)
        if self.is_masked(name, args) or name in READS or (is_sent and is_ours):
            self.lines[line_of_ours()] += 1
        return function(*args, **given)


@pytest.mark.parametrize("is_sampled", [True, False])
@pytest.mark.parametrize("name", first(STATIC, 1))
def test_a_captured_step_reads_and_sends_nothing(name, is_sampled, target, prompts, drafter_of, monkeypatch):
    """And the host waits once for what it committed and drafted."""
    drafter, sampling = drafter_of(CASES[name]), Sampling(temperature=0.8, seed=1) if is_sampled else Sampling()
    if name == "medusa" and is_sampled:
        monkeypatch.setattr(drafter.model, "config", drafter.model.config.model_copy(update={"drawn": False}))
    lines, events, real, launch = InStep(), Counter[str](), static.step, StepGraphs.launch

    def watched(*given):
        events["steps"] += 1
        with lines:
            return real(*given)

    monkeypatch.setattr(static, "step", watched)
    monkeypatch.setattr(StepGraphs, "launch", lambda *given: (events.update(launched=1), launch(*given))[1])
    requests = [Request(prompt, 24, sampling) for prompt in prompts[:2]]
    state = generation.batch(target, 2, ends=frozenset())
    whole = WholeSteps(target, drafter, 2, 24 + max(map(len, prompts)), frozenset(), recorder=rerunning)
    for _ in advance(target, requests, drafter, Fixed(drafter.limit), state, fast=lambda _length: whole):
        pass
    assert not lines.lines, f"a step reads or sends at {dict(lines.lines)}"
    assert events["steps"] >= events["launched"] > 3
