"""Continue token ids greedily with transformers' own assisted generation, in this process, and record how much of each
draft was accepted.

transformers does not count drafts, so its candidate generator is recorded.  It drafts after the prompt's last token, so
its first token comes from a verified step, as ours does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from outrider.targets.hf.transformers import TransformersTarget


class Round(NamedTuple):
    """One verified step."""

    drafted: int
    accepted: int


def answer(
    folder: Path, target: TransformersTarget, prompts: Sequence[Sequence[int]], max_new_tokens: int, length: int
) -> dict[str, Any]:  # fmt: skip
    """The same answer as `verify.vllm`: {engine, version, tokens, accepted, drafted}, or an error if it can't load.

    length: tokens drafted per step.
    """
    about = {"engine": "transformers", "version": transformers.__version__, "platform": target.device.type}
    tokens, rounds = [], []
    try:
        assistant = loaded(folder, length).to(target.device)
        for prompt in prompts:
            with recorded() as steps:
                tokens.append(continued(target, prompt, max_new_tokens, assistant))
            rounds.append(steps)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        return {**about, "error": f"{type(error).__name__}: {error}"}
    return {
        **about, "tokens": tokens, "accepted": [[step.accepted for step in steps] for steps in rounds],
        "drafted": [[step.drafted for step in steps] for steps in rounds],
    }  # fmt: skip


def loaded(folder: Path, length: int) -> Any:
    """A folder as the assistant model, drafting `length` tokens per step at any confidence."""
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assistant.generation_config.update(num_assistant_tokens=length, num_assistant_tokens_schedule="constant")
    assistant.generation_config.assistant_confidence_threshold = 0.0  # the default is 0.4, which cuts drafts short
    return assistant


@torch.inference_mode()
def continued(target: TransformersTarget, prompt: Sequence[int], new: int, assistant: Any = None) -> list[int]:
    """transformers' greedy continuation of a prompt, at most `new` tokens, ignoring the sampling settings in the
    target's folder."""
    model: Any = target.model
    inputs = torch.tensor([list(prompt)], device=target.device)
    plain = GenerationConfig(
        do_sample=False, max_new_tokens=new, eos_token_id=list(target.ends) or None, pad_token_id=0
    )
    recommended, model.generation_config = model.generation_config, plain
    try:
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=assistant)
    finally:
        model.generation_config = recommended
    return list(out[0, len(prompt) :].tolist())


@contextmanager
def recorded() -> Iterator[list[Round]]:
    """Record the result of each draft."""
    rounds: list[Round] = []
    draft, update = AssistedCandidateGenerator.get_candidates, AssistedCandidateGenerator.update_candidate_strategy
    last = 0

    def drafts(self: Any, input_ids: Any, *others: Any, **named: Any) -> Any:
        nonlocal last
        candidates = draft(self, input_ids, *others, **named)
        last = candidates[0].shape[1] - input_ids.shape[1]
        return candidates

    def updates(self: Any, input_ids: Any, scores: Any, num_matches: Any) -> Any:
        rounds.append(Round(last, int(num_matches)))
        return update(self, input_ids, scores, num_matches)

    held: Any = AssistedCandidateGenerator
    held.get_candidates, held.update_candidate_strategy = drafts, updates
    try:
        yield rounds
    finally:
        held.get_candidates, held.update_candidate_strategy = draft, update
