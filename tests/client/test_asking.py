"""A file of prompts: every line is answered once, whatever stops the run in between."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from outrider.client import AsyncClient, RefusedError, Retries, asking
from outrider.client.asking import FileProgress, ask_all, locked, read_prompts, unanswered
from outrider.errors import ConfigError, DataError
from tests.client import misbehaving
from tests.client.misbehaving import MODEL, PRICES, Ledger, text_of

RETRIES = Retries(attempts=2, base_s=0.01, spare=1000)


@pytest.fixture
def stub() -> Iterator[tuple[str, Ledger]]:
    with misbehaving.running() as server:
        yield server


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(url: str, source: Path, to: Path, **settings: Any) -> FileProgress:
    async def main() -> FileProgress:
        prompts = read_prompts(source, {"max_tokens": 8})
        async with AsyncClient(url, model=MODEL, retries=RETRIES, prices=PRICES, **settings) as client:
            with locked(to):
                return await ask_all(client, unanswered(prompts, to), to, 4)

    return asyncio.run(main())


def test_lines_of_every_kind_are_answered_with_their_ids(stub, tmp_path):
    """Catches a form that is not understood, a setting of a line that everybody's overrides, and an id that is lost."""
    url, _ledger = stub
    rows = [
        "a text", {"prompt": "b", "id": 7, "max_tokens": 4},
        {"messages": [{"role": "user", "content": "c"}], "id": "x"},
        {"custom_id": "y", "method": "POST", "body": {"prompt": "d", "max_completion_tokens": 6}}, "a text",
    ]  # fmt: skip
    outcome = run(url, written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert (outcome.answered, outcome.failed, outcome.stopped) == (5, {}, None)
    rows = {row["id"]: row for row in rows_of(tmp_path / "out.jsonl")}
    hashed = asking.digest({"prompt": "a text"})[: asking.SHORT]
    assert rows.keys() == {hashed, f"{hashed}-2", "7", "x", "y"}
    assert rows[hashed]["text"] == rows[f"{hashed}-2"]["text"] == text_of("a text", 8)
    assert (rows["7"]["text"], rows["x"]["text"], rows["y"]["text"]) == (
        text_of("b", 4), text_of("c", 8), text_of("d", 6)
    )  # fmt: skip
    assert rows["7"]["cost"] == "0.000081" and rows["7"]["usage"]["completion_tokens"] == 4
    assert (rows["7"]["finish_reason"], rows["7"]["attempts"], rows["7"]["model"]) == ("stop", 1, MODEL)


def test_the_same_command_asks_for_what_failed_only(stub, tmp_path):
    """Catches an answered prompt that is asked again, a failed one that is not and a line that was cut short."""
    url, ledger = stub
    rows = [{"prompt": f"p{i}", "trouble": [{"status": 400}] if i == 3 else []} for i in range(40)]
    source, to = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    first = run(url, source, to, budget=Decimal("0.003"))
    assert 4 < first.answered < 39 and first.stopped is not None and len(first.failed) <= 5
    assert sum(isinstance(error, RefusedError) for error in first.failed.values()) == 1 and ledger.charged <= Decimal(
        "0.003"
    )
    with to.open("a") as file:
        file.write('{"id": "cut sho')
    second = run(url, source, to)
    assert (first.answered + second.answered, second.failed, second.stopped) == (40, {}, None)
    assert sorted(row["text"] for row in rows_of(to)) == sorted(text_of(f"p{i}", 8) for i in range(40))
    assert len({row["id"] for row in rows_of(to)}) == 40
    assert [ledger.attempts[f"p{i}"] for i in range(5)] == [1, 1, 1, 2, 1]


WRONG = [
        ("", "has no prompts"), ('"a"\nno\n', "line 2 is not JSON"), ("[1]\n", "line 1 must be a text, or an object"),
        ('{"prompt": "a", "messages": []}\n', "either messages or prompt"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": "1"}\n', "line 2: id '1' is already in line 1"),
        ('{"prompt": "a", "id": true}\n', "must be a text or a number"),
]  # fmt: skip


def test_a_file_that_is_wrong_is_refused_before_anything_is_sent(tmp_path):
    """Catches a mistake in the last line that is found after the others were paid for."""
    for lines, match in WRONG:
        (tmp_path / "in.jsonl").write_text(lines)
        with pytest.raises(DataError, match=match):
            read_prompts(tmp_path / "in.jsonl", {})
    with pytest.raises(DataError, match="can't read"):
        read_prompts(tmp_path / "none.jsonl", {})


def test_answers_to_other_requests_are_not_taken_for_these(tmp_path):
    """Catches answers of two settings mixed in one file, a file of something else, and two processes at once."""
    source, to = written(tmp_path / "in.jsonl", [{"id": "a", "prompt": "p"}]), tmp_path / "out.jsonl"
    [prompt] = read_prompts(source, {"temperature": 0})
    written(to, [{"id": "a", "request": prompt.request}])
    assert unanswered([prompt], to) == []
    with pytest.raises(DataError, match="another request with id 'a'"):
        unanswered(read_prompts(source, {"temperature": 1}), to)
    written(to, [{"other": 1}])
    with pytest.raises(DataError, match="line 1, is not an answer of `outrider ask`"):
        unanswered([prompt], to)
    with pytest.raises(ConfigError, match="can't write"), locked(tmp_path / "none" / "out.jsonl"):
        pass
    with locked(to), pytest.raises(DataError, match="another process writes answers"), locked(to):
        pass


SCRIPT = """
import asyncio, sys
from pathlib import Path
from outrider.client import AsyncClient, Limits
from outrider.client.asking import ask_all, locked, read_prompts, unanswered
url, given, to = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
async def main():
    async with AsyncClient(url, model="stub", limits=Limits(concurrency=4)) as client:
        with locked(to):
            await ask_all(client, unanswered(read_prompts(given, {}), to), to, 4)
asyncio.run(main())
"""


def test_a_run_that_is_killed_loses_nothing_and_answers_nothing_twice(stub, tmp_path):
    """Catches an answer that waits in memory and half a line that is taken for one."""
    url, ledger = stub
    rows = [{"prompt": f"p{i}", "trouble": [{"slow": True}] * 9} for i in range(24)]
    source, to = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    noise, kills, before = random.Random(1), 0, 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, url, str(source), str(to)], env=os.environ)
        until = before + noise.randint(8, 14)
        while process.poll() is None and (not to.exists() or to.read_bytes().count(b"\n") < until):
            time.sleep(0.005)
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills, before = kills + 1, to.read_bytes().count(b"\n")
    assert kills
    assert sorted(row["text"] for row in rows_of(to)) == sorted(text_of(f"p{i}") for i in range(24))
    assert len({row["id"] for row in rows_of(to)}) == 24
    assert sum(ledger.attempts.values()) <= 24 + 4 * kills
