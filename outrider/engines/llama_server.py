"""llama.cpp's server on this machine: finding the program, starting it, and how much of each draft was accepted.

The server reports how many drafted tokens a whole request has accepted (`timings` of an answer).  With LLAMA_TRACE it
also logs every verified step, by the task number of its request; `steps_of` reads that log.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import httpx

from outrider.engines.tuning import sweep
from outrider.errors import ConfigError, DataError

VARIABLE = "LLAMA_SERVER"
"""Environment variable that names the program."""
ANSWERS_S = 600.0
"""Maximum duration of one request, in seconds."""
STEP = re.compile(r"\| task (\d+) \| accepted +(\d+)/ *(\d+) draft tokens$")
ERROR = re.compile(r"^[\d.]+ E (.*)")
"""A line marked as an error, after its timestamp."""
MOST_ERRORS = 4
ENDED = re.compile(r"\| task (\d+) \| stop processing: ")


class Step(NamedTuple):
    """One verified step that had a draft."""

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """The greedy text of one request."""

    tokens: list[int]
    """Includes the token that ends the text, if one does."""
    drafted: int
    accepted: int


def program(path: str | Path | None = None) -> Path:
    """The server's program: as given, otherwise from LLAMA_SERVER or the PATH.

    Raises ConfigError, which says how to get it, if there is none.
    """
    named = str(path or os.environ.get(VARIABLE) or "")
    executable = shutil.which(named or "llama-server")
    if executable is None:
        what = f"no program {named}" if named else f"no llama-server on the PATH, and {VARIABLE} is not set"
        how = "build it with `python benchmarks/engines/build_llama.py` (6 minutes), or install llama.cpp"
        raise ConfigError(f"{what}; {how}, and name it with --server or {VARIABLE}")
    return Path(executable).absolute()


@contextmanager
def serving(words: Sequence[object], log: Path) -> Iterator[httpx.Client]:
    """Run the server for the duration of the block, on a free loopback port. words: the program and its arguments.

    log: receives its output; complete once the block has ended.  Raises DataError, with the server's last lines, if it
    does not start, exits, or stops responding.
    """
    port = sweep.free_port()
    command = [*map(str, words), "--host", "127.0.0.1", "--port", str(port), "--log-colors", "off"]
    try:
        with (
            sweep.served(command, f"http://127.0.0.1:{port}", "/health", log, env={"LLAMA_TRACE": "1"}) as url,
            httpx.Client(base_url=url, timeout=ANSWERS_S, trust_env=False) as client,
        ):
            yield client
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        silent = f"llama-server did not answer a request ({reason})"
        raise DataError(f"{silent}; see {log}, its last lines: {sweep.last_lines(log)}{_errors(log)}") from None
    except DataError as error:
        raise DataError(f"{error}{_errors(log)}") from None


def _errors(log: Path) -> str:
    """The messages that the server marked as errors, without duplicates, as the end of a sentence; empty if there are
    none."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    messages = dict.fromkeys(match[1].strip() for line in lines if (match := ERROR.search(line)))
    return f"; its errors: {' | '.join(list(messages)[:MOST_ERRORS])}" if messages else ""


def continued(client: httpx.Client, prompt: Sequence[int], new: int) -> Answer:
    """The greedy continuation of token ids, at most `new` tokens.  Raises DataError if the server refuses it."""
    body = {
        "prompt": list(prompt), "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True,
    }  # fmt: skip
    answer = client.post("/completion", json=body)
    if answer.status_code != 200:
        raise DataError(f"llama-server refused a prompt of {len(prompt)} tokens: {answer.text[:300]}")
    reply = answer.json()
    times = reply["timings"]
    return Answer(list(reply["tokens"]), times.get("draft_n", 0), times.get("draft_n_accepted", 0))


def steps_of(log: Path, answers: Sequence[Answer]) -> list[list[Step]]:
    """The verified steps of each answer, from the log of a server that received one request at a time.

    Raises DataError if the log and the answers' own counts differ.
    """
    by_task: dict[str, list[Step]] = {}
    tasks: list[str] = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if step := STEP.search(line):
            by_task.setdefault(step[1], []).append(Step(int(step[3]), int(step[2])))
        elif end := ENDED.search(line):
            tasks.append(end[1])
    by_answer = [by_task.get(task, []) for task in tasks]
    counts = [(sum(step.drafted for step in steps), sum(step.accepted for step in steps)) for steps in by_answer]
    if counts != [(answer.drafted, answer.accepted) for answer in answers]:
        logged = f"{sum(drafted for drafted, _ in counts)} drafted tokens in {len(by_answer)} requests"
        answered = f"{sum(answer.drafted for answer in answers)} in {len(answers)}"
        raise DataError(
            f"llama-server logged {logged}, but its answers report {answered}; this version logs its steps otherwise: "
            "use one near 0c1e570"
        )
    return by_answer
