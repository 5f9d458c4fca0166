"""The prompts of an evaluation: drawing them, their tokens, the target's answers, and which prompts are left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from outrider.decoding.state import Request
from outrider.measure import timing
from outrider.measure.config import Config
from outrider.measure.tasks import names
from outrider.measure.tasks.names import Prompt, PromptSet
from outrider.report.parts import LeftOut
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts

SPARE = 4
"""Number of prompts drawn per prompt measured, since some answers may fall into loops."""


def draw(task: str, config: Config) -> PromptSet:
    """The prompts of a task, in the order of measurement; more than are measured, since some are left out.

    Raises DataError like `names.load`.
    """
    most = config.prompts * SPARE
    if task == "stdlib":
        prompts = list(names.prompts(task, most, config.seed))
        return PromptSet(prompts, "the standard library of this Python", None, None)
    if task in names.INSTRUCTIONS:
        return PromptSet(list(names.prompts(task, most, config.seed)), names.BUILT_IN_INSTRUCTIONS, None, None)
    loaded = names.load(task, config.data, config.revisions.get(task))
    # a file's prompts are taken in order, a data set's by seed
    prompts = list(loaded.some(most, config.seed) if task in names.TASKS else loaded.prompts[:most])
    return replace(loaded, prompts=prompts)


def digest(prompt: Prompt) -> str:
    """A hash of the prompt's id, system text and turns."""
    text = json.dumps([prompt.id, prompt.system, *prompt.turns])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_tokens(
    target: TransformersTarget, prompt: Prompt, answers: Sequence[str] = (), thinking: bool | None = None
) -> list[int]:
    """A prompt up to its next answer as token ids, rendered by the chat template if the tokenizer has one."""
    messages = prompt.messages(answers)
    if getattr(target.tokenizer, "chat_template", None) is None:
        return target.encode("".join(message["content"] for message in messages))
    return target.encode(messages, thinking)


def fitted(
    target: TransformersTarget, prompt: Prompt, references: Sequence[Sequence[int]], config: Config,
    cuts: Cuts | None = None,
) -> list[int]:  # fmt: skip
    """The tokens of the turn after these answers, cut at the front to leave room for an answer.  cuts: records that."""
    answers = [target.decode(list(reference)) for reference in references]
    tokens = as_tokens(target, prompt, answers, config.thinking)
    return (cuts or Cuts()).fit(tokens, target.spec.context - config.max_new_tokens - 1, prompt.id)


def answer(target: TransformersTarget, prompt: Prompt, config: Config) -> tuple[list[list[int]], float]:
    """The output of transformers' `generate` for every turn, and its seconds."""
    references: list[list[int]] = []
    seconds = 0.0
    for _ in prompt.turns:
        tokens = fitted(target, prompt, references, config)
        reference, turn_s = timing.generate_once(target, tokens, config.max_new_tokens)
        references.append(reference)
        seconds += turn_s
    return references, seconds


def requests(
    target: TransformersTarget, prompt: Prompt, references: Sequence[list[int]], config: Config, temperature: float,
    index: int, tenant: str = "",
) -> list[Request]:  # fmt: skip
    """A prompt's requests, one per turn, with the target's own greedy answers between turns for every drafter.

    index: of the prompt in its task.  Above temperature 0, answers are as long as the greedy ones.
    """
    sampling = Sampling(temperature, seed=config.seed + index)
    return [
        Request(
            fitted(target, prompt, references[:turn], config),
            config.max_new_tokens if temperature == 0 else len(reference), sampling, tenant=tenant,
        )
        for turn, reference in enumerate(references)
    ]  # fmt: skip


def left_out(prompt: Prompt, task: str, references: Sequence[list[int]], config: Config) -> LeftOut | None:
    """Why a prompt is not measured: in some turn, the target's own answer loops or is one token.  None if it is."""
    share = min(map(first_ngram_share, references))
    if not config.min_first_ngrams or (share >= config.min_first_ngrams and min(map(len, references)) > 1):
        return None
    reason = "loop" if share < config.min_first_ngrams else "short"
    return LeftOut(id=prompt.id, task=task, first_ngram_share=round(share, 3), reason=reason)


def first_ngram_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of n-grams that occur for the first time: 1 without repetition, near 0 for a loop."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
