"""transformers' own assisted generation with a drafter of ours: the text stays the target's, and what fits is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tiny import make_folder, randomise
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from outrider import generate, load_drafter, load_target
from outrider.checkpoint import save
from outrider.config import build
from outrider.drafters import find as find_drafter
from outrider.export.writing import export_folder

PROMPTS = ["a text of some words", "another one", "1, 2, 3, "]
NEW = 24


class Round(NamedTuple):
    drafted: int
    kept: int


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return load_target(folder, dtype="float64")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """What became of each draft; transformers counts nothing itself."""
    found: list[Round] = []
    draft, told = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy
    drafted: list[int] = []

    def drafts(self: Any, input_ids: Any, *others: Any, **named: Any) -> Any:
        candidates = draft(self, input_ids, *others, **named)
        drafted.append(candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    def hears(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        found.append(Round(drafted[-1], int(num_matches)))
        return told(self, input_ids, scores, num_matches)

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", drafts)
    monkeypatch.setattr(AssistedCandidateGenerator, "update_candidate_strategy", hears)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.02, 1.0])
def test_assisted_generation_writes_the_targets_own_text(noise, folder, target, rounds, tmp_path):
    """Catches an export that transformers loads with other weights, or with fresh ones: then next to nothing is kept.

    The drafter is the target itself with noise: all is kept without any, part with a little.
    """
    module = find_drafter("small_model")
    model = module.Model(build(module.Config, {"kind": "small_model", "model": str(folder)}, "drafter"), target)
    save(tmp_path / "mine", randomise(model.double(), noise))
    export_folder(tmp_path / "mine", "transformers", tmp_path / "there", target)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path / "there", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "there")
    assistant.generation_config.update(num_assistant_tokens=4, num_assistant_tokens_schedule="constant")
    assistant.generation_config.assistant_confidence_threshold = 0.0
    ours = generate(target, PROMPTS, load_drafter(tmp_path / "mine", target), max_new_tokens=NEW)
    for prompt, expected in zip(PROMPTS, ours, strict=True):
        inputs = torch.tensor([tokenizer.encode(prompt)])
        assert inputs[0].tolist() == target.tokenizer.encode(prompt)
        asked = {
            "attention_mask": torch.ones_like(inputs),
            "max_new_tokens": NEW,
            "do_sample": False,
            "pad_token_id": 0,
        }
        plain = target.model.generate(inputs, **asked)
        assisted = target.model.generate(inputs, assistant_model=assistant, **asked)
        assert assisted.tolist() == plain.tolist()
        assert assisted[0, inputs.shape[1] :].tolist() == expected.tokens
    drafted, kept = (sum(getattr(one, field) for one in rounds) for field in ("drafted", "kept"))
    assert drafted > 0
    shares = {0.0: kept == drafted, 0.02: 0 < kept < drafted, 1.0: kept < drafted / 2}
    assert shares[noise], f"{kept} of {drafted}"
