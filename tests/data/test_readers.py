"""Rows of files of any size: in pieces, each row once, and what is damaged is named or counted."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from outrider.data.config import Source
from outrider.data.sources import readers
from outrider.data.sources.readers import Skipped, rows
from outrider.errors import DataError

ROWS = [{"prompt": f"{'가나다 ü🙂 ' * (i % 5)}{i}", "n": [i, {"a": None}]} for i in range(40)]


def read(path: Path, skip_bad: bool = False, **settings: Any) -> tuple[list[Any], Skipped]:
    skipped = Skipped()
    return [row for _, row in rows(Source(path=str(path), **settings), skip_bad, skipped)], skipped


@pytest.mark.parametrize(("piece", "indent"), [(1, None), (2, 1), (3, None), (7, 1), (64, None), (1 << 16, 1)])
def test_a_list_is_read_piece_by_piece(piece, indent, tmp_path, monkeypatch) -> None:
    """Catches a character, a number or a row that is torn where a piece of the file ends."""
    monkeypatch.setattr(readers, "PIECE", piece)
    path = tmp_path / "list.json"
    for given in (ROWS, [12, 345, 6.5, "x", None], []):
        path.write_text(" \n" + json.dumps(given, indent=indent, ensure_ascii=False) + "\n ", encoding="utf-8")
        assert read(path)[0] == given


@pytest.mark.parametrize("text", ["[1 2]", "[1,]", "[1] x", "[1", "[", '["a', "[nul]"])
def test_a_list_that_is_damaged_is_refused(text: str, tmp_path: Path) -> None:
    """Catches rows after the damage that are lost without a word."""
    (tmp_path / "list.json").write_text(text)
    with pytest.raises(DataError, match="is not JSON"):
        read(tmp_path / "list.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_row_that_is_too_long_is_named_and_not_held(name, tmp_path, monkeypatch) -> None:
    """Catches a file without line breaks that takes the memory of all of it; the rows after it are still read."""
    monkeypatch.setattr(readers, "ROW_BYTES", 100)
    path, long = tmp_path / name, "x" * 1000
    lines = ["a", long, "b"] if name == "a.txt" else [json.dumps({"prompt": text}) for text in ("a", long, "b")]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=rf"{name}, line 2 is longer than 0 MiB"):
        read(path)
    found, skipped = read(path, skip_bad=True)
    assert found == [{"prompt": "a"}, {"prompt": "b"}]
    assert len(skipped.reasons) == 1


def test_a_line_that_is_not_utf_8_is_named_or_counted(tmp_path: Path) -> None:
    """Catches one wrong byte that costs the whole file."""
    for name, ok, bad in (("a.txt", b"a\n", b"\xff\n"), ("a.jsonl", b'{"prompt": "a"}\n', b'{"prompt": "\xff"}\n')):
        (tmp_path / name).write_bytes(ok + bad + ok)
        with pytest.raises(DataError, match=f"{name}, line 2"):
            read(tmp_path / name)
        found, skipped = read(tmp_path / name, skip_bad=True)
        assert found == [{"prompt": "a"}] * 2 and len(skipped.reasons) == 1
    (tmp_path / "a.json").write_bytes(b'["\xff"]')
    with pytest.raises(DataError, match="is not JSON"):
        read(tmp_path / "a.json", skip_bad=True)


def write_parquet(path: Path, given: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(given), path, row_group_size=16)
    return path


def test_parquet_is_read(tmp_path: Path) -> None:
    """Catches rows of a later row group that are lost, and a file that was cut."""
    given = [{"id": str(i), "messages": [{"role": "user", "content": f"가 {i}"}]} for i in range(100)]
    path = write_parquet(tmp_path / "a.parquet", given)
    assert read(path)[0] == given
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"a\.parquet can't be read"):
        read(path)


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    """Catches a shard that is missed, and an order that the file system decides."""
    write_parquet(tmp_path / "c.parquet", [{"prompt": "4"}])
    (tmp_path / "b.txt").write_text("2\n3\n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "README.md").write_text("no rows")
    assert [row["prompt"] for row in read(tmp_path)[0]] == ["1", "2", "3", "4"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="has no file of prompts"):
        read(tmp_path / "none")


class Hub:
    """Stands for the hub."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def load_dataset(self, name: str, config: str | None, split: str, revision: str | None, streaming: bool) -> Any:
        import datasets

        self.asked.append((name, config, split, revision, streaming))
        whole = datasets.Dataset.from_list([{"prompt": str(i)} for i in range(50)])
        return whole.to_iterable_dataset() if streaming else whole


def test_a_data_set_is_asked_for_as_it_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a configuration, a split or a pinned revision that does not arrive."""
    import datasets

    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    source = Source(name=f"org/set{random.random()}", config="main", split="test", revision="abc123")
    assert [row["prompt"] for _, row in rows(source, False, Skipped())] == [str(i) for i in range(50)]
    assert hub.asked == [(source.name, "main", "test", "abc123", False)]
    some = source.model_copy(update={"count": 5})
    orders = [[row["prompt"] for _, row in rows(some, False, Skipped(), seed)] for seed in (1, 1, 2)]
    assert hub.asked[1][-1] is True
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(str(i) for i in range(50))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "needs a name"), ({"name": "a/b", "path": "c.jsonl"}, "not both"),
        ({"path": "c.jsonl", "revision": "main"}, "revision has no effect"),
        ({"path": "c.jsonl", "config": "main"}, "config has no effect"),
        ({"name": "a/b", "answers": "c.jsonl"}, "answers has no effect"),
    ],
)  # fmt: skip
def test_a_source_that_contradicts_itself_is_refused(given: dict[str, Any], problem: str) -> None:
    """Catches a pinned revision that pins nothing."""
    with pytest.raises(ValueError, match=problem):
        Source(**given)
