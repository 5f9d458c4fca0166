"""Threads on one target write what each would write alone, whatever drafts for them.  No test here is random."""

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from conftest import cases, fast
from torch import nn

from benchmarks.families import tiny
from outrider.generation import generate
from outrider.kernels import prepacked
from outrider.retrieval.native_trie import fastest
from outrider.retrieval.trie import Trie
from outrider.targets.load import load_target

KINDS = pytest.mark.parametrize("case", fast(cases(), ("dspark", "eagle3", "small_model")))
THREADS, TOKENS = 4, 10


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns 25 times as often, so that what they share is met in every state."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-4)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], object]) -> list[object]:
    """What these return, each called in a thread of its own; an exception is returned too."""
    found: list[object] = [None] * len(works)
    start = threading.Barrier(len(works))

    def run(n: int) -> None:
        start.wait()
        try:
            found[n] = works[n]()
        except Exception as error:  # shown by the comparison that follows
            found[n] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@KINDS
def test_four_threads_write_the_targets_text_with_every_drafter(
    case, target, prompts, plain, drafter_of, eager_switches
):
    """Catches taps and hidden states that one pass catches for another, and layers that one thread leaves out for
    all."""
    drafter = drafter_of(case)
    few = [prompt for prompt in prompts if len(prompt) > 2][:THREADS]

    def text(prompt: list[int]) -> list[int]:
        return generate(target, prompt, drafter, max_new_tokens=TOKENS)[0].tokens

    assert at_once(*(partial(text, prompt) for prompt in few)) == [plain(target, prompt, TOKENS) for prompt in few]


def test_the_model_itself_is_untouched_while_layers_are_left_out(target, prompts, plain, drafter_of, eager_switches):
    """Catches stand-ins that answer `model.generate` in another thread, or stay behind when two threads leave at
    once."""
    drafter = drafter_of(next(case for case in cases() if case.kind == "layer_skip"))
    whole = plain(target, prompts[0], 12)
    text = torch.tensor([prompts[0]])

    def of_the_model() -> object:
        given = {"attention_mask": torch.ones_like(text), "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
        return target.model.generate(text, max_new_tokens=12, **given)[0, len(prompts[0]) :].tolist()

    def drafted() -> object:
        return generate(target, prompts[0], drafter, max_new_tokens=12)[0].tokens

    assert at_once(of_the_model, drafted, drafted, of_the_model) == [whole] * 4
    assert of_the_model() == whole
    assert not any("forward" in vars(layer) for layer in target.model.modules() if not isinstance(layer, nn.Linear))


@pytest.mark.parametrize("make", [Trie, fastest], ids=["python", "native"])
def test_texts_of_several_threads_grow_in_one_trie(make, eager_switches):
    """Catches a memory that is read while another thread lets its oldest n-grams go."""
    trie = make(4, 1000)
    texts = torch.randint(40, (THREADS, 800), generator=torch.Generator().manual_seed(3)).tolist()

    def grow(text: list[int]) -> bool:
        cursor = trie.cursor()
        for n in range(0, len(text), 5):
            cursor.append(text[n : n + 5])
            cursor.tree("frequency", 8, 4)
        return len(trie) <= 1000

    assert at_once(*(partial(grow, text) for text in texts)) == [True] * THREADS


def test_a_copy_of_a_loaded_recurrent_model_computes_with_its_own_weights():
    """Catches a wrapper around a layer that calls the layer it was made for from within the copy."""
    model = load_target(tiny("qwen3.5")).model
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.1)
    wanted = tiny("qwen3.5")
    wanted.load_state_dict(other.state_dict())
    tokens = torch.arange(6)[None]
    assert torch.equal(load_target(other).read(tokens)[0], load_target(wanted).read(tokens)[0])
    for module in other.modules():
        assert not hasattr(getattr(vars(module).get("forward"), "func", None), "func"), "a wrapper in a wrapper"


def test_packed_weights_are_used_by_the_thread_that_asks_alone():
    """Catches a switch for all threads, which the last one to leave sets to what the first one met."""
    inside, done = threading.Event(), threading.Event()

    def first() -> bool:
        with prepacked.enabled():
            inside.set()
            done.wait(5)
            return bool(prepacked._open.get())

    def second() -> list[bool]:
        inside.wait(5)
        seen = [bool(prepacked._open.get())]
        with prepacked.enabled():
            pass
        seen.append(bool(prepacked._open.get()))
        done.set()
        return seen

    assert at_once(first, second) == [True, [False, False]]
    assert not bool(prepacked._open.get())
