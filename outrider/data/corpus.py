"""Plans and builds a corpus of texts to draft from, with hashes of its texts."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.data.overlap.hash_files import Collector
from outrider.errors import DataError, TargetError
from outrider.retrieval.corpus import build as corpus_build
from outrider.retrieval.corpus import corpora
from outrider.retrieval.corpus import texts as corpus_texts
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.targets import catalog
from outrider.targets.identity import hash_tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """A corpus to build, with sizes and time estimated from the first texts."""

    path: Path
    files: list[Path]
    left_out: list[Path]
    """Files that are not UTF-8 text."""
    ignored: Counter[str]
    """Number of ignored files and folders, by reason: hidden, __pycache__, in .gitignore."""
    characters: int
    tokenizer: Any
    tokens: int
    """Estimated number of tokens."""
    seconds: float

    @property
    def token_bytes(self) -> int:
        return 2 if _ids(self.tokenizer) < 1 << 16 else 4

    @property
    def size_bytes(self) -> int:
        """Estimated bytes on disk."""
        return self.tokens * (self.token_bytes + 4)

    @property
    def memory_bytes(self) -> float:
        return 2e8 + self.tokens * 8 * self.token_bytes

    @property
    def disk(self) -> Path:
        """An existing folder on the disk of the corpus."""
        return next(folder for folder in self.path.parents if folder.exists())


def planned(
    name: str, files: Sequence[Path], target: str = "demo", folder: Path | None = None, *, skip_binary: bool = False
) -> Plan:  # fmt: skip
    """Plan a corpus of these files and folders with the tokenizer of `target`.

    Raises DataError if nothing can be read, and for a file that is not text unless `skip_binary` is set.
    """
    path, left_out, ignored = corpora.folder_of(name, folder), list[Path](), Counter[str]()
    paths = corpus_texts.readable(corpus_texts.files_of(files, ignored), left_out if skip_binary else None)
    characters = sum(file.stat().st_size for file in paths)
    if not characters:
        raise DataError(f"nothing to read in {', '.join(map(str, files))}; name files with text")
    tokenizer = tokenizer_of(target)
    _encoded(tokenizer, ["warm"])
    began = time.perf_counter()
    sample = [text.text[: 1 << 16] for text in islice(corpus_texts.texts(paths), 16)]
    read = max(1, sum(map(len, sample)))
    tokens = int(characters * sum(map(len, _encoded(tokenizer, sample))) / read)
    reading_s = characters * (time.perf_counter() - began) / read
    # sorting and writing 10 M tokens takes 3 to 4 s
    return Plan(path, paths, left_out, ignored, characters, tokenizer, tokens, reading_s + tokens * 4e-7)


def build(
    plan: Plan, on_text: Callable[[int], None] = lambda done: None,
    on_stage: Callable[[str, int], None] = lambda stage, tokens: None,
) -> Corpus:  # fmt: skip
    """Build the corpus; one of the same name is replaced.

    on_text: called with the number of characters read.  on_stage: called with each stage's name and number of tokens.
    """
    used: dict[str, int] = {}
    hashes = Collector("documents")

    def documents() -> Iterator[list[int]]:
        done = 0
        for batch in _batches(corpus_texts.texts(plan.files), 1 << 20):
            used.update((str(text.file.absolute()), text.file.stat().st_size) for text in batch)
            for text in batch:
                hashes.add("documents", [text.text])
            yield from _encoded(plan.tokenizer, [text.text for text in batch])
            done += sum(len(text.text) for text in batch)
            on_text(min(done, plan.characters))

    corpus = corpus_build.build(
        plan.path, documents(), vocabulary=_ids(plan.tokenizer), tokenizer_hash=hash_tokenizer(plan.tokenizer),
        sources=used.items(), on_stage=on_stage,
    )  # fmt: skip
    corpora.keep_hashes(plan.path, hashes.save)
    return corpus


def tokenizer_of(target: str) -> Any:
    """A target's tokenizer, without its weights."""
    tokenizer, reason = load_tokenizer(catalog.checkpoint(target))
    if reason:
        raise TargetError(
            f"can't load the tokenizer of {target!r}: {reason}; give `demo`, `smollm2`, a folder, a GGUF file, or a "
            "Hugging Face id"
        )
    return tokenizer


def _batches(texts: Iterator[Any], characters: int) -> Iterator[list[Any]]:
    """Batches of texts of about `characters` characters."""
    batch: list[Any] = []
    for text in texts:
        batch.append(text)
        if sum(len(member.text) for member in batch) >= characters:
            yield batch
            batch = []
    if batch:
        yield batch


def _ids(tokenizer: Any) -> int:
    """One more than the largest id; there may be gaps."""
    return 1 + max(tokenizer.get_vocab().values())


def _encoded(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    ids: list[list[int]] = encoded["input_ids"]
    return ids
