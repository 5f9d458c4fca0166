"""The cost of choosing conversations: memory and conversations per second, by stage.

    python benchmarks/sources.py [--conversations 200000] [--out FILE]

Conversations are synthetic: 40 to 120 words from a vocabulary of 4,000, one in 20 a copy and one in 20 a near copy of
an earlier one, one in 1,000 with a piece of an evaluation prompt in it.  Every stage runs in a separate process and on
one core; its peak is that of the process, including the loaded libraries.  `select` is the whole first reading: parse,
lengths, contamination, exact and near duplicates, choice.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from outrider.data.answers.dialogue import hash_conversations
from outrider.data.answers.ledger import Ledger
from outrider.data.config import Config, Source
from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.sources.conversations import Skipped, from_source
from outrider.data.sources.duplicates import content_key
from outrider.data.sources.mixture import opening, select
from outrider.data.sources.spool import Spool
from outrider.data.split import Openings, held_out

PROMPTS = 1000
LIMIT_BYTES = 2 * 10**9
VOCABULARY = [f"{random.Random(i).choice(('ka', 'lo', 'mi', 'ren', 'sut'))}{i:x}" for i in range(4000)]


class Prompt(NamedTuple):
    id: str
    questions: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=200_000)
    parser.add_argument("--only", nargs="+", choices=list(STAGES), default=list(STAGES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "dialogues.jsonl"
        size_bytes = make(path, options.conversations)
        stages = {}
        for name in options.only:
            stages[name] = in_a_process(name, path, options.conversations)
            print(json.dumps({name: stages[name]}), file=sys.stderr, flush=True)
    peak = max(one["peak_bytes"] for one in stages.values())
    found = {
        "conversations": options.conversations, "file_bytes": size_bytes, "stages": stages,
        "promises": [{
            "promise": "peak resident bytes", "wanted": LIMIT_BYTES, "found": peak, "holds": peak <= LIMIT_BYTES,
        }],
    }  # fmt: skip
    from batch_time import write  # loads torch, which the stages do not need

    write(found, options.out)


def text_of(number: int, kind: str = "dialogue") -> str:
    draw = random.Random(f"{kind} {number}")
    return " ".join(draw.choices(VOCABULARY, k=draw.randrange(40, 120)))


def prompts() -> list[Prompt]:
    return [Prompt(str(i), (text_of(i, "prompt"),)) for i in range(PROMPTS)]


def make(path: Path, count: int) -> int:
    """Write this many conversations; returns the size of the file in bytes."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            text = text_of(number)
            if number % 20 == 19:
                text = text_of(number - 10)
            elif number % 20 == 18:
                text = text_of(number - 10) + " and more"
            elif number % 1000 == 1:
                text += " " + text_of(number // 1000 % PROMPTS, "prompt")
            messages = [{"role": "user", "content": text}, {"role": "assistant", "content": text[:200]}]
            file.write(json.dumps({"id": f"t{number}", "messages": messages}) + "\n")
    return path.stat().st_size


# ── stages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read(path: Path) -> dict[str, Any]:
    return {"count": sum(1 for _ in from_source(Source(path=str(path)), Config(), Skipped()))}


def chosen(path: Path, **settings: Any) -> dict[str, Any]:
    evaluated = EvaluationPrompts({"quiz": prompts()}) if settings.pop("is_checked", False) else None
    found = select(Config(sources=[{"path": str(path)}], **settings), evaluated=evaluated)
    return {"count": len(found), "left_out": dict(found.left_out)}


def split(path: Path) -> dict[str, Any]:
    """The openings of all conversations, and a split by them; a conversation's key stands in for its prompt's hash."""
    found = select(Config(sources=[{"path": str(path)}]))
    keys, openings = found.parts[0].keys, found.parts[0].openings
    known = Openings(keys, openings)
    is_out = held_out(keys, known.of(keys), len(keys) // 16)
    return {"count": len(keys), "held_out": int(is_out.sum())}


def again(path: Path) -> dict[str, Any]:
    """Both readings: `select`, then every conversation in shuffled order."""
    found = select(Config(sources=[{"path": str(path)}]))
    return {"count": sum(content_key(opening(one)) >= 0 for one in found)}


def prompts_of(path: Path) -> dict[str, Any]:
    """`select`, and the hashes under which answers are stored."""
    return {"count": len(select(Config(sources=[{"path": str(path)}])).prompt_hashes)}


def ledger(path: Path) -> dict[str, Any]:
    """Everything before the first answer: both readings, and every prompt in the ledger and in the prompts file."""
    config = Config(sources=[{"path": str(path)}])
    with tempfile.TemporaryDirectory() as place, Ledger(Path(place)) as entries, Spool(Path(place)) as spool:
        with entries.transaction():
            for position, one in enumerate(hash_conversations(select(config), config)):
                spool.add(one)
                entries.ask(one.prompt_hash, one.conversation.id, position)
        return {"count": entries.counts()["open"]}


STAGES = {
    "read": read,
    "exact": lambda path: chosen(path, deduplicate="exact"),
    "contamination": lambda path: chosen(path, is_checked=True),
    "near": lambda path: chosen(path, deduplicate="near"),
    "select": lambda path: chosen(path, deduplicate="near", is_checked=True, min_characters=10, count=10**9),
    "split": split,
    "prompts": prompts_of,
    "again": again,
    "ledger": ledger,
}


def in_a_process(name: str, path: Path, count: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(timed, name, path, count).result()


def timed(name: str, path: Path, count: int) -> dict[str, Any]:
    before, began = time.process_time(), time.perf_counter()
    found = STAGES[name](path)
    seconds, cpu = time.perf_counter() - began, time.process_time() - before
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found | {"seconds": round(seconds, 2), "per_second_and_core": round(count / cpu), "peak_bytes": peak}


if __name__ == "__main__":
    main()
