"""DEER: independent positions, one pass that is the same in training and at serving, and what its two stages weigh."""

import pytest
import torch
from conftest import batch_of
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.lab.drafters import deer
from outrider.targets.load import load_target

SIZES = {"layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "block": 4, "anchors": 16}


def made(target, **settings):
    torch.manual_seed(1)
    return deer.Model(deer.Config(**(SIZES | settings)), target).double()


@pytest.mark.parametrize(
    ("progress", "refine", "stage"),
    [(0.49, 0.5, 1), (0.5, 0.5, 2), (0.99, 1.0, 1), (0.0, 0.0, 2)],
)
def test_the_second_stage_begins_where_it_says(progress, refine, stage, target):
    """Catches a stage that never comes, and rows of the first that weigh unequally. R of 48 blocks."""
    model = made(target, refine=refine, alpha=2.0, anchors=12)
    model.progress = progress
    torch.manual_seed(0)
    weights = model.predict(batch_of(target, (), torch.randint(64, (4, 24)))).weight.unflatten(0, (-1, 4))
    blocks = {tuple(block) for block in weights.tolist()}
    whole = {(1, 1, 1, 1)} if stage == 1 else {(1, 0, 0, 0), (2, 1, 0, 0), (4, 2, 1, 0), (8, 4, 2, 1)}
    # the end of a text cuts blocks short
    short = {block[:n] + (0,) * (4 - n) for block in whole for n in range(1, 4)}
    assert whole <= blocks <= whole | short


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_adapted_from_all_layers_it_begins_as_the_target(family, target):
    """Catches norms of queries that a Llama's layers lack, and a final norm that is not the target's.  The mask is a
    token of the vocabulary, so its row is the target's own after the text and that token."""
    if family == "llama":
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "num_hidden_layers": 3}
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, **sizes, pad_token_id=None)).double().eval()
        torch.nn.init.uniform_(model.model.norm.weight, 0.5, 2.0)
        target = load_target(model)
    count = target.spec.layers
    config = deer.Config(layers=count, init_from_layers=tuple(range(count)), block=1, mask_token=9)
    adapted, text = deer.Model(config, target).double(), torch.arange(20, 40)[None]
    causal = torch.ones(21, 21, dtype=torch.bool).tril()[None, None]
    states = adapted(text, torch.arange(21)[None], 1, causal)[:, 0, 0]
    wanted = target.read(torch.cat([text, torch.tensor([[9]])], 1), ())[0][:, -1]
    torch.testing.assert_close(states, wanted, rtol=1e-4, atol=1e-4)  # its norm's epsilon is in the copied weight
