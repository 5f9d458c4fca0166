"""Operations of a training step on paper against those that torch counts in one."""

import pytest
import torch
from conftest import batch_of
from torch.utils.flop_counter import FlopCounterMode

from outrider import drafters
from outrider.config import build
from outrider.plan.paper import anatomy, drafts, weights
from outrider.targets.sketch import of_config

SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 96}
PRODUCTS = ("mm", "addmm")
"""What torch calls products with weights; attention has others."""


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dflash", {**SHAPE, "layers": 2, "block": 4, "taps": (0, 2), "mask_token": 3, "anchors": 64}),
        ("dflash", {**SHAPE, "layers": 1, "block": 4, "taps": (0, 2), "mask_token": 3, "anchor_predicts": False}),
        ("dspark", {**SHAPE, "layers": 2, "block": 3, "rank": 8, "taps": (0, 2), "mask_token": 3, "confidence": False}),
        ("eagle3", {**SHAPE, "ttt": 4, "taps": (0, 2)}),
    ],
)
def test_paper_agrees_with_a_step(target, kind, settings):
    """Catches a head that is counted once per position, weights counted without their gradients, and rows that are
    forgotten."""
    sketched = of_config(target.model.config, "tiny")
    draft = drafts.on_paper(kind, sketched, **settings)
    module = drafters.find(kind)
    model = module.Model(build(module.Config, {"kind": kind, **settings}), target)
    length = 48
    tokens = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(0))
    batch = batch_of(target, model.taps, tokens)
    with FlopCounterMode(display=False) as counter:
        rows = model.to(torch.float64).predict(batch)
        for logits, _, part in rows.chunks(4096):
            torch.nn.functional.cross_entropy(logits, rows.labels[part]).backward()
        rows.backward()
    counted = sum(
        count for name, count in counter.get_flop_counts()["Global"].items() if str(name).split(".")[1] in PRODUCTS
    )
    target_model = anatomy.of_sketch(sketched, weights.stored({"dtype": "float32"}, None, "tiny"))
    assert draft.training_flops(target_model, length, length - 1) == pytest.approx(counted, rel=0.1)
