"""Stores answers as they arrive: an entry in the ledger, then a line of the file."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from outrider.data.answers.dialogue import Dialogue
from outrider.data.answers.ledger import Ledger, Origin
from outrider.data.answers.store import Answer, to_line
from outrider.data.config import Config
from outrider.data.sources.conversations import Skipped

OnAnswer = Callable[[int, Answer], None]
"""Called with the number of answered conversations of the run and the newest answer."""
HERE = Origin()
COUNT_EVERY_S = 5.0
"""Seconds between two counts of the answers of other processes."""


@dataclass(slots=True)
class AnswerWriter:
    """Writes the answers of a run to its file and ledger."""

    file: IO[str]
    ledger: Ledger
    settings_hash: str
    done: int
    """Number of answered conversations of this run."""
    on_answer: OnAnswer
    skipped: Skipped
    is_shared: bool = False
    """Whether other processes answer prompts of the same ledger."""
    counted_at: float = 0.0
    """When all answers were last counted."""

    def answer(self, answer: Answer, origin: Origin = HERE) -> None:
        """Write an answer and flush it, so that a killed process does not lose it."""
        written = sum(end - start for start, end in answer.learn)
        self.ledger.answer(answer.prompt_hash or "", written, answer.finish_reason, origin)
        self.file.write(to_line(answer, self.settings_hash))
        self.file.flush()
        self.done += 1
        # also counts answers of other processes; not every time, since it reads all prompts
        if self.is_shared and time.monotonic() - self.counted_at > COUNT_EVERY_S:
            self.done, self.counted_at = self.ledger.counts()["answered"], time.monotonic()
        self.on_answer(self.done, answer)

    def fail(self, dialogue: Dialogue, reason: str) -> None:
        """No server answered the prompt; the next run tries again."""
        self.ledger.fail(dialogue.prompt_hash, reason, dialogue.attempts)

    def skip(self, prompt_hash: str, reason: str) -> None:
        """The prompt can't be answered."""
        self.ledger.skip(prompt_hash, reason)

    def no_room(self, dialogue: Dialogue, config: Config, context: int, origin: Origin = HERE) -> None:
        """Called if its next turn does not fit; stores the answers so far, if there are any."""
        if dialogue.learn:
            self.answer(dialogue.answer("length"), origin)
        else:
            self.skip(dialogue.prompt_hash, f"no room for an answer within {min(config.length, context)} tokens")
