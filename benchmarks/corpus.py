"""The cost of building, opening and searching a corpus.

    python benchmarks/corpus.py [--tokens 10000000] [--out FILE]

The Python sources of the standard library and of the installed packages, tokenised with the demo's tokenizer; if there
are fewer tokens than requested, they are repeated with every tenth token changed.  Build and search run in separate
processes.  Contexts are 64 tokens from anywhere in the corpus, with one of the last 32 changed, so that suffixes of all
lengths are searched for.

Warm is after every page was touched once.  Cold is after the mapping was dropped and the kernel was told by
posix_fadvise (DONTNEED) to drop the files' pages.  Anonymous memory is the growth of RssAnon from before `open` until
after all searches, with modules and contexts loaded beforehand.  Shared is what a second process that ran the same
searches maps together with the first, according to smaps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import site
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outrider.retrieval.corpus import build as corpus_build
from outrider.retrieval.corpus import corpora, suffix_array
from outrider.retrieval.corpus import texts as corpus_texts
from outrider.retrieval.corpus.suffix_array import Corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--searches", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="build here, and keep it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", choices=["build", "search", "share"], help="one part, in this process")
    options = parser.parse_args()
    if options.only:
        part = {"build": build, "search": search, "share": share}[options.only]
        part(options.folder, options.tokens if options.only == "build" else options.searches)
        return
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "sources"
        built, searched = (_part(name, folder, options) for name in ("build", "search"))
    from batch_time import write

    promises = [
        {"promise": name, "wanted": most, "found": found, "holds": found <= most}
        for name, most, found in (
            ("seconds to build 10 M tokens", 120, built["seconds"] * 1e7 / built["tokens"]),
            ("resident bytes while building", 2e9 if built["tokens"] < 2e7 else 20e9, built["peak_bytes"]),
            ("milliseconds to open", 50, searched["open_ms"]["max"]),
            ("microseconds of a warm search, p99", 100, searched["warm_us"]["native"]["p99"]),
            ("anonymous bytes", 50e6, searched["anonymous_bytes"]),
        )
    ]
    write({"promises": promises, "build": built, "search": searched}, options.out)


def _part(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--only", name, "--folder", str(folder), "--tokens", str(options.tokens)]
    done = subprocess.run(
        [*command, "--searches", str(options.searches)], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# ── building ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def build(folder: Path, tokens: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from transformers import AutoTokenizer

    from outrider import demo

    tokenizer = AutoTokenizer.from_pretrained(str(demo.TARGET))
    loaded, stages, began = _memory("VmHWM"), {}, time.perf_counter()
    documents = _Sources(tokenizer, tokens)

    def on_stage(stage: str, _: int) -> None:
        stages[stage] = time.perf_counter() - began
        print(f"{stage} after {stages[stage]:.0f} s", file=sys.stderr, flush=True)

    made = corpus_build.build(folder, documents, vocabulary=len(tokenizer), on_stage=on_stage)
    seconds = time.perf_counter() - began
    found = {
        "tokens": made.header["tokens"], "documents": made.header["documents"], "vocabulary": len(tokenizer),
        "passes_over_the_sources": documents.passes, "seconds": seconds, "tokenise_seconds": stages["sort"],
        "sort_seconds": stages["write"] - stages["sort"], "write_seconds": seconds - stages["write"],
        "peak_bytes": _memory("VmHWM"), "peak_bytes_before": loaded, "disk_bytes": corpora.size_of(folder),
    }  # fmt: skip
    print(json.dumps(found))


class _Sources:
    """Documents of tokens, `wanted` tokens in all."""

    def __init__(self, tokenizer: Any, wanted: int):
        self.tokenizer, self.wanted, self.passes = tokenizer, wanted, 0

    def __iter__(self) -> Iterator[list[int]]:
        folders = [Path(sysconfig.get_paths()["stdlib"]), *map(Path, site.getsitepackages())]
        files = sorted({path.resolve() for folder in folders for path in folder.rglob("*.py")})
        noise, left = random.Random(0), self.wanted
        while left > 0:
            self.passes += 1
            for document in self._documents(files):
                if self.passes > 1:
                    for at in range(noise.randrange(10), len(document), 10):
                        document[at] = noise.randrange(len(self.tokenizer))
                yield document[:left]
                left -= len(document)
                if left <= 0:
                    return

    def _documents(self, files: list[Path]) -> Iterator[list[int]]:
        held: list[str] = []
        for text in corpus_texts.texts(corpus_texts.readable(files, [])):
            held.append(text.text)
            if sum(map(len, held)) > 1 << 20:
                yield from self._encoded(held)
                held = []
        yield from self._encoded(held)

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


# ── searching ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def search(folder: Path, searches: int) -> None:
    assert suffix_array._library() is not None, "the native search is not to be had here"
    contexts = _contexts(Corpus.open(folder), searches)
    before, opened = _memory("RssAnon"), []
    for _ in range(20):
        began = time.perf_counter()
        Corpus.open(folder)
        opened.append(1e3 * (time.perf_counter() - began))
    found = {
        "searches": searches, "open_ms": {"median": statistics.median(opened), "max": max(opened)}, **_warm(folder,
        contexts),
        "anonymous_bytes": _memory("RssAnon") - before, "cold_us": _cold(folder, contexts[:200]),
    }  # fmt: skip
    print(json.dumps(found))


def _warm(folder: Path, contexts: list[list[int]]) -> dict[str, Any]:
    corpus = Corpus.open(folder)
    for pages in (corpus.tokens, corpus.order):
        pages[:: 4096 // pages.itemsize].max()
    lengths = [corpus.longest(context).length for context in contexts]
    child = [sys.executable, __file__, "--only", "share", "--folder", str(folder), "--searches", str(len(contexts))]
    return {
        "match_tokens": {
            "median": statistics.median(lengths),
            "mean": statistics.fmean(lengths),
            "none": lengths.count(0),
        },
        "warm_us": {
            "native": _times(corpus.longest, contexts),
            "python": _times(lambda context: corpus._longest_in_python(array("q", context), 1), contexts[:2000]),
            "proposal of 16 nodes": _times(lambda context: corpora.look_up(corpus, context, 16, 8).proposal, contexts),
        },
        "second_process": json.loads(subprocess.run(child, check=True, stdout=subprocess.PIPE, text=True).stdout),
    }


def share(folder: Path, searches: int) -> None:
    corpus = Corpus.open(folder)
    for context in _contexts(corpus, searches):
        corpus.longest(context)
    print(json.dumps(_mapping(folder)))


def _contexts(corpus: Corpus, count: int) -> list[list[int]]:
    noise = random.Random(1)
    found = []
    while len(found) < count:
        end = noise.randrange(64, len(corpus.tokens))
        context = corpus.tokens[end - 64 : end].tolist()
        context[-noise.randrange(1, 33)] = noise.randrange(corpus.separator)
        found.append(context)
    return found


def _times(function: Callable[[list[int]], object], contexts: list[list[int]]) -> dict[str, float]:
    taken = []
    for context in contexts:
        began = time.perf_counter_ns()
        function(context)
        taken.append(1e-3 * (time.perf_counter_ns() - began))
    taken.sort()
    return {
        "p50": taken[len(taken) // 2], "p99": taken[len(taken) * 99 // 100], "max": taken[-1],
        "mean": statistics.fmean(taken),
    }  # fmt: skip


def _cold(folder: Path, contexts: list[list[int]]) -> dict[str, float]:
    """Must be called when no mapping of the files is left."""
    for name in ("tokens.bin", "suffixes.bin"):
        with (folder / name).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    corpus = Corpus.open(folder)
    return _times(corpus.longest, contexts)


def _memory(what: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return 1024 * int(line.split()[1])


def _mapping(folder: Path) -> dict[str, int]:
    """Bytes of this process's mappings of the corpus, from smaps."""
    sums = {"Rss": 0, "Shared_Clean": 0, "Private_Clean": 0, "Private_Dirty": 0, "Anonymous": 0}
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0].rstrip(":")
        if "-" in name:
            is_ours = str(folder.resolve()) in line
        elif is_ours and name in sums:
            sums[name] += 1024 * int(line.split()[1])
    return {f"{name.lower()}_bytes": size for name, size in sums.items()}


if __name__ == "__main__":
    main()
