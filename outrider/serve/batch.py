"""Offline batches: requests from a file in OpenAI's batch format, one JSON object per line, answered into another file.

An answer is written when its request has ended.  An interrupted run resumes: requests whose custom_id has an answer are
skipped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple
from uuid import uuid4

from outrider.errors import ConfigError, DataError
from outrider.serve.bodies.parsing import read
from outrider.serve.bodies.refusals import Refusal, invalid
from outrider.serve.service import Kind, Post, Service
from outrider.storage.atomic import whole_lines
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.trusted import regular

URLS: dict[str, Kind] = {
    "/v1/completions": "completion", "/v1/chat/completions": "chat", "/v1/responses": "response",
}  # fmt: skip
REQUESTS_PER_SLOT = 2
"""Requests in flight per slot: one runs while the other waits its turn."""

Update = Callable[[int, int], None]
"""Called with the number of answered requests, and how many of them were refused."""


class Line(NamedTuple):
    """A request of the file."""

    custom_id: str
    kind: Kind
    body: Any
    size: int
    """In bytes."""


def lines_of(path: Path) -> Iterator[Line]:
    """The requests of a file.  Raises DataError, with the line number, for an invalid one."""
    ids: set[str] = set()
    try:
        with regular(path).open("rb") as file:
            for number, text in numbered_lines(file):
                if text.strip():
                    yield _line(text, f"{path}, line {number}", ids)
    except OSError as error:
        raise DataError(f"can't read {path}: {error.strerror or error}; give a JSONL file") from None


def _line(text: bytes, where: str, ids: set[str]) -> Line:
    try:
        row = read(text, where)
    except Refusal as refusal:
        raise DataError(refusal.message) from None
    if not isinstance(row, dict) or not isinstance(row.get("custom_id"), str) or not isinstance(row.get("body"), dict):
        raise DataError(f"{where} must be an object with custom_id, a string, and body, an object")
    if row.get("method", "POST") != "POST" or row.get("url") not in list(URLS):  # a list has no hash
        raise DataError(
            f"{where} is a {row.get('method', 'POST')} of {row.get('url')!r}; expected POST and {' or '.join(URLS)}"
        )
    if row["custom_id"] in ids:
        raise DataError(f"{where}: custom_id {row['custom_id']!r} is used twice; each request needs its own")
    ids.add(row["custom_id"])
    return Line(row["custom_id"], URLS[row["url"]], row["body"], len(text))


def answered(path: Path) -> set[str]:
    """The custom_ids that have an answer; removes an incomplete last line.  Raises DataError for any other file."""
    ids: set[str] = set()
    for number, line in whole_lines(path):
        try:
            ids.add(parse_json(line)["custom_id"])
        except (ValueError, LookupError, TypeError):
            raise DataError(f"{path}, line {number}, is not a batch answer; name another file") from None
    return ids


def check(source: Path, to: Path) -> tuple[int, int]:
    """Number of requests, and of those already answered.  Raises DataError or ConfigError; loads no weights."""
    if to.exists() and source.exists() and source.samefile(to):
        raise ConfigError(f"answers would overwrite {source}; name another file with --batch-out")
    if not to.parent.is_dir():
        raise ConfigError(f"can't write the answers to {to}: the folder {to.parent} does not exist; create it first")
    before = answered(to)
    ids = [line.custom_id for line in lines_of(source)]
    return len(ids), len(before.intersection(ids))


def run(service: Service, post: Post, source: Path, to: Path, update: Update = lambda done, refused: None) -> int:
    """Answer the unanswered requests of a file; returns how many were refused."""
    before = answered(to)
    waiting = (line for line in lines_of(source) if line.custom_id not in before)

    async def main() -> int:
        post.loop = asyncio.get_running_loop()
        with to.open("a", encoding="utf-8") as out:
            work = Work(service, out, update)
            in_flight = min(REQUESTS_PER_SLOT * service.engine.slots, service.config.queue)
            await asyncio.gather(*(work.run(waiting) for _ in range(in_flight)))
            return work.refused

    return asyncio.run(main())


class Work:
    """Answers requests one after another; `run` may be called from several tasks."""

    def __init__(self, service: Service, out: IO[str], update: Update):
        self.service, self.out, self.update = service, out, update
        self.done = self.refused = 0

    async def run(self, waiting: Iterator[Line]) -> None:
        for line in waiting:
            status, body = await self._answer(line)
            response = {"status_code": status, "request_id": body.get("id") or f"req-{uuid4().hex}", "body": body}
            row = {
                "id": f"batch_req_{uuid4().hex}",
                "custom_id": line.custom_id,
                "response": response,
                "error": None,
            }
            self.out.write(json.dumps(row) + "\n")
            self.out.flush()
            self.done, self.refused = self.done + 1, self.refused + (status != 200)
            self.update(self.done, self.refused)

    async def _answer(self, line: Line) -> tuple[int, dict[str, Any]]:
        while True:
            try:
                if line.body.get("stream"):
                    raise invalid("stream has no effect in a batch; leave it out", "stream")
                job = await self.service.start(line.kind, line.body, line.size)
                try:
                    return 200, await self.service.whole(job)
                finally:
                    self.service.finish(job)
            except Refusal as refusal:
                if refusal.status == 503 or self.service.engine.error:
                    raise DataError(
                        "the engine stopped; the answers so far are kept, rerun the command to resume"
                    ) from None
                if refusal.status == 429:
                    await asyncio.sleep(0.1)
                    continue
                return refusal.status, refusal.body
