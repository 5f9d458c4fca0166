"""Let the target answer the prompts itself, a batch of slots at a time; every finished conversation is on disk at once.

    answers.jsonl   {"id", "prompt_hash", "settings_hash", "tokens", "learn": [[start, end], ...], "finish_reason"} a line
    answers.json    the target, sampling and template they belong to, and which hashes are theirs
    prompts.grams   hashes of what stands in prompts and answers, to ask later whether a text was among them

An answer is known by what was asked and who answered, never by where the prompt stood: `prompt_hash` is that of the prompt's
content, `settings_hash` that of answers.json's target, template and settings.  A crash loses the answers being written at that
moment, and none is written twice; a torn last line is cut off.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.data import ngram_hashes
from outrider.data.conversations import (
    Config,
    Conversation,
    Skipped,
    at_place,
    check_template,
    prompt_tokens,
    render,
    template_hash,
)
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.errors import DataError
from outrider.generation import serve
from outrider.lock import held
from outrider.nn.draft_model import binding
from outrider.sampling.settings import Sampling
from outrider.targets.protocol import Target

ANSWERS, MANIFEST, GRAMS = "answers.jsonl", "answers.json", "prompts.grams"
SHAPING = {"regenerate", "length", "max_new_tokens", "temperature", "top_p", "top_k", "seed"}
"""Settings on which the text of an answer depends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text as the target saw it, and the spans of it that train."""

    id: str
    tokens: list[int]
    learn: list[tuple[int, int]]
    finish_reason: str | None = None
    prompt_hash: str | None = None
    settings_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A conversation to be answered, and the hash by which its answer is known again."""

    conversation: Conversation
    prompt_hash: str


def prepare(
    target: Target, tokenizer: Any, conversations: Iterable[Conversation], folder: str | Path, config: Config,
    drafter: Drafter | None = None, on_answer: Callable[[int, Answer], None] | None = None, skipped: Skipped | None = None,
) -> Path:  # fmt: skip
    """Write the answers of all conversations that have none yet; returns the file.  `drafter` makes it faster, not different.

    on_answer gets the number of these conversations that are answered, and the newest answer.  skipped gets what the chat
    template refuses, where `config.skip_bad` asks for that.
    Raises DataError where the folder holds answers of another target, sampling or template, or another process writes there,
    and with file and line for a conversation that the chat template refuses.
    """
    folder = Path(folder)
    path = folder / ANSWERS
    busy = DataError(f"another process is writing answers to {folder}; wait for it, or name another prepare.folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with held(folder, busy):
            there, mine = _repair(path, target.spec.vocabulary), whose(target, tokenizer, config)
            _claim(folder, mine, there)
            asked = as_asked(conversations, config)
            known = {answer.prompt_hash for answer in there}
            waiting = _renderable(tokenizer, [one for one in asked if one.prompt_hash not in known], config, skipped)
            done, settings_hash = sum(one.prompt_hash in known for one in asked), _hash(mine)
            with path.open("a", encoding="utf-8") as file:
                for answer in _answers(target, tokenizer, waiting, config, drafter, skipped):
                    file.write(_line(answer, settings_hash))
                    file.flush()
                    done += 1
                    if on_answer is not None:
                        on_answer(done, answer)
            _put_in_order(path, asked)
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


def answers_for(folder: Path, target: Target, tokenizer: Any) -> list[Answer]:
    """All answers of a folder, to train on.  Raises DataError where they are those of another target or template."""
    answers = read_answers(folder / ANSWERS, target.spec.vocabulary)
    mine = whose(target, tokenizer, Config())
    del mine["config"]  # to train on shorter texts than were written, or with other prompts to come, is no harm
    theirs = _manifest(folder)
    if answers and not theirs:
        raise DataError(f"{folder / MANIFEST} is missing or damaged; run `outrider prepare` again, it writes the file anew")
    _check(folder, answers, mine, theirs)
    return answers


def answered(folder: Path, conversations: Iterable[Conversation], config: Config) -> int:
    """How many of these conversations have their answer there; another process may be writing more."""
    path = folder / ANSWERS
    if not path.exists():
        return 0
    whole = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]
    try:
        known = {json.loads(line).get("prompt_hash") for line in whole}
    except (ValueError, AttributeError):  # `prepare` says which line is damaged
        return 0
    return sum(one.prompt_hash in known for one in as_asked(conversations, config))


def as_asked(conversations: Iterable[Conversation], config: Config) -> list[Asked]:
    """Each conversation with the hash of what its answer depends on: its messages, and its own id, which draws the noise.

    A text that is asked several times is known by its number among its equals as well.  Answers that the target is going to
    replace do not count.
    """
    found, seen = [], Counter[str]()
    for one in conversations:
        messages = [m for m in one.messages if not config.regenerate or m["role"] != "assistant"]
        content = _hash([one.id if one.has_own_id else None, messages])
        seen[content] += 1
        found.append(Asked(one, content if seen[content] == 1 else _hash([content, seen[content]])))
    return found


def whose(target: Target, tokenizer: Any, config: Config) -> dict[str, Any]:
    """The target, template and settings on which answers depend, as answers.json has them."""
    return {
        "target": binding(target) | {"ends": sorted(target.ends)},
        "template": template_hash(tokenizer),
        "config": config.model_dump(mode="json", include=SHAPING),
    }


def _hash(value: Any) -> str:
    """16 hex digits that tell two values apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _line(answer: Answer, settings_hash: str) -> str:
    row = asdict(answer)
    first = {"id": row.pop("id"), "prompt_hash": row.pop("prompt_hash"), "settings_hash": settings_hash}
    return json.dumps(first | {key: value for key, value in row.items() if key not in first}) + "\n"


def _renderable(tokenizer: Any, asked: list[Asked], config: Config, skipped: Skipped | None) -> list[Asked]:
    """Those that the chat template takes, found before the first answer is written.  Raises DataError for one it refuses."""
    if not config.regenerate:  # rendered once, when their turn comes
        return asked
    found = []
    for one in asked:
        try:
            check_template(tokenizer, one.conversation)
        except DataError as error:
            _skip(error, config, skipped)
            continue
        found.append(one)
    return found


def _skip(error: DataError, config: Config, skipped: Skipped | None) -> None:
    """Count a row that can't be used, where that is asked for; else raise."""
    if not config.skip_bad:
        raise error
    if skipped is not None:
        skipped.reasons.append(str(error))


def _repair(path: Path, vocabulary: int) -> list[Answer]:
    """The answers that are whole; a torn line at the end is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return read_answers(path, vocabulary)


def _put_in_order(path: Path, asked: Sequence[Asked]) -> None:
    """Sort answers as their prompts stand, others behind them: a run that was stopped leaves what an undisturbed one does."""
    place = {one.prompt_hash: number for number, one in enumerate(asked)}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: place.get(json.loads(line)["prompt_hash"], len(asked)))
    if ordered != lines:
        part = path.with_name(path.name + ".part")
        part.write_text("".join(ordered), encoding="utf-8")
        os.replace(part, path)


def _answer(line: str) -> Answer:
    row = json.loads(line)
    learn = [(start, end) for start, end in row["learn"]]
    known_by = row.get("prompt_hash"), row.get("settings_hash")
    return Answer(row["id"], row["tokens"], learn, row.get("finish_reason"), *known_by)


def _claim(folder: Path, mine: dict[str, Any], there: Sequence[Answer]) -> None:
    """Say whose answers these are; refuse to mix them with others'."""
    theirs = _manifest(folder)
    _check(folder, there, mine, theirs or mine)  # where answers.json is lost, the answers themselves say whose they are
    if theirs != mine:
        _write_manifest(folder, mine)


def _check(folder: Path, answers: Sequence[Answer], mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises DataError for answers of another target, template or setting than `mine`, and for one that does not say."""
    if any(answer.prompt_hash is None or answer.settings_hash is None for answer in answers):
        raise DataError(
            f"{folder / ANSWERS} does not say to which prompts its answers belong, because an older Outrider wrote it; name "
            "another prepare.folder, or delete this one, and run `outrider prepare` again"
        )
    if answers and (differs := [key for key, value in mine.items() if theirs.get(key) != value]):
        raise DataError(
            f"{folder} holds answers made with another {' and '.join(differs)}; name another prepare.folder, or delete it"
        )
    settings_hash = _hash(theirs)
    for number, answer in enumerate(answers, 1):
        if answer.settings_hash != settings_hash:
            raise DataError(
                f"{folder / ANSWERS}, line {number} was made with another target, template or config; name another "
                "prepare.folder, or delete that line"
            )


def _manifest(folder: Path) -> dict[str, Any]:
    """What answers.json says of whose the answers are; empty where it says nothing."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key != "grams"}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def _write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    part = folder / (MANIFEST + ".part")
    part.write_text(json.dumps(manifest, indent=2))
    os.replace(part, folder / MANIFEST)


def _keep_grams(folder: Path, target: Target, asked: list[Asked]) -> None:
    """Write the hashes of all prompts and answers there are, and name them in the manifest; nothing where they are there."""
    there = ngram_hashes.named(folder, MANIFEST)
    if there is not None and not there.facts["unknown"] and ngram_hashes.is_whole(there):
        return
    prompts = {one.prompt_hash: [m["content"] for m in one.conversation.messages if m["role"] != "assistant"] for one in asked}
    collected, unknown = ngram_hashes.Collector("prompts", "answers"), 0
    with (folder / ANSWERS).open(encoding="utf-8") as lines:
        for line in lines:
            answer = _answer(line)
            if answer.prompt_hash in prompts:
                collected.add("prompts", prompts[answer.prompt_hash])
            else:  # of a row that was edited since, or of an earlier run that was asked more, and stopped before it came here
                unknown += 1
            collected.add("answers", [target.decode(answer.tokens[start:end]) for start, end in answer.learn])
    facts = collected.save(folder / GRAMS) | {"unknown": unknown}
    facts["of"] = {"file": ANSWERS, "size_bytes": (folder / ANSWERS).stat().st_size}
    _write_manifest(folder, json.loads((folder / MANIFEST).read_text()) | {"grams": facts})


def _answers(
    target: Target, tokenizer: Any, waiting: list[Asked], config: Config, drafter: Drafter | None, skipped: Skipped | None
) -> Iterator[Answer]:
    if not config.regenerate:
        yield from _given(tokenizer, waiting, config, skipped)
        return
    talks = [_Talk(one) for one in waiting]
    while talks:
        asked = []
        for talk in talks:
            if talk.ask(tokenizer, config, target.spec.context):
                asked.append(talk)
            elif talk.learn:  # no room for a further turn: what was answered stays
                yield talk.answer("length")
        yield from _round(target, asked, config, drafter)
        talks = [talk for talk in asked if not talk.over]


def _given(tokenizer: Any, waiting: list[Asked], config: Config, skipped: Skipped | None) -> Iterator[Answer]:
    """The answers that came with the conversations, rendered."""
    for one in waiting:
        try:
            with at_place(one.conversation):
                rendered = render(tokenizer, one.conversation.messages, config.length)
        except DataError as error:
            _skip(error, config, skipped)
            continue
        if rendered.learn:
            yield Answer(one.conversation.id, rendered.tokens, rendered.learn, prompt_hash=one.prompt_hash)


def _round(target: Target, talks: list[_Talk], config: Config, drafter: Drafter | None) -> Iterator[Answer]:
    """One turn of every talk; a talk that is over is given out the moment its last answer ends."""
    requests = [talk.request(config) for talk in talks]
    answers: list[list[int]] = [[] for _ in talks]
    for progress in serve(target, requests, drafter, slots=config.slots):
        answers[progress.request] += progress.tokens
        if progress.finish_reason is not None:
            talk = talks[progress.request]
            talk.hear(answers[progress.request], target.decode(answers[progress.request]))
            if talk.over:
                yield talk.answer(progress.finish_reason)


class _Talk:
    """A conversation on its way: the user's turns as given, the answers as the target writes them."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._left = [message for message in asked.conversation.messages if message["role"] != "assistant"]
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
        with at_place(self._asked.conversation):
            tokens = prompt_tokens(tokenizer, self._said)
        if not 0 < len(tokens) < min(config.length, context):
            return False
        self.tokens = tokens
        return True

    def request(self, config: Config) -> Request:
        # by content, not by place: a line that moved is answered as before
        name = self._asked.conversation.id if self._asked.conversation.has_own_id else self._asked.prompt_hash
        seed = zlib.crc32(f"{name} {len(self._said)}".encode()) ^ config.seed
        sampling = Sampling(config.temperature, config.top_k, config.top_p, seed)
        return Request(self.tokens, min(config.max_new_tokens, config.length - len(self.tokens)), sampling)

    def hear(self, answer: list[int], text: str) -> None:
        # of several turns only the last answer trains: earlier ones stand in its prompt as the template renders them
        self.learn = [(len(self.tokens), len(self.tokens) + len(answer))]
        self.tokens = self.tokens + answer
        self._said.append({"role": "assistant", "content": text})

    def answer(self, finish_reason: str | None) -> Answer:
        """What was answered so far, as it is written down."""
        return Answer(self._asked.conversation.id, self.tokens, self.learn, finish_reason, self._asked.prompt_hash)
