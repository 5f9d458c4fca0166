"""The native trie is the Python one, and a library that can't be had is done without."""

import concurrent.futures
import logging
import shutil
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.retrieval import native, native_trie
from outrider.retrieval.native import NotNative
from outrider.retrieval.native_trie import NativeTrie
from outrider.retrieval.trie import Trie

SOURCE = """
extern "C" int outrider_one_version() { return 3; }
extern "C" int one() { return 1; }
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A small source, and a cache of its own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "one.cpp"
    path.write_text(SOURCE)
    return path


ACTIONS = st.sampled_from(["append", "append", "append", "follow", "clear", "new"])
STREAM = st.lists(st.tuples(ACTIONS, st.integers(0, 3), st.lists(st.integers(0, 5), max_size=12)), max_size=25)


def answers(grown, cursor) -> list[object]:
    found = [len(grown), cursor.match, cursor.followed, cursor.chain(6), cursor.chain(3, 2)]
    for order in ("recency", "frequency"):
        found += [cursor.tree(order, *limits) for limits in ((12, 5, 1), (5, 2, 2), (0, 3, 1))]
    return found


def same(depth: int, capacity: int, stream) -> bool:
    """Whether both answer alike, whatever is read, cleared and evicted in between."""
    pair = [Trie(depth, capacity), native_trie.fastest(depth, capacity)]
    cursors = [[grown.cursor() for _ in range(4)] for grown in pair]
    for what, which, tokens in stream:
        found = []
        for grown, own in zip(pair, cursors, strict=True):
            if what == "clear":
                if not which:  # now and then
                    grown.clear()
            elif what == "new":
                own[which] = grown.cursor()
            else:
                getattr(own[which], what)(tokens)
            found.append([answers(grown, cursor) for cursor in own])
        if found[0] != found[1]:
            return False
    return True


@given(stream=STREAM, depth=st.integers(2, 5), spare=st.integers(0, 60))
def test_python_and_native_agree_whatever_is_read_forgotten_and_cleared(stream, depth, spare):
    """Catches any difference in windows, counts, order, ties and evictions, in the smallest memories above all."""
    assert isinstance(native_trie.fastest(depth, 100), NativeTrie)
    assert same(depth, 2 * depth + spare, stream)


def test_python_and_native_agree_on_a_long_text():
    """Catches a table that loses entries as it grows, or as they are erased; the numbers are the same in every run."""
    text, x = [], 1
    for _ in range(10_000):
        x = x * 1103515245 + 12345 & 0x7FFFFFFF
        text.append((x >> 16) % (3 if x >> 29 else 900))
    for capacity in (1_000_000, 3_000):
        pair = [Trie(5, capacity), native_trie.fastest(5, capacity)]
        cursors = [grown.cursor() for grown in pair]
        for at in range(0, len(text), 500):
            for cursor in cursors:
                cursor.append(text[at : at + 500])
            one, other = (answers(grown, cursor) for grown, cursor in zip(pair, cursors, strict=True))
            assert one == other


def test_a_trie_outlives_its_name_as_long_as_a_cursor_needs_it():
    """Catches memory that is given back while a cursor still reads it."""
    cursor = native_trie.fastest(4, 1000).cursor()
    cursor.append([1, 2, 3, 1, 2])
    for _ in range(100):
        native_trie.fastest(4, 1000).cursor().append(range(50))
    assert cursor.chain(2) == [3, 1]


def built(source) -> list[str]:
    return sorted(path.name for path in (source.parent / "cache" / "native").iterdir())


def test_a_library_is_compiled_once_and_again_for_another_source(source):
    """Catches a stale library behind a changed source, and temporary files that stay."""
    assert native.load(source, 3).one() == 1
    first = built(source)
    folder = source.parent / "cache" / "native"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    made = (folder / first[0]).stat().st_mtime_ns
    assert native.load(source, 3).one() == 1
    assert built(source) == first and (folder / first[0]).stat().st_mtime_ns == made
    source.write_text(SOURCE.replace("return 1", "return 2"))
    assert native.load(source, 3).one() == 2
    assert len(built(source)) == 2


def test_several_processes_may_compile_at_once(source):
    """Catches a half written library that another one loads."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [found.one() for found in pool.map(lambda _: native.load(source, 3), range(4))] == [1] * 4
    assert len(built(source)) == 1


def test_what_is_no_library_of_this_version_is_refused_by_name(source):
    """Catches functions called with arguments of another version, a failure that says nothing."""
    with pytest.raises(NotNative, match="must have version 4, got 3"):
        native.load(source, 4)
    source.write_text(SOURCE.replace("return 1", "return 2"))  # a library that is mapped must not change
    native._built(source).write_text("nothing")
    with pytest.raises(NotNative, match="delete it"):
        native.load(source, 3)
    before = built(source)
    source.write_text("int outrider_one_version() { return missing; }\n")
    with pytest.raises(NotNative, match=r"one\.cpp:1.*missing"):
        native.load(source, 3)
    assert built(source) == before


@pytest.mark.parametrize(
    ("cause", "said"), [("switch", "OUTRIDER_NATIVE=0"), ("compiler", "no C++ compiler"), ("folder", "can't be used")]
)
def test_without_a_library_python_goes_on_and_one_line_says_so(cause, said, source, monkeypatch, caplog):
    """Catches a package that needs a compiler, and a log line a trie."""
    if cause == "switch":
        monkeypatch.setenv("OUTRIDER_NATIVE", "0")
    elif cause == "compiler":
        monkeypatch.setattr(shutil, "which", lambda name: None)
    else:
        (source.parent / "cache").write_text("a file")
    for cached in (native.library, native_trie._functions):
        monkeypatch.setattr(cached.__module__ + "." + cached.__name__, cached.__wrapped__)
    uncached = native.library
    calls = []
    monkeypatch.setattr(native, "library", lambda *given: calls.append(given) or uncached(*given))
    with caplog.at_level(logging.INFO):
        assert isinstance(native_trie.fastest(3, 100), Trie)
    (line,) = caplog.messages
    assert said in line and "Python" in line
    assert calls == [("trie.cpp", native_trie.VERSION)]
