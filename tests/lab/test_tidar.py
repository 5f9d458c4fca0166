"""TiDAR's masks; what it shares with other trained targets is in `test_target_models.py`."""

import pytest
import torch

from outrider.errors import DrafterError
from outrider.lab.drafters import tidar
from outrider.nn.drafting import trees

CONFIG = tidar.Config(block=3, mask_token=63, anchors=16)


def made(target) -> tidar.TargetModel:
    torch.manual_seed(1)
    return tidar.TargetModel(CONFIG, target).double()


def test_the_masks_of_a_branch_are_those_of_a_pass_over_its_prefix_alone(target):
    """Catches a position or a mask that depends on the branches beside."""
    model, text = made(target), [5, 9, 17, 3]
    draft = trees.of_lists([[11, 12, 13]], [[-1, -1, 0]])
    cache = target.allocate(1, 60)
    target.prefill(cache, [0], torch.tensor([text[:-1]]), [3])
    scores = target.verify(cache, [0], torch.tensor(text[-1:]), draft, (), model.drafter().probe([], None, draft))
    for row, path in enumerate([[], [11], [12], [11, 13]]):
        tokens = torch.tensor([text + path])
        alone = model.read(tokens, torch.ones_like(tokens), torch.tensor([[tokens.shape[1] - 1]]))[0, -3:]
        torch.testing.assert_close(scores.probe[0, 3 * row : 3 * row + 3], alone, rtol=1e-9, atol=1e-9)


def test_a_model_without_a_mask_token_is_refused(target):
    """Catches masks that are a word of the text unasked."""
    with pytest.raises(DrafterError, match=r"no token that can serve as mask.*drafter\.mask_token"):
        tidar.build(tidar.Config(), target)
