"""The slot cache against plain lists: what stays, stays where it was; what does not never happened."""

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from outrider.targets.cache import lazy_memory, stacks
from outrider.targets.cache.slots import SlotCache

SLOTS, LENGTH, HEADS, SIZE = 4, 24, 2, 3


@pytest.fixture(autouse=True, scope="module", params=["pages", "doubling"])
def few_columns(request):
    """Caches whose memory comes by pages, and others that grow within these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "FIRST", 5)
        patch.setattr(stacks, "KEPT", 0)
        if request.param == "doubling":
            patch.setattr(lazy_memory, "comes_by_page", lambda device: False)
        elif not lazy_memory.comes_by_page(torch.device("cpu")):
            pytest.skip("needs Linux")
        yield


class Reference:
    """Numbers of every slot's tokens in a list; a token's key is its number everywhere."""

    def __init__(self):
        self.texts = [[] for _ in range(SLOTS)]
        self.next = 1

    def fresh(self, rows, width):
        numbers = [[self.next + r * width + n for n in range(width)] for r in range(len(rows))]
        self.next += len(rows) * width
        return numbers


def states(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)[:, None, :, None].expand(-1, HEADS, -1, SIZE).clone()


def written(cache: SlotCache, numbers) -> torch.Tensor:
    """One pass over two layers; returns what layer 0 reads."""
    keys, values = cache.update(states(numbers), -states(numbers), 0)
    cache.update(10_000 + states(numbers), states(numbers), 1)
    assert torch.equal(values, -keys)
    return keys[:, 0, :, 0]


def check(cache: SlotCache, reference: Reference) -> None:
    assert cache.lengths == [len(text) for text in reference.texts]
    for layer, add in ((0, 0), (1, 10_000)):
        if layer in cache._layers:
            for row, text in enumerate(reference.texts):
                held = cache._layers[layer][0][cache.buffer_rows[row], :, : len(text)]
                assert torch.equal(held, (states([text])[0] + add if text else held[:, :0]))


@st.composite
def histories(draw):
    """A list of passes and frees, as choices to be read off."""
    actions = st.tuples(st.sampled_from(["prefill", "tree", "free"]), st.integers(0, 2**30))
    return draw(st.lists(actions, min_size=1, max_size=12))


@given(histories())
@examples(max_examples=60)
def test_any_history_leaves_what_was_kept(history):
    """Catches a node moved over another, a row that writes in its neighbour, a freed slot that remembers."""
    cache, reference = SlotCache(SLOTS, LENGTH), Reference()
    for action, seed in history:
        generator = torch.Generator().manual_seed(seed)
        draw = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))  # noqa: B023
        rows = [row for row in range(SLOTS) if draw(0, 1)] or [draw(0, SLOTS - 1)]
        if action == "free":
            cache.free(rows)
            for row in rows:
                reference.texts[row] = []
            check(cache, reference)
            continue
        room = LENGTH - max(len(reference.texts[row]) for row in rows)
        if room < 1:
            continue
        width = draw(1, min(room, 5))
        before = [list(reference.texts[row]) for row in rows]
        numbers = reference.fresh(rows, width)
        if draw(0, 1):
            rows = [rows[n] for n in torch.randperm(len(rows), generator=generator)]
            before = [list(reference.texts[row]) for row in rows]
            cache.gather(rows)
            assert sorted(cache.buffer_rows) == list(range(SLOTS))
            check(cache, reference)
            cache.open(rows, width)
            assert cache._span is not None
        cache.open(rows, width)
        seen = written(cache, numbers)
        mask = cache.mask(None, torch.float64)
        positions = cache.positions().expand(len(rows), -1)
        for r in range(len(rows)):
            assert positions[r].tolist() == [len(before[r]) + n for n in range(width)]
            for n in range(width):
                visible = seen[r][mask.expand(len(rows), -1, -1, -1)[r, 0, n] == 0].tolist()
                assert visible == before[r] + numbers[r][: n + 1]
        if action == "prefill":
            counts = [draw(1, width) for _ in rows]
            cache.append(counts)
            for row, fresh, count in zip(rows, numbers, counts, strict=True):
                reference.texts[row] += fresh[:count]
        else:
            deepest = draw(0, width - 1)
            paths = []
            for _ in rows:
                order = torch.randperm(width - 1, generator=generator) if width > 1 else torch.zeros(0)
                paths.append(sorted(order[: draw(0, deepest)].tolist()))
            cache.keep(paths)
            for row, fresh, path in zip(rows, numbers, paths, strict=True):
                reference.texts[row] += [fresh[0], *(fresh[n + 1] for n in path)]
        check(cache, reference)


def filled(slots: int, lengths: list[int], seed: int) -> SlotCache:
    """Three layers of two shapes and an index in stacks of two, noise everywhere, the first slot in another row."""
    cache, noise = SlotCache(slots, LENGTH, layers=2), torch.Generator().manual_seed(seed)
    cache.open(range(slots), LENGTH)
    for layer, heads in ((0, HEADS), (1, 1), (2, HEADS)):
        keys, values = (torch.randn(slots, heads, LENGTH, SIZE, generator=noise) for _ in range(2))
        cache.update(keys, values, layer)
    cache.update_indexer(torch.randn(slots, LENGTH, SIZE, generator=noise), 1)
    cache.append(lengths)
    if slots > 1:
        cache.gather([slots - 1, 0])
        assert cache.buffer_rows[0] != 0
    return cache


def held(cache: SlotCache, row: int) -> list[torch.Tensor]:
    """All that a slot's columns hold, layer by layer."""
    at, length = cache.buffer_rows[row], cache.lengths[row]
    buffers = [*(buffer for layer in cache.layers for buffer in cache._layers[layer]), *cache._indexers.values()]
    return [buffer[at, :, :length].clone() for buffer in buffers]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("is_new", [True, False], ids=["a cache before its first pass", "one after it"])
def test_columns_are_copied_into_another_cache(is_new):
    """Catches columns of another layer, slot or position, and a spare buffer that is copied or written."""
    cache = filled(3, [20, 7, 13], 1)
    other = SlotCache(2, LENGTH, layers=2).laid_out(cache.layout) if is_new else filled(2, [9, 0], 2)
    assert other.layout == cache.layout and len(cache.layout) == 7
    untouched = held(other, 0)
    parts = [cache.copy_out(0, 0, 8), cache.copy_out(0, 8, 12)]
    assert sum(part.numel() * part.itemsize for part in parts[1]) == 4 * cache.column_bytes
    for part in parts:
        other.copy_in(1, part)
    assert other.lengths[1] == 12
    assert equal(held(other, 1), [buffer[:, :12] for buffer in held(cache, 0)])
    assert is_new or equal(held(other, 0), untouched)
    # a copy: what the first slot reads later is not in it
    wanted = held(other, 1)
    for stack in cache.stacks.tensors:
        stack.zero_()
    assert equal(held(other, 1), wanted)


def test_views_of_buffers_show_copied_columns():
    """Catches a compiled step that reads buffers in which nothing was copied."""
    cache = SlotCache(2, LENGTH, layers=2).laid_out(filled(3, [20, 7, 13], 1).layout)
    cache.reserve(LENGTH)
    cache.open([1], 1)
    views = cache.buffers
    columns = filled(3, [20, 7, 13], 1).copy_out(0, 0, 8)
    cache.copy_in(1, columns)
    assert cache.buffers is views
    assert all(bool(view[0, :, :8].all()) for view in views)


def test_columns_beyond_a_slot_are_our_own_mistake():
    """Catches columns that were never read, and a slot or a buffer written over its end in silence."""
    cache = filled(3, [20, 7, 13], 1)
    with pytest.raises(AssertionError, match="up to 8 of a slot that has 7"):
        cache.copy_out(1, 0, 8)
    with pytest.raises(AssertionError, match="cache of 24"):
        cache.copy_in(0, cache.copy_out(0, 0, 8))
    with pytest.raises(AssertionError, match="cache of 24"):
        cache.open([0], 5)


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not lazy_memory.comes_by_page(torch.device("cpu")), reason="needs Linux")
def test_memory_follows_the_tokens_of_every_slot(monkeypatch):
    """64 slots of 32k, a gigabyte: catches a slot that is as wide as its neighbour, a huge page for one token, and a
    text that keeps its memory when it is over."""
    monkeypatch.setattr(lazy_memory, "comes_by_page", lambda device: True)
    size, column = 32, 2 * 4 * 32
    cache = SlotCache(64, 32_768, layers=2)
    before = resident()
    for row in range(64):
        cache.open([row], 10)
        cache.update(*torch.ones(2, 1, 1, 10, size), 0)
        cache.append([10])
    assert resident() - before < 10e6
    for _ in range(20):
        cache.open([7], 1000)
        cache.update(*torch.ones(2, 1, 1, 1000, size), 0)
        cache.append([1000])
    assert 0.7 * 20_000 * column < resident() - before < 1.3 * 20_000 * column + 10e6
    cache.free([7])
    assert resident() - before < 10e6
    assert not bool(cache.views(slice(7, 8))[0][:, :, 100:20_000].any())


def test_a_text_that_ends_takes_nothing_from_its_neighbours(few_columns):
    """Catches a page that is given back while another slot's first or last columns are on it, and memory of a slot
    that was moved away from."""
    cache = SlotCache(4, 1001, layers=2)  # no slot begins where a page does
    numbers = {row: torch.rand(2, 1, HEADS, 900 + row, SIZE, dtype=torch.float64) for row in range(4)}
    for row, both in numbers.items():
        for layer in range(2):
            if not layer:
                cache.open([row], 900 + row)
            cache.update(both[0] + layer, both[1] + layer, layer)
        cache.append([900 + row])

    def check(rows):
        for row in rows:
            for layer in range(2):
                keys, values = cache.cached(layer, [row])
                assert torch.equal(keys, numbers[row][0] + layer) and torch.equal(values, numbers[row][1] + layer)

    cache.free([1])
    check([0, 2, 3])
    cache.gather([3, 0, 2])  # moves the last into the place that is free
    check([0, 2, 3])
    cache.free([0])
    check([2, 3])
    cache.open([1], 3)
    cache.update(*torch.ones(2, 1, HEADS, 3, SIZE, dtype=torch.float64), 0)
    cache.append([3])
    check([2, 3])


def test_slots_take_the_memory_of_the_longest_text_not_of_the_context(monkeypatch):
    """64 slots of 32k: catches buffers that are allocated whole, and columns that are lost as they grow."""
    monkeypatch.setattr(stacks, "FIRST", 512)
    monkeypatch.setattr(lazy_memory, "comes_by_page", lambda device: False)
    allocated = lambda stacks: sum(tensor.nbytes for tensor in stacks.tensors)
    cache, column = SlotCache(64, 32_768, layers=1), 2 * 4 * SIZE
    text = torch.arange(600 * SIZE, dtype=torch.float32).view(1, 1, 600, SIZE)
    found = []
    for row, begin, end in ((0, 0, 300), (7, 0, 600), (0, 300, 600), (63, 0, 1)):
        cache.open([row], end - begin)
        keys, values = cache.update(text[:, :, begin:end], -text[:, :, begin:end], 0)
        assert torch.equal(keys, text[:, :, :end])
        assert torch.equal(values, -keys)
        cache.append([end - begin])
        found.append(allocated(cache.stacks))
    assert found == [64 * 512 * column, *[64 * 1024 * column] * 3]
    assert max(found) < 64 * 32_768 * column / 30
    cache.reserve(20_000)
    assert allocated(cache.stacks) == 64 * 20_000 * column
    cache.reserve(20_001)
    assert allocated(cache.stacks) == 64 * 32_768 * column
    keys, _ = cache.cached(0, [7])
    assert torch.equal(keys, text)
    monkeypatch.setattr(stacks, "FIRST", 5)
    small = SlotCache(1, 24)  # one that grows in inference mode can be written without
    with torch.inference_mode():
        small.laid_out(
            [stacks.LayerBuffer(0, holds, 1, SIZE, torch.float32, small.device) for holds in ("keys", "values")]
        )
        small.open([0], 9)
    small.update(*torch.ones(2, 1, 1, 9, SIZE), 0)
