"""Answer a file of prompts into another file, one JSON object per line, and each prompt once.

Every answer is written when it arrives.  Rerun the same command to resume after a stop or a kill: prompts that have an
answer are skipped.  Failed prompts get no line, and the next run tries them again.
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
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.lock import held
from outrider.storage.trusted import regular

Update = Callable[[int, int], None]
"""Called with the numbers of answered and of failed prompts."""
SHORT = 16
"""Characters of a hash that is used as an id."""


class Prompt(NamedTuple):
    """A line of the file."""

    id: str
    """From the line, or a hash of it."""
    body: Mapping[str, Any]
    """`messages` or `prompt`, and settings."""
    request: str
    """Hash of the body with all settings, which tells answers to different requests apart."""


@dataclass
class FileProgress:
    """Which prompts of a file one run has answered, and which failed."""

    answered: int = 0
    failed: dict[str, ClientError] = field(default_factory=dict)
    """Errors by the ids of prompts."""
    stopped: ClientError | None = None
    """Why the run ended early."""


def read_prompts(path: Path, settings: Mapping[str, Any]) -> list[Prompt]:
    """The prompts of a file.  settings: defaults for lines that do not set them.

    Raises DataError, with the line number, for an invalid line.
    """
    prompts: list[Prompt] = []
    ids, hashes = dict[str, int](), Counter[str]()
    try:
        with regular(path).open("rb") as file:
            for number, line in numbered_lines(file):
                if not line.strip():
                    continue
                prompt = _prompt(line, f"{path}, line {number}", settings, hashes)
                if prompt.id in ids:
                    raise DataError(f"{path}, line {number}: id {prompt.id!r} is already in line {ids[prompt.id]}")
                ids[prompt.id] = number
                prompts.append(prompt)
    except OSError as error:
        raise DataError(f"can't read {path}: {error}; give a JSONL file in UTF-8") from None
    if not prompts:
        raise DataError(f'{path} has no prompts; give lines such as {{"prompt": "…"}} or {{"messages": […]}}')
    return prompts


def _prompt(line: bytes, where: str, settings: Mapping[str, Any], hashes: Counter[str]) -> Prompt:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from None
    if isinstance(row, str):
        row = {"prompt": row}
    fields = row.get("body", row) if isinstance(row, dict) else None  # OpenAI's batch format has a body
    if not isinstance(fields, dict) or ("messages" in fields) == ("prompt" in fields):
        raise DataError(f"{where} must be a text, or an object with either messages or prompt")
    body = {**settings, **{name: value for name, value in fields.items() if name not in ("id", "custom_id", "stream")}}
    if "max_completion_tokens" in fields and "max_tokens" not in fields:
        body.pop("max_tokens", None)  # the line's limit replaces the default
    name = row.get("id", row.get("custom_id"))
    if name is None:
        short = digest(fields)[:SHORT]
        hashes[short] += 1
        name = short if hashes[short] == 1 else f"{short}-{hashes[short]}"  # a repeated prompt is answered again
    elif not isinstance(name, str | int) or isinstance(name, bool):
        raise DataError(f"{where}: id must be a text or a number, got {name!r}")
    return Prompt(str(name), body, digest(body)[:SHORT])


def _answered(path: Path) -> dict[str, str]:
    """Ids that have an answer, with the hashes of their requests; a truncated last line is removed.

    Raises DataError if the file holds anything else.
    """
    requests: dict[str, str] = {}
    for number, line in whole_lines(path):
        try:
            row = parse_json(line)
            requests[row["id"]] = row["request"]
        except (ValueError, LookupError, TypeError):
            raise DataError(f"{path}, line {number}, is not an answer of `outrider ask`; name another file") from None
    return requests


def unanswered(prompts: Sequence[Prompt], to: Path) -> list[Prompt]:
    """The prompts without an answer in `to`.

    Raises DataError if an answer has the id of a prompt and belongs to another request.
    """
    before = _answered(to)
    for prompt in prompts:
        if before.get(prompt.id, prompt.request) != prompt.request:
            raise DataError(
                f"{to} has an answer to another request with id {prompt.id!r}: the prompt or its settings have "
                "changed; name another file with --out"
            )
    return [prompt for prompt in prompts if prompt.id not in before]


@contextmanager
def locked(to: Path) -> Iterator[None]:
    """Lock the file of answers.  Raises DataError if another process has it, ConfigError if it can't be created."""
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
) -> FileProgress:
    """Answer prompts concurrently and append the answers to a file.  Ends early when the budget is used up or the
    breaker opens."""
    progress, queue = FileProgress(), iter(prompts)
    with to.open("a", encoding="utf-8") as out:
        await asyncio.gather(*(_work(client, queue, out, progress, update) for _ in range(concurrency)))
    return progress


async def _work(
    client: AsyncClient, queue: Iterator[Prompt], out: IO[str], progress: FileProgress, update: Update
) -> None:
    for prompt in queue:
        if progress.stopped is not None:
            return
        try:
            answer = await ask(client, prompt.body)
        except ClientError as error:
            progress.failed[prompt.id] = error
            if isinstance(error, BudgetExceeded | CircuitOpen):
                progress.stopped = error
        else:
            out.write(json.dumps(_row(prompt, answer)) + "\n")
            out.flush()  # survives a kill of the process
            progress.answered += 1
        update(progress.answered, len(progress.failed))


async def ask(client: AsyncClient, body: Mapping[str, Any]) -> Answer:
    """The answer to a body with `messages` or `prompt`."""
    if "messages" in body:
        return await client.chat(body["messages"], **_settings(body))
    return await client.complete(body["prompt"], **_settings(body))


async def stream_text(client: AsyncClient, body: Mapping[str, Any], stream: bool = True) -> AsyncIterator[str]:
    """The text of the answer, in pieces if `stream`, else whole."""
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
