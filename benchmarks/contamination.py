"""Accuracy of the contamination search: 400 labelled pairs of an evaluation row and a training conversation.

    python benchmarks/contamination.py [--turns 6000] [--out FILE]

The pairs are our own texts in the layouts of nine tasks, in contamination/pairs.jsonl; the rewordings and their
look-alikes were written by someone who had not read the rule.  Every pair is judged twice: from the text, as in
`prepare`, and from the stored hashes of that one conversation, as in `evaluate`.  All rows together are the evaluation.
A pair counts as flagged if its own row is named.  Speed is that of `prepare` on one core, with turns of 40 to 120
made-up words against 1,000 prompts.  Exits with 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sources import PROMPTS, prompts, text_of

from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.overlap.hash_files import Collector, HashFile, NgramHashes, read
from outrider.data.overlap.questions import Questions
from outrider.measure.tasks import layouts

PAIRS = Path(__file__).resolve().parent / "contamination" / "pairs.jsonl"
WORD_FOR_WORD = ("exact", "shortened", "same-instruction")
"""Kinds for which at least 0.99 of the pairs must be judged correctly."""
ACCURACY, RECALL, PRECISION, TURNS_PER_S = 0.99, 0.8, 0.98, 3000


class Pair(NamedTuple):
    id: str
    kind: str
    key: tuple[str, str]
    """Task and id of its row's prompt."""
    training: list[str]
    """The user's turns."""
    is_contaminated: bool


class Judged(NamedTuple):
    pair: Pair
    is_called: bool
    """Whether it is contaminated by its own row."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--turns", type=int, default=6000, help="made-up turns to time")
    parser.add_argument("--mistakes", action="store_true", help="list every pair that is judged wrongly")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    pairs, evaluation = load(options.pairs)
    ways = {"texts": by_texts(pairs, evaluation), "hashes": by_hashes(pairs, evaluation)}
    figures = {way: summary(judged) for way, judged in ways.items()}
    speed = turns_per_s(options.turns)
    promises = [one for way, each in figures.items() for one in promised(way, each)]
    promises.append({
        "promise": f"turns/s on one core against {PROMPTS:,} prompts", "wanted": TURNS_PER_S, "found": round(speed),
        "holds": speed >= TURNS_PER_S,
    })  # fmt: skip
    if options.mistakes:
        for way, judged in ways.items():
            for pair, is_called in judged:
                if is_called != pair.is_contaminated:
                    print(f"{way}: {pair.id} ({pair.kind}) called {is_called}", file=sys.stderr)
    from batch_time import write  # loads torch, which the rest does not need

    write({"pairs": len(pairs), "prompts": sum(map(len, evaluation.values())), **figures, "promises": promises},
          options.out)  # fmt: skip
    return 0 if all(one["holds"] for one in promises) else 1


def load(path: Path) -> tuple[list[Pair], dict[str, list[layouts.Prompt]]]:
    """The pairs, and the evaluation made of their rows, by task."""
    pairs, evaluation, ids = list[Pair](), defaultdict[str, list[layouts.Prompt]](list), dict[str, str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        row = json.dumps([entry["task"], entry["row"]], sort_keys=True)
        if row not in ids:
            ids[row] = str(len(ids))
            prompt = getattr(layouts, entry["task"])(entry["row"])
            evaluation[entry["task"]].append(prompt._replace(id=ids[row]))
        key = (entry["task"], ids[row])
        pairs.append(Pair(entry["id"], entry["kind"], key, entry["training"], entry["contaminated"]))
    return pairs, dict(evaluation)


def by_texts(pairs: Sequence[Pair], evaluation: Mapping[str, Sequence[layouts.Prompt]]) -> list[Judged]:
    evaluated = EvaluationPrompts(evaluation)
    overlaps = [evaluated.overlap(pair.training) for pair in pairs]
    return [
        Judged(pair, overlap is not None and (overlap.task, overlap.prompt) == pair.key)
        for pair, overlap in zip(pairs, overlaps, strict=True)
    ]


def by_hashes(pairs: Sequence[Pair], evaluation: Mapping[str, Sequence[layouts.Prompt]]) -> list[Judged]:
    questions = Questions(evaluation)
    judged = []
    with tempfile.TemporaryDirectory() as folder:
        for pair in pairs:
            numbers = stored(Path(folder) / "one.grams", pair.training).questions_in("prompts", questions)
            judged.append(Judged(pair, pair.key in {questions.keys[number] for number in numbers}))
    return judged


def stored(path: Path, turns: Sequence[str]) -> NgramHashes:
    collected = Collector("prompts")
    collected.add("prompts", turns)
    return read(HashFile(path, collected.save(path)))


def summary(judged: Sequence[Judged]) -> dict[str, Any]:
    """Counts, the share of each kind that is right, and recall and precision of the rewordings: of all flagged pairs
    that are reworded or clean, the share that is reworded."""
    counts, right = Counter[str](), Counter[str]()
    for pair, is_called in judged:
        counts[pair.kind] += 1
        right[pair.kind] += is_called == pair.is_contaminated
    false_alarms = sum(is_called and not pair.is_contaminated for pair, is_called in judged)
    reworded = right["reworded"]
    return {
        "counts": dict(counts), "accuracy": {kind: right[kind] / count for kind, count in counts.items()},
        "recall": reworded / counts["reworded"], "precision": reworded / max(1, reworded + false_alarms),
    }  # fmt: skip


def promised(way: str, figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [(f"{kind} pairs that are right", ACCURACY, figures["accuracy"][kind]) for kind in WORD_FOR_WORD]
    rows += [("recall of rewordings", RECALL, figures["recall"])]
    rows += [("precision of rewordings", PRECISION, figures["precision"])]
    return [
        {"promise": f"{what}, by {way}", "wanted": least, "found": round(value, 4), "holds": value >= least}
        for what, least, value in rows
    ]


def turns_per_s(count: int) -> float:
    evaluated = EvaluationPrompts({"quiz": prompts()})
    turns = [text_of(number) for number in range(count)]
    evaluated.overlap(turns[:1])
    began = time.process_time()
    for turn in turns:
        evaluated.overlap([turn])
    return count / (time.process_time() - began)


if __name__ == "__main__":
    sys.exit(main())
