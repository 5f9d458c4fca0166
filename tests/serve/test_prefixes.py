"""A beginning that was stored changes no text and no draft; what is stored is what was computed, within the budget."""

import copy
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Case, cases, fast
from contracts.parties import TableTarget
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.families import CAUSAL, built, tiny
from outrider.decoding.loop import step
from outrider.decoding.protocols import Drafter
from outrider.decoding.scheduler import read
from outrider.decoding.state import DecodeState, Request, Scores
from outrider.generation import batch
from outrider.policies.fixed import Fixed
from outrider.sampling.settings import Sampling
from outrider.serve.prefixes import PrefixStore
from outrider.targets.cache.slots import SlotCache
from outrider.targets.hf.proof.miniature import enlivened
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

EVERY = pytest.mark.parametrize("case", fast(cases(), ("eagle3",)))
"""One kind; the others only where there is time."""
BLOCK = 8


class Trace(NamedTuple):
    """One request's text, and how it came about."""

    tokens: list[int]
    drafts: list[tuple[list[int], tuple[int, ...]]]
    """Tokens and parents, step by step."""
    accepted: list[int]
    cached: int


def decoded(
    target: Any, drafter: Drafter, requests: Sequence[Request], store: PrefixStore, slots: int = 2, chunk: int = 16
) -> list[Trace]:
    """Serve these requests over slots as the engine does: prompts in chunks, several in one pass."""
    state = batch(target, slots)
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    cache = target.allocate(slots, longest + max(drafter.limit, 1) + 1 + drafter.probe_rows)
    memory = drafter.allocate(cache)
    noted = copy.copy(drafter)
    traces = [Trace([], [], [], 0) for _ in requests]
    waiting, serving = list(enumerate(requests)), dict[int, int]()

    def propose(memory: Any, state: DecodeState, budget: Tensor) -> Any:
        draft = drafter.propose(memory, state, budget)
        for b, row in enumerate(state.rows):
            size = draft.live[b]
            traces[serving[row]].drafts.append((draft.ids[b][:size], draft.tree[b][:size]))
        return draft

    noted.propose = propose
    while waiting or serving:
        new = [row for row in range(slots) if row not in serving][: len(waiting)]
        for row in new:
            serving[row], request = waiting.pop(0)
            state.admit(row, request)
            found = store.take(target, drafter, cache, memory, state, row)
            assert state.prefilled[row] == found <= len(request.prompt) - 1
            traces[serving[row]] = traces[serving[row]]._replace(cached=found)
        while counts := {row: min(chunk, state.unread(row)) for row in new if state.unread(row)}:
            scores = read(target, drafter, cache, memory, state, counts)
            store.put(target, drafter, cache, state, counts, scores)
        rows, before = state.rows, [len(state.tokens[row]) for row in state.rows]
        accepted, _ = step(target, noted, Fixed(drafter.limit), cache, memory, state)
        for b, row in enumerate(rows):
            trace = traces[serving[row]]
            trace.tokens.extend(state.tokens[row][before[b] :])
            trace.accepted.append(len(accepted.paths[b]))
        for row in [row for row in rows if state.finished[row]]:
            drafter.free(memory, [row])
            cache.free([row])
            state.free(row)
            del serving[row]
    return traces


def prompts_of(vocabulary: int) -> list[list[int]]:
    """Two whole blocks are shared by all, two more by most; two prompts are equal, one has nothing but blocks and an
    anchor, one is new."""
    noise = torch.Generator().manual_seed(3)
    draw = lambda count: torch.randint(vocabulary, (count,), generator=noise).tolist()
    shared, other = draw(4 * BLOCK), draw(4 * BLOCK)
    return [
        shared + draw(9), shared + draw(3), shared[: 2 * BLOCK] + draw(20), shared + draw(1), other + draw(2),
        shared + draw(30), other + draw(2), shared[: 2 * BLOCK - 1] + draw(5),
    ]  # fmt: skip


CACHED = [0, 0, 2, 4, 0, 4, 4, 1]
"""Blocks that each of these finds, where two slots are admitted at a time and the first two read the same at once."""


def requests_of(vocabulary: int, count: int = 16) -> list[Request]:
    """Greedy ones and sampled ones with a seed."""
    kinds = [Sampling() if n % 2 == 0 else Sampling(1.0, seed=n) for n in range(len(CACHED))]
    return [Request(prompt, count, sampling) for prompt, sampling in zip(prompts_of(vocabulary), kinds, strict=True)]


def agree(target: Any, make: Callable[[], Drafter], count: int = 16, **options: Any) -> list[Trace]:
    """Texts, drafts and what was accepted of them are the same with the store as without; returns the traces."""
    requests = requests_of(target.spec.vocabulary, count)
    without = decoded(target, make(), requests, PrefixStore(0), **options)
    with_store = decoded(target, make(), requests, PrefixStore(2**30, block=BLOCK), **options)
    assert [trace.cached for trace in without] == [0] * len(requests)
    for one, other in zip(without, with_store, strict=True):
        assert other.tokens == one.tokens and len(one.tokens) == count
        assert (other.drafts, other.accepted) == (one.drafts, one.accepted)
    return with_store


@EVERY
def test_a_stored_beginning_changes_no_text_and_no_draft(case, target, workshop, drafter_of):
    """Catches keys, values, taps or hidden states of other tokens, and a drafter that has not read what was copied.

    In float64; a tie within its rounding has odds below 1e-9.
    """
    make = lambda: drafter_of(case) if case.trains else workshop.build(case, target)
    found = agree(target, make)
    assert [trace.cached // BLOCK for trace in found] == CACHED
    assert sum(sum(trace.accepted) for trace in found) > 0


def test_plain_decoding_and_chunks_that_end_between_blocks(target, drafter_of):
    """Catches columns of a block that two passes read, of which the store saw half, and taps of other tokens in it."""
    assert [trace.cached // BLOCK for trace in agree(target, Drafter, 6)] == CACHED
    for make in (Drafter, lambda: drafter_of(Case("dspark"))):
        assert [trace.cached // BLOCK for trace in agree(target, make, 6, chunk=13)] == CACHED


def test_a_slot_has_nothing_of_a_prompt_whose_reading_was_cut_off(target):
    """Catches the blocks of a request that was cancelled, taken over by the next one in its slot."""
    store, state, cache = PrefixStore(2**30, block=BLOCK), batch(target, 1), target.allocate(1, 80)
    known, other = (Request([1 + n % size for n in range(60)], 4, Sampling()) for size in (7, 5))
    state.admit(0, known)
    counts = {0: 2 * BLOCK}
    store.put(target, Drafter(), cache, state, counts, read(target, Drafter(), cache, None, state, counts))
    cache.free([0])
    state.free(0)
    state.admit(0, other)
    assert store.take(target, Drafter(), cache, None, state, 0) == 0


@pytest.mark.parametrize("family", ["gemma4", "deepseek-v3"])
def test_families_with_windows_and_other_keys(family):
    """Catches layers of several shapes copied into each other's place, and windows that a copied beginning leaves."""
    found = agree(load_target(tiny(family)), Drafter, 6)
    assert [trace.cached // BLOCK for trace in found] == CACHED


def test_buffers_may_be_there_before_the_first_pass(target, monkeypatch):
    """Catches a store that makes a cache's buffers a second time: a compiled target's are there from the start."""
    target.prefill(cache := target.allocate(1, 8), [0], torch.tensor([[1, 2]]), [2])
    monkeypatch.setattr(target.step, "layout", cache.layout)
    assert target.allocate(1, 8).layers == cache.layers != []
    assert [trace.cached // BLOCK for trace in agree(target, Drafter, 6)] == CACHED


TABLE = TableTarget.random(3)
HIDDEN = TABLE.spec.hidden
SLOTS, LENGTH = 3, 80


def value(tokens: Sequence[int]) -> list[float]:
    """A number for each beginning of these tokens, that of no other."""
    found, state = [], 1
    for token in tokens:
        state = (state * 31 + token + 7) % 1_000_003
        found.append(float(state))
    return found


def scores_of(tokens: Sequence[int], begin: int) -> tuple[Tensor, Tensor]:
    """Hidden states [n, H] and taps [n, 2, H] of the tokens from `begin` on."""
    values = torch.tensor(value(tokens)[begin:], dtype=torch.float64)[:, None]
    hidden = values + torch.arange(HIDDEN)
    return hidden, torch.stack([-hidden, 2 * hidden], 1)


class Reader(Drafter):
    """Notes what it is given of every slot, and compares it with what it should be."""

    taps = (0, 2)

    def __init__(self) -> None:
        self.given: list[Scores] = []

    def admit(self, memory: Any, rows: Sequence[int], state: DecodeState, scores: Scores, lengths: Sequence[int]):
        self.given.append(scores)
        for b, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            read = state.prefilled[row]
            hidden, taps = scores_of(state.tokens[row][:read], read - length)
            assert torch.equal(scores.hidden[b, :length], hidden) and torch.equal(scores.taps[b, :length], taps)
            assert torch.equal(scores.logits[b], TABLE.head(hidden[-1:]))


class Bench:
    """A store, and slots whose keys, values and features follow from the tokens read; no model."""

    def __init__(self, store: PrefixStore):
        self.store, self.drafter = store, Reader()
        self.cache, self.state = SlotCache(SLOTS, LENGTH, layers=2), DecodeState(SLOTS, LENGTH + 1)

    def read(self, prompt: list[int], row: int = 0, chunk: int = 12, tenant: str = "", keep: bool = False) -> int:
        """Read a prompt into a slot; returns how much was found."""
        state, cache = self.state, self.cache
        state.admit(row, Request(prompt, 1, Sampling(), tenant=tenant), is_live=False)
        found = self.store.take(TABLE, self.drafter, cache, None, state, row)
        while state.unread(row):
            count = min(chunk, state.unread(row))
            self._pass(row, count)
            self.drafter.admit(None, [row], state, scores := self.scores(row, count), [count])
            self.store.put(TABLE, self.drafter, cache, state, {row: count}, scores)
        if cache.lengths[row]:
            for layer in range(3):
                keys, values = cache.cached(layer, [row])
                wanted = torch.tensor(value(prompt[:-1]), dtype=torch.float64)[None, None, :, None] + layer
                assert torch.equal(keys, wanted.expand_as(keys)) and torch.equal(values, -keys)
        cache.free([row])
        state.free(row)
        return found

    def scores(self, row: int, count: int) -> Scores:
        """Of the last tokens read into a slot."""
        read = self.state.prefilled[row]
        hidden, taps = scores_of(self.state.tokens[row][:read], read - count)
        return Scores(TABLE.head(hidden[None, -1:]), hidden[None], taps[None])

    def _pass(self, row: int, count: int) -> None:
        prompt, begin = self.state.tokens[row], self.state.prefilled[row]
        self.cache.open([row], count)
        for layer, heads in enumerate((2, 1, 2)):
            own = torch.tensor(value(prompt[: begin + count])[begin:], dtype=torch.float64) + layer
            keys = own[None, None, :, None].expand(1, heads, -1, 3)
            self.cache.update(keys, -keys, layer)
        self.cache.append([count])
        self.state.prefilled[row] += count

    @property
    def measured(self) -> int:
        """Bytes that the tensors of all blocks hold, each memory once."""
        tensors = [
            tensor for block in self.store._blocks.values() for tensor in (*block.columns, block.hidden, block.taps)
        ]
        return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def with_room_for(blocks: int) -> Bench:
    """One whose store holds so many blocks of four tokens, and nothing yet."""
    bench = Bench(PrefixStore(1, block=4))
    bench.read([0] * 9)
    bench.store = PrefixStore(blocks * 4 * (bench.cache.column_bytes + 3 * HIDDEN * 8), block=4)
    return bench


def random_prompts(count: int, seed: int) -> list[tuple[str, list[int]]]:
    """Tenants and prompts; most begin as an earlier one does."""
    draw, prompts = random.Random(seed), [[1]]
    for _ in range(count):
        begin = draw.choice(prompts[-60:])
        begin = begin[: draw.randint(0, len(begin))]
        prompts.append((begin + [draw.randrange(3) for _ in range(draw.randint(1, 40))])[:LENGTH])
    return [(draw.choice("ab"), prompt) for prompt in prompts[1:]]


@pytest.mark.parametrize("budget_blocks", [1, 5])
def test_memory_stays_within_the_budget_and_all_that_is_stored_is_right(budget_blocks):
    """Catches a block that holds its whole pass in memory and one that is counted twice or never."""
    bench = Bench(PrefixStore(1, block=4))
    bench.read([0, 1, 2, 0, 1, 2])
    size = 4 * (bench.cache.column_bytes + 3 * HIDDEN * 8)
    store = bench.store = PrefixStore(budget_blocks * size + size // 2, block=4)
    draw, hits = random.Random(budget_blocks), 0
    for tenant, prompt in random_prompts(120, seed=budget_blocks):
        bench.cache.gather(draw.sample(range(SLOTS), 2))
        hits += bench.read(prompt, draw.randrange(SLOTS), draw.choice([4, 8, 12, 13, 80]), tenant)
        assert bench.measured == store.bytes == len(store) * size <= store.budget_bytes
        numbers = {block.number for block in store._blocks.values()}
        assert all(before in numbers or before in ("a", "b") for before, _ in store._blocks)
    assert len(store) == budget_blocks and hits > 0


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_longest_known_beginning_is_found(is_shared):
    """Catches a block that is not found, or one of another tenant that is, where nothing had to be removed."""
    bench = Bench(PrefixStore(2**30, is_shared, block=4))
    known = set()
    for tenant, prompt in random_prompts(80, seed=7):
        owner = "" if is_shared else tenant
        beginnings = [prompt[:at] for at in range(4, len(prompt), 4)]
        longest = max((len(part) for part in beginnings if (owner, tuple(part)) in known), default=0)
        assert bench.read(prompt, tenant=tenant) == longest
        known |= {(owner, tuple(part)) for part in beginnings}


def test_the_least_recently_used_is_removed_and_never_a_beginning_before_its_end():
    """Catches a store that removes what is asked for most, or blocks whose beginning is gone."""
    bench = with_room_for(6)
    one, two, three = ([n] * 13 for n in range(3))
    assert [bench.read(prompt) for prompt in (one, two, one)] == [0, 0, 12]
    bench.read(three)  # in place of `two`, which was used before `one`
    assert [bench.read(prompt) for prompt in (one, three)] == [12, 12]
    assert bench.read([*two[:4], 0, 0]) == 0
    # that took the place of the last block of `one`, and the next takes that of the last of `three`
    assert bench.read([*one[:12], 2]) == 8 and bench.read(three) == 8
    # a prompt longer than all that may be stored keeps its own beginning
    bench = with_room_for(2)
    assert [bench.read(prompt) for prompt in (one, one, two, two)] == [0, 8, 0, 8]


@torch.inference_mode()
def test_what_a_drafter_was_given_outlives_the_blocks():
    """Catches a drafter that reads the store's own memory: blocks could not be removed, or would change under it."""
    bench = with_room_for(4)
    prompt = [0, 1, 2, 0] * 3
    bench.read(prompt)
    bench.drafter.given.clear()
    assert bench.read(prompt) == 8
    given = bench.drafter.given[0]
    blocks = list(bench.store._blocks.values())
    own = {tensor.untyped_storage().data_ptr() for block in blocks for tensor in (block.hidden, block.taps)}
    assert not own & {x.untyped_storage().data_ptr() for x in (given.hidden, given.taps)}
    for n in range(3):
        bench.read([n] * 20)
    assert not any(block in bench.store._blocks.values() for block in blocks)
    for block in blocks:  # as memory that is given to others would be
        for tensor in (*block.columns, block.hidden, block.taps):
            tensor.fill_(9)
    hidden, taps = scores_of(prompt[:8], 0)
    assert torch.equal(given.hidden[0], hidden) and torch.equal(given.taps[0], taps)


def test_another_drafter_or_cache_begins_anew():
    """Catches taps of one drafter given to another, and columns of other layers."""
    bench = Bench(PrefixStore(2**30, block=4))
    prompt = [0, 1, 2] * 5
    assert (bench.read(prompt), bench.read(prompt)) == (0, 12)
    bench.cache = SlotCache(SLOTS, LENGTH, layers=2)
    assert bench.read(prompt) == 12  # before the cache's first pass
    bench.cache = SlotCache(SLOTS, LENGTH, layers=3)
    assert bench.read(prompt) == 0
    one, other = SlotCache(1, LENGTH, layers=2), bench.drafter
    other.taps = (0,)
    bench.state.admit(0, Request(prompt, 1, Sampling()), is_live=False)
    assert bench.store.take(TABLE, other, one, None, bench.state, 0) == 0 and len(bench.store) == 0


def unlike(name: str) -> TransformersTarget:
    if name == "a cache of its own":
        return load_target(built("rwkv", CAUSAL))
    if name == "a recurrent state":
        return load_target(tiny("qwen3-next"))
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
    config = AutoConfig.for_model("llama", **sizes, **heads, eos_token_id=None, rope_parameters=rope)
    torch.manual_seed(1)
    return load_target(enlivened(AutoModelForCausalLM.from_config(config)).double().eval())


UNLIKE = {
    "a cache of its own": "does not store keys and values by slot", "a recurrent state": "more than keys and values",
    "rotary factors by length": "rotary factors",
}  # fmt: skip


@pytest.mark.parametrize("name", UNLIKE)
def test_a_target_that_stores_more_is_left_alone_and_said_so_once(name, caplog):
    """Catches a text that goes on from keys without the state that belongs to them."""
    target = unlike(name)
    store = PrefixStore(2**30, block=BLOCK)
    requests = requests_of(target.spec.vocabulary, 3)[:4]
    with caplog.at_level(logging.WARNING, logger="outrider"):
        found = decoded(target, Drafter(), requests, store)
    assert [trace.cached for trace in found] == [0] * len(requests) and len(store) == 0
    assert [trace.tokens for trace in found] == [
        trace.tokens for trace in decoded(target, Drafter(), requests, PrefixStore(0))
    ]
    [said] = [record.getMessage() for record in caplog.records if "prefixes of prompts" in record.getMessage()]
    assert UNLIKE[name] in said and target.spec.name in said
