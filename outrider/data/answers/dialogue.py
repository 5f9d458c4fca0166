"""A conversation being answered: the user's messages come from its source, the answers from the target."""

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
class HashedConversation:
    """A conversation to be answered, and the hash under which its answer is stored."""

    conversation: Conversation
    prompt_hash: str

    @property
    def questions(self) -> list[dict[str, Any]]:
        """The messages without those of the assistant."""
        return [message for message in self.conversation.messages if message["role"] != "assistant"]


def hash_conversations(conversations: Iterable[Conversation], config: Config) -> Iterator[HashedConversation]:
    """Each conversation with the hash of everything its answer depends on.

    That is its messages and tools, and its id if the source gives one, since the id seeds the noise.  Repeated content
    is hashed together with its repetition number.  Answers that the target will replace are not hashed.
    """
    counts = Counter[int]()
    for conversation in conversations:
        content = conversation.prompt_hash(answered=not config.regenerate)
        number = int(content, 16)  # halves the memory of a text
        counts[number] += 1
        yield HashedConversation(conversation, hash_of_repeat(content, counts[number]))


class Dialogue:
    """A conversation in progress."""

    def __init__(self, hashed: HashedConversation):
        self.conversation, self.prompt_hash = hashed.conversation, hashed.prompt_hash
        self._pending = hashed.questions
        self.messages = list[Mapping[str, Any]]()
        self.tokens: list[int] = []
        self.learn: list[tuple[int, int]] = []
        self.retokenised = False
        """An answer arrived as text and was tokenised here: the model may have sampled other tokens."""
        self.attempts = 0
        """Requests that failed."""

    @property
    def is_over(self) -> bool:
        """Whether every turn of the user is answered."""
        return not any(message["role"] == "user" for message in self._pending)

    def ask(self, tokenizer: Any, config: Config, context: int) -> bool:
        """Append the messages up to the next user turn; False if there is no room for an answer."""
        while self._pending and (not self.messages or self.messages[-1]["role"] != "user"):
            self.messages.append(self._pending.pop(0))
        with at_place(self.conversation):
            tokens = prompt_tokens(tokenizer, self.messages, config.enable_thinking, self.conversation.tools)
        if not 0 < len(tokens) < min(config.length, context):
            return False
        self.read(tokens)
        return True

    def read(self, tokens: Sequence[int]) -> None:
        """Replace the prompt's ids.  Answers in it are trained on only up to the first token that differs."""
        same = common_prefix(self.tokens, tokens)
        self.learn = [(start, min(end, same)) for start, end in self.learn if start < same]
        self.tokens = list(tokens)

    def request(self, config: Config) -> Request:
        """The request for the next answer; its seed depends on content, so a row that moved gets the same answer."""
        name = self.conversation.id if self.conversation.has_own_id else self.prompt_hash
        seed = zlib.crc32(f"{name} {len(self.messages)}".encode()) ^ config.seed
        sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        return Request(self.tokens, min(config.max_new_tokens, config.length - len(self.tokens)), sampling)

    def add_answer(self, answer: Sequence[int], text: str) -> None:
        """Append the target's answer.  A token that closes the turn is trained on if the target generated it."""
        self.learn = [*self.learn, (len(self.tokens), len(self.tokens) + len(answer))]
        self.tokens = [*self.tokens, *answer]
        self.messages.append({"role": "assistant", "content": text})

    def answer(self, finish_reason: str | None) -> Answer:
        """The dialogue so far, in the form that is stored."""
        return Answer(
            self.conversation.id, self.tokens, self.learn, finish_reason, self.prompt_hash, retokenised=self.retokenised
        )
