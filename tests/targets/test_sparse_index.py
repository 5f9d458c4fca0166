"""An index of keys takes the earliest of equal scores, so a text is the same however it is batched."""

import copy

import pytest
import torch

from benchmarks.families import built
from outrider.targets.load import load_target
from outrider.targets.sparse_index import earliest


@pytest.mark.parametrize("columns", [8, 30, 70, 300])
def test_equal_scores_are_taken_in_their_order(columns: int) -> None:
    scores = torch.zeros(2, 3, columns).index_fill(-1, torch.tensor([5, 2]), 1.0)
    found = earliest(scores, 6)
    assert found.indices.tolist() == [[[2, 5, 0, 1, 3, 4]] * 3] * 2
    assert found.values.tolist() == torch.topk(scores, 6).values.tolist()
    assert earliest(scores[0, 0], k=3, dim=0).indices.tolist() == [2, 5, 0]


def test_what_follows_a_text_does_not_move_the_keys_that_it_reads() -> None:
    model = built("hy_v4", "causal", torch.float64)
    untaught = copy.deepcopy(model)
    load_target(model)
    noise = torch.Generator().manual_seed(0)
    texts = torch.randint(model.config.get_text_config().vocab_size, (24, 90), generator=noise)
    assert moved(model, texts) < 1e-5
    assert moved(untaught, texts) > 1e-4, "topk no longer takes others of equal scores in another shape"


@torch.inference_mode()
def moved(model: torch.nn.Module, texts: torch.Tensor) -> float:
    """The most that logits of the first 50 tokens differ when a pass reads 40 more."""
    whole = model(input_ids=texts, use_cache=False).logits[:, :50]
    return float((model(input_ids=texts[:, :50], use_cache=False).logits - whole).abs().max())
