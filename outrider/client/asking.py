"""A file of prompts, answered into another: a JSON object a line, and each line is answered once.

A line of answers is written when its answer has come.  A run that was stopped, even killed, goes on: prompts that have
an answer are left out.  What failed has no line, and is asked again by the next run.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from outrider.client.answers import Answer
from outrider.client.asynchronous import AsyncClient
from outrider.client.cache import digest
from outrider.client.failures import BudgetExceeded, CircuitOpen, ClientError
from outrider.errors import ConfigError, DataError
from outrider.storage.atomic import whole_lines
from outrider.storage.lock import held

Update = Callable[[int, int], None]
"""Called with the numbers of prompts that are answered and that failed."""
SHORT = 16
"""Characters of a hash that stands for an id."""


class Prompt(NamedTuple):
    """A line of the file."""

    id: str
    """Its own, or a hash of it."""
    body: Mapping[str, Any]
    """`messages` or `prompt`, and settings."""
    request: str
    """Hash of the body with all settings: an answer to another request is not taken for one to this."""


@dataclass
class Outcome:
    """What became of a file's prompts in one run."""

    answered: int = 0
    failed: dict[str, ClientError] = field(default_factory=dict)
    """Error of each prompt, by its id."""
    stopped: ClientError | None = None
    """Why not all were asked."""

    @property
    def reasons(self) -> Counter[str]:
        """How often each kind of error came."""
        return Counter(type(error).__name__ for error in self.failed.values())


def prompts_of(path: Path, settings: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a file.  settings: of lines that do not say otherwise.

    Raises DataError, with the number of the line, for one that can't be asked.
    """
    found: list[Prompt] = []
    ids, hashes = dict[str, int](), Counter[str]()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                prompt = _prompt(line, f"{path}, line {number}", settings, hashes)
                if prompt.id in ids:
                    raise DataError(f"{path}, line {number}: id {prompt.id!r} is in line {ids[prompt.id]} too")
                ids[prompt.id] = number
                found.append(prompt)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"can't read {path}: {error}; give a JSONL file in UTF-8") from None
    if not found:
        raise DataError(f'{path} has no prompts; give lines such as {{"prompt": "…"}} or {{"messages": […]}}')
    return found


def _prompt(line: str, where: str, settings: Mapping[str, Any], hashes: Counter[str]) -> Prompt:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if isinstance(row, str):
        row = {"prompt": row}
    own = row.get("body", row) if isinstance(row, dict) else None  # OpenAI's batch format has a body
    if not isinstance(own, dict) or ("messages" in own) == ("prompt" in own):
        raise DataError(f"{where} must be a text, or an object with either messages or prompt")
    body = {**settings, **{name: value for name, value in own.items() if name not in ("id", "custom_id", "stream")}}
    body = _one_length(body, own)
    name = row.get("id", row.get("custom_id"))
    if name is None:
        short = digest(own)[:SHORT]
        hashes[short] += 1
        name = short if hashes[short] == 1 else f"{short}-{hashes[short]}"  # the same prompt again is another one
    elif not isinstance(name, str | int) or isinstance(name, bool):
        raise DataError(f"{where}: id must be a text or a number, got {name!r}")
    return Prompt(str(name), body, digest(body)[:SHORT])


def _one_length(body: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A line's max_completion_tokens stands instead of everybody's max_tokens."""
    is_twice = "max_completion_tokens" in own and "max_tokens" not in own
    return {name: value for name, value in body.items() if not (is_twice and name == "max_tokens")}


def answered(path: Path) -> dict[str, str]:
    """Ids that have an answer, and the hash of its request; a last line that was cut short is taken away.

    Raises DataError for a file of something else.
    """
    found: dict[str, str] = {}
    for number, line in whole_lines(path):
        try:
            row = json.loads(line)
            found[row["id"]] = row["request"]
        except (ValueError, LookupError, TypeError):
            raise DataError(f"{path}, line {number}, is no answer of `outrider ask`; name another file") from None
    return found


def left_of(prompts: Sequence[Prompt], to: Path) -> list[Prompt]:
    """The prompts without an answer in `to`.

    Raises DataError where an answer is to another request under the same id.
    """
    before = answered(to)
    for prompt in prompts:
        if before.get(prompt.id, prompt.request) != prompt.request:
            raise DataError(
                f"{to} has an answer to another request with id {prompt.id!r}: the prompt or its settings have "
                "changed; name another file with --out"
            )
    return [prompt for prompt in prompts if prompt.id not in before]


@contextmanager
def locked(to: Path) -> Iterator[None]:
    """Nobody else writes answers into this file.  Raises DataError where somebody does, ConfigError where there is no
    folder for it."""
    try:
        to.touch()
    except OSError as error:
        raise ConfigError(
            f"can't write {to}: {error.strerror}; name a file in a folder that exists and can be written to"
        ) from None
    with held(to, DataError(f"another process writes answers into {to}; wait for it, or name another file")):
        yield


async def ask_all(
    client: AsyncClient, prompts: Sequence[Prompt], to: Path, concurrency: int, update: Update = lambda *_: None
) -> Outcome:
    """Ask so many at once and add the answers to a file.  It ends early where the budget or the server's patience is
    used up."""
    outcome, several = Outcome(), iter(prompts)
    with to.open("a", encoding="utf-8") as out:
        await asyncio.gather(*(_work(client, several, out, outcome, update) for _ in range(concurrency)))
    return outcome


async def _work(client: AsyncClient, prompts: Iterator[Prompt], out: IO[str], outcome: Outcome, update: Update) -> None:
    for prompt in prompts:
        if outcome.stopped is not None:
            return
        try:
            answer = await ask(client, prompt.body)
        except (BudgetExceeded, CircuitOpen) as error:
            outcome.stopped = error
            outcome.failed[prompt.id] = error
        except ClientError as error:
            outcome.failed[prompt.id] = error
        else:
            out.write(json.dumps(_row(prompt, answer)) + "\n")
            out.flush()  # from here on a killed process does not lose it
            outcome.answered += 1
        update(outcome.answered, len(outcome.failed))


async def ask(client: AsyncClient, body: Mapping[str, Any]) -> Answer:
    """The answer to a body with `messages` or `prompt`."""
    if "messages" in body:
        return await client.chat(body["messages"], **_settings(body))
    return await client.complete(body["prompt"], **_settings(body))


async def streamed(client: AsyncClient, body: Mapping[str, Any], stream: bool = True) -> AsyncIterator[str]:
    """The same answer's text, in pieces as it is written where `stream`."""
    if not stream:
        yield (await ask(client, body)).text
        return
    is_chat, settings = "messages" in body, _settings(body)
    chunks = (
        client.chat_stream(body["messages"], **settings) if is_chat
        else client.complete_stream(body["prompt"], **settings)
    )  # fmt: skip
    async with aclosing(chunks):
        async for chunk in chunks:
            yield chunk.text


def _settings(body: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in ("messages", "prompt")}


def _row(prompt: Prompt, answer: Answer) -> dict[str, Any]:
    return {
        "id": prompt.id, "request": prompt.request, "text": answer.text, "finish_reason": answer.finish_reason,
        "usage": None if answer.usage is None else answer.usage._asdict(),
        "cost": None if answer.cost is None else f"{answer.cost:f}",
        "attempts": answer.attempts, "request_id": answer.request_id, "model": answer.raw.get("model"),
    }  # fmt: skip
