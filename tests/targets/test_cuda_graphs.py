"""Passes captured in a few sizes.  No GPU is needed: a recorder that calls the function again stands for its graph."""

import gc
import weakref
from collections import Counter

import pytest
import torch
from conftest import DEVICE, Case
from targets.test_step import Guesses, agree, written
from tiny import tiny_model

from outrider.fast.gpu import cuda_graphs
from outrider.fast.gpu.cuda_graphs import CudaGraphs
from outrider.fast.passes.compiled import TracedPass
from outrider.generation import generate
from outrider.sampling.settings import Sampling
from outrider.targets.cache import stacks
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target


class Tape:
    """Runs the function anew into the same outputs, as a replay does; and counts."""

    is_stuck = False

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __call__(self, function):
        outputs = cuda_graphs.flat(function())
        self.count["cuda_graphs"] += 1

        def replay() -> None:
            self.count["replayed"] += 1
            if self.is_stuck:
                return
            for there, here in zip(outputs, cuda_graphs.flat(function()), strict=True):
                there.copy_(here)

        return replay, outputs


def with_tape(target: TransformersTarget, tape: Tape) -> TransformersTarget:
    """The target, its passes captured."""
    target.step._weights = list(target.model.parameters())
    target.step._version = sum(weight._version for weight in target.step._weights)
    layers = target.step._pass(1, 1)[0].layers
    target.step.graph = CudaGraphs(TracedPass(target, layers), tape)
    return target


@pytest.fixture(scope="module")
def slow() -> TransformersTarget:
    return load_target(tiny_model(dtype=torch.float64), compile=False)


@pytest.fixture
def tape(monkeypatch) -> Tape:
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 16)
    return Tape()


@pytest.fixture
def fast(tape) -> TransformersTarget:
    return with_tape(load_target(tiny_model(dtype=torch.float64), compile=False), tape)


def test_cuda_graphs_passes_say_what_plain_ones_say(fast, slow, tape):
    """Catches padding that is seen, columns that are cut, another replay's rows."""
    agree(fast, slow)
    assert 0 < tape.count["cuda_graphs"] < tape.count["replayed"] / 4


def test_a_pass_that_has_no_room_for_its_padding_stays_plain(fast):
    """Catches keys written behind the end of a slot."""
    cache = fast.allocate(1, 20)
    fast.prefill(cache, [0], torch.ones(1, 14, dtype=torch.int64), [14])
    assert fast.step.fits(cache, [0], 4)
    assert not fast.step.fits(cache, [0], 5)


def test_no_more_captures_are_held_than_fit(fast, tape, monkeypatch):
    """Catches memory that grows with every batch of slots."""
    monkeypatch.setattr(cuda_graphs, "MAX_CAPTURES", 3)
    written(fast, Guesses(fast.spec.vocabulary, True), 2)
    assert tape.count["cuda_graphs"] > 3
    assert len(fast.step.graph.captures) <= 3


class Arena:
    """An allocator whose memory is always the same bytes."""

    def __init__(self) -> None:
        self.bytes = torch.zeros(2**20, dtype=torch.uint8)

    def zeros(self, shape, dtype, device=None):
        size = torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[:size].zero_().view(dtype).view(shape)


def test_a_capture_is_not_taken_for_a_cache_of_another_shape_at_its_address(tape):
    """Catches a replay that writes keys by the strides of a cache that lay there before: equal bytes, other slots."""
    arena = Arena()

    def add_up(tokens, depths, visible, starts, columns, taps, asked, buffers):
        return tokens + buffers[0][:, 1, columns].sum(), tokens, tokens, tokens

    passes, ones = CudaGraphs(add_up, tape), torch.ones(1, 2, dtype=torch.int64)
    tree, starts = torch.ones(1, 2, 2, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    given = ones, ones, tree, starts, torch.arange(4), ones[0, :1], ones
    shapes = ((1, 2, 32, 8), torch.float64), ((2, 2, 16, 8), torch.float64), ((1, 2, 64, 8), torch.float32)
    for shape, dtype in shapes * 2:
        buffer = arena.zeros(shape, dtype)
        buffer[0, 1] = 1  # of the first slot the second head, which lies elsewhere in each
        logits, *_ = passes.forward(*given, [buffer[:1], buffer[:1]])
        assert logits[0].tolist() == [1 + 16 * 8] * 2
    assert len(passes.captures) == 3  # a cache of the same layout in its place shares one


def test_what_a_replay_reads_lives_as_long_as_its_capture(fast, tape):
    """Catches memory that a graph reads on after its owner is gone: a graph holds addresses, not tensors."""
    read: list[weakref.ref] = []

    class Forgets(Tape):
        def __call__(self, function):
            _, outputs = super().__call__(function)
            return (lambda: None), outputs  # as a graph, holds nothing of what it was recorded from

    traced = fast.step.graph.traced

    def noting(*arguments):
        read.extend(weakref.ref(argument) for argument in arguments[:-1])
        return traced(*arguments)

    graph = CudaGraphs(noting, Forgets())
    cache, tokens = fast.step._pass(2, 3)
    with torch.inference_mode():
        graph.forward(*fast.step._arguments(tokens, cache, None, ()))
    gc.collect()
    assert len(read) == 7
    assert all(reference() is not None for reference in read)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_graphs_of_a_gpu_say_what_plain_passes_say(dtype):
    """Catches replays that read memory that was given back, and launches that are not captured."""
    fast, slow = (load_target(tiny_model().to("cuda", dtype), compile=False) for _ in range(2))
    fast.compile()
    agree(fast, slow)
    assert fast.step.graph.captures


@pytest.mark.parametrize(("name", "heat"), [("dspark", 0.8), ("small_model", 0.0)])
def test_a_cache_that_grows_in_the_middle_of_texts_changes_no_token(
    name, heat, target, prompts, drafter_of, monkeypatch
):
    """Catches buffers of target or drafter that are still read or written after others took their place."""
    drafter = drafter_of(Case(name, {"markov": "vanilla"} if name == "dspark" else {}))
    asked = {"max_new_tokens": 30, "sampling": Sampling(heat, seed=3), "slots": 2, "policy": "fixed"}
    wanted = generate(target, prompts[:3], drafter, **asked)
    monkeypatch.setattr(stacks.lazy_memory, "comes_by_page", lambda device: False)
    monkeypatch.setattr(stacks, "FIRST", 3)
    grown, grow = [], stacks.Stacks.grow
    monkeypatch.setattr(stacks.Stacks, "grow", lambda self, *own: (grown.append(self), grow(self, *own))[1])
    assert generate(target, prompts[:3], drafter, **asked) == wanted
    assert len(grown) > 2


@pytest.mark.skipif(DEVICE != "cpu", reason="a recorder stands for CUDA graphs")
def test_captures_of_a_cache_that_grows_write_within_its_buffers(monkeypatch):
    """Catches a padded pass that writes beside its buffers, and a capture of buffers that are gone."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 16)
    slow, tape = load_target(tiny_model(dtype=torch.float64), compile=False), Tape()
    wanted = generate(slow, [[1, 2, 3]], "ngram", max_new_tokens=60, policy="fixed")
    fast = with_tape(load_target(tiny_model(dtype=torch.float64), compile=False), tape)
    monkeypatch.setattr(stacks.lazy_memory, "comes_by_page", lambda device: False)
    monkeypatch.setattr(stacks, "FIRST", 4)
    assert generate(fast, [[1, 2, 3]], "ngram", max_new_tokens=60, policy="fixed") == wanted
    assert tape.count["replayed"] > tape.count["cuda_graphs"] > 2
