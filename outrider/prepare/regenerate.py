"""Let the target answer the prompts itself, a batch of slots at a time; every finished conversation is on disk at once.

    answers.jsonl   {"id", "tokens", "learn": [[start, end], ...], "finish_reason"} a line
    answers.json    the target, sampling and template they belong to, and which hashes are theirs
    prompts.grams   hashes of what stands in prompts and answers, to ask later whether a text was among them

A crash loses the answers being written at that moment, and none is written twice: what is there is known by its id, and a
torn last line is cut off.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.decoding.generate import advance
from outrider.decoding.parties import Drafter, Target
from outrider.decoding.sampling import Sampling
from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.lock import held
from outrider.nn.draft_model import binding
from outrider.prepare import grams
from outrider.prepare.conversations import Config, Conversation, prompt_tokens, render, template_hash

ANSWERS, MANIFEST, GRAMS = "answers.jsonl", "answers.json", "prompts.grams"


@dataclass(frozen=True, slots=True)
class Answer:
    """One text as the target saw it, and the spans of it that train."""

    id: str
    tokens: list[int]
    learn: list[tuple[int, int]]
    finish_reason: str | None = None


def prepare(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: str | Path, config: Config,
    drafter: Drafter | None = None, on_answer: Callable[[int, Answer], None] | None = None,
) -> Path:  # fmt: skip
    """Write the answers of all conversations that have none yet; returns the file.  `drafter` makes it faster, not different.

    Raises DataError where the folder holds answers of another target, sampling or template, or another process writes there.
    """
    folder = Path(folder)
    path = folder / ANSWERS
    busy = DataError(f"another process is writing answers to {folder}; wait for it, or name another prepare.folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder, busy):
            _claim(folder, target, tokenizer, config)
            done = {answer.id for answer in _repair(path, target.spec.vocabulary)}
            asked = list(conversations)
            waiting = [conversation for conversation in asked if conversation.id not in done]
            with path.open("a", encoding="utf-8") as file:
                for answer in _answers(target, tokenizer, waiting, config, drafter):
                    file.write(json.dumps(asdict(answer)) + "\n")
                    file.flush()
                    done.add(answer.id)
                    if on_answer is not None:
                        on_answer(len(done), answer)
            if config.grams:
                _keep_grams(folder, target, asked)
    except OSError as error:
        raise DataError(
            f"can't write answers to {folder}: {error.strerror or error}; what is written is kept, make room and run again"
        ) from error
    return path


def read_answers(path: str | Path, vocabulary: int | None = None) -> list[Answer]:
    """All answers of a file.  Raises DataError with the line of one that can't be read, or has ids outside the vocabulary."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"no answers at {path} ({error.strerror}); run `outrider prepare` first") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text ({error}); delete it and run `outrider prepare` again") from None
    answers = []
    for number, line in enumerate(lines, 1):
        try:
            answers.append(_answer(line))
            _check_ids(answers[-1], vocabulary)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}, line {number} is no answer ({error}); run `outrider prepare` again, it cuts a torn line off"
            ) from None
    return answers


def _check_ids(answer: Answer, vocabulary: int | None) -> None:
    """Raise ValueError for tokens that are no ids of this vocabulary, and spans outside the text."""
    if not answer.tokens or not all(type(token) is int for token in answer.tokens):
        raise ValueError("its tokens are no list of whole numbers")
    least, most = min(answer.tokens), max(answer.tokens)
    if least < 0 or (vocabulary is not None and most >= vocabulary):
        wrong = least if least < 0 else most
        raise ValueError(f"token {wrong} lies outside the target's vocabulary" + f" of {vocabulary}" * (vocabulary is not None))
    if not all(0 <= start <= end <= len(answer.tokens) for start, end in answer.learn):
        raise ValueError(f"its spans {answer.learn} reach outside its {len(answer.tokens)} tokens")


def answered(path: Path) -> int:
    """How many answers are there, whole; another process may be writing them."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _repair(path: Path, vocabulary: int) -> list[Answer]:
    """The answers that are whole; a torn line at the end is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return read_answers(path, vocabulary)


def _answer(line: str) -> Answer:
    row = json.loads(line)
    return Answer(row["id"], row["tokens"], [(start, end) for start, end in row["learn"]], row.get("finish_reason"))


def _claim(folder: Path, target: Target, tokenizer: Any, config: Config) -> None:
    """Say whose answers these are; refuse to mix them with others'."""
    mine = {
        "target": binding(target), "template": template_hash(tokenizer),
        "config": config.model_dump(mode="json", exclude={"count", "slots", "skip_bad", "folder", "grams"}),
    }  # fmt: skip
    path = folder / MANIFEST
    if not path.exists() or not (folder / ANSWERS).exists():
        _write_manifest(folder, mine)
        return
    try:
        theirs = json.loads(path.read_text())
        theirs.pop("grams", None)
    except (ValueError, AttributeError):
        theirs = {}
    if theirs != mine:
        differs = [key for key in mine if theirs.get(key) != mine[key]]
        raise DataError(
            f"{folder} holds answers made with another {' and '.join(differs)}; name another prepare.folder, or delete it"
        )


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    part = folder / (MANIFEST + ".part")
    part.write_text(json.dumps(manifest, indent=2))
    os.replace(part, folder / MANIFEST)


def _keep_grams(folder: Path, target: Target, asked: list[Conversation]) -> None:
    """Write the hashes of all prompts and answers there are, and name them in the manifest; nothing where they are there."""
    there = grams.named(folder, MANIFEST)
    if there is not None and not there.facts["unknown"] and grams.is_whole(there):
        return
    prompts = {one.id: [m["content"] for m in one.messages if m["role"] != "assistant"] for one in asked}
    collected, unknown = grams.Collector("prompts", "answers"), 0
    with (folder / ANSWERS).open(encoding="utf-8") as lines:
        for line in lines:
            answer = _answer(line)
            if answer.id in prompts:
                collected.add("prompts", prompts[answer.id])
            else:  # of an earlier run that was asked more, and stopped before it came here
                unknown += 1
            collected.add("answers", [target.decode(answer.tokens[start:end]) for start, end in answer.learn])
    facts = collected.save(folder / GRAMS) | {"unknown": unknown}
    facts["of"] = {"file": ANSWERS, "size_bytes": (folder / ANSWERS).stat().st_size}
    _write_manifest(folder, json.loads((folder / MANIFEST).read_text()) | {"grams": facts})


def _answers(
    target: Target, tokenizer: Any, waiting: list[Conversation], config: Config, drafter: Drafter | None
) -> Iterator[Answer]:
    if not config.regenerate:
        for conversation in waiting:
            rendered = render(tokenizer, conversation.messages, config.length)
            if rendered.learn:
                yield Answer(conversation.id, rendered.tokens, rendered.learn)
        return
    talks = [_Talk(conversation) for conversation in waiting]
    while talks:
        asked = []
        for talk in talks:
            if talk.ask(tokenizer, config, target.spec.context):
                asked.append(talk)
            elif talk.learn:  # no room for a further turn: what was answered stays
                yield Answer(talk.id, talk.tokens, talk.learn, "length")
        yield from _round(target, asked, config, drafter)
        talks = [talk for talk in asked if not talk.over]


def _round(target: Target, talks: list[_Talk], config: Config, drafter: Drafter | None) -> Iterator[Answer]:
    """One turn of every talk; a talk that is over is given out the moment its last answer ends."""
    requests = [talk.request(config) for talk in talks]
    answers: list[list[int]] = [[] for _ in talks]
    for progress in advance(target, requests, drafter, slots=config.slots):
        answers[progress.request] += progress.tokens
        if progress.finish_reason is not None:
            talk = talks[progress.request]
            talk.hear(answers[progress.request], target.decode(answers[progress.request]))
            if talk.over:
                yield Answer(talk.id, talk.tokens, talk.learn, progress.finish_reason)


class _Talk:
    """A conversation on its way: the user's turns as given, the answers as the target writes them."""

    def __init__(self, conversation: Conversation):
        self.id = conversation.id
        self._left = [message for message in conversation.messages if message["role"] != "assistant"]
        self._said: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.learn: list[tuple[int, int]] = []

    @property
    def over(self) -> bool:
        return not any(message["role"] == "user" for message in self._left)

    def ask(self, tokenizer: Any, config: Config, context: int) -> bool:
        """Say everything up to the next user turn; False where no room is left for an answer."""
        while self._left and (not self._said or self._said[-1]["role"] != "user"):
            self._said.append(self._left.pop(0))
        tokens = prompt_tokens(tokenizer, self._said)
        if not 0 < len(tokens) < min(config.length, context):
            return False
        self.tokens = tokens
        return True

    def request(self, config: Config) -> Request:
        seed = zlib.crc32(f"{self.id} {len(self._said)}".encode()) ^ config.seed
        sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        return Request(self.tokens, min(config.max_new_tokens, config.length - len(self.tokens)), sampling)

    def hear(self, answer: list[int], text: str) -> None:
        # of several turns only the last answer trains: earlier ones stand in its prompt as the template renders them
        self.learn = [(len(self.tokens), len(self.tokens) + len(answer))]
        self.tokens = self.tokens + answer
        self._said.append({"role": "assistant", "content": text})
