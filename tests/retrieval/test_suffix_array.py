"""A corpus finds what a search through everything finds; what is damaged, foreign or half built is refused."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, DataError
from outrider.retrieval.corpus import build as corpus_build
from outrider.retrieval.corpus import corpora, texts
from outrider.retrieval.corpus import files as corpus_files
from outrider.retrieval.corpus.build import build
from outrider.retrieval.corpus.files import verify
from outrider.retrieval.corpus.suffix_array import LONGEST, NOTHING, SAMPLE, Corpus, Match
from outrider.retrieval.proposal import Proposal, SourceProposal, merge_proposals

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), max_size=24), min_size=1, max_size=6)
CONTEXTS = st.lists(st.lists(st.integers(-1, 4), max_size=10), min_size=1, max_size=12)
VOCABULARIES = st.sampled_from([4, 255, 256, 65_535, 65_536, 1 << 24])
"""Around the borders of one, two, three and four bytes."""


def found_by_reading(documents: list[list[int]], context: list[int], vocabulary: int) -> tuple[int, list[list[int]]]:
    """Length of the longest suffix with something behind it, and what follows each of its places."""
    length, behind = 0, []
    for document in documents:
        for end in range(1, len(document)):
            pairs = zip(reversed(document[:end]), reversed(context[-LONGEST:]), strict=False)
            shared = next(
                (n for n, (mine, wanted) in enumerate(pairs) if mine != wanted), min(end, len(context), LONGEST)
            )
            if shared > length:
                length, behind = shared, []
            if shared == length > 0:
                behind.append(document[end:])
    return length, behind


def twins(corpus: Corpus, context: Sequence[int], least: int = 1) -> Match:
    """What both say."""
    slow = corpus._longest_in_python(array("q", context[-LONGEST:]), least)
    assert corpus.longest(context, least) == slow
    return slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpora")


@settings(deadline=None, max_examples=30)
@given(DOCUMENTS, CONTEXTS, VOCABULARIES)
def test_the_longest_suffix_is_the_one_that_reading_everything_finds(place, documents, contexts, vocabulary):
    """Catches an order that is not sorted backwards, a match across documents, a neighbour forgotten."""
    if not any(len(document) > 1 for document in documents):
        with pytest.raises(DataError, match="would be empty"):
            build(place / "c", documents, vocabulary=vocabulary)
        return
    corpus = build(place / "c", documents, vocabulary=vocabulary)
    assert corpus.header["positions"] == len(corpus.order)
    for context in contexts:
        context = [vocabulary if token == 4 else token for token in context]  # -1 and the separator match nothing
        length, behind = found_by_reading(documents, context, vocabulary)
        match = twins(corpus, context)
        assert (match.length, match.occurrences) == (length, len(behind))
        assert twins(corpus, context, least=3) == (match if length >= 3 else NOTHING)
        if len(behind) <= SAMPLE:
            follow = [corpus.tokens[end:].tolist() for end in match.ends]
            assert sorted(one[: one.index(vocabulary)] for one in follow) == sorted(behind)


def test_wide_and_long_contexts_are_cut_at_the_same_place(place: Path) -> None:
    """Catches a search that compares more than LONGEST tokens in one twin only; also an int64 order."""
    text = list(range(200)) * 3
    corpus = build(place / "long", [text], vocabulary=1000)
    assert twins(corpus, text).length == LONGEST
    assert twins(corpus, text).occurrences == 2  # the third stands at the end, where nothing follows
    corpus.order = corpus.order.astype("<i8")
    corpus._view.order, corpus._view.order_bytes = corpus.order.ctypes.data, 8
    assert twins(corpus, text[:70]).occurrences == 3
    assert corpus.longest([]) == corpus.longest([1000]) == corpus.longest([-1]) == NOTHING


def test_a_sample_is_spread_evenly_and_is_always_the_same(place: Path) -> None:
    """Catches a sample of the first places alone, which all have the same tokens before them."""
    documents = [[before, 7, 50 + before] for before in range(8, 48) for _ in range(5)]
    corpus = build(place / "sample", documents, vocabulary=100)
    match = twins(corpus, [99, 7])
    assert (match.length, match.occurrences, len(match.ends)) == (1, 200, SAMPLE)
    assert len({int(corpus.tokens[end]) for end in match.ends}) == SAMPLE
    assert twins(corpus, [99, 7]) == match


def test_hostile_files_are_never_read_out_of_bounds(place: Path) -> None:
    """Catches an index that the file decides: every place points outside, or the tokens have no separator."""
    corpus = build(place / "hostile", [[1, 2, 3, 1, 2, 3, 1, 2]], vocabulary=4)
    for values in ([-1, -(1 << 31), (1 << 31) - 1, 9, 10, 11], [0, 0, 0, 0, 0, 0]):
        corpus.order = np.array(values, dtype="<i4")
        corpus._view.order, corpus._view.positions = corpus.order.ctypes.data, len(values)
        for context in ([1, 2, 3], [3], [0]):
            corpus.continuations(corpus.longest(context), 8, 8)
    corpus.tokens = np.full(30, 2, dtype="<u2")[10:20]  # what stands around it would match too
    corpus.order = np.arange(1, 10, dtype="<i4")
    corpus._view.tokens, corpus._view.size = corpus.tokens.ctypes.data, 10
    corpus._view.order, corpus._view.positions = corpus.order.ctypes.data, 9
    assert twins(corpus, [2] * 40).length == 9
    assert corpus.continuations(corpus.longest([2] * 40), 8, 8).tokens == [2]


@settings(deadline=None, max_examples=20)
@given(DOCUMENTS, CONTEXTS, st.integers(0, 12), st.integers(1, 5))
def test_a_tree_counts_what_follows(place, documents, contexts, nodes, depth):
    """Catches shares that are not counts, a separator proposed, a child before its parent, a likelier node left out."""
    corpus = build(place / "c", [[0, 1], *documents], vocabulary=4)
    for context in contexts:
        match = corpus.longest(context)
        tree = corpus.continuations(match, nodes, depth)
        _, behind = found_by_reading([[0, 1], *documents], context, 4)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        if match.occurrences > SAMPLE:
            continue
        counts: dict[tuple[int, ...], int] = {}
        for row in behind:
            for end in range(1, min(depth, len(row)) + 1):
                counts[tuple(row[:end])] = counts.get(tuple(row[:end]), 0) + 1
        assert [round(share * (len(behind) + 1)) for share in tree.shares] == [counts[path] for path in paths]
        assert [counts[path] for path in paths] == sorted(counts.values(), reverse=True)[:nodes]
        assert len(paths) == len(set(paths)) == min(nodes, len(counts))
        assert all(parent < n for n, parent in enumerate(tree.parents))


def test_a_merge_is_the_best_tree_over_all_sources() -> None:
    """Catches siblings that are not joined, a parent behind its child, a weak source before a strong one."""
    strong = SourceProposal("strong", 8, Proposal([1, 2, 3], [-1, 0, 1], [1.0, 1.0, 0.5]))
    weak = SourceProposal("weak", 2, Proposal([1, 9, 5], [-1, 0, -1], [0.8, 0.7, 0.2]))
    tree = merge_proposals([weak, strong], 5)
    # by 64 / 72 and 4 / 12, 8 to 3, and so (8 / 3) ** 4 to 1
    weak_share = 1 / (1 + (8 / 3) ** 4)
    assert tree[:2] == ([1, 2, 3, 9, 5], [-1, 0, 1, 0, -1])
    assert tree.shares == pytest.approx(
        [1 - 0.2 * weak_share, 1 - weak_share, (1 - weak_share) / 2, 0.7 * weak_share, 0.2 * weak_share]
    )
    for nodes in range(5):
        assert merge_proposals([strong, weak], nodes) == tree.first(nodes)
    assert merge_proposals([strong], 2) == strong.proposal.first(2)
    certain = Proposal([4, 5], [-1, 0], [0.5, 0.5])  # a child as likely as its parent
    assert merge_proposals([SourceProposal("one", 3, certain), SourceProposal("other", 3, certain)], 1)[:2] == (
        [4],
        [-1],
    )
    assert merge_proposals([], 8) == Proposal([], [], [])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    sources = [("a.txt", 5), ("b.txt", 6)]
    build(tmp_path / "small", [[1, 2, 3], [1, 2, 4]], vocabulary=9, tokenizer_hash="aa", sources=sources)
    return tmp_path / "small"


def test_a_corpus_is_what_its_page_says(small: Path) -> None:
    """Catches a file that is missing, named otherwise or of another type; and rights that let others read it."""
    header = json.loads((small / "corpus.json").read_text())
    assert {path.name for path in small.iterdir()} == {"tokens.bin", "suffixes.bin", "sources.jsonl", "corpus.json"}
    assert np.fromfile(small / "tokens.bin", "<u2").tolist() == [9, 1, 2, 3, 9, 1, 2, 4, 9]
    suffixes = np.fromfile(small / "suffixes.bin", "<i4").tolist()
    assert (sorted(suffixes[:2]), sorted(suffixes[2:])) == ([2, 6], [3, 7])
    assert (header["documents"], header["tokens"], header["positions"], header["separator"]) == (2, 6, 4, 9)
    assert corpora.sources(small) == [("a.txt", 5), ("b.txt", 6)]
    assert small.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in small.parent.iterdir()] == ["small"]
    # ids of one vocabulary proposed in another would be rejected one and all, in silence
    assert Corpus.open(small, "aa").name == "small"
    with pytest.raises(DataError, match="tokenizer bb, got aa; add it again"):
        Corpus.open(small, "bb")


@pytest.mark.parametrize("name", ["tokens.bin", "suffixes.bin"])
def test_a_changed_file_is_refused_and_its_block_is_named(small, name, monkeypatch):
    """Catches a corpus that is searched although its files differ from those of its build."""
    monkeypatch.setattr(corpus_files, "BLOCK", 4)
    shutil.rmtree(small)
    build(small, [[1, 2, 3], [1, 2, 4]], vocabulary=9)
    path, before = small / name, (small / name).stat()
    content = bytearray(path.read_bytes())
    content[6] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} was written or copied.*outrider corpus verify small"):
        Corpus.open(small)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    Corpus.open(small)  # nothing is read
    with pytest.raises(DataError, match=rf"{name} is damaged: bytes 4 to 8 differ from"):
        verify(small)
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"must have {len(content)} bytes, got {len(content) - 1}"):
        Corpus.open(small)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Corpus.open(small)


def test_a_copied_corpus_is_taken_once_it_was_verified(small: Path) -> None:
    """Catches a corpus that can't move to another machine."""
    copied = Path(shutil.copytree(small, small.with_name("copied"), copy_function=shutil.copyfile))
    with pytest.raises(DataError, match="copied after its build"):
        Corpus.open(copied)
    seen: list[int] = []
    size = sum((copied / name).stat().st_size for name in ("tokens.bin", "suffixes.bin"))
    assert verify(copied, seen.append) == size == seen[-1]
    assert Corpus.open(copied).longest([1, 2]).occurrences == 2


def test_a_header_that_is_not_its_builds_is_refused(small: Path) -> None:
    """Catches a KeyError from a damaged header, or sizes that somebody wrote."""
    path = small / "corpus.json"
    for text, said in (
        (path.read_text().replace('"vocabulary": 9', '"vocabulary": 90'), "changed after its build, or is damaged"),
        ("{", "is damaged"), ("[]", "is damaged"), ('{"format": 1}', "is damaged"),
        ('{"format": 7, "seal": ""}', "has format 7"),
    ):  # fmt: skip
        path.write_text(text)
        with pytest.raises(DataError, match=said):
            Corpus.open(small)
    path.unlink()
    with pytest.raises(DataError, match="no corpus in"):
        Corpus.open(small)


def is_whole(folder: Path) -> bool:
    """The corpus is the old one, and nothing lies beside it."""
    names = [path.name for path in folder.parent.iterdir()]
    return bool(verify(folder)) and Corpus.open(folder).header["tokens"] == 6 and names == ["small"]


def many() -> Iterator[list[int]]:
    noise = np.random.default_rng(0)
    while True:
        yield noise.integers(0, 9, 100_000).tolist()


def test_a_full_disk_leaves_the_old_corpus(small: Path) -> None:
    """Catches a build in place; the limit is the process's own, on the size of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(DataError, match="can't write corpus 'small'.*nothing was changed"):
            build(small, many(), vocabulary=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert is_whole(small)


def test_a_failed_build_leaves_the_old_corpus(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches half a corpus after an error in a text or Ctrl-C, and an ImportError after minutes of reading."""

    def documents() -> Iterator[list[int]]:
        yield [1, 2, 3] * 1000
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(small, documents(), vocabulary=9)
    assert is_whole(small)
    with pytest.raises(DataError, match="token id 9 is outside"):
        build(small, [[1, 9]], vocabulary=9)
    with pytest.raises(DataError, match="would be empty"):
        build(small, [[], [3]], vocabulary=9)
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(DataError, match=r"pip install 'outrider\[corpus\]'"):
        build(small, [[1, 2]], vocabulary=3)
    assert is_whole(small)


def test_what_a_killed_build_left_goes_with_the_next(small: Path) -> None:
    """Catches folders that pile up after kills; that of a build which is still at work must stay."""
    context = multiprocessing.get_context("fork")
    builds = [context.Process(target=build, args=(small, many()), kwargs={"vocabulary": 9}) for _ in range(2)]
    for one in builds:
        one.start()
    deadline = time.monotonic() + 20
    while len(list(small.parent.glob(".small.*/tokens.bin"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        os.kill(builds[0].pid or 0, signal.SIGKILL)
        builds[0].join()
        assert Corpus.open(small).header["tokens"] == 6
        build(small, [[5, 6, 7]], vocabulary=9)
        assert len(list(small.parent.glob(".small.*"))) == 1
    finally:
        builds[1].kill()
        builds[1].join()
    assert Corpus.open(small).header["tokens"] == 3


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_new_corpus_takes_the_place_of_an_old_one_that_is_in_use(small, can_exchange, monkeypatch):
    """Catches a map that changes under a search."""
    if not can_exchange:
        monkeypatch.setattr(corpus_build, "_exchanged", lambda *_: False)
    old = Corpus.open(small)
    new = build(small, [[1, 2, 7, 7]], vocabulary=9)
    assert old.longest([1, 2]).occurrences == 2
    assert new.continuations(new.longest([1, 2]), 4, 4).tokens == [7, 7]
    assert [path.name for path in small.parent.iterdir()] == ["small"]


def test_corpora_are_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a folder that can't be moved, and a corpus written, or deleted, outside of it."""
    for name in ("a/b", "../a", "/a", "", ".a", "a\nb", "a" * 65, "é"):
        with pytest.raises(ConfigError, match="is not a valid corpus name"):
            corpora.folder_of(name, tmp_path)
    assert corpora.folder_of("a.b-c_1", tmp_path) == tmp_path / "a.b-c_1"
    with pytest.raises(DataError, match="no corpus 'x'.*none yet"):
        corpora.remove("x", tmp_path)
    monkeypatch.setenv("OUTRIDER_CORPORA", str(tmp_path / "here"))
    build(corpora.folder_of("b"), [[1, 2]], vocabulary=3)
    build(corpora.folder_of("a"), [[1, 2]], vocabulary=3)
    assert corpora.names() == ["a", "b"]
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700
    assert [corpus.name for corpus in corpora.load(["b", "a"])] == ["b", "a"]
    assert corpora.remove("a") > 0
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["b"]
    monkeypatch.delenv("OUTRIDER_CORPORA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert corpora.home() == tmp_path / "outrider" / "corpora"


def test_texts_are_read_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ends of lines that are changed, a hidden file read, a long text that loses a letter where it is cut."""
    monkeypatch.setattr(texts, "PIECE", 10)
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    (tmp_path / "b" / "long.md").write_text("0123456789abcdefghijKLM\nnext é\nlast")
    (tmp_path / "rows.jsonl").write_text('{"text": "x\\ny"}\n\n{"text": "", "id": 3}\n{"text": "z"}\n')
    (tmp_path / "empty.txt").write_text("")
    files = texts.files_of([tmp_path, tmp_path / "a.txt"])
    assert [file.name for file in files] == ["a.txt", "empty.txt", "rows.jsonl", "long.md"]
    read = [(text.file.name, text.text) for text in texts.texts(files)]
    assert read == [
        ("a.txt", "one\r\ntwo\n"), ("rows.jsonl", "x\ny"), ("rows.jsonl", "z"), ("long.md", "0123456789"),
        ("long.md", "abcdefghij"), ("long.md", "KLM\n"), ("long.md", "next é\n"), ("long.md", "last"),
    ]  # fmt: skip


def test_bad_files_are_named(tmp_path: Path) -> None:
    """Catches a binary file taken for text, one that is skipped in its middle."""
    (tmp_path / "zeros.bin").write_bytes(b"text\0more")
    (tmp_path / "latin.txt").write_bytes(b"fine\n" * 300_000 + "é".encode("latin-1"))
    (tmp_path / "rows.jsonl").write_text('{"text": "x"}\n{"texts": "y"}\n')
    for name in ("zeros.bin", "latin.txt"):
        with pytest.raises(DataError, match=rf"{name} is not UTF-8 text .*--skip-binary"):
            texts.readable([tmp_path / name])
        skipped: list[Path] = []
        assert texts.readable([tmp_path / name, tmp_path / "rows.jsonl"], skipped) == [tmp_path / "rows.jsonl"]
        assert skipped == [tmp_path / name]
    with pytest.raises(DataError, match=r"rows\.jsonl:2 has no `text`"):
        list(texts.texts([tmp_path / "rows.jsonl"]))
    for name in ("latin.txt", "nowhere"):
        with pytest.raises(DataError, match=rf"can't read .*{name}"):
            list(texts.texts([tmp_path / name]))
    with pytest.raises(DataError, match="nothing.txt does not exist"):
        texts.files_of([tmp_path / "nothing.txt"])
