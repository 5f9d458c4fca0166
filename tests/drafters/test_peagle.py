"""P-EAGLE: what its rows see, which depths are dropped, and that serving is what was trained."""

import pytest
import torch
from conftest import SMALL

from outrider.drafters import peagle
from outrider.errors import DrafterError
from outrider.nn.rows import pair_mask


def model_of(target, **choices):
    torch.manual_seed(3)
    small = {key: value for key, value in SMALL.items() if key in peagle.Config.model_fields}
    return peagle.Model(peagle.Config(**(small | {"layers": 3, "taps": (0, 1, 3)} | choices)), target).double()


def table(seen: torch.Tensor) -> list[str]:
    return ["".join("x" if cell else "." for cell in row) for row in seen.tolist()]


def test_a_pass_of_pairs_and_masks_sees_what_it_should():
    """Catches a mask that sees another slot's padding, a pair that sees a mask, a query that sees nothing at all (NaN),
    and a feature of one text beside the token of the next."""
    both, one = peagle.pass_mask(2, 2, torch.tensor([2, 1]))
    assert table(both) == ["x...", "xx..", "xxx.", "xxxx"]
    assert table(one) == ["x...", "xx..", "x.x.", "x.xx"]
    assert bool(peagle.pass_mask(2, 1, torch.tensor([0])).any(-1).all())
    two, padded = pair_mask(torch.tensor([[1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 0, 0]]))
    assert table(two) == ["x....", "xx...", "..x..", "...x.", "...xx"]
    assert table(padded) == ["x....", ".x...", "..x..", "...x.", "....x"]


def test_a_depth_is_kept_only_where_the_one_before_was_and_in_the_right_share():
    """Catches depths dropped independently, shares of what is left instead of all, and a floor that is not one."""
    torch.manual_seed(0)
    learnt = torch.ones(3, 500, 9, dtype=torch.bool)
    learnt[1, 200:] = False
    learnt[2, :, 4:] = False
    kept = peagle.conditional_drop(learnt, 0.8, 0.2)
    assert not bool((kept[..., 1:] & ~kept[..., :-1]).any())
    assert not bool((kept & ~learnt).any())
    shares = [max(0.8**d, 0.2) for d in range(9)]
    assert kept[0].sum(0).tolist() == [round(500 * share) for share in shares]
    assert kept[1].sum(0).tolist() == [round(200 * share) for share in shares]
    assert kept[2, :, 4:].sum() == 0
    assert peagle.conditional_drop(learnt, 0.5, 0.25)[0].sum(0).tolist() == [500, 250, *[125] * 7]
    assert torch.equal(peagle.conditional_drop(learnt, 1.0, 0.0), learnt)


def test_layers_behind_the_first_can_begin_as_the_targets(target):
    """Catches copies that are counted from the first layer, whose shape no target has."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 64}
    model = model_of(target, init_from_layers=(0, 3), **sizes)
    theirs = target.layer(3).state_dict()["mlp.up_proj.weight"]
    assert torch.equal(model.layers[2].state_dict()["mlp.up_proj.weight"], theirs)
    with pytest.raises(DrafterError, match="init_from_layers"):
        model_of(target, init_from_layers=(0, 1, 3), **sizes)
