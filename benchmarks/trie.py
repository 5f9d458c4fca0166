"""What a token costs in the n-gram trie, by how much it holds: microseconds and bytes, native and in Python.

    python benchmarks/trie.py [--sizes 10000,30000,100000,300000,1000000] [--depth 5] [--nodes 16] [--out FILE]

Python source of installed packages, as the demo target's tokenizer reads it, goes into one trie file by file.  At each
size the next tokens are read one by one with a tree proposed by frequency after each, in short runs; update is the
first without the second.  Medians over the runs, of processor time, since other work on the machine is no cost of the
trie.

How many tokens a step such trees would bring is counted on the same files: the text itself stands for the target, from
a third of each file on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batch_time import write
from transformers import AutoTokenizer

from outrider import demo
from outrider.retrieval import native_trie
from outrider.retrieval.native_trie import NativeCursor, NativeTrie
from outrider.retrieval.proposal import Proposal
from outrider.retrieval.texts import History
from outrider.retrieval.trie import Cursor, Trie

RUNS, RUN = 40, 50
LEVELS, SHORTEST = 7, 1
CAPACITY = 16_000_000
PROMISED_US = 50.0

Tries = Trie | NativeTrie
Cursors = Cursor | NativeCursor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,30000,100000,300000,1000000")
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    texts = texts_of(max(sizes) + 2 * RUNS * RUN * len(sizes))
    makers: dict[str, Callable[[int, int], Tries]] = {"python": Trie}
    if isinstance(native_trie.fastest(2, 4), NativeTrie):
        makers["native"] = native_trie.fastest
    curves = {name: curve(make(options.depth, CAPACITY), texts, sizes, options.nodes) for name, make in makers.items()}
    if "native" in makers:
        # at its capacity every new n-gram sends an old one off
        full = makers["native"](options.depth, 300_000)
        curves["native, full at 300,000 nodes"] = curve(full, texts, sizes[-1:], options.nodes)
    promises = []
    for name, rows in curves.items():
        slowest = max(row["us_per_token"] for row in rows)
        promises.append({
            "promise": f"microseconds of processor time per token, update and proposal, {name}",
            "wanted": PROMISED_US, "found": slowest, "holds": slowest <= PROMISED_US,
        })  # fmt: skip
    steps = {name: tokens_per_step(texts[:12], make) for name, make in ways(options.depth, options.nodes).items()}
    write(
        {
            "depth": options.depth,
            "nodes": options.nodes,
            "promises": promises,
            "curves": curves,
            "tokens_per_step": steps,
        },
        options.out,
    )


def texts_of(tokens: int) -> list[list[int]]:
    """Whole files of at least so many tokens together, packages by name."""
    tokenizer = AutoTokenizer.from_pretrained(str(demo.TARGET))
    texts: list[list[int]] = []
    found = 0
    for path in sources():
        text = tokenizer(path.read_text(encoding="utf-8", errors="ignore"), verbose=False)["input_ids"]
        if len(text) > 500:
            texts.append(text)
            found += len(text)
        if found >= tokens:
            return texts
    raise SystemExit(
        f"the installed packages have {found} tokens of Python source, {tokens} are wanted; give smaller --sizes"
    )


def sources() -> Iterator[Path]:
    """Python files of the installed packages, one of each package by turns, so that the text is mixed at every size."""
    folders = sorted(path for path in Path(sysconfig.get_paths()["purelib"]).iterdir() if path.is_dir())
    queues = [iter(sorted(folder.rglob("*.py"))) for folder in folders]
    while queues:
        left = []
        for queue in queues:
            path = next(queue, None)
            if path is not None:
                yield path
                left.append(queue)
        queues = left


class Feed:
    """Texts one after the other, in pieces of any size."""

    def __init__(self, texts: Sequence[list[int]]):
        self.texts = deque(texts)

    def take(self, tokens: int) -> Iterator[list[int]]:
        """The next tokens, file by file."""
        while tokens > 0:
            text = self.texts.popleft()
            if len(text) > tokens:
                self.texts.appendleft(text[tokens:])
            yield text[:tokens]
            tokens -= min(tokens, len(text))


def curve(grown: Tries, texts: Sequence[list[int]], sizes: Sequence[int], nodes: int) -> list[dict[str, Any]]:
    rows = []
    stored, feed = 0, Feed(texts)
    for size in sizes:
        for text in feed.take(size - stored):
            grown.cursor().append(text)
        row = {"stored_tokens": size, "nodes": len(grown), "bytes_per_token": grown.size_bytes / size}
        updates, both = (measured(grown, feed, own) for own in (0, nodes))
        stored = size + 2 * RUNS * RUN
        rows.append({
            **row, "us_per_token": statistics.median(both.cpu), "us_update": statistics.median(updates.cpu),
            "us_per_token_by_the_wall": statistics.median(both.wall), "us_slowest_run": max(both.cpu),
            "samples": RUNS * RUN,
        })  # fmt: skip
        print(
            f"{type(grown).__name__} {size:>9,}: {rows[-1]['us_per_token']:.1f} us a token", file=sys.stderr, flush=True
        )
    return rows


class Taken(NamedTuple):
    """Microseconds a token in every run, of processor time and by the clock on the wall."""

    cpu: list[float]
    wall: list[float]


def measured(grown: Tries, feed: Feed, nodes: int) -> Taken:
    """Read the next tokens one by one, and propose a tree of so many nodes after each."""
    taken = Taken([], [])
    for _ in range(RUNS):
        cursor = grown.cursor()
        tokens = [token for text in feed.take(RUN) for token in text]
        cpu, wall = time.process_time(), time.perf_counter()
        for token in tokens:
            cursor.append([token])
            if nodes:
                cursor.tree("frequency", nodes, LEVELS, SHORTEST)
        taken.cpu.append(1e6 * (time.process_time() - cpu) / len(tokens))
        taken.wall.append(1e6 * (time.perf_counter() - wall) / len(tokens))
    return taken


# ── tokens per step ───────────────────────────────────────────────────────────────────────────────────────────────────

Propose = Callable[[list[int], int], Proposal]
"""(text, how much of it stands there) to what may follow."""


def ways(depth: int, nodes: int) -> dict[str, Callable[[], Propose]]:
    """What looks a new text up, one text after the other, by name."""

    def lookup() -> Propose:
        history = History(SHORTEST, depth - 1)

        def propose(text: list[int], end: int) -> Proposal:
            history.read(text[:end])
            return history.propose(text[:end], LEVELS)

        return propose

    def in_trie(order: Any, shared: Tries | None = None) -> Callable[[], Propose]:
        def begin() -> Propose:
            cursor = (shared if shared is not None else native_trie.fastest(depth, CAPACITY)).cursor()
            known = 0

            def propose(text: list[int], end: int) -> Proposal:
                nonlocal known
                cursor.append(text[known:end])
                known = end
                return cursor.tree(order, nodes, LEVELS, SHORTEST)

            return propose

        return begin

    return {
        "chain": lookup, "recency": in_trie("recency"), "frequency": in_trie("frequency"),
        "recency, shared": in_trie("recency", native_trie.fastest(depth, CAPACITY)),
        "frequency, shared": in_trie("frequency", native_trie.fastest(depth, CAPACITY)),
    }  # fmt: skip


def tokens_per_step(texts: Sequence[list[int]], begin: Callable[[], Propose], most: int = 3000) -> dict[str, float]:
    steps = tokens = nodes = 0
    for whole in texts:
        text = whole[:most]
        propose, end = begin(), len(text) // 3
        while end < len(text):
            proposal = propose(text, end)
            kept = min(followed(proposal, text[end : end + LEVELS]), len(text) - end - 1)
            nodes += len(proposal.tokens)
            end += kept + 1
            tokens += kept + 1
            steps += 1
    return {"tokens_per_step": tokens / steps, "nodes_per_step": nodes / steps, "tokens": tokens}


def followed(proposal: Proposal, text: Sequence[int]) -> int:
    """How many tokens of the text are a path of the tree."""
    at, depth = -1, 0
    for n, (token, parent) in enumerate(zip(*proposal, strict=True)):
        if depth < len(text) and parent == at and token == text[depth]:
            at, depth = n, depth + 1
    return depth


if __name__ == "__main__":
    main()
