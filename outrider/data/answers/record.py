"""Where answers go while they are written: a line of the file each, and before it an entry of the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from outrider.data.answers.ledger import Ledger, Origin
from outrider.data.answers.store import Answer, to_line
from outrider.data.answers.talks import Talk
from outrider.data.config import Config
from outrider.data.sources.conversations import Skipped

OnAnswer = Callable[[int, Answer], None]
"""Gets the number of a run's conversations that are answered, and the newest answer."""
HERE = Origin()
COUNT_EVERY_S = 5.0
"""Seconds between two counts of what other processes have answered."""


@dataclass(slots=True)
class Record:
    """A run's file and ledger."""

    file: IO[str]
    ledger: Ledger
    settings_hash: str
    done: int
    """Conversations of this run that are answered."""
    on_answer: OnAnswer
    skipped: Skipped
    is_shared: bool = False
    """Whether other processes answer prompts of the same ledger."""
    counted_at: float = 0.0
    """When all answers were last counted."""

    def answer(self, answer: Answer, origin: Origin = HERE) -> None:
        """Write an answer; from here on a killed process does not lose it."""
        written = sum(end - start for start, end in answer.learn)
        self.ledger.answer(answer.prompt_hash or "", written, answer.finish_reason, origin)
        self.file.write(to_line(answer, self.settings_hash))
        self.file.flush()
        self.done += 1
        if self.is_shared and time.monotonic() - self.counted_at > COUNT_EVERY_S:  # others' too; it reads all prompts
            self.done, self.counted_at = self.ledger.counts()["answered"], time.monotonic()
        self.on_answer(self.done, answer)

    def fail(self, talk: Talk, reason: str) -> None:
        """No server answers it: the next run asks again."""
        self.ledger.fail(talk.asked.prompt_hash, reason, talk.attempts)

    def skip(self, prompt_hash: str, reason: str) -> None:
        """It can't be asked."""
        self.ledger.skip(prompt_hash, reason)

    def no_room(self, talk: Talk, config: Config, context: int, origin: Origin = HERE) -> None:
        """Its next turn does not fit: the answers so far are stored, where there are any."""
        if talk.learn:
            self.answer(talk.answer("length"), origin)
        else:
            self.skip(talk.asked.prompt_hash, f"no room for an answer within {min(config.length, context)} tokens")
