"""A step waits once for the device: what came from the device's weights is read by the host in one place.

On a CPU everything is in the host's memory, so tensors that would be on a device are marked, results of marked ones are
marked, and reading one is a wait.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import cases
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import outrider
from outrider import generation
from outrider.compiled.step_graphs import Packets
from outrider.compiled.whole_step import WholeStep
from outrider.decoding import static
from outrider.decoding.accept import accept
from outrider.decoding.noise import Purpose
from outrider.decoding.state import Request
from outrider.drafters import dflash
from outrider.sampling.distribution import Settings, distribution
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

    def __torch_function__(self, function, types, args=(), kwargs=None):
        leaves = pytree.arg_tree_leaves(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        is_masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(leaf, OnDevice) and leaf.dtype == torch.bool for leaf in pytree.arg_tree_leaves(args[1])
        )
        if is_masked or (name in READS and any(isinstance(leaf, OnDevice) for leaf in leaves)):
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


def waits_of(target, prompts, drafter, sampling=None, kernels=None) -> tuple[int, Counter[str]]:
    """Steps of two texts after their first, and where they waited."""
    state = generation.batch(target, 2, ends=frozenset())
    state.judge.kernels = kernels
    requests = [Request(prompt, 40, sampling or Sampling()) for prompt in prompts[:2]]
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


@pytest.mark.parametrize("name", ["none", *CASES])
def test_a_step_waits_once(name, target, prompts, drafter_of):
    """Or as often as `MORE` says: catches a drafter, a rule or a cache that asks the device for a number of its own."""
    drafter = None if name == "none" else drafter_of(CASES[name])
    steps, lines = waits_of(target, prompts, drafter)
    assert steps > 3
    assert lines.total() <= MORE.get(name, 1) * steps, f"{steps} steps wait at {dict(lines)}"


def test_a_wait_that_is_planted_is_found(target, prompts, drafter_of, monkeypatch):
    """The test above, with a drafter that looks at its tokens."""
    drafter = drafter_of(CASES["dspark"])
    propose = type(drafter).propose

    def looks(self, memory, state, budget):
        draft = propose(self, memory, state, budget)
        assert bool((draft.tokens >= 0).all())
        return draft

    monkeypatch.setattr(type(drafter), "propose", looks)
    steps, lines = waits_of(target, prompts, drafter)
    assert lines.total() > steps


class OnDeviceKernels:
    """Stand for kernels that accept and draw on a device: the plain rule, uncounted, with results that are marked."""

    @staticmethod
    def accept(draft, logits, temperature, streams):
        with torch._C.DisableTorchFunction():
            plain = lambda x: None if x is None else x.as_subclass(Tensor)
            own = replace(draft, tokens=plain(draft.tokens), parents=plain(draft.parents), q=plain(draft.q))
            p = distribution(plain(logits), Settings(temperature, None, None))
            found = accept(own, p, streams)
            nodes = draft.tokens.shape[1]
            rows = [[*path, *[-1] * (nodes - len(path)), len(path), *more] for path, *more in zip(*found, strict=True)]
            return torch.tensor([[*row, 1] for row in rows]).as_subclass(OnDevice)

    @staticmethod
    def sample(logits, temperature, streams, depth):
        with torch._C.DisableTorchFunction():
            q = distribution(logits.as_subclass(Tensor), Settings(temperature, None, None))
            return q.as_subclass(OnDevice), streams.draw(q, depth, Purpose.DRAFT).as_subclass(OnDevice)


@pytest.mark.parametrize("name", ["none", "dspark", "eagle3", "small_model"])
def test_a_sampled_step_waits_once_where_there_are_kernels(name, target, prompts, drafter_of):
    """Without them it waits for q, for what is accepted, for the draft's tokens and for the largest logits."""
    drafter, heat = None if name == "none" else drafter_of(CASES[name]), Sampling(temperature=0.8)
    steps, lines = waits_of(target, prompts, drafter, heat, OnDeviceKernels)
    assert steps > 3
    assert lines.total() <= steps, f"{steps} steps wait at {dict(lines)}"
    _, without = waits_of(target, prompts, drafter, heat)
    assert without.total() > lines.total()


# ── the whole step captured ───────────────────────────────────────────────────────────────────────────────────────────

STATIC = ("dspark", "dflash", "eagle3", "mtp", "medusa", "small_model")
MAKES = {"arange", "zeros", "ones", "full", "empty", "eye"}
"""Functions that make a tensor on the host unless they are given a device."""


class InStep(TorchFunctionMode):
    """Counts, by line of ours, where a static step reads any tensor, or makes one that it would have to send."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, given = getattr(function, "__name__", ""), kwargs or {}
        is_masked = name in ("__getitem__", "__setitem__") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in pytree.arg_tree_leaves(args[1])
        )
        is_ours = sys._getframe(1).f_code.co_filename.startswith(str(Path(outrider.__file__).parent))
        is_sent = name in ("tensor", "as_tensor", "from_numpy") or (name in MAKES and "device" not in given)
        if is_masked or name in READS or (is_sent and is_ours):
            self.lines[line_of_ours()] += 1
        return function(*args, **given)


def whole_steps(target, prompts, drafter, sampling, monkeypatch) -> tuple[Counter[str], Counter[str]]:
    """Where captured steps of two texts read or send, and how often they were launched and read."""
    found, events, real, send = InStep(), Counter[str](), static.step, Packets.send

    def watched(*given):
        events["steps"] += 1
        with found:
            return real(*given)

    def noted(self, packet):
        events["sent"] += 1
        events["ahead"] = max(events["ahead"], events["sent"] - events["read"])
        read = send(self, packet)

        def count():
            events["read"] += 1
            return read()

        return count

    monkeypatch.setattr(static, "step", watched)
    monkeypatch.setattr(Packets, "send", noted)
    state = generation.batch(target, 2, ends=frozenset())
    requests = [Request(prompt, 40, sampling) for prompt in prompts[:2]]
    whole = WholeStep(target, drafter, state)
    whole.open(requests)
    for _ in whole.advance(requests):
        pass
    return found.lines, events


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=1)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", STATIC)
def test_a_captured_step_reads_and_sends_nothing(name, sampling, target, prompts, drafter_of, monkeypatch):
    """And what it committed is carried to the host once, and read when the next step is under way."""
    drafter = drafter_of(CASES[name])
    if name == "medusa" and sampling.temperature:
        monkeypatch.setattr(drafter.model, "config", drafter.model.config.model_copy(update={"drawn": False}))
    lines, events = whole_steps(target, prompts, drafter, sampling, monkeypatch)
    assert not lines, f"a step reads or sends at {dict(lines)}"
    assert events["steps"] >= events["sent"] >= events["read"] > 3
    assert events["ahead"] == 2


def test_a_read_that_is_planted_in_a_captured_step_is_found(target, prompts, drafter_of, monkeypatch):
    """The test above, with a drafter that looks at what was committed."""
    drafter, real = drafter_of(CASES["dspark"]), dflash.StaticBlock.observe

    def looks(self, slots, committed, scores):
        real(self, slots, committed, scores)
        assert int(committed.counts.sum()) >= 0

    monkeypatch.setattr(dflash.StaticBlock, "observe", looks)
    lines, _ = whole_steps(target, prompts, drafter, Sampling(), monkeypatch)
    assert lines
