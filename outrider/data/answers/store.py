"""The target's answers on disk, and the target they belong to.

    answers.jsonl   {"id", "prompt_hash", "settings_hash", "tokens", "learn": [[start, end], ...], "finish_reason"} a
    line, and "retokenised": true where a server gave text and no token ids
    answers.json    the target, sampling and template they belong to, and which hashes are theirs
    answers.sqlite  what became of every prompt (see data/answers/ledger.py)
    prompts.grams   hashes of what stands in prompts and answers, to ask later whether a text was among them

An answer belongs to the content of its prompt and to the target, never to a line of a file: `prompt_hash` is the hash
of the prompt's content, `settings_hash` that of answers.json's target, template and settings.
"""

import json
import os
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from outrider.data.config import Config
from outrider.data.overlap import hash_files
from outrider.data.rendering import template_hash
from outrider.data.sources.duplicates import content_hash
from outrider.data.split import Openings, held_out
from outrider.errors import DataError
from outrider.nn.draft_model import binding
from outrider.storage.atomic import replacing
from outrider.targets.protocol import Target

ANSWERS, MANIFEST, NGRAM_HASHES = "answers.jsonl", "answers.json", "prompts.grams"
KEYS = ("id", "prompt_hash", "settings_hash", "tokens", "learn", "finish_reason")
SHAPING = {"regenerate", "length", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking"}
"""Settings on which the text of an answer depends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text as the target saw it, and the spans of it that train."""

    id: str
    tokens: Sequence[int]
    """Ids: a list, or an array of int32 where many are held."""
    learn: list[tuple[int, int]]
    finish_reason: str | None = None
    prompt_hash: str | None = None
    settings_hash: str | None = None
    retokenised: bool = False
    """The answer came as text: its ids are the tokenizer's, and the model may have drawn others."""


# ── read ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def iterate_answers(path: str | Path, vocabulary: int | None = None) -> Iterator[Answer]:
    """The answers of a file, one by one.  Raises DataError with the line of one that can't be read, or has ids outside
    the vocabulary."""
    for _, _, answer in _placed(Path(path), vocabulary):
        yield answer


def read_answers(path: str | Path, vocabulary: int | None = None) -> list[Answer]:
    """All answers of a file, in memory.  Raises DataError as `iterate_answers` does."""
    return list(iterate_answers(path, vocabulary))


def _placed(path: Path, vocabulary: int | None) -> Iterator[tuple[int, int, Answer]]:
    """(first byte, bytes) of each line, and the answer there."""
    with _opened(path) as file:
        yield from _placed_in(file, path, vocabulary)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"no answers at {path} ({error.strerror}); run `outrider prepare` first") from None


def _placed_in(file: BinaryIO, path: Path, vocabulary: int | None) -> Iterator[tuple[int, int, Answer]]:
    begin = 0
    for number, line in enumerate(file, 1):
        try:
            answer = _from_line(line.decode("utf-8"), vocabulary)
        except (ValueError, KeyError, TypeError) as error:
            what = f"{path}, line {number} is not an answer ({error})"
            raise DataError(
                f"{what}; delete the line, or run `outrider prepare`, which removes an incomplete last line"
            ) from None
        yield begin, len(line), answer
        begin += len(line)


def _from_line(line: str, vocabulary: int | None = None) -> Answer:
    """Raises ValueError for tokens that are not ids of this vocabulary, and for spans outside the text."""
    row = json.loads(line)
    tokens, learn = row["tokens"], [(start, end) for start, end in row["learn"]]
    check_tokens(tokens, vocabulary)
    if not tokens:
        raise ValueError("it has no tokens")
    if not all(0 <= start <= end <= len(tokens) for start, end in learn):
        raise ValueError(f"its spans {learn} reach outside its {len(tokens)} tokens")
    hashes = row.get("prompt_hash"), row.get("settings_hash")
    return Answer(row["id"], tokens, learn, row.get("finish_reason"), *hashes, bool(row.get("retokenised")))


def check_tokens(tokens: Any, vocabulary: int | None) -> None:
    """Raises ValueError for what is not a list of ids of this vocabulary."""
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("its tokens are not a list of whole numbers")
    wrong = min(tokens, default=0) if min(tokens, default=0) < 0 else max(tokens, default=0)
    if wrong < 0 or (vocabulary is not None and wrong >= vocabulary):
        wanted = "at least 0" if vocabulary is None else f"0 to {vocabulary - 1} (the target's vocabulary)"
        raise ValueError(f"a token must be {wanted}, got {wrong}")


class StoredAnswers(Sequence[Answer]):
    """Answers of a file, each read when it is asked for: 24 bytes of memory an answer, whatever its length.

    Their tokens are arrays of int32.  The file stays open: another run may add answers, and put a sorted file in its
    place.
    """

    def __init__(self, file: BinaryIO, begins: np.ndarray, sizes: np.ndarray, hashes: np.ndarray):
        """begins, sizes [n] int64: bytes of each line.  hashes [n] uint64: of the prompts."""
        self._file, self.begins, self.sizes, self.hashes = file, begins, sizes, hashes

    @classmethod
    def read(
        cls, path: Path, vocabulary: int | None = None, check: Callable[[int, Answer], None] = lambda *_: None
    ) -> "StoredAnswers":
        """Find the lines of a file.  check: gets the number of each line and its answer, and may raise.

        Raises DataError as `iterate_answers` does.
        """
        begins, sizes, hashes, file = array("q"), array("q"), array("Q"), _opened(path)
        for number, (begin, size, answer) in enumerate(_placed_in(file, path, vocabulary), 1):
            check(number, answer)
            begins.append(begin)
            sizes.append(size)
            hashes.append(hash_number(answer.prompt_hash))
        return cls(file, np.array(begins, np.int64), np.array(sizes, np.int64), np.array(hashes, np.uint64))

    def __len__(self) -> int:
        return len(self.begins)

    @overload
    def __getitem__(self, index: int) -> Answer: ...
    @overload
    def __getitem__(self, index: slice) -> "StoredAnswers": ...
    def __getitem__(self, index: int | slice) -> "Answer | StoredAnswers":
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        line = os.pread(self._file.fileno(), int(self.sizes[index]), int(self.begins[index]))
        return compact(_from_line(line.decode("utf-8")))

    def select(self, chosen: np.ndarray) -> "StoredAnswers":
        """These of them: indices [m], or [n] bool."""
        return StoredAnswers(self._file, self.begins[chosen], self.sizes[chosen], self.hashes[chosen])

    def to_prompts(self, hashes: np.ndarray) -> "StoredAnswers":
        """The answers to prompts with these hashes, [m] uint64."""
        return self.select(np.isin(self.hashes, hashes))


def hash_number(prompt_hash: str | None) -> int:
    """16 hex digits as a number; of another text, a number of its own."""
    try:
        return int(prompt_hash or "0", 16) & ((1 << 64) - 1)
    except ValueError:
        return int(content_hash(prompt_hash), 16)


def compact(answer: Answer) -> Answer:
    """The same answer with its tokens as an array of int32: 4 bytes each instead of 8 to 36."""
    return replace(answer, tokens=array("i", answer.tokens))


def hold_out(
    answers: Sequence[Answer], count: int, openings: Openings | None = None, chosen: Collection[int] = ()
) -> tuple[Sequence[Answer], Sequence[Answer]]:
    """Answers to train on, and up to `count`, at most one in 16, that are held out; both in their order.

    Which ones depends on the prompts alone: most of them stay the same when more answers come.
    openings: conversations that begin alike are on one side.
    chosen: `hash_number` of the prompts that are held out, in place of a split.
    """
    if isinstance(answers, StoredAnswers):
        hashes = answers.hashes
    else:
        hashes = np.array([_number(answer) for answer in answers], np.uint64)
    if chosen:
        is_out = np.isin(hashes, np.fromiter(chosen, np.uint64))
    else:
        groups = hashes if openings is None else openings.of(hashes)
        is_out = held_out(hashes, groups, min(count, len(answers) // 16))
    if isinstance(answers, StoredAnswers):
        return answers.select(~is_out), answers.select(is_out)
    both = list(zip(answers, is_out, strict=True))
    return [one for one, is_held in both if not is_held], [one for one, is_held in both if is_held]


def _number(answer: Answer) -> int:
    """The hash of its prompt as a number; of its id where an older file has none."""
    return hash_number(answer.prompt_hash or content_hash(answer.id))


def answers_for(folder: Path, target: Target, tokenizer: Any) -> StoredAnswers:
    """All answers of a folder, to train on.  Raises DataError where they are those of another target or template."""
    theirs = manifest_of(folder)
    mine = agreed(whose(target, tokenizer, Config()), theirs)
    del mine["config"]  # a text may be cut, and prompts may be added, without changing an answer
    is_theirs = checker(folder, mine, theirs)

    def check(number: int, answer: Answer) -> None:
        if not theirs:
            raise DataError(
                f"{folder / MANIFEST} is missing or damaged; run `outrider prepare` again, which writes that file"
            )
        is_theirs(number, answer)

    return StoredAnswers.read(folder / ANSWERS, target.spec.vocabulary, check)


# ── whose they are ────────────────────────────────────────────────────────────────────────────────────────────────────


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


def agreed(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`mine`, with the weights of answers.json where one of both does not know them: a target whose weights are on a
    server alone is told by its config and tokenizer."""
    target = theirs.get("target")
    if not isinstance(target, dict) or "" not in (mine["target"]["weights_hash"], target.get("weights_hash")):
        return mine
    return mine | {"target": mine["target"] | {"weights_hash": target.get("weights_hash")}}


def checker(folder: Path, mine: dict[str, Any], theirs: dict[str, Any]) -> Callable[[int, Answer], None]:
    """A function of a line's number and its answer that raises DataError for one of another target, template or
    setting than `mine`, and for one without its hashes."""
    settings_hash, differs = content_hash(theirs), [key for key, value in mine.items() if theirs.get(key) != value]

    def check(number: int, answer: Answer) -> None:
        if None in (answer.prompt_hash, answer.settings_hash):
            raise DataError(
                f"an older Outrider wrote {folder / ANSWERS}; name another prepare.folder, or delete this file"
            )
        if differs:
            wrong = f"made with another {' and '.join(differs)}"
            raise DataError(f"{folder} holds answers {wrong}; name another prepare.folder, or delete it")
        if answer.settings_hash != settings_hash:
            wrong = f"line {number} was made with another target, template or config"
            raise DataError(f"{folder / ANSWERS}: {wrong}; name another prepare.folder, or delete that line")

    return check


def manifest_of(folder: Path) -> dict[str, Any]:
    """The target, template and settings in answers.json; empty where it is missing or damaged."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return {key: value for key, value in found.items() if key != "ngram_hashes"}
    except (FileNotFoundError, ValueError, AttributeError):
        return {}


# ── written ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_line(answer: Answer, settings_hash: str) -> str:
    """An answer as it stands in answers.jsonl."""
    values = answer.id, answer.prompt_hash, settings_hash, list(answer.tokens), answer.learn, answer.finish_reason
    row = dict(zip(KEYS, values, strict=True)) | ({"retokenised": True} if answer.retokenised else {})
    return json.dumps(row) + "\n"


def put_in_order(path: Path, position: Callable[[str], int | None]) -> None:
    """Sort answers in the order of their prompts, others last, so that a stopped run ends with the same file.

    position: a prompt's number by its hash, None for one that is not asked.
    """
    begins, sizes, positions = array("q"), array("q"), array("q")
    begin = 0
    with path.open("rb") as file:
        for line in file:
            at = position(json.loads(line)["prompt_hash"])
            begins.append(begin)
            sizes.append(len(line))
            positions.append((1 << 62) if at is None else at)
            begin += len(line)
    order = np.argsort(np.array(positions, np.int64), kind="stable")
    if np.array_equal(order, np.arange(len(order))):
        return
    with replacing(path) as part, path.open("rb") as file, part.open("wb") as out:
        for i in order.tolist():
            file.seek(begins[i])
            out.write(file.read(sizes[i]))


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Replace answers.json, whole or not at all."""
    with replacing(folder / MANIFEST) as part:
        part.write_text(json.dumps(content, indent=2), encoding="utf-8")


def keep_hashes(folder: Path, target: Target, prompts: Iterable[list[str]], held_out: Collection[int] = ()) -> None:
    """Write the n-gram hashes of all prompts and answers that train, and name them in the manifest; nothing is done
    where they exist.

    prompts: the texts of each prompt that has an answer.  held_out: `hash_number` of the prompts of the others.
    """
    there = hash_files.named(folder, MANIFEST)
    if there is not None and not there.facts["unknown"] and hash_files.is_whole(there):
        return
    collected, unknown = hash_files.Collector("prompts", "answers"), 0
    for answer in iterate_answers(folder / ANSWERS):
        if _number(answer) in held_out:
            continue
        collected.add("answers", [target.decode(answer.tokens[start:end]) for start, end in answer.learn])
        unknown += 1
    for texts in prompts:
        collected.add("prompts", texts)
        unknown -= 1
    # what is left: of an edited row, or of an earlier run with more prompts that stopped before its hashes were written
    facts = collected.save(folder / NGRAM_HASHES) | {"unknown": unknown}
    facts["of"] = {"file": ANSWERS, "size_bytes": (folder / ANSWERS).stat().st_size}
    write_manifest(folder, manifest_of(folder) | {"ngram_hashes": facts})
