"""A conversation while it is answered: the user's messages as given, the answers as the target writes them."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.data.answers.store import Answer
from outrider.data.config import Config
from outrider.data.rendering import prompt_tokens
from outrider.data.sources.conversations import Conversation, at_place
from outrider.data.sources.mixture import hash_of_repeat
from outrider.decoding.state import Request
from outrider.sampling.settings import Sampling
from outrider.sampling.text import common_prefix


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation to be answered, and the hash that its answer is stored under."""

    conversation: Conversation
    prompt_hash: str

    @property
    def questions(self) -> list[dict[str, Any]]:
        """The messages of a conversation without those of the assistant."""
        return [message for message in self.conversation.messages if message["role"] != "assistant"]


def iterate_asked(conversations: Iterable[Conversation], config: Config) -> Iterator[Asked]:
    """Each conversation with the hash of what its answer depends on: its messages and tools, and its own id, which
    seeds the noise.

    Of equal texts the second, third, … are hashed with their number.  Answers that the target will replace are not
    hashed.
    """
    counts = Counter[int]()
    for one in conversations:
        content = one.prompt_hash(answered=not config.regenerate)
        number = int(content, 16)  # half of a text's memory
        counts[number] += 1
        yield Asked(one, hash_of_repeat(content, counts[number]))


class Talk:
    """A conversation in progress."""

    def __init__(self, asked: Asked):
        self.asked, self._left, self.messages = asked, asked.questions, list[Mapping[str, Any]]()
        self.tokens: list[int] = []
        self.learn: list[tuple[int, int]] = []
        self.retokenised = False
        """Tokens of an answer are the tokenizer's of its text: which ones the model drew is not known."""
        self.attempts = 0
        """Requests that failed."""

    @property
    def over(self) -> bool:
        return not any(message["role"] == "user" for message in self._left)

    def ask(self, tokenizer: Any, config: Config, context: int) -> bool:
        """Append the messages up to the next user turn; False where no room is left for an answer."""
        while self._left and (not self.messages or self.messages[-1]["role"] != "user"):
            self.messages.append(self._left.pop(0))
        with at_place(self.asked.conversation):
            tokens = prompt_tokens(tokenizer, self.messages, config.enable_thinking, self.asked.conversation.tools)
        if not 0 < len(tokens) < min(config.length, context):
            return False
        self.read(tokens)
        return True

    def read(self, tokens: Sequence[int]) -> None:
        """Take these ids for the prompt.  Of the answers in it, what they render otherwise no longer trains."""
        same = common_prefix(self.tokens, tokens)
        self.learn = [(start, min(end, same)) for start, end in self.learn if start < same]
        self.tokens = list(tokens)

    def request(self, config: Config) -> Request:
        """The prompt as the target is asked it; its seed depends on content, so a line that moved gets the same
        answer."""
        conversation = self.asked.conversation
        name = conversation.id if conversation.has_own_id else self.asked.prompt_hash
        seed = zlib.crc32(f"{name} {len(self.messages)}".encode()) ^ config.seed
        sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        return Request(self.tokens, min(config.max_new_tokens, config.length - len(self.tokens)), sampling)

    def add_answer(self, answer: Sequence[int], text: str) -> None:
        """Append the target's answer.  What the template closes a turn with trains where the target wrote it."""
        self.learn = [*self.learn, (len(self.tokens), len(self.tokens) + len(answer))]
        self.tokens = [*self.tokens, *answer]
        self.messages.append({"role": "assistant", "content": text})

    def answer(self, finish_reason: str | None) -> Answer:
        """The answers so far, as they are stored."""
        name, prompt_hash = self.asked.conversation.id, self.asked.prompt_hash
        return Answer(name, self.tokens, self.learn, finish_reason, prompt_hash, retokenised=self.retokenised)
