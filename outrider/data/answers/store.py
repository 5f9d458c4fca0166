"""The target's answers on disk, and the target they belong to.

    answers.jsonl   one answer per line: {"id", "prompt_hash", "settings_hash", "tokens", "learn": [[start, end], ...],
    "finish_reason"}, and "retokenised": true if a server returned text without token ids
    answers.json    the target, sampling and template of the answers, and the entry of prompts.grams
    answers.sqlite  the status of every prompt (see data/answers/ledger.py)
    prompts.grams   n-gram hashes of prompts and answers, to check later whether a text was among them

Answers are keyed by content, never by line number: `prompt_hash` is the hash of the prompt's content, `settings_hash`
that of the target, template and settings in answers.json.
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
from outrider.storage.json_text import numbered_lines, parse_json
from outrider.storage.trusted import regular, whole_text
from outrider.targets.protocol import Target

ANSWERS, MANIFEST, NGRAM_HASHES = "answers.jsonl", "answers.json", "prompts.grams"
KEYS = ("id", "prompt_hash", "settings_hash", "tokens", "learn", "finish_reason")
SHAPING = {"regenerate", "length", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "thinking"}
"""Settings on which the text of an answer depends."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text in the target's tokens, and the spans [start, end) of it that are trained on."""

    id: str
    tokens: Sequence[int]
    """Ids: a list, or an int32 array to save memory."""
    learn: list[tuple[int, int]]
    finish_reason: str | None = None
    prompt_hash: str | None = None
    settings_hash: str | None = None
    retokenised: bool = False
    """The answer arrived as text and was tokenised here; the model may have sampled other ids."""


# ── reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def iterate_answers(path: str | Path, vocabulary: int | None = None) -> Iterator[Answer]:
    """The answers of a file, one by one.

    Raises DataError with the line of an answer that can't be read or has ids outside the vocabulary.
    """
    path = Path(path)
    with _opened(path) as file:
        for _, _, answer in _placed(file, path, vocabulary):
            yield answer


def read_answers(path: str | Path, vocabulary: int | None = None) -> list[Answer]:
    """All answers of a file, in memory.  Raises DataError as `iterate_answers` does."""
    return list(iterate_answers(path, vocabulary))


def _opened(path: Path) -> BinaryIO:
    try:
        return regular(path).open("rb")
    except OSError as error:
        raise DataError(f"no answers at {path} ({error.strerror}); run `outrider prepare` first") from None


def _placed(file: BinaryIO, path: Path, vocabulary: int | None) -> Iterator[tuple[int, int, Answer]]:
    """Offset and size in bytes of each line, and its answer."""
    begin = number = 0
    try:
        for number, line in numbered_lines(file):  # noqa: B007
            yield begin, len(line), _from_line(line, vocabulary)
            begin += len(line)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}, line {number} is not an answer ({error}); delete the line, or run `outrider prepare`, which "
            "removes an incomplete last line"
        ) from None


def _from_line(line: bytes, vocabulary: int | None = None) -> Answer:
    """Raises ValueError for tokens that are not ids of this vocabulary, and for spans outside the text."""
    row = parse_json(line)
    tokens, learn = row["tokens"], [(start, end) for start, end in row["learn"]]
    check_tokens(tokens, vocabulary)
    if not tokens:
        raise ValueError("it has no tokens")
    if not all(0 <= start <= end <= len(tokens) for start, end in learn):
        raise ValueError(f"its spans {learn} are outside its {len(tokens)} tokens")
    hashes = row.get("prompt_hash"), row.get("settings_hash")
    return Answer(row["id"], tokens, learn, row.get("finish_reason"), *hashes, bool(row.get("retokenised")))


def check_tokens(tokens: Any, vocabulary: int | None) -> None:
    """Raises ValueError unless `tokens` is a list of ids of this vocabulary."""
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("its tokens are not a list of integers")
    wrong = min(tokens, default=0) if min(tokens, default=0) < 0 else max(tokens, default=0)
    if wrong < 0 or (vocabulary is not None and wrong >= vocabulary):
        valid = "at least 0" if vocabulary is None else f"0 to {vocabulary - 1} (the target's vocabulary)"
        raise ValueError(f"a token must be {valid}, got {wrong}")


class StoredAnswers(Sequence[Answer]):
    """Answers of a file, each read from disk on access: 24 bytes of memory per answer, whatever its length.

    Their tokens are int32 arrays.  The file stays open, since another run may add answers and replace it with a sorted
    file.
    """

    def __init__(self, file: BinaryIO, begins: np.ndarray, sizes: np.ndarray, hashes: np.ndarray):
        """begins, sizes [n] int64: bytes of each line.  hashes [n] uint64: of the prompts."""
        self._file, self.begins, self.sizes, self.hashes = file, begins, sizes, hashes

    @classmethod
    def read(
        cls, path: Path, vocabulary: int | None = None, check: Callable[[int, Answer], None] = lambda *_: None
    ) -> "StoredAnswers":
        """Index the lines of a file.  check: called with the number and the answer of each line, and may raise.

        Raises DataError as `iterate_answers` does.
        """
        file = _opened(path)
        begins, sizes, hashes = array("q"), array("q"), array("Q")
        for number, (begin, size, answer) in enumerate(_placed(file, path, vocabulary), 1):
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
        return compact(_from_line(line))

    def select(self, chosen: np.ndarray) -> "StoredAnswers":
        """A subset: indices [m], or [n] bool."""
        return StoredAnswers(self._file, self.begins[chosen], self.sizes[chosen], self.hashes[chosen])

    def to_prompts(self, hashes: np.ndarray) -> "StoredAnswers":
        """The answers to prompts with these hashes, [m] uint64."""
        return self.select(np.isin(self.hashes, hashes))


def hash_number(prompt_hash: str | None) -> int:
    """16 hex digits as a number; any other text is hashed."""
    try:
        return int(prompt_hash or "0", 16) & ((1 << 64) - 1)
    except ValueError:
        return int(content_hash(prompt_hash), 16)


def compact(answer: Answer) -> Answer:
    """The same answer with its tokens as an int32 array: 4 bytes each instead of 8 to 36."""
    return replace(answer, tokens=array("i", answer.tokens))


def hold_out(
    answers: Sequence[Answer], count: int, openings: Openings | None = None, chosen: Collection[int] = ()
) -> tuple[Sequence[Answer], Sequence[Answer]]:
    """Split answers into those to train on and those held out (at most `count`, and at most one in 16); both keep their
    order.

    The split depends only on the prompts: most held-out answers stay the same when more are added.
    openings: conversations with the same beginning are not split.
    chosen: `hash_number` of the prompts to hold out, in place of a split.
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
    pairs = list(zip(answers, is_out, strict=True))
    return [answer for answer, is_held in pairs if not is_held], [answer for answer, is_held in pairs if is_held]


def _number(answer: Answer) -> int:
    """The hash of its prompt as a number; of its id in older files, which lack it."""
    return hash_number(answer.prompt_hash or content_hash(answer.id))


def answers_for(folder: Path, target: Target, tokenizer: Any) -> StoredAnswers:
    """All answers of a folder, to train on.  Raises DataError if they come from another target or template."""
    stored = read_manifest(folder)
    expected = with_known_weights(manifest_for(target, tokenizer, Config()), stored)
    del expected["config"]  # a text may be cut, and prompts may be added, without changing an answer
    check_match = checker(folder, expected, stored)

    def check(number: int, answer: Answer) -> None:
        if not stored:
            raise DataError(
                f"{folder / MANIFEST} is missing or damaged; run `outrider prepare` again, which writes that file"
            )
        check_match(number, answer)

    return StoredAnswers.read(folder / ANSWERS, target.spec.vocabulary, check)


# ── the manifest ──────────────────────────────────────────────────────────────────────────────────────────────────────


def manifest_for(target: Target, tokenizer: Any, config: Config) -> dict[str, Any]:
    """The target, template and settings on which answers depend: the content of answers.json."""
    return {
        "target": binding(target) | {"ends": sorted(target.ends)},
        "template": template_hash(tokenizer),
        "config": {
            key: value
            for key, value in config.model_dump(mode="json", include=SHAPING).items()
            if (key, value) != ("thinking", "keep")
        },
    }


def with_known_weights(expected: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """`expected` with the weights hash of `stored` if one of the two is unknown.

    A target whose weights are only on a server is identified by its config and tokenizer.
    """
    target = stored.get("target")
    if not isinstance(target, dict) or "" not in (expected["target"]["weights_hash"], target.get("weights_hash")):
        return expected
    return expected | {"target": expected["target"] | {"weights_hash": target.get("weights_hash")}}


def checker(folder: Path, expected: dict[str, Any], stored: dict[str, Any]) -> Callable[[int, Answer], None]:
    """Returns a check of a line's number and answer against the `expected` manifest.

    It raises DataError for an answer from another target, template or setting, and for one without hashes.
    """
    settings_hash = content_hash(stored)
    differing = [key for key, value in expected.items() if stored.get(key) != value]

    def check(number: int, answer: Answer) -> None:
        if None in (answer.prompt_hash, answer.settings_hash):
            raise DataError(
                f"an older Outrider wrote {folder / ANSWERS}; name another prepare.folder, or delete this file"
            )
        if differing:
            raise DataError(
                f"{folder} contains answers made with another {' and '.join(differing)}; name another "
                "prepare.folder, or delete it"
            )
        if answer.settings_hash != settings_hash:
            raise DataError(
                f"{folder / ANSWERS}: line {number} was made with another target, template or config; name another "
                "prepare.folder, or delete that line"
            )

    return check


def read_manifest(folder: Path) -> dict[str, Any]:
    """The target, template and settings in answers.json; empty if it is missing or damaged."""
    try:
        content = parse_json(whole_text(folder / MANIFEST))
        return {key: value for key, value in content.items() if key != "ngram_hashes"}
    except (OSError, ValueError, AttributeError):
        return {}


# ── writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def to_line(answer: Answer, settings_hash: str) -> str:
    """An answer as a line of answers.jsonl."""
    values = answer.id, answer.prompt_hash, settings_hash, list(answer.tokens), answer.learn, answer.finish_reason
    row = dict(zip(KEYS, values, strict=True)) | ({"retokenised": True} if answer.retokenised else {})
    return json.dumps(row) + "\n"


def put_in_order(path: Path, position: Callable[[str], int | None]) -> None:
    """Sort answers in the order of their prompts, others last, so that a resumed run ends with the same file.

    position: the index of a prompt by its hash; None for a prompt of another run.
    """
    begins, sizes, positions = array("q"), array("q"), array("q")
    begin = 0
    with path.open("rb") as file:
        for line in file:
            at = position(parse_json(line)["prompt_hash"])
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
    """Replace answers.json atomically."""
    with replacing(folder / MANIFEST) as part:
        part.write_text(json.dumps(content, indent=2), encoding="utf-8")


def keep_hashes(folder: Path, target: Target, prompts: Iterable[list[str]], held_out: Collection[int] = ()) -> None:
    """Write the n-gram hashes of all prompts and answers that are trained on and enter them in the manifest, unless
    they exist.

    prompts: the texts of each prompt whose answer is trained on.  held_out: `hash_number` of the held-out prompts.
    """
    existing = hash_files.named(folder, MANIFEST)
    if existing is not None and not existing.facts["unknown"] and hash_files.is_intact(existing):
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
    # the rest come from edited rows, or from an earlier run with more prompts that stopped before its hashes were
    # written
    facts = collected.save(folder / NGRAM_HASHES) | {"unknown": unknown}
    facts["of"] = {"file": ANSWERS, "size_bytes": (folder / ANSWERS).stat().st_size}
    write_manifest(folder, read_manifest(folder) | {"ngram_hashes": facts})
