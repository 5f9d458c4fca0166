"""Is every prompt answered exactly once, whatever is killed, and how much throughput does `prepare` cost the servers?

    python benchmarks/regeneration.py [--kills 50] [--prompts 2000] [--engine outrider|vllm] [--out FILE]

Local: the demo target answers 64 prompts, 16 tokens each, in a process that is killed with -9 at random moments and
restarted; the file must be identical, byte for byte, to that of an undisturbed run, and the ledger must add up.
Servers: two on the loopback with the demo target; one is killed with -9 after a third of the prompts and restarted on
its port.  Every prompt must have one answer.  Then both stay up, and `prepare` and a plain loop of httpx requests with
the same concurrency send the same prompts, interleaved: what share of its tokens/s does `prepare` reach?  Prints JSON;
exits with 1 if a promise does not hold, with 3 if there is no vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.batch_time import promise  # noqa: E402
from benchmarks.engines.server_process import free_port  # noqa: E402
from benchmarks.replay import provenance, publish  # noqa: E402
from outrider import demo, load_target  # noqa: E402
from outrider.data.answers.dialogue import Dialogue, hash_conversations  # noqa: E402
from outrider.data.answers.ledger import Ledger  # noqa: E402
from outrider.data.answers.regenerate import prepare  # noqa: E402
from outrider.data.answers.server import AnswerRequest  # noqa: E402
from outrider.data.answers.store import ANSWERS, Answer, iterate_answers  # noqa: E402
from outrider.data.config import Config  # noqa: E402
from outrider.data.sources.conversations import Conversation  # noqa: E402
from outrider.targets.hf.transformers import TransformersTarget  # noqa: E402

VENV = Path(os.environ.get("VENV", ROOT / "benchmarks" / "engines" / ".venv"))
"""vLLM's environment."""
START_S = 1200.0
"""Time limit of a start in seconds: others may be using the CPU."""
KILLS_A_RUN = 5
"""Kills per folder before its run may finish."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--local", type=int, default=64, help="prompts answered here")
    parser.add_argument("--prompts", type=int, default=2000, help="prompts answered by servers")
    parser.add_argument("--timed", type=int, default=400, help="prompts of each timed part")
    parser.add_argument("--rounds", type=int, default=3, help="timed parts of each kind")
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--in-flight", type=int, default=16, help="requests at each server at once")
    parser.add_argument("--engine", choices=("outrider", "vllm"), default="outrider")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.engine == "vllm" and not (VENV / "bin" / "python").exists():
        print(f"no {VENV}: run benchmarks/engines/install.py", file=sys.stderr)
        raise SystemExit(3)
    torch.set_num_threads(1)  # processes are forked from this one
    began, target = time.monotonic(), load_target("demo", compile=False)
    with tempfile.TemporaryDirectory() as folder:
        found = {"local": killed_runs(target, Path(folder), options)} if options.kills else {}
        if options.prompts:
            found["servers"] = on_servers(target, Path(folder), options)
    promises = [one for part in found.values() for one in part.pop("promises")]
    publish(provenance(time.monotonic() - began) | {"promises": promises} | found, options.out)
    raise SystemExit(0 if all(each["holds"] for each in promises) else 1)


def conversations(count: int, first: int = 0) -> list[Conversation]:
    drawn = list(demo.prompts("train", first + count, characters=240))[first:]
    assert len(drawn) == count, f"there are {len(drawn)} prompts, not {count}"
    return [Conversation(name, [{"role": "user", "content": text}]) for name, text in drawn]


def settings(new: int, **more: Any) -> Config:
    return Config(length=512, max_new_tokens=new, ngram_hashes=False, **more)


# ── local ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_runs(target: TransformersTarget, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Folders whose runs are killed again and again, each compared with an undisturbed one."""
    asked, config = conversations(options.local), settings(options.new, slots=4)  # few, so that answers trickle in
    run = lambda place: prepare(target, target.tokenizer, asked, place, config)
    began = time.monotonic()
    finish(run, folder / "whole")
    whole_s, whole = time.monotonic() - began, (folder / "whole" / ANSWERS).read_bytes()
    draw, kills, equal, once, runs, moments = random.Random(0), 0, 0, 0, 0, Counter[int]()
    while kills < options.kills:
        place = folder / f"run{runs}"
        for _ in range(min(KILLS_A_RUN, options.kills - kills)):
            was_killed, lines = kill(run, place, draw.uniform(0, 2 * whole_s / KILLS_A_RUN))
            kills += was_killed
            moments[lines] += was_killed
        finish(run, place)
        runs += 1
        equal += (place / ANSWERS).read_bytes() == whole
        once += is_once(place, len(asked))
    return {
        "promises": [
            promise("kills -9 of a local run", options.kills, kills),
            promise("runs whose file is that of an undisturbed one, byte for byte", runs, equal),
            promise("runs with one answer to every prompt, in file and ledger", runs, once),
        ],
        "prompts": len(asked), "new": options.new, "seconds_undisturbed": round(whole_s, 2),
        "answers_in_the_file_when_killed": {str(lines): number for lines, number in sorted(moments.items())},
    }  # fmt: skip


def finish(run: Callable[[Path], object], place: Path) -> None:
    child = multiprocessing.get_context("fork").Process(target=run, args=(place,))
    child.start()
    child.join()
    assert child.exitcode == 0, f"a run ended with {child.exitcode}"


def kill(run: Callable[[Path], object], place: Path, after_s: float) -> tuple[bool, int]:
    """Kill a run with -9 after this many seconds; returns whether it was still at work, and how many answers it had."""
    child = multiprocessing.get_context("fork").Process(target=run, args=(place,))
    child.start()
    time.sleep(after_s)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    path = place / ANSWERS
    return child.exitcode == -signal.SIGKILL, path.read_bytes().count(b"\n") if path.exists() else 0


def is_once(place: Path, prompts: int) -> bool:
    """Whether file and ledger have one answer to each of this many prompts, and nothing else."""
    counts = Counter(answer.prompt_hash for answer in iterate_answers(place / ANSWERS))
    with Ledger(place) as ledger:
        ledgers = ledger.counts()
    return len(counts) == prompts == ledgers["answered"] == sum(ledgers.values()) and set(counts.values()) == {1}


# ── servers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Engine:
    """A server on its own port, which can be killed and restarted."""

    def __init__(self, engine: str, slots: int, log: Path):
        self.port, self._log = free_port(), log
        if engine == "vllm":
            self._command = [ROOT / "benchmarks" / "engines" / "serve_vllm.sh", "--max-num-seqs", slots]
            self._command += ["--per-request-spec-decode-metrics", "none", "--speculative-config", "null"]
        else:
            self._command = [sys.executable, "-m", "outrider", "serve", "--target", "demo", "--no-compile"]
            self._command += ["--slots", slots]
        self._command += ["--port", self.port]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        alone = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "VENV": str(VENV)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, self._command)), stdout=log, stderr=log, start_new_session=True, env=os.environ | alone
            )

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            assert self._process.poll() is None, self._log.read_text()[-600:]
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/models", timeout=5).status_code == 200:
                    return
            time.sleep(0.2)
        raise ChildProcessError(f"no answer within {START_S:.0f} s: {self._log.read_text()[-600:]}")


@contextmanager
def engines(options: argparse.Namespace, folder: Path) -> Iterator[list[Engine]]:
    with ExitStack() as stack:
        found = []
        for number in range(2):
            found.append(Engine(options.engine, options.in_flight, folder / f"{options.engine}{number}.log"))
            stack.callback(found[-1].kill)
        for one in found:
            one.wait()
        yield found


def on_servers(target: TransformersTarget, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    with engines(options, folder) as servers:
        killed = one_killed(target, folder, servers, options)
        timed = compared(target, folder, servers, options)
    return {"engine": options.engine, "in_flight": options.in_flight, "new": options.new, **killed, **timed} | {
        "promises": [*killed["promises"], *timed["promises"]]
    }


def one_killed(
    target: TransformersTarget, folder: Path, servers: Sequence[Engine], options: argparse.Namespace
) -> dict[str, Any]:
    """All prompts on two servers, one of which dies after a third of them and is restarted."""
    asked, place, count = conversations(options.prompts), folder / "killed", options.prompts
    died: dict[str, float] = {}
    began = time.monotonic()

    def on_answer(done: int, answer: Answer) -> None:
        if done == count // 3:
            servers[1].kill()
            servers[1].start()
            died["s"] = time.monotonic() - began

    config = settings(options.new, servers=[one.url for one in servers], in_flight=options.in_flight)
    prepare(target, target.tokenizer, asked, place, config, on_answer=on_answer)
    seconds = time.monotonic() - began
    servers[1].wait()
    with Ledger(place) as ledger:
        counts, by, attempts = ledger.counts(), ledger.servers(), attempts_of(place)
    return {
        "promises": [
            promise(f"prompts answered once by two servers of {options.engine}, one killed", 1, is_once(place, count))
        ],
        "prompts": count, "seconds": round(seconds, 1), "killed_after_s": round(died["s"], 1), "ledger": counts,
        "answers_by_server": [by.get(one.url, 0) for one in servers],
        "prompts_asked_more_than_once": sum(number for times, number in attempts.items() if times > 1),
    }  # fmt: skip


def attempts_of(place: Path) -> Counter[int]:
    import sqlite3

    with sqlite3.connect(place / "answers.sqlite") as db:
        return Counter(times for (times,) in db.execute("SELECT attempts FROM prompts"))


def compared(
    target: TransformersTarget, folder: Path, servers: Sequence[Engine], options: argparse.Namespace
) -> dict[str, Any]:
    """Tokens/s of `prepare` and of a plain loop, interleaved, on the same prompts with different seeds."""
    asked = conversations(options.timed)
    rates: dict[str, list[float]] = {"prepare": [], "plain": []}
    urls = [one.url for one in servers]
    for number in range(options.rounds + 1):
        config = settings(options.new, servers=urls, in_flight=options.in_flight, seed=number)
        for name in sorted(rates, reverse=bool(number % 2)):
            began = time.monotonic()
            if name == "prepare":
                path = prepare(target, target.tokenizer, asked, folder / f"timed{number}", config)
                tokens = sum(end - start for answer in iterate_answers(path) for start, end in answer.learn)
            else:
                tokens = asyncio.run(plain(target, asked, config))
            if number:  # the first of each is a warm-up
                rates[name].append(tokens / (time.monotonic() - began))
    ratios = [mine / other for mine, other in zip(rates["prepare"], rates["plain"], strict=True)]
    return {
        "promises": [promise("throughput, as a share of a plain loop's", 0.9, statistics.median(ratios))],
        "tokens_per_s": rates, "share_of_a_plain_loop": ratios, "prompts_a_round": options.timed,
    }  # fmt: skip


async def plain(target: TransformersTarget, asked: Sequence[Conversation], config: Config) -> int:
    """The same requests with plain httpx; returns the number of tokens received."""
    bodies, total = [], 0
    for one in hash_conversations(asked, config):
        dialogue = Dialogue(one)
        dialogue.ask(target.tokenizer, config, target.spec.context)
        request = AnswerRequest.of(dialogue, config)
        bodies.append({"prompt": request.request.prompt, "return_token_ids": True, **request.settings})
    several = iter(bodies)

    async def work(client: httpx.AsyncClient, url: str) -> None:
        nonlocal total
        for body in several:
            answer = (await client.post(f"{url}/completions", json=body)).json()
            total += len(answer["choices"][0]["token_ids"])

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=2 * config.in_flight)
    async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(work(client, url) for url in config.servers for _ in range(config.in_flight)))
    return total


if __name__ == "__main__":
    main()
