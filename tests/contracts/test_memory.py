"""What is held across requests has a bound: after thousands of them it is no more than after a few.  Counted, not
measured.

No test here is random but by fixed seeds.
"""

import torch

from outrider.targets.cache.attention_mask import AttentionLimit
from outrider.targets.cache.slots import SlotCache

REQUESTS = 3000


def tensor_bytes(cache: SlotCache) -> int:
    """Of all tensors that a cache holds, each storage once."""
    waiting, sizes = list(vars(cache).values()), {}
    while waiting:
        held = waiting.pop()
        if isinstance(held, torch.Tensor):
            sizes[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
        elif isinstance(held, dict):
            waiting += held.values()
        elif isinstance(held, list | tuple):
            waiting += held
    return sum(sizes.values())


def opened(
    cache: SlotCache, rows: list[int], width: int, limits: dict[str, AttentionLimit | None]
) -> dict[str, torch.Tensor]:
    cache.open(rows, width)
    return cache.masks(None, torch.float32, limits)


def test_masks_of_many_prompt_lengths_take_no_more_than_those_of_one():
    """Catches a mask that is held for every prompt length: 2.5 GiB after 400 prompts beside one of 8,000 tokens."""
    cache, limits = SlotCache(2, 2048), {"full_attention": None, "sliding_attention": AttentionLimit("window", 24)}
    opened(cache, [0], 8, limits)
    before = tensor_bytes(cache)
    for request in range(REQUESTS):
        width = 1 + (request * 37) % 512 if request % 10 == 0 else 1 + request % 16
        opened(cache, [request % 2], width, limits)
    assert tensor_bytes(cache) <= before


def test_views_of_many_spans_of_slots_are_not_all_held():
    """Catches views of every layer for every span of slots that was ever live at once."""
    cache = SlotCache(200, 4)
    for begin in range(0, 200, 2):
        for end in range(begin + 1, 201, 3):
            cache.open(range(begin, end), 1)
            cache.update(*[torch.zeros(end - begin, 1, 1, 1)] * 2, layer_idx=0)
            assert len(cache.buffers) == 2
    assert len(cache._views) <= 64
