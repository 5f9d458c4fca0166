"""The target's answers on disk, and the target they belong to.

    answers.jsonl   {"id", "prompt_hash", "settings_hash", "tokens", "learn": [[start, end], ...], "finish_reason"} a
    line answers.json    the target, sampling and template they belong to, and which hashes are theirs
    prompts.grams   hashes of what stands in prompts and answers, to ask later whether a text was among them

An answer belongs to the content of its prompt and to the target, never to a line of a file: `prompt_hash` is the hash
of the prompt's content, `settings_hash` that of answers.json's target, template and settings.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.atomic import replacing
from outrider.data import hash_files
from outrider.data.config import Config
from outrider.data.rendering import template_hash
from outrider.data.split import Openings, held_out
from outrider.errors import DataError
from outrider.nn.draft_model import binding
from outrider.targets.protocol import Target

ANSWERS, MANIFEST, NGRAM_HASHES = "answers.jsonl", "answers.json", "prompts.grams"
KEYS = ("id", "prompt_hash", "settings_hash", "tokens", "learn", "finish_reason")
SHAPING = {"regenerate", "length", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking"}
"""Settings on which the text of an answer depends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text as the target saw it, and the spans of it that train."""

    id: str
    tokens: list[int]
    learn: list[tuple[int, int]]
    finish_reason: str | None = None
    prompt_hash: str | None = None
    settings_hash: str | None = None


def hold_out(
    answers: Sequence[Answer], count: int, openings: Openings | None = None
) -> tuple[list[Answer], list[Answer]]:
    """Answers to train on, and up to `count`, at most one in 16, that are held out; both in their order.

    Which ones depends on the prompts alone: most of them stay the same when more answers come.
    openings: conversations that begin alike are on one side.
    """
    hashes = np.array([_number(answer) for answer in answers], np.uint64)
    groups = hashes if openings is None else openings.of(hashes)
    is_held_out = held_out(hashes, groups, min(count, len(answers) // 16))
    both = list(zip(answers, is_held_out, strict=True))
    return [one for one, is_out in both if not is_out], [one for one, is_out in both if is_out]


def _number(answer: Answer) -> int:
    """The hash of its prompt as a number; of its id where an older file has none."""
    return int(answer.prompt_hash or content_hash(answer.id), 16)


def read_answers(path: str | Path, vocabulary: int | None = None) -> list[Answer]:
    """All answers of a file.  Raises as `iterate_answers` does."""
    return list(iterate_answers(path, vocabulary))


def iterate_answers(path: str | Path, vocabulary: int | None = None) -> Iterator[Answer]:
    """The answers of a file, one after the other.  Raises DataError with the line of one that can't be read, or has ids
    outside the vocabulary."""
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield _from_line(line, vocabulary)
                except (ValueError, KeyError, TypeError) as error:
                    what = f"{path}, line {number} is not an answer ({error})"
                    raise DataError(
                        f"{what}; delete the line, or run `outrider prepare`, which removes an incomplete last line"
                    ) from None
    except OSError as error:
        raise DataError(f"no answers at {path} ({error.strerror}); run `outrider prepare` first") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text ({error}); delete it and run `outrider prepare` again") from None


def _from_line(line: str, vocabulary: int | None = None) -> Answer:
    """Raises ValueError for tokens that are not ids of this vocabulary, and for spans outside the text."""
    row = json.loads(line)
    tokens, learn = row["tokens"], [(start, end) for start, end in row["learn"]]
    if not tokens or not all(type(token) is int for token in tokens):
        raise ValueError("its tokens are not a list of whole numbers")
    wrong = min(tokens) if min(tokens) < 0 else max(tokens)
    if wrong < 0 or (vocabulary is not None and wrong >= vocabulary):
        wanted = "at least 0" if vocabulary is None else f"0 to {vocabulary - 1} (the target's vocabulary)"
        raise ValueError(f"a token must be {wanted}, got {wrong}")
    if not all(0 <= start <= end <= len(tokens) for start, end in learn):
        raise ValueError(f"its spans {learn} reach outside its {len(tokens)} tokens")
    return Answer(row["id"], tokens, learn, row.get("finish_reason"), row.get("prompt_hash"), row.get("settings_hash"))


def answers_for(folder: Path, target: Target, tokenizer: Any) -> list[Answer]:
    """All answers of a folder, to train on.  Raises DataError where they are those of another target or template."""
    answers, theirs = read_answers(folder / ANSWERS, target.spec.vocabulary), _manifest(folder)
    mine = whose(target, tokenizer, Config())
    del mine["config"]  # a text may be cut, and prompts may be added, without changing an answer
    if answers and not theirs:
        raise DataError(
            f"{folder / MANIFEST} is missing or damaged; run `outrider prepare` again, which writes that file"
        )
    _check(folder, answers, mine, theirs)
    return answers


def whose(target: Target, tokenizer: Any, config: Config) -> dict[str, Any]:
    """The target, template and settings on which answers depend, as answers.json has them."""
    return {
        "target": binding(target) | {"ends": sorted(target.ends)},
        "template": template_hash(tokenizer),
        "config": {
            key: value
            for key, value in config.model_dump(mode="json", include=SHAPING).items()
            if (key, value) != ("thinking", "keep")
        },
    }


def content_hash(value: Any) -> str:
    """16 hex digits that tell two values apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def to_line(answer: Answer, settings_hash: str) -> str:
    """An answer as it stands in answers.jsonl."""
    row = asdict(answer) | {"settings_hash": settings_hash}
    return json.dumps({key: row[key] for key in KEYS}) + "\n"


def repair(path: Path, vocabulary: int) -> list[Answer]:
    """The answers that are whole; a torn line at the end is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return read_answers(path, vocabulary)


def put_in_order(path: Path, prompts: Mapping[str, list[str]]) -> None:
    """Sort answers in the order of their prompts, others last, so that a stopped run ends with the same file."""
    place = {prompt_hash: number for number, prompt_hash in enumerate(prompts)}
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: place.get(json.loads(line)["prompt_hash"], len(prompts)))
    if ordered != lines:
        _write(path, "".join(ordered))


def claim(folder: Path, mine: dict[str, Any], there: Sequence[Answer]) -> None:
    """Write which target the answers belong to; refuse to mix them with another's."""
    theirs = _manifest(folder)
    _check(folder, there, mine, theirs or mine)  # where answers.json is lost, the answers' settings_hash is compared
    if theirs != mine:
        _write(folder / MANIFEST, json.dumps(mine, indent=2))


def _check(folder: Path, answers: Sequence[Answer], mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raises DataError for answers of another target, template or setting than `mine`, and for one without its
    hashes."""
    if any(None in (answer.prompt_hash, answer.settings_hash) for answer in answers):
        raise DataError(f"an older Outrider wrote {folder / ANSWERS}; name another prepare.folder, or delete this file")
    if answers and (differs := [key for key, value in mine.items() if theirs.get(key) != value]):
        wrong = f"made with another {' and '.join(differs)}"
        raise DataError(f"{folder} holds answers {wrong}; name another prepare.folder, or delete it")
    settings_hash = content_hash(theirs)
    others = (number for number, answer in enumerate(answers, 1) if answer.settings_hash != settings_hash)
    if number := next(others, 0):
        wrong = f"line {number} was made with another target, template or config"
        raise DataError(f"{folder / ANSWERS}: {wrong}; name another prepare.folder, or delete that line")


def _manifest(folder: Path) -> dict[str, Any]:
    """The target, template and settings in answers.json; empty where it is missing or damaged."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key != "ngram_hashes"}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


def _write(path: Path, text: str) -> None:
    """Replace a file's text, whole or not at all."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def keep_hashes(folder: Path, target: Target, prompts: Mapping[str, list[str]]) -> None:
    """Write the n-gram hashes of all prompts and answers, and name them in the manifest; nothing is done where they
    exist.

    prompts: the texts of each prompt by its hash.
    """
    there = hash_files.named(folder, MANIFEST)
    if there is not None and not there.facts["unknown"] and hash_files.is_whole(there):
        return
    collected, unknown = hash_files.Collector("prompts", "answers"), 0
    with (folder / ANSWERS).open(encoding="utf-8") as lines:
        for line in lines:
            answer = _from_line(line)
            if (texts := prompts.get(answer.prompt_hash or "")) is not None:
                collected.add("prompts", texts)
            # of an edited row, or of an earlier run with more prompts that stopped before its hashes were written
            else:
                unknown += 1
            collected.add("answers", [target.decode(answer.tokens[start:end]) for start, end in answer.learn])
    facts = collected.save(folder / NGRAM_HASHES) | {"unknown": unknown}
    facts["of"] = {"file": ANSWERS, "size_bytes": (folder / ANSWERS).stat().st_size}
    _write(folder / MANIFEST, json.dumps(_manifest(folder) | {"ngram_hashes": facts}, indent=2))
