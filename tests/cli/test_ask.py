"""`outrider ask`: what it prints and writes, what it refuses before anything is sent, and its exit code."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serve.running import running
from verbs import outrider_with

from outrider import generate
from outrider.cli import console
from outrider.targets.hf.transformers import TransformersTarget
from tests.client import misbehaving
from tests.client.misbehaving import MODEL, Ledger, text_of

PRICES = f"date: 2026-11-25\ncurrency: EUR\nmodels: {{{MODEL}: {{input: 1, output: 20}}}}\n"
FILE = ("ask", "in.jsonl", "--out", "out.jsonl", "--prices", "prices.yaml")
Said = Callable[[], tuple[str, str]]


@pytest.fixture
def stub() -> Iterator[tuple[str, Ledger]]:
    with misbehaving.running() as found:
        yield found


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Said]:
    """What went to standard output, and to standard error as one line, since the last call."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "out", Console(width=300))
    monkeypatch.setattr(console, "note", Console(stderr=True, width=300))
    (tmp_path / "prices.yaml").write_text(PRICES)
    capsys.readouterr()

    def read() -> tuple[str, str]:
        found = capsys.readouterr()
        return found.out, " ".join(found.err.split())

    return read


def prompts(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("more", [(), ("--no-stream",), ("--completions",)])
def test_a_text_is_answered_on_standard_output_alone(stub, said, more, tmp_path, monkeypatch):
    """Catches an answer mixed with remarks, a cost that is not told, and an option without an effect."""
    monkeypatch.setenv("MY_KEY", "k-1")
    (tmp_path / "old.txt").write_text("what was there")
    words = ("ask", "say [bold]this[/bold]", "--server", stub[0], "--max-tokens", "6", *more)
    assert outrider_with(*words, "--prices", "prices.yaml") == 0
    out, err = said()
    assert out == text_of("say [bold]this[/bold]", 6) + "\n"
    assert "6 tokens after 6, " in err and "cost 0.000126 EUR by prices of 2026-11-25" in err
    assert ("stream" in stub[1].bodies[0]) == ("--no-stream" not in more)
    assert ("prompt" in stub[1].bodies[0]) == ("--completions" in more)
    if not more:
        words += ("--temperature", "0", "--seed", "3", "--prediction", "old.txt", "--key-from", "MY_KEY")
        assert outrider_with(*words, "--model", MODEL) == 0
        body, headers = stub[1].bodies[1], stub[1].headers[1]
        assert (body["temperature"], body["seed"], body["prediction"]["content"]) == (0.0, 3, "what was there")
        assert (body["model"], headers["authorization"]) == (MODEL, "Bearer k-1")
        assert "cost unknown: no --prices" in said()[1]


def test_a_file_is_answered_into_another_with_a_report(stub: tuple[str, Ledger], said: Said, tmp_path: Path) -> None:
    """Catches a report that counts what it did not do, failures that are passed over, and a run from the start."""
    rows = [{"prompt": f"p{i}", "trouble": [{"status": 400}] * 2 if i == 2 else [{"status": 503}]} for i in range(6)]
    prompts(tmp_path / "in.jsonl", rows)
    words = (*FILE, "--server", stub[0], "--max-tokens", "4")
    assert outrider_with(*words, "--json", "report.json") == 1
    out, _ = said()
    assert "6 prompts, 0 answered before; model stub, answers in out.jsonl" in out
    assert "RefusedError: HTTP 400: told to answer 400" in out and "rerun the same command" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["answered"], len(report["failed"]), report["usage"]["attempts"]) == (5, 1, 11)
    assert (report["cost"], report["currency"]) == ("0.000405", "EUR")
    for name, value in (("answered", "5"), ("failed", "1"), ("sent", "11 times"), ("cost", "0.000405 EUR")):
        assert any(line.split()[:1] == [name] and value in line for line in out.splitlines()), name
    assert outrider_with(*words) == 1
    assert "5 answered before" in said()[0]
    assert outrider_with(*words) == 0
    before = (tmp_path / "out.jsonl").read_text()
    assert len(before.splitlines()) == 6
    assert outrider_with(*words) == 0
    assert (tmp_path / "out.jsonl").read_text() == before


def test_a_budget_stops_a_file_with_exit_code_1(stub, said, tmp_path):
    """Catches a script that goes on as if all had been answered, a traceback, and minutes of silence."""
    prompts(tmp_path / "in.jsonl", [f"p{i}" for i in range(30)])
    words = (*FILE, "--server", stub[0], "--max-tokens", "8")
    assert outrider_with(*words, "--budget", "0.002", "--concurrency", "2") == 1
    assert "stopped early: another attempt may cost" in said()[0]
    assert 0 < len((tmp_path / "out.jsonl").read_text().splitlines()) < 30
    assert stub[1].charged <= 0.002
    assert outrider_with("ask", "hi", "--server", "http://127.0.0.1:1", "--attempts", "1") == 1
    assert "no answer; sent once, last: http://127.0.0.1:1/v1 can't be reached" in said()[1]


WRONG = [
    (("in.jsonl",), "answers to in.jsonl need a file; name one with --out"),
    (("hi", "--out", "out.jsonl"), "--out is for a file of prompts"),
    (("none.jsonl", "--out", "out.jsonl"), "can't read none.jsonl"),
    (("in.jsonl", "--out", "in.jsonl"), "answers would overwrite in.jsonl"),
    (("hi", "--budget", "5"), "a budget needs prices"),
    (("hi", "--budget", "much", "--prices", "prices.yaml"), "--budget must be an amount such as 5.00, got 'much'"),
    (("hi", "--budget", "5", "--prices", "prices.yaml", "--model", "other"), "price of 'other'"),
    (("hi", "--prices", "none.yaml"), "no table of prices at none.yaml"),
    (("hi", "--prediction", "none.txt"), "can't read none.txt"),
    (("hi", "--key-from", "NO_SUCH_KEY"), "this environment variable is not set"),
    (("hi", "--server", "ftp://x"), "not the address of a server"),
]


def test_what_is_wrong_is_said_before_anything_is_sent(stub, said, tmp_path):
    """Catches a mistake that is found after the first answers were paid for."""
    prompts(tmp_path / "in.jsonl", ["a"])
    for words, match in WRONG:
        server = () if "--server" in words else ("--server", stub[0])
        assert outrider_with("ask", *words, *server) in (1, 2)
        assert match in said()[1]
    assert not stub[1].bodies


def test_a_server_verifies_what_is_drafted_here(said: Said, talker: TransformersTarget, folder: Path) -> None:
    """Catches a text that is not the server's own, and options that are dropped in silence."""
    drafted = ("--drafter", "ngram", "--set", "length=3", "--tokenizer", str(folder), "--max-tokens", "12")
    with running(talker) as server:
        words = ("ask", "abcabcabc", "--server", server.url, "--json", "out.json")
        assert outrider_with(*words, *drafted) == 0
        out, err = said()
        messages = [{"role": "user", "content": "abcabcabc"}]
        assert out == generate(talker, [messages], max_new_tokens=12)[0].text + "\n"
        assert "drafted 12 tokens in" in err and "plain 12 tokens in" in err
        report = json.loads(Path("out.json").read_text())
        assert report["tokens"] == 12 and report["drafted"]["rounds"] == 12 - report["accepted"]
        assert outrider_with(*words, *drafted, "--budget", "1") == 2
        assert "--budget has no effect with --drafter" in said()[1]
        assert outrider_with(*words, "--drafter", "ngram") == 2
        assert "needs the model's own --tokenizer" in said()[1]
