"""The run file of a fine-tuning run: a trained drafter learns prompts of another kind without forgetting its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from outrider.config import to_yaml
from outrider.data.config import BUILT_IN
from outrider.data.config import Config as Prepare
from outrider.data.sources.conversations import Conversation, read
from outrider.errors import ConfigError
from outrider.loading import describe
from outrider.measure.tasks.names import INSTRUCTIONS

FILE = """\
# outrider run {file}                  answers, fine-tunes, and measures before and after on both kinds of prompts
# outrider run {file} --dry-run        checks everything and prints counts and sizes
target: {target}
drafter: {{from: {drafter}}}  # its kind, sizes and weights
prepare:  # the target answers the prompts
  sources:
    - {{path: {new}, weight: 1}}  # yours
    - {{path: {old}, weight: 1}}  # like those it was trained on, so that it forgets less
  count: {count}
  max_new_tokens: 256  # longest answer
  length: 2048  # longest text, prompt plus answer; longer ones are cut
train:
  epochs: 4  # passes over the answers
  batch: 8
  lr: 1e-3  # an eighth of a new training's: more learns faster and forgets more
  optimizer: muon
  loss: {{kl: 1.0}}
evaluate:
  tasks: {tasks}  # prompts that are not in the training data: yours, and like those it was trained on
  prompts: 24  # of each task
  max_new_tokens: 96
  temperatures: [0.0, 0.7]
  baselines: [{drafter}]  # the drafter before the fine-tuning, measured in the same run
"""
MOST = 200
"""Maximum number of prompts of each kind to answer."""
EVERY = 5
"""Every n-th prompt is held out for measurement."""
LEAST = 20
"""Minimum number of prompts for fine-tuning."""


class Split(NamedTuple):
    """One kind of prompts."""

    source: str
    """Trained on."""
    tasks: list[str]
    """Measured on."""
    prompts: int
    """Number of prompts to train on."""
    files: dict[Path, str]
    """Files to write, with their text."""


def fine_tuning(
    place: Path, drafter: str, target: str | None, data: str, old: str | None
) -> tuple[str, dict[Path, str]]:
    """The text of the run file, and the files of prompts it names: NAME.new.train.jsonl and so on, beside it.

    data: the new prompts.  old: prompts like those that the drafter was trained on.  Raises ConfigError for a drafter
    without a target, and for too few prompts.
    """
    source = describe(drafter)
    target = target or source.target
    if target is None:
        raise ConfigError(f"{drafter} names no target; give it with --target")
    library = "stdlib:train" if target == "demo" else "instructions:train"
    yours, known_kind = _split(place, "new", data), _split(place, "old", old or library)
    text = FILE.format(
        file=place, target=to_yaml(target), drafter=to_yaml(drafter), new=to_yaml(yours.source),
        old=to_yaml(known_kind.source), count=2 * min(MOST, yours.prompts),
        tasks=to_yaml([*yours.tasks, *known_kind.tasks]),
    )  # fmt: skip
    return text, yours.files | known_kind.files


def _split(place: Path, name: str, data: str) -> Split:
    if data.startswith(BUILT_IN):
        return Split(data, [*INSTRUCTIONS] if data.startswith("instructions:") else ["stdlib"], MOST, {})
    rows = list(_first_of_each(read(Prepare(conversations=data))))
    if len(rows) < LEAST:
        raise ConfigError(
            f"{data} has {len(rows)} different first questions, and fine-tuning needs at least {LEAST}; add prompts"
        )
    train, test = (place.with_name(f"{place.stem}.{name}.{part}.jsonl") for part in ("train", "test"))
    for file in (train, test):
        if file.exists():
            raise ConfigError(f"{file} exists already; move it, or name another run file")
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    learnt = [line for number, line in enumerate(lines) if number % EVERY]
    return Split(str(train), [str(test)], len(learnt), {train: "".join(learnt), test: "".join(lines[::EVERY])})


def _first_of_each(conversations: Iterator[Conversation]) -> Iterator[dict[str, Any]]:
    """Conversations with different first questions, as rows: all turns of a dialogue must be on the same side of the
    split."""
    before: set[str] = set()
    for conversation in conversations:
        opening = next(iter(conversation.questions), "")
        if opening and opening not in before:
            before.add(opening)
            yield {"id": conversation.id, "messages": conversation.messages} | (
                {"tools": list(conversation.tools)} if conversation.tools else {}
            )
