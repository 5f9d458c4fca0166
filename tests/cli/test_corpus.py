"""`outrider corpus`, in this process: what is made, told, refused and deleted."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from verbs import outrider_with

from outrider.cli import console
from outrider.data.corpus import tokenizer_of
from outrider.retrieval.corpus import build
from outrider.retrieval.corpus.suffix_array import Corpus
from outrider.targets.identity import hash_tokenizer

pytest.importorskip("pydivsufsort")


Command = Callable[..., SimpleNamespace]


@pytest.fixture
def corpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Run `outrider corpus` in an empty folder, with the corpora in `tmp_path / "home"`; white space in what it says is
    one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_CORPORA", str(tmp_path / "home"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(console, "out", Console(width=300))
    monkeypatch.setattr(console, "note", Console(stderr=True, width=300))
    capsys.readouterr()

    def command(*words: object) -> SimpleNamespace:
        code = outrider_with("corpus", *map(str, words))
        told = capsys.readouterr()
        return SimpleNamespace(code=code, out=" ".join(told.out.split()), err=" ".join(told.err.split()))

    return command


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "one.py").write_text(
        "import json\nimport os\n\n\ndef read(path):\n    return json.loads(path.read_text())\n"
    )
    (folder / "rows.jsonl").write_text('{"text": "import os"}\n{"text": "a line"}\n')
    return folder


def test_add_says_what_comes_and_what_came(corpus: Command, texts: Path, tmp_path: Path) -> None:
    """Catches a build that begins without a word of its size, special tokens in a text, or another tokenizer's hash."""
    done = corpus("add", "mine", "texts")
    assert done.code == 0, done.err
    assert "corpus mine: 2 files, 121B; about" in done.out
    assert "tokens, " in done.out and "on disk, " in done.out and "of memory, 0 s" in done.out
    assert f"3 documents, {Corpus.open(tmp_path / 'home/mine').header['tokens']} tokens in 0 s" in done.out
    tokenizer = tokenizer_of("demo")
    made = Corpus.open(tmp_path / "home/mine", hash_tokenizer(tokenizer))
    assert made.header["vocabulary"] == len(tokenizer)
    wanted = tokenizer((texts / "one.py").read_text(), add_special_tokens=False)["input_ids"]
    assert made.tokens[1 : len(wanted) + 2].tolist() == [*wanted, len(tokenizer)]
    match = made.longest(wanted[:-3])
    assert made.continuations(match, 3, 3).tokens == wanted[-3:]


def test_a_corpus_is_listed_told_of_checked_and_removed(corpus: Command, texts: Path, tmp_path: Path) -> None:
    """Catches a verb that says nothing, or that leaves files behind."""
    assert "no corpora in" in corpus("list").out
    for name in ("b", "a"):
        assert corpus("add", name, texts).code == 0
    rows = json.loads(corpus("list", "--json", "-").out)
    assert [(row["name"], row["error"], row["documents"]) for row in rows] == [("a", None, 3), ("b", None, 3)]
    assert rows[0]["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "home/a").iterdir())
    assert "corpus documents tokens size tokenizer made" in corpus("list").out
    told = json.loads(corpus("stats", "a", "--json", "-").out)
    assert {source["name"] for source in told["sources"]} == {str(path) for path in texts.iterdir()}
    assert "files 2, 121B; the largest: 80B" in corpus("stats", "a").out
    assert "all checksums match" in corpus("verify", "a").out
    assert corpus("remove", "a").out.startswith("removed a, ")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["b"]


def test_another_folder_and_another_target(corpus: Command, texts: Path, tmp_path: Path, folder: Path) -> None:
    """Catches an option that is not heard; `folder` has a model that reads bytes."""
    assert corpus("add", "bytes", texts, "--target", folder, "--folder", "there").code == 0
    made = Corpus.open(tmp_path / "there/bytes")
    assert made.header["tokens"] == 80 + len("import os") + len("a line")
    assert not (tmp_path / "home").exists()
    assert json.loads(corpus("list", "--folder", "there", "--json", "-").out)[0]["name"] == "bytes"
    (tmp_path / "empty").mkdir()
    assert "can't load the tokenizer of 'empty'" in corpus("add", "x", texts, "--target", "empty").err


def test_a_damaged_corpus_is_listed_with_what_to_do(corpus, texts, tmp_path, monkeypatch):
    """Catches half a corpus after Ctrl-C, a replacement that is not announced, a list that fails because of one damaged
    corpus in it, and a build that fails for want of room after its half hour."""
    corpus("add", "mine", texts)
    with monkeypatch.context() as patched:
        patched.setattr(build, "_write_sources", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        done = corpus("add", "mine", texts / "one.py")
    assert (done.code, done.err) == (130, "stopped; corpus mine is unchanged")
    assert json.loads(corpus("list", "--json", "-").out)[0]["documents"] == 3
    done = corpus("add", "mine", texts / "one.py")
    assert "replaces the existing one" in done.out
    assert Corpus.open(tmp_path / "home/mine").header["documents"] == 1
    path = tmp_path / "home/mine/tokens.bin"
    content = bytearray(path.read_bytes())
    content[4] ^= 8
    path.write_bytes(content)
    assert "outrider corpus verify mine" in corpus("list").out
    done = corpus("verify", "mine")
    assert (done.code, "tokens.bin is damaged: bytes 0 to" in done.err) == (1, True)
    assert (corpus("stats", "mine").code, corpus("remove", "mine").code) == (1, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    done = corpus("add", "mine", texts)
    assert (done.code, "needs about" in done.err and "has 10B left" in done.err) == (1, True), done
    assert not list((tmp_path / "home").iterdir())


def test_what_can_not_be_a_corpus_is_refused(corpus: Command, texts: Path, tmp_path: Path) -> None:
    """Catches a traceback, an exit code of 0, or something left behind."""
    (texts / "zeros.bin").write_bytes(b"\0\0")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("a")
    for words, code, said in (
        (("add", "mine", texts), 1, "zeros.bin is not UTF-8 text"),
        (("add", "mine", "empty.txt"), 1, "nothing to read in empty.txt"),
        (("add", "mine", "one.txt"), 1, "would be empty"),
        (("add", "mine", "nowhere.txt"), 1, "nowhere.txt does not exist"),
        (("add", "a/b", texts), 2, "'a/b' is not a valid corpus name"),
        (("remove", "../texts"), 2, "is not a valid corpus name"),
        (("stats", "other"), 1, "no corpus 'other'"),
    ):
        done = corpus(*words)
        assert (done.code, said in done.err) == (code, True), done
        assert "Traceback" not in done.err
    assert not (tmp_path / "home").exists() or not list((tmp_path / "home").iterdir())
    done = corpus("add", "mine", texts, "--skip-binary")
    assert (done.code, "1 files left out, not UTF-8 text" in done.out) == (0, True), done


def test_add_takes_of_a_folder_what_git_would_and_says_what_it_left_out(corpus: Command, tmp_path: Path) -> None:
    """Catches compiled files, secrets and build output in a corpus; nested and negated patterns decide as git does."""
    for name, text in {
        "repo/.git/config": "", "repo/.gitignore": "build/\n*.log\n/local.py\n", "repo/src/kept.py": "kept = 1\n",
        "repo/src/__pycache__/kept.pyc": "\0", "repo/src/.env": "SECRET=1", "repo/src/run.log": "a line of a log",
        "repo/local.py": "no",
        "repo/src/.gitignore": "!keep.log\n", "repo/src/keep.log": "a log to keep", "repo/src/build/out.py": "built",
        "repo/src/deep/local.py": "not the one at the top", "repo/src/.venv/lib.py": "hidden",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def taken(*words: str) -> tuple[set[str], str]:
        done = corpus("add", "mine", *words)
        assert done.code == 0, done.err
        sources = json.loads(corpus("stats", "mine", "--json", "-").out)["sources"]
        return {Path(source["name"]).name for source in sources}, done.out

    names, out = taken("repo/src")
    assert names == {"kept.py", "keep.log", "local.py"}
    assert "left out: 1 __pycache__, 3 hidden, 2 in .gitignore" in out
    assert taken("repo")[0] == {"kept.py", "keep.log", "local.py"}
    assert taken("repo/src/build")[0] == {"out.py"}, "a folder that is named is taken"
    assert taken("repo/src/run.log")[0] == {"run.log"}
