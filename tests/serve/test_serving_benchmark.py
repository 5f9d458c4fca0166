"""The benchmark of the server finds what it is for: a token lost or said twice, by the server or by a client."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import serving, serving_clients, serving_turns
from benchmarks.serving_clients import Connection, Due, Read, compared, parted
from benchmarks.serving_turns import Turn, audit, audited, best_by_halves, by_turns, known, with_body
from outrider import load_drafter
from outrider.serve.answers import Answer
from outrider.targets.transformers import TransformersTarget
from serve.running import MODEL, Running, running


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, load_drafter("ngram", talker)) as found:
        yield found


@pytest.fixture(scope="module")
def pool(talker: TransformersTarget) -> list[Due]:
    return with_body(known(talker, 8, (9, 14), (60,), has_all=True), model=MODEL, return_token_ids=True)


def soaked(server: Running, pool: list[Due], **changes: Any) -> dict[str, Any]:
    """What six clients find in half a second."""
    port = int(server.url.rpartition(":")[2])
    plan = {"port": port, "model": MODEL, "clients": 6, "seconds": 0.5, "seed": 0, "leaving": 0.0, "malformed": 0.0}
    return asyncio.run(serving_clients.soak(plan | {"pool": [list(due) for due in pool]} | changes))


def test_a_soak_of_a_sound_server_finds_nothing_and_leaves_nothing(server: Running, pool: list[Due]) -> None:
    """Catches nonsense that is answered or breaks the server, and clients that leave with their slots."""
    found = soaked(server, pool, leaving=0.3, malformed=0.3, seconds=1.5)
    counts = found["counts"]
    assert (found["partings"], found["failed"], counts["malformed, accepted"]) == ([], [], 0)
    assert min(counts["whole"], counts["left"], counts["malformed"], counts["tokens compared"]) > 5
    assert all(status[0] == "4" for statuses in found["refused"].values() for status in statuses)
    assert server.settled(lambda: server.engine.running == server.engine.queued == 0)


def at_its_third_call(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method whose result is another at the third call on each object."""

    def faulty(method: Callable[..., Any]) -> Callable[..., Any]:
        calls: dict[int, int] = {}

        def called(own: Any, *given: Any) -> Any:
            calls[id(own)] = calls.get(id(own), 0) + 1
            found = method(own, *given)
            return change(found) if calls[id(own)] == 3 else found

        return called

    return faulty


def hears_twice(take: Callable[[Connection, bytes], None]) -> Callable[[Connection, bytes], None]:
    """A client that counts the second piece of every answer twice."""

    def taken(own: Connection, data: bytes) -> None:
        before = own._answer
        take(own, data)
        if before is not None and len(before.events) == 2:
            before.events.append(before.events[-1])

    return taken


@pytest.mark.parametrize(
    ("owner", "name", "fault", "kind"),
    [
        (Answer, "chunk", at_its_third_call(lambda chunk: b""), "lost"),
        (Answer, "chunk", at_its_third_call(lambda chunk: chunk * 2), "repeated"),
        (Connection, "_take", hears_twice, "repeated"),
    ],
    ids=["a server that drops a piece", "a server that says one twice", "a client that counts one twice"],
)
def test_a_planted_fault_is_found_and_is_no_tie(
    owner: Any, name: str, fault: Any, kind: str, server: Running, pool: list[Due], talker: TransformersTarget,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches a comparison of an answer with itself, and an audit that excuses everything."""
    monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    found = soaked(server, pool)
    assert found["counts"]["differ"] > 3
    told = audited(talker, pool, found["partings"])
    assert not any(one["is_tie"] for one in told)
    assert kind in {one["kind"] for one in told}


@pytest.mark.parametrize(
    ("text", "is_whole", "kind"),
    [
        ("abcdef", True, None), ("abef", True, "lost"), ("abcd", True, "lost"), ("", True, "lost"),
        ("abcdcdef", True, "repeated"), ("abcdeff", True, "repeated"), ("abXdef", True, "other"),
        ("abcX", True, "other"), ("abcd", False, None), ("", False, None), ("abe", False, "lost"),
        ("abcbc", False, "repeated"), ("abX", False, "other"), ("abcdefg", False, "other"),
    ],
)  # fmt: skip
def test_a_text_is_lost_repeated_or_another(text: str, is_whole: bool, kind: str | None) -> None:
    assert parted(text, "abcdef", is_whole) == kind


def test_equal_texts_still_differ_by_ids_count_and_reason() -> None:
    due = Due("/v1/completions", {}, "ab", [1, 2], "length")
    sound = Read("ab", [1, 2], 2, "length", [0.0, 1.0], "")
    assert compared(due, sound, True) is None
    assert compared(due, sound._replace(text="a", tokens=[1], counted=None, finish_reason=None), False) is None
    assert compared(due, sound._replace(tokens=[1, 3]), True) == "tokens"
    assert compared(due, sound._replace(counted=3), True) == "count"
    assert compared(due, sound._replace(finish_reason="stop"), True) == "reason"


def test_only_a_margin_that_rounding_explains_is_a_tie(
    talker: TransformersTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a margin at another place, or of another token."""
    (due,) = known(talker, 1, (9,), (60,))
    prompt = talker.encode(due.body["prompt"])
    given = torch.tensor([[*prompt, *due.tokens[:4]]])
    logits = talker.model(given).logits[0, -1].detach()
    other = int(logits.topk(2).indices[1])
    text = talker.detokenizer.decode([*due.tokens[:4], other]) + "..."
    found = audit(talker, due, text)
    assert found is not None and found["at"] == 4
    assert found["margin"] == pytest.approx(float(logits[due.tokens[4]] - logits[other]), abs=1e-9)
    parting = {"due": 0, "kind": "other", "text": text}
    assert not audited(talker, [due], [parting])[0]["is_tie"]
    monkeypatch.setattr(serving_turns, "spread", lambda *_: (logits, found["margin"] / 3))
    assert audited(talker, [due], [parting])[0]["is_tie"]


# ── turns and results ─────────────────────────────────────────────────────────────────────────────────────────────────


def turn(tokens: int) -> Turn:
    return Turn(tokens, 1.0, 0.0, [], [])


def test_every_way_has_its_turn_and_one_that_fails_is_left_out() -> None:
    """Catches an order that favours the first, a warm-up that counts, and a failure that ends the others' turns."""
    asked: list[tuple[int, str]] = []

    def ask(way: str, number: int) -> Turn:
        asked.append((number, way))
        if (number, way) == (2, "b"):
            raise OSError("gone")
        return turn(number)

    left_out: list[dict[str, Any]] = []
    found = by_turns(["a", "b", "c"], 3, ask, left_out)
    assert {way: [done.tokens for done in turns] for way, turns in found.items()} == {"a": [1, 2, 3], "c": [1, 2, 3]}
    assert left_out == [{"way": "b", "why": "gone"}]
    assert [way for number, way in asked if number == 1] == ["b", "c", "a"]


def test_a_run_that_is_told_to_end_ends() -> None:
    """Catches SIGTERM, which is a SystemExit, as a way that can't be had."""

    def ask(way: str, number: int) -> Turn:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        by_turns(["a"], 1, ask, [])
    with pytest.raises(SystemExit), serving_turns.asleep({"a": lambda name: sys.exit(1)}, [], lambda server: None):
        pass


def test_the_best_is_chosen_on_turns_that_it_is_not_judged_by() -> None:
    """Catches the highest of noisy numbers as what is to be reached: here each way is fast in one half only."""
    ways = {"even": [turn(9), turn(1)] * 4, "odd": [turn(1), turn(9)] * 4}
    best, names = best_by_halves(ways)
    assert [done.tokens for done in best] == [1] * 8
    assert names == ["odd", "even"]


def test_a_part_that_is_done_is_measured_again_only_with_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that begins anew, one that keeps what other settings gave, and one that forgets other parts."""
    measured: list[str] = []

    def part(name: str) -> serving.Part:
        def measure(wanted: argparse.Namespace, own: dict[str, Any], clients: Any, save: Any) -> None:
            measured.append(name)
            own["promises"] = [serving_turns.at_most(name, 1, wanted.seed)]

        return serving.Part(measure, lambda wanted: 1.0, ("seed",))

    monkeypatch.setattr(serving, "PARTS", {name: part(name) for name in ("soak", "fuzz")})

    def run(*given: str) -> int:
        return serving.run(serving.settings([*given, "--out", str(tmp_path / "serving.json")]))

    assert run("soak") == 0
    assert run("all") == 0
    assert run("all", "--seed", "2") == 1
    assert measured == ["soak", "fuzz", "soak", "fuzz"]
    found = json.loads((tmp_path / "serving.json").read_text())
    assert [one["found"] for one in found["promises"]] == [2, 2]
