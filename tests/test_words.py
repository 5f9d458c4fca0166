"""Names are the field's words: no identifier of the package is made of a word of the first house."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "outrider"

OLD = {
    "abroad": "remote", "angles": "cos_sin", "anew": "again", "apart": "max_difference, or in a subprocess",
    "behind": "after", "beside": "baselines, or what it is", "captured": "cuda_graphs", "certain": "deterministic",
    "copies": "aliases, or init_from_layers", "fresh": "new, or min_first_ngrams", "grams": "ngram_hashes",
    "graphs": "cuda_graphs", "heard": "received", "heat": "temperature", "kept": "accepted, or cached",
    "law": "acceptance rule", "laws": "acceptance rules", "least": "minimum", "lent": "copied", "observed": "traced",
    "packed": "prepacked", "pairs": "features", "parties": "protocols", "places": "positions",
    "products": "matmul, or prepacked", "replays": "cuda_graphs", "rider": "drafter",
    "said": "what it is: text, config, manifest", "seen": "known, visited", "settle": "catch_up, or resolve",
    "settled": "resolved", "sight": "attention mask", "strayed": "tv_distance", "told": "reported",
    "turn": "round, or rotate", "turns": "rounds", "twin": "reference", "twins": "references", "unlawful": "invalid",
    "verdict": "Accepted", "visible": "attention mask", "waiting": "buffered",
}  # fmt: skip
"""What was said before, and what is said now."""

ALLOWED = {
    "graphs": {"": "CUDA graphs are called so; only in cuda_graphs"},
    "packed": dict.fromkeys(("data", "nn", "training"), "several texts in a row of a batch, as trainers call it"),
    "pairs": {
        "gate": "paired comparisons", "report": "paired rows", "cli": "paired answers", "traffic": "names and values",
        "config.py": "json's object_pairs_hook",
    },
    "turn": dict.fromkeys(("data", "demo", "measure", "traffic"), "a turn of a conversation"),
    "turns": dict.fromkeys(("data", "measure"), "turns of a conversation"),
    "verdict": {"gate": "what a gate decides", "cli": "what a gate decides"},
    "waiting": dict.fromkeys(("traffic", "cli", "serve"), "requests in a server's queue"),
}  # fmt: skip
"""Where an old word is the field's own: room, or all of them, and why."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def old_words(name: str) -> set[str]:
    return {part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)} & OLD.keys()


def left(source: str, room: str) -> set[str]:
    """Identifiers with a word of the old table that is not the field's own in that room."""
    found = set()
    for name in identifiers(ast.parse(source)):
        for word in old_words(name):
            if not ALLOWED.get(word, {}).keys() & {"", room} and not (
                word == "graphs" and "cuda_graphs" in name.lower()
            ):
                found.add(name)
    return found


def test_no_identifier_is_of_the_old_table() -> None:
    """Catches a name that has to be learnt before the code can be read."""
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        names = left(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).parts[0])
        if names:
            found[file.name] = {name: [OLD[word] for word in old_words(name)] for name in sorted(names)}
    assert not found


def test_an_old_name_would_be_seen() -> None:
    """A planted fault: the list above would be empty too if nothing were looked at."""
    source = "class Kept:\n    sight: int\ndef f(told, *, _heat=1):\n    return f'{told.twin_of}'\nimport x as laws\n"
    assert left(source, "nn") == {"Kept", "sight", "told", "_heat", "twin_of", "laws"}
    assert left("verdict = 1", "gate") == set()
    assert left("verdict = 1", "nn") == {"verdict"}
