"""A training with a budget of tokens learns what the padded one learns."""

import json
from pathlib import Path

import pytest
import torch

from outrider.data.features.live import LiveFeatures
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training.config import Config
from outrider.training.trainer import train
from training.bench import TAPS, make_answers, make_model


def test_a_packed_training_is_the_padded_one(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches texts that are left out of a step or move to another, and rows that weigh more in a smaller batch.

    float32: anchors are all positions, so nothing that is drawn differs.
    """
    given = {"steps": 4, "batch": 3, "accumulate": 2, "lr": 1e-3, "dtype": "float32", "log_every": 1}
    found = []
    for tokens in (None, 32, 200):
        model = make_model(talker, anchors=64)
        source = LiveFeatures(talker, make_answers(), TAPS, batch=3, length=64, budget=tokens)
        folder = tmp_path / str(tokens)
        train(model, source, Config(**given, tokens=tokens), folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append((rows, torch.cat([weight.detach().flatten() for weight in model.parameters()])))
    (plain, weights), *others = found
    for packed, same in others:
        for one, other in zip(plain, packed, strict=True):
            assert one["tokens"] == other["tokens"]
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
            assert one["acceptance"] == pytest.approx(other["acceptance"], abs=2e-4)
            assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-2)
        # AdamW moves even a weight that has hardly a gradient by up to lr a step
        torch.testing.assert_close(same, weights, rtol=0, atol=1e-3)
