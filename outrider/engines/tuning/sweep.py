"""Tokens per second by draft length and load: servers are started one after the other, with a replay at each load.

No torch.  Rounds alternate between ascending and descending lengths, so that a machine that slows down as it heats up
does not favour one.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from outrider.engines import commands
from outrider.engines.engine import Draft, Wish, engine_of
from outrider.engines.tuning.tune import Arm, Point
from outrider.errors import ConfigError, DataError
from outrider.storage.atomic import replacing
from outrider.storage.json_text import parse_json
from outrider.traffic.logs.traces import Trace
from outrider.traffic.replay.plan import Plan
from outrider.traffic.replay.run import replay

POINTS = "points.jsonl"
READY_S, STOP_S, POLL_S = 900.0, 30.0, 0.2
PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
PR_SET_PDEATHSIG = 1
"""Linux's prctl option for the signal a process gets when its parent exits."""
Starts = Callable[[Arm], AbstractContextManager[str]]
"""One way to draft → the address of a server that drafts that way."""
Measure = Callable[[str, int], float]
"""(address, load) → tokens per second."""


def arms(tokens: Iterable[int], widths: Iterable[int] = (1,), cutoffs: Iterable[float | None] = (None,)) -> list[Arm]:
    """Every combination; without tokens there is neither width nor cut-off.  Raises ConfigError for invalid ones."""
    combinations = dict.fromkeys(
        Arm(count, width, cutoff) if count else Arm(0) for count in tokens for width in widths for cutoff in cutoffs
    )
    wrong = [arm for arm in combinations if arm.tokens < 0 or arm.width < 1 or not 0 <= (arm.cutoff or 0) < 1]
    if wrong or not combinations:
        raise ConfigError(
            f"tokens must be at least 0, widths at least 1 and cut-offs from 0 to below 1, got {wrong or 'none'}"
        )
    return sorted(combinations, key=Arm.order)


def sweep(
    arms: Sequence[Arm], loads: Sequence[int], rounds: int, start: Starts,
    measure: Measure, folder: Path, about: Mapping[str, Any] | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> list[Point]:  # fmt: skip
    """Measure every arm at every load, `rounds` times, as soon as its server is up.  Points already in `folder` are not
    measured again.

    start: runs a server that drafts this way and yields its address.  measure: (address, load) → tokens per second.
    about: what was measured; a folder with points of something else is refused with a DataError.
    """
    if rounds < 1 or not loads or min(loads) < 1:
        raise ConfigError(f"rounds and loads must be at least 1, got {rounds} rounds at loads {list(loads)}")
    loads = sorted(set(loads))
    points = _begun(folder, dict(about or {}))
    done = {(point.arm, point.load, point.round) for point in points}
    planned = {(arm, load, repeat) for repeat in range(rounds) for arm in arms for load in loads}
    points = [point for point in points if point[:3] in planned]
    with (folder / POINTS).open("a", encoding="utf-8") as file:
        for repeat in range(rounds):
            for arm in arms if repeat % 2 == 0 else reversed(arms):
                left = [load for load in loads if (arm, load, repeat) not in done]
                if not left:
                    continue
                with start(arm) as url:
                    for load in left if repeat % 2 == 0 else reversed(left):
                        point = Point(arm, load, repeat, measure(url, load))
                        _keep(file, point)
                        points.append(point)
                        if progress is not None:
                            progress(
                                len(points),
                                f"{arm.tokens} tokens, {load} concurrent: {point.tokens_per_s:.0f} tokens/s",
                            )
    return points


def _keep(file: Any, point: Point) -> None:
    if not (math.isfinite(point.tokens_per_s) and point.tokens_per_s > 0):
        raise DataError(
            f"the server gave {point.tokens_per_s} tokens/s at {point.load} concurrent requests; check that it responds"
        )
    file.write(json.dumps([*point.arm, point.load, point.round, point.tokens_per_s]) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _begun(folder: Path, about: dict[str, Any]) -> list[Point]:
    """Points that were already measured.  A line cut off by a crash is dropped."""
    path = folder / POINTS
    about = json.loads(json.dumps(about))
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write(path, json.dumps(about) + "\n")
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    try:
        header, *rows = (parse_json(line) for line in whole)
        points = [Point(Arm(*row[:3]), *row[3:]) for row in rows]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} can't be read ({error}); name another --out, or delete it") from None
    differing = sorted(key for key in header.keys() | about.keys() if header.get(key) != about.get(key))
    if differing:
        raise DataError(f"{path} was measured with another {', '.join(differing)}; name another --out, or delete it")
    if len(whole) < len(lines):
        _write(path, "".join(whole))
    return points


def _write(path: Path, text: str) -> None:
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


@contextmanager
def served(
    words: Sequence[str], url: str, health: str, log: Path, ready_s: float = READY_S,
    env: Mapping[str, str] | None = None,
) -> Iterator[str]:  # fmt: skip
    """Run a server for the duration of the block, with its output in `log`.  Yields `url`.

    env: extra environment variables.  The server exits with this process, even if the process is killed (on Linux).
    Raises DataError if the address is already in use, and if the server exits or does not respond within `ready_s`.
    """
    if _answers(url + health):
        raise DataError(f"a server is already running at {url}; stop it, or choose another --port")
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_ends_with_parent,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        except OSError as error:
            raise DataError(
                f"{words[0]} can't be run: {error.strerror}; install it, or name the Python of its environment with "
                "--python"
            ) from None
    try:
        until_s = time.monotonic() + ready_s
        while not _answers(url + health):
            if process.poll() is not None:
                raise DataError(
                    f"{words[0]} exited with {process.returncode} before it answered; see {log}, its last lines: "
                    f"{last_lines(log)}"
                )
            if time.monotonic() > until_s:
                raise DataError(f"{words[0]} did not answer at {url} within {ready_s:.0f} s; see {log}")
            time.sleep(POLL_S)
        yield url
    finally:
        _stop(process)


def _answers(place: str) -> bool:
    try:
        return httpx.get(place, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop the process and its children, which form a process group."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def last_lines(log: Path, count: int = 3) -> str:
    """The last lines of a log, joined into one."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return " | ".join(line.strip()[:300] for line in lines[-count:]) or "none"


def _ends_with_parent() -> None:
    """Runs in the child: Linux kills it when its parent exits."""
    if PRCTL is not None:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


# ── servers and their load ────────────────────────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def of_template(start: str, port: int, health: str, out: Path, ready_s: float = READY_S) -> Starts:
    """Servers of a command template."""
    if "{tokens}" not in start or "{port}" not in start:
        raise ConfigError(
            "--start must contain {tokens} and {port}, where the draft length and the port are filled in; add them"
        )

    def starts(arm: Arm) -> AbstractContextManager[str]:
        filled = start
        for name, value in {"tokens": arm.tokens, "width": arm.width, "cutoff": arm.cutoff or 0, "port": port}.items():
            filled = filled.replace(f"{{{name}}}", str(value))
        return served(shlex.split(filled), f"http://127.0.0.1:{port}", health, out / "server.log", ready_s)

    return starts


def of_engine(
    engine: str, draft: Draft, wish: Wish, arms: Sequence[Arm], out: Path, ready_s: float = READY_S,
    python: str | None = None, version: str | None = None,
) -> Starts:  # fmt: skip
    """Servers of an engine.  Every arm's command is built once before the first one starts, so that none is refused
    halfway.

    wish: settings that stay the same. python, version: of the engine, as in `commands.installed`.
    """
    described = engine_of(engine)
    if described.metrics is None:
        raise ConfigError(
            f"{described.title} can't be started and measured by `outrider tune`; name one of vllm, sglang, trtllm, "
            "llamacpp"
        )
    version = version or (None if python is None else commands.installed(engine, python))
    wish = replace(wish, files=str(out))
    made = {arm: commands.command(engine, draft, replace(wish, **arm._asdict()), version) for arm in arms}

    @contextmanager
    def starts(arm: Arm) -> Iterator[str]:
        for name, text in made[arm].files.items():
            (out / name).write_text(text, encoding="utf-8")
        words = _in_environment(made[arm].words, python)
        with served(words, f"http://127.0.0.1:{wish.port}", described.health, out / "server.log", ready_s) as url:
            yield url

    return starts


def _in_environment(words: tuple[str, ...], python: str | None) -> list[str]:
    """The same words, with programs taken from that Python's environment."""
    if python is None:
        return list(words)
    program = Path(python).parent / words[0]
    first = python if words[0] == "python" else str(program) if program.exists() else words[0]
    return [first, *words[1:]]


def by_replay(
    trace: Trace, calls: int, max_tokens: int, completions: bool, key: str | None
) -> Measure:  # fmt: skip
    """(address, load) → tokens per second, by a closed-loop replay."""

    def measure(url: str, load: int) -> float:
        count = max(calls, 8 * load)
        plan = Plan(concurrency=load, limit=count, max_tokens=max_tokens, ignore_eos=True, completions=completions)
        result = replay(_repeated(trace, count), [url], plan, key=key)
        if not result.is_whole:
            raise KeyboardInterrupt
        [one] = result.endpoints
        if one.answered < one.sent:
            failures = ", ".join(f"{reason}: {number}" for reason, number in {**one.failed, **one.cut_off}.items())
            lost = one.sent - one.answered
            raise DataError(f"{lost} of {one.sent} requests were not answered ({failures}); see the server's log")
        if not one.tokens:
            raise DataError(f"{url} does not report how many tokens it generated (usage); use an engine that does")
        return one.tokens_per_s

    return measure


def _repeated(trace: Trace, count: int) -> Trace:
    """The log, repeated until it has `count` calls."""
    times = -(-count // trace.size)
    offsets, lines = [*trace.offsets] * times, [*trace.lines] * times
    return replace(trace, size=trace.size * times, offsets=offsets, lines=lines, has_times=False)
