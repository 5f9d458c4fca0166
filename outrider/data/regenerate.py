"""Let the target answer the prompts, a batch of slots at a time; every finished conversation is written at once.

A crash loses only unfinished answers, and none is written twice; a torn last line is cut off.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.data.answers import (
    ANSWERS,
    Answer,
    claim,
    content_hash,
    keep_hashes,
    put_in_order,
    repair,
    to_line,
    whose,
)
from outrider.data.config import Config
from outrider.data.conversations import Conversation, Skipped, at_place
from outrider.data.rendering import check_template, prompt_tokens, render
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.generation import serve
from outrider.lock import held
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import Target


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation to be answered, and the hash that its answer is stored under."""

    conversation: Conversation
    prompt_hash: str

    @property
    def questions(self) -> list[dict[str, Any]]:
        """The messages of a conversation without those of the assistant."""
        return [message for message in self.conversation.messages if message["role"] != "assistant"]


def prepare(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: str | Path, config: Config,
    drafter: Drafter | None = None, on_answer: Callable[[int, Answer], None] | None = None,
    skipped: Skipped | None = None,
) -> Path:  # fmt: skip
    """Write the answers of all conversations that have none yet; returns the file.

    drafter: changes the speed, not the text.
    on_answer: gets the number of these conversations that are answered, and the newest answer.
    skipped: gets what the chat template refuses, with `config.skip_bad`.
    Raises DataError where the folder holds answers of another target, sampling or template, or another process writes
    there, and with file and line for a conversation that the chat template refuses.
    """
    folder, path, skipped = Path(folder), Path(folder, ANSWERS), Skipped() if skipped is None else skipped
    busy = DataError(f"another process is writing answers to {folder}; wait for it, or name another prepare.folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder, busy):
            there, mine = repair(path, target.spec.vocabulary), whose(target, tokenizer, config)
            claim(folder, mine, there)
            asked = as_asked(conversations, config)
            known = {answer.prompt_hash for answer in there}
            unanswered = _renderable(tokenizer, [one for one in asked if one.prompt_hash not in known], config, skipped)
            done, settings_hash = sum(one.prompt_hash in known for one in asked), content_hash(mine)
            with path.open("a", encoding="utf-8") as file:
                for answer in _answers(target, tokenizer, unanswered, config, drafter, skipped):
                    file.write(to_line(answer, settings_hash))
                    file.flush()
                    done += 1
                    if on_answer is not None:
                        on_answer(done, answer)
            prompts = {one.prompt_hash: [message["content"] for message in one.questions] for one in asked}
            put_in_order(path, prompts)
            if config.ngram_hashes:
                keep_hashes(folder, target, prompts)
    except OSError as error:
        why = f"{error.strerror or error}; what is written stays; make room and run again"
        raise DataError(f"can't write answers to {folder}: {why}") from error
    return path


def answered(folder: Path, conversations: Iterable[Conversation], config: Config) -> int:
    """How many of these conversations have an answer in the folder; another process may be writing more."""
    try:
        whole = (folder / ANSWERS).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        known = {json.loads(line).get("prompt_hash") for line in whole}
    except (FileNotFoundError, ValueError, AttributeError):  # `prepare` names the damaged line
        return 0
    return sum(one.prompt_hash in known for one in as_asked(conversations, config))


def as_asked(conversations: Iterable[Conversation], config: Config) -> list[Asked]:
    """Each conversation with the hash of what its answer depends on: its messages, and its own id, which seeds the
    noise.

    Of equal texts the second, third, … are hashed with their number.  Answers that the target will replace are not
    hashed.
    """
    found, counts = [], Counter[str]()
    for one in conversations:
        messages = [m for m in one.messages if not config.regenerate or m["role"] != "assistant"]
        content = content_hash([one.id if one.has_own_id else None, messages])
        counts[content] += 1
        found.append(Asked(one, content if counts[content] == 1 else content_hash([content, counts[content]])))
    return found


def _renderable(tokenizer: Any, asked: list[Asked], config: Config, skipped: Skipped) -> list[Asked]:
    """Those that the chat template takes, checked before the first answer.  Raises DataError for one that it
    refuses."""
    if not config.regenerate:  # checked when they are rendered
        return asked

    def checked(one: Asked) -> Asked:
        check_template(tokenizer, one.conversation, config.enable_thinking)
        return one

    return list(skipped.usable(asked, checked, config.skip_bad))


def _answers(
    target: Target, tokenizer: Any, unanswered: list[Asked], config: Config, drafter: Drafter | None, skipped: Skipped
) -> Iterator[Answer]:
    if not config.regenerate:
        yield from _given(tokenizer, unanswered, config, skipped)
        return
    talks = [_Talk(one) for one in unanswered]
    while talks:
        asked = []
        for talk in talks:
            if talk.ask(tokenizer, config, target.spec.context):
                asked.append(talk)
            elif talk.learn:  # no room for a further turn: the answers so far are stored
                yield talk.answer("length")
        answers: list[list[int]] = [[] for _ in asked]
        for progress in serve(target, [talk.request(config) for talk in asked], drafter, slots=config.slots):
            talk, answer = asked[progress.request], answers[progress.request]
            answer += progress.tokens
            if progress.finish_reason is not None:
                talk.add_answer(answer, target.decode(answer))
                if talk.over:  # yielded as soon as its last answer ends
                    yield talk.answer(progress.finish_reason)
        talks = [talk for talk in asked if not talk.over]


def _given(tokenizer: Any, unanswered: list[Asked], config: Config, skipped: Skipped) -> Iterator[Answer]:
    """The conversations' own answers, rendered."""

    def answer(one: Asked) -> Answer:
        with at_place(one.conversation):
            rendered = render(tokenizer, one.conversation.messages, config.length, config.enable_thinking)
        skipped.unstable += rendered.unstable
        return Answer(one.conversation.id, rendered.tokens, rendered.learn, prompt_hash=one.prompt_hash)

    return (found for found in skipped.usable(unanswered, answer, config.skip_bad) if found.learn)


class _Talk:
    """A conversation in progress: the user's turns as given, the answers as the target writes them."""

    def __init__(self, asked: Asked):
        self._asked, self._left, self._messages = asked, asked.questions, list[dict[str, Any]]()
        self.tokens: list[int] = []
        self.learn: list[tuple[int, int]] = []

    @property
    def over(self) -> bool:
        return not any(message["role"] == "user" for message in self._left)

    def ask(self, tokenizer: Any, config: Config, context: int) -> bool:
        """Append the messages up to the next user turn; False where no room is left for an answer."""
        while self._left and (not self._messages or self._messages[-1]["role"] != "user"):
            self._messages.append(self._left.pop(0))
        with at_place(self._asked.conversation):
            tokens = prompt_tokens(tokenizer, self._messages, config.enable_thinking)
        if not 0 < len(tokens) < min(config.length, context):
            return False
        self.tokens = tokens
        return True

    def request(self, config: Config) -> Request:
        # by content, not by line: a line that moved gets the same answer
        name = self._asked.conversation.id if self._asked.conversation.has_own_id else self._asked.prompt_hash
        seed = zlib.crc32(f"{name} {len(self._messages)}".encode()) ^ config.seed
        sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        return Request(self.tokens, min(config.max_new_tokens, config.length - len(self.tokens)), sampling)

    def add_answer(self, answer: list[int], text: str) -> None:
        # of several turns only the last answer trains: the earlier ones are in its prompt as the template renders them
        self.learn = [(len(self.tokens), len(self.tokens) + len(answer))]
        self.tokens = self.tokens + answer
        self._messages.append({"role": "assistant", "content": text})

    def answer(self, finish_reason: str | None) -> Answer:
        """The answers so far, as they are stored."""
        return Answer(self._asked.conversation.id, self.tokens, self.learn, finish_reason, self._asked.prompt_hash)
