"""The prompts of an evaluation: which are drawn, how the target reads them, what it answers, which are left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from outrider.decoding.state import Request
from outrider.measure import timing
from outrider.measure.config import Config
from outrider.measure.tasks import names, scoring
from outrider.measure.tasks.names import Prompt, PromptSet, task_name
from outrider.report.parts import LeftOut
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.text.cuts import Cuts

SPARE = 4
"""Prompts drawn for each that is measured: some may fall into loops."""


def draw(task: str, config: Config) -> PromptSet:
    """The prompts of a task, in the order in which they are measured; more than are measured, since some are left out.

    Raises DataError as `tasks.load` does, and where code is to be scored by tests that can't be read.
    """
    most, name = config.prompts * SPARE, task_name(task)
    if task == "stdlib":
        prompts = list(names.prompts(task, most, config.seed))
        return PromptSet(prompts, "the standard library of this Python", None, None)
    if task in names.INSTRUCTIONS:
        return PromptSet(list(names.prompts(task, most, config.seed)), names.OWN, None, None)
    loaded = names.load(task, config.data, config.revisions.get(task))
    # a file's prompts are taken in their order, a data set's by the seed
    prompts = list(loaded.some(most, config.seed) if task in names.TASKS else loaded.prompts[:most])
    if config.score and config.allow_code_execution and name in names.TASKS and names.TASKS[name].score == "tests":
        for prompt in prompts:  # an answer is scored only hours later
            if prompt.reference is not None:
                scoring.program(name, prompt, "")
    return replace(loaded, prompts=prompts)


def digest(prompt: Prompt) -> str:
    """A hash of what is asked."""
    text = json.dumps([prompt.id, prompt.system, *prompt.turns])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def as_tokens(
    target: TransformersTarget, prompt: Prompt, answers: Sequence[str] = (), thinking: bool | None = None
) -> list[int]:
    """A prompt up to its next answer, as the target reads it: through the chat template where there is one."""
    messages = prompt.messages(answers)
    if getattr(target.tokenizer, "chat_template", None) is None:
        return target.encode("".join(message["content"] for message in messages))
    return target.encode(messages, thinking)


def asked(
    target: TransformersTarget, prompt: Prompt, references: Sequence[Sequence[int]], config: Config,
    cuts: Cuts | None = None,
) -> list[int]:  # fmt: skip
    """The tokens of the turn after these answers, cut at the front to leave room for an answer; `cuts` notes that."""
    answers = [target.decode(list(reference)) for reference in references]
    tokens = as_tokens(target, prompt, answers, config.thinking)
    return (cuts or Cuts()).fit(tokens, target.spec.context - config.max_new_tokens - 1, prompt.id)


def answer(target: TransformersTarget, prompt: Prompt, config: Config) -> tuple[list[list[int]], float]:
    """What transformers' generate writes in every turn, and its seconds."""
    references: list[list[int]] = []
    seconds = 0.0
    for _ in prompt.turns:
        reference, own_s = timing.generate_once(
            target, asked(target, prompt, references, config), config.max_new_tokens
        )
        references.append(reference)
        seconds += own_s
    return references, seconds


def requests(
    target: TransformersTarget, prompt: Prompt, references: Sequence[list[int]], config: Config, temperature: float,
    index: int, tenant: str = "",
) -> list[Request]:  # fmt: skip
    """A prompt's requests, one a turn.  Between turns are the target's own greedy answers, for every drafter.

    index: of the prompt in its task.  Above temperature 0 lengths are those of the greedy answers.
    """
    sampling = Sampling(temperature, seed=config.seed + index)
    return [
        Request(
            asked(target, prompt, references[:turn], config),
            config.max_new_tokens if temperature == 0 else len(reference), sampling, tenant=tenant,
        )
        for turn, reference in enumerate(references)
    ]  # fmt: skip


def left_out(prompt: Prompt, task: str, references: Sequence[list[int]], config: Config) -> LeftOut | None:
    """Why a prompt is not measured: the target's own answer loops, or is one token in some turn."""
    share = min(map(first_ngram_share, references))
    if not config.min_first_ngrams or (share >= config.min_first_ngrams and min(map(len, references)) > 1):
        return None
    reason = "loop" if share < config.min_first_ngrams else "short"
    return LeftOut(id=prompt.id, task=task, first_ngram_share=round(share, 3), reason=reason)


def first_ngram_share(tokens: Sequence[int], n: int = 8) -> float:
    """Share of n-grams that are in a text for the first time: 1 without repetition, near 0 for a loop."""
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 1.0
