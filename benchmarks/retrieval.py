"""Drafters that need no training, on the demo target over unseen modules: tokens per step and speed-up.

    python benchmarks/retrieval.py [--prompts 12] [--new 88] [--plain-path] [--out FILE]

The corpus contains the standard library's other modules, which the target was trained on; held-out modules are not in
it.  Two unrelated corpora contain C++ headers and package metadata.  Nothing is carried over from one text to the next,
except in the row that says so.  Every prompt goes through all configurations one after the other.  Tasks: `new`, pieces
of held-out modules; `seen`, pieces of modules in the corpus; `edit`, a held-out piece whose first half appears twice.
The cold row reads a copy of the corpus whose pages are dropped before every text.

See corpus.py and trie.py for the cost of searching and growing.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from batch_time import parties, write

from outrider import demo, load_drafter
from outrider.decoding.state import Request
from outrider.measure.record import Run
from outrider.measure.timing import run_once
from outrider.retrieval.corpus import build, suffix_array
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget

NODES = 10
"""Nodes of every tree, as many as the demo's dspark verifies."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=12, help="of each task")
    parser.add_argument("--new", type=int, default=88, help="tokens a prompt")
    parser.add_argument("--plain-path", action="store_true", help="without compiled steps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    target, trained = parties(["dspark"], compiled=not options.plain_path)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OUTRIDER_CORPORA"] = folder
        sizes = {name: built(target, Path(folder) / name, texts) for name, texts in sources().items()}
        ways = drafters(target, trained)
        found = measured(target, ways, options.prompts, options.new)
    rows = [row(name, task, runs, found["plain", task]) for (name, task), runs in found.items()]
    differ = sum(
        a.tokens != b.tokens
        for (_, task), runs in found.items()
        for a, b in zip(runs, found["plain", task], strict=True)
    )
    write(
        {
            "path": "plain" if options.plain_path else "compiled", "prompts": options.prompts,
            "new_tokens": options.new,
            "nodes": NODES, "corpora_tokens": sizes, "texts_that_differ": differ, "promises": promises(rows),
            "rows": rows,
        },
        options.out,
    )  # fmt: skip
    sys.exit(bool(differ))


def drafters(target: TransformersTarget, trained: dict[str, Any]) -> dict[str, Any]:
    """By name; None is plain decoding."""
    suffix: dict[str, Any] = {"kind": "suffix", "nodes": NODES}
    corpus, three = ["library"], ["library", "headers", "metadata"]
    ways = {
        "plain": None,
        "ngram": load_drafter("ngram", target),
        "ngram tree": load_drafter("ngram", target, tree="frequency", shortest=1, nodes=NODES),
        "recycle": load_drafter("recycle", target, nodes=NODES),
        "jacobi": load_drafter("jacobi", target, branches=3),
        "suffix": load_drafter("suffix", target, nodes=NODES),
        "suffix, corpus": load_drafter("suffix", target, nodes=NODES, corpora=corpus),
        "suffix, corpus, cold": load_drafter("suffix", target, nodes=NODES, corpora=["cold"]),
        "suffix, corpus and two distractors": load_drafter("suffix", target, nodes=NODES, corpora=three),
        "suffix, corpus, shared with earlier texts": load_drafter(
            "suffix", target, nodes=NODES, corpora=corpus, shared="all"
        ),
        "mix(ngram, recycle)": load_drafter("mix", target, nodes=NODES),
    }
    if "dspark" in trained:
        from batch_time import CHECKPOINT

        dspark = str(CHECKPOINT)
        both: list[Any] = [dspark, suffix | {"corpora": corpus}]
        ways |= {
            "dspark": trained["dspark"],
            "mix(dspark, suffix, corpus)": load_drafter("mix", target, members=both, nodes=NODES),
            "mix(dspark, suffix, corpus), by request": load_drafter(
                "mix", target, members=both, nodes=NODES, share="request"
            ),
            "graft(dspark, recycle)": load_drafter("graft", target, base=dspark, nodes=NODES),
        }
    return ways


# ── texts ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sources() -> dict[str, Iterator[str]]:
    """Texts of the corpus, and of two others that are unrelated to Python modules."""
    site = Path(torch.__file__).parent.parent
    return {
        "library": (module.text for module in demo.modules("train")),
        "cold": (module.text for module in demo.modules("train")),
        "headers": _read(site.glob("torch/include/**/*.h"), 1500),
        "metadata": _read(itertools.chain(site.glob("*.dist-info/METADATA"), site.glob("**/*.txt")), 1500),
    }


def _read(paths: Iterator[Path], most: int) -> Iterator[str]:
    for path in itertools.islice(sorted(paths), most):
        yield path.read_text(encoding="utf-8", errors="replace")[: 1 << 16]


def built(target: TransformersTarget, folder: Path, texts: Iterator[str]) -> int:
    documents = (target.tokenizer.encode(text) for text in texts if text)
    spec = target.spec
    corpus = build.build(folder, documents, vocabulary=spec.vocabulary, tokenizer_hash=spec.tokenizer_hash)
    return int(corpus.header["tokens"])


def tasks(target: TransformersTarget, count: int) -> dict[str, list[list[int]]]:
    new = [text for _, text in demo.prompts("held_out", 2 * count)]
    halves = [text[: len(text) // 2] for text in new[count:]]
    return {
        "new": [target.encode(text) for text in new[:count]],
        "seen": [target.encode(text) for _, text in demo.prompts("train", count)],
        "edit": [target.encode(text + half) for text, half in zip(new[count:], halves, strict=True)],
    }


# ── measuring ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measured(
    target: TransformersTarget, ways: dict[str, Any], count: int, new: int
) -> dict[tuple[str, str], list[Run]]:
    prompts = tasks(target, count)
    found: dict[tuple[str, str], list[Run]] = {(name, task): [] for task in prompts for name in ways}
    for drafter in ways.values():  # a warm-up for each, so that the first one does not pay for all
        run_once(target, Request(prompts["new"][0], 16, Sampling()), drafter, ends=False)
        if getattr(drafter, "shared", None):
            drafter.shared.kept.clear()
    for task, texts in prompts.items():
        for number, prompt in enumerate(texts):
            for name, drafter in ways.items():
                if name.endswith("cold"):
                    drop(drafter.sources)
                found[name, task].append(run_once(target, Request(prompt, new, Sampling()), drafter, ends=False))
            print(f"{task}: {number + 1} of {count}", file=sys.stderr, flush=True)
    return found


def drop(corpora: Sequence[suffix_array.Corpus]) -> None:
    """Drop these files from the page cache; no other process has them mapped."""
    for corpus in corpora:
        for mapped in (corpus.tokens, corpus.order):
            mapped.base._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
        for path in corpus.folder.iterdir():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def row(name: str, task: str, runs: list[Run], plain: list[Run]) -> dict[str, Any]:
    steps, tokens = sum(run.steps for run in runs), sum(len(run.tokens) for run in runs)
    seconds = [sum(run.draft_s + run.verify_s + run.other_s for run in of) for of in (plain, runs)]
    return {
        "name": name, "task": task, "tokens_per_step": tokens / steps, "speedup": seconds[0] / seconds[1],
        "draft_ms": 1e3 * sum(run.draft_s for run in runs) / steps,
    }  # fmt: skip


def promises(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    per_step = {(row["name"], row["task"]): row["tokens_per_step"] for row in rows}
    kinds = list(dict.fromkeys(row["task"] for row in rows))

    def mean(name: str) -> float:
        return sum(per_step[name, task] for task in kinds) / len(kinds)

    found = [
        ("suffix with corpus over ngram, tokens per step, task new", 1.5,
         per_step["suffix, corpus", "new"] / per_step["ngram", "new"]),
        ("two distractors, share of tokens per step that stays", 0.95,
         min(per_step["suffix, corpus and two distractors", task] / per_step["suffix, corpus",
         task] for task in kinds)),
    ]  # fmt: skip
    mix, parts = "mix(dspark, suffix, corpus)", ("dspark", "suffix, corpus")
    if (mix, "new") in per_step:
        found += [
            (f"mix over the better of its parts, task {task}", 0.98,
             per_step[mix, task] / max(per_step[part, task] for part in parts))
            for task in kinds
        ]  # fmt: skip
        found.append(
            ("mix over the better of its parts, mean of the tasks", 1.0, mean(mix) / max(mean(part) for part in parts))
        )
    return [{"promise": name, "wanted": wanted, "found": is_, "holds": is_ >= wanted} for name, wanted, is_ in found]


if __name__ == "__main__":
    main()
