"""Tuning: the planted optimum is found, noise makes no schedule, and tables read as engines read them."""

import itertools
import json
import math
import random
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verbs import outrider_with

from outrider.engines import commands
from outrider.engines.engine import Draft, Wish
from outrider.engines.tuning import sweep, tune
from outrider.engines.tuning.tune import Arm, Point, Range
from outrider.errors import ConfigError, DataError

STUB = Path(__file__).with_name("stub_engine.py")
LENGTHS, LOADS = (0, 1, 2, 3, 5, 7), (1, 2, 4, 8, 16, 32, 64)
Distribution = Callable[[int, int], float]


def roof(knee: float, kept: float = 0.8, draft: float = 0.03) -> Distribution:
    """Tokens a second of n requests that draft K: steps are as long as their memory or their computing takes."""

    def distribution(tokens: int, load: int) -> float:
        per_step = sum(kept**depth for depth in range(tokens + 1))
        return load * per_step / (max(1.0, load * (tokens + 1) / knee) + draft * tokens)

    return distribution


def measured(
    distribution: Distribution, rounds: int = 3, noise: float = 0.0, seed: int = 0, server: float = 0.0
) -> list[Point]:
    """Points of a distribution.  noise: of each; server: of all points of one start of a server."""
    draws, found = random.Random(seed), []
    for turn in range(rounds):
        for length in LENGTHS:
            together = draws.gauss(0, server)
            found += [
                Point(Arm(length), load, turn, distribution(length, load) * math.exp(together + draws.gauss(0, noise)))
                for load in LOADS
            ]
    return found


def at(ranges: tuple[Range, ...], load: int) -> int:
    return next(one.tokens for one in ranges if one.first <= load <= one.last)


def regret(distribution: Distribution, ranges: tuple[Range, ...]) -> float:
    """Share of speed that is lost at the worst measured load."""
    return max(
        1 - distribution(at(ranges, load), load) / max(distribution(length, load) for length in LENGTHS)
        for load in LOADS
    )


def test_the_sequence_is_the_best_of_all_sequences() -> None:
    """Catches a dynamic program that forgets a transition.  Twin: all 792 sequences."""
    for seed in range(3):
        points = measured(roof(20), rounds=1, noise=0.3, seed=seed)
        mean = {(p.arm.tokens, p.load): math.log(p.tokens_per_s) for p in points}
        best = -math.inf
        for lengths in itertools.combinations_with_replacement(sorted(LENGTHS, reverse=True), len(LOADS)):
            changes = len({*lengths, min(LENGTHS)}) - 1
            worth = sum(mean[pair] for pair in zip(lengths, LOADS, strict=True)) - changes * math.log1p(0.05)
            best = max(best, worth)
        table = tune._Table(points, 0.05)
        assert table.best(table.arms)[0] == pytest.approx(best)


@pytest.mark.parametrize("server", [0.0, 0.05])
def test_noise_alone_makes_no_schedule(server: float) -> None:
    """Catches the winner's curse: of six equal lengths one always looks best.

    A drafting table is a false alarm; at most 2.5 % a run by design, so more than 5 of 60 has a chance below 1 in 200.
    With `server`, the loads of one start stray together; a price that takes them for independent raises 14.
    """
    flat: Distribution = lambda tokens, load: 100.0 * load
    alarms = sum(tune.choose(measured(flat, 3, 0.05, seed, server)).ranges[0].tokens > 0 for seed in range(60))
    assert alarms <= 5


def test_noise_costs_little_speed() -> None:
    """Catches a price of changes that hides what speculation wins. Worst load of 20 seeds at 3 % noise, seeds fixed: 10
    %."""
    schedules = [tune.choose(measured(roof(24), 3, 0.03, seed)).ranges for seed in range(20)]
    assert max(regret(roof(24), ranges) for ranges in schedules) < 0.15


def test_where_speculation_stops_paying_lies_between_the_measured_loads() -> None:
    """Catches a threshold that is a measured load whatever the distribution is: here lines cross at 18.5 requests."""
    cross: Distribution = lambda tokens, load: load * (1.0 if tokens == 0 else (18.5 / load) ** (0.5 + tokens / 100))
    choice = tune.choose([p for p in measured(cross) if p.arm.tokens in (0, 3)])
    assert choice.pays_to == 18
    assert choice.ranges == (Range(1, 18, 3), Range(19, tune.LARGEST, 0))


def test_a_tree_is_chosen_only_where_it_wins_more_than_a_length_must() -> None:
    """Catches a width that is taken for the first one, or for the widest."""
    points = [
        Point(Arm(4, width), load, turn, 100 * load * (1.3 if width == 4 else 1.001 if width == 2 else 1))
        for width in (1, 2, 4) for load in (1, 8) for turn in range(2)
    ]  # fmt: skip
    points += [Point(Arm(0), load, turn, 50 * load) for load in (1, 8) for turn in range(2)]
    assert tune.choose(points).width == 4
    assert tune.choose([p for p in points if p.arm.width < 4]).width == 1


def test_what_was_not_measured_is_said() -> None:
    """Catches a table without a base line, or beyond what was measured, that reads as if it were known."""
    points = [p for p in measured(roof(1000), rounds=1) if p.arm.tokens]
    notes = " ".join(tune.choose(points).notes)
    for part in ("0 tokens was not measured", "beyond 64", "measured only once", "longest draft"):
        assert part in notes
    with pytest.raises(DataError, match="not measured yet: 7 tokens at 64"):
        tune.choose(points[:-1])


def test_a_table_of_trees_is_not_deployed_as_one_of_chains(tmp_path: Path) -> None:
    """Catches a schedule that is served with another draft than was measured to pay."""
    place = tmp_path / "tune.json"
    for own in ({"width": 4}, {"cutoff": 0.3}):
        place.write_text(json.dumps({"ranges": [[1, 8, 3]], "width": 1, "cutoff": None} | own))
        with pytest.raises(ConfigError, match="which a table by load can't express"):
            tune.read(place)
    place.write_text('{"ranges": [[1, 1e999, 2]]}')
    with pytest.raises(DataError, match="is not a schedule"):
        tune.read(place)


def test_a_round_that_was_cut_off_does_not_count() -> None:
    """Catches means over other loads than their neighbours'."""
    whole = measured(roof(16), rounds=1)
    half = [point._replace(round=1, tokens_per_s=1.0) for point in whole[:9]]
    found, alone = tune.choose(whole + half), tune.choose(whole)
    assert found.ranges == alone.ranges
    assert "1 round was not measured completely" in " ".join(found.notes)


SCHEDULES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), min_size=1, max_size=6).map(
    lambda parts: tuple(
        Range(sum(length for length, _ in parts[:at]) + 1, sum(length for length, _ in parts[: at + 1]), tokens)
        for at, tokens in enumerate(sorted({tokens for _, tokens in parts}, reverse=True))
    )
)


def as_vllm(table: list[list[int]], load: int) -> int:
    """Inclusive ranges; beyond the last one its length stays."""
    assert table[0][0] == 1
    for (_, last, _), (first, *_) in itertools.pairwise(table):
        assert first == last + 1, "ranges overlap, or leave a gap"
    return next((tokens for first, last, tokens in table if first <= load <= last), table[-1][2])


def as_sglang(table: dict[str, Any], load: int) -> int:
    """The entry of the highest key that is not above the batch."""
    assert all(key.isdigit() and entry["candidate_steps"] for key, entry in table.items())
    [steps] = table[str(max(int(key) for key in table if int(key) <= load))]["candidate_steps"]
    return int(steps)


def as_trtllm(table: dict[int, int], load: int) -> int:
    """The entry of the lowest key that is not below the batch; 0 beyond the last."""
    return next((table[key] for key in sorted(table) if load <= key), 0)


@given(SCHEDULES)
def test_every_engine_reads_the_same_length_at_every_load(ranges: tuple[Range, ...]) -> None:
    """Catches a table that begins late, is off by one at an edge, or means lower bounds where the engine means upper
    ones."""
    if not any(one.tokens for one in ranges):
        return
    tune.check(ranges)
    last = ranges[-1].last
    for load in {1, last, *(edge for one in ranges for edge in (one.first, one.last, (one.first + one.last) // 2))}:
        wanted = at(ranges, load)
        assert as_vllm(tune.for_vllm(ranges), load) == wanted
        assert as_sglang(json.loads(json.dumps(tune.for_sglang(ranges))), load) == wanted
        assert as_trtllm(tune.for_trtllm(ranges), load) == wanted
    trtllm = tune.for_trtllm(ranges)
    assert trtllm[min(trtllm)] == max(one.tokens for one in ranges), "the lowest key must draft most"


def test_a_table_that_engines_would_misread_is_refused(tmp_path: Path) -> None:
    """Catches a schedule edited by hand with a gap, a late start, a rising length, or without any draft."""
    for ranges in ([], [(2, 8, 3)], [(1, 8, 3), (10, 20, 1)], [(1, 8, 1), (9, 9, 3)], [(1, 8, 0)]):
        (tmp_path / "tune.json").write_text(json.dumps({"ranges": ranges}))
        with pytest.raises(ConfigError):
            tune.read(tmp_path / "tune.json")


def swept(folder: Path, calls: list[tuple[Arm, int]], fails_at: int | None = None, **about: Any) -> list[Point]:
    """A sweep over a distribution, which notes what it measures, and stops in the middle."""
    now: list[Arm] = []

    def start(arm: Arm) -> Any:
        now[:] = [arm]
        return nullcontext("")

    def measure(url: str, load: int) -> float:
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        calls.append((now[0], load))
        return roof(16)(now[0].tokens, load)

    return sweep.sweep(sweep.arms(LENGTHS), LOADS, 2, start, measure, folder, about)


def test_a_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Catches points that are measured twice or lost when a sweep is stopped, and a torn last line that ends the next
    one."""
    calls: list[tuple[Arm, int]] = []
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, calls, fails_at=30, log="one")
    with (tmp_path / sweep.POINTS).open("a") as file:
        file.write("[3, 1, nul")
    points = swept(tmp_path, calls, log="one")
    assert len(calls) == 2 * len(LENGTHS) * len(LOADS)
    undisturbed: list[tuple[Arm, int]] = []
    assert sorted(points, key=str) == sorted(swept(tmp_path / "whole", undisturbed), key=str)
    half = len(undisturbed) // 2  # rounds go there and back, for machines that slow down
    assert undisturbed[half:] == undisturbed[:half][::-1]
    with pytest.raises(DataError, match="another log"):
        swept(tmp_path, calls, log="other")


def log_of(folder: Path, count: int = 12) -> Path:
    path = folder / "log.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"question {n}"}], "max_tokens": 16} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow  # it times servers
def test_the_optimum_of_a_real_server_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a load that is not the load, tokens that are not counted, and servers that are left running.

    The distribution: alone, 4 drafted tokens win 3.05 times; 16 at once they cost 10 times as much for it, so 0 wins 3
    times.
    """
    port = sweep.free_port()
    start = f"{sys.executable} {STUB} --port {{port}} --tokens {{tokens}}"
    words = ["tune", str(log_of(tmp_path)), "--out", str(tmp_path / "tuned"), "--start", start, "--port", str(port)]
    words += ["--tokens", "0,4", "--loads", "1,16", "--rounds", "1", "--calls", "8", "--max-tokens", "12"]
    assert outrider_with(*words) == 0
    found = json.loads((tmp_path / "tuned" / "tune.json").read_text())
    assert [tokens for _, _, tokens in found["ranges"]] == [4, 0]
    assert 1 <= found["pays_to"] < 16 and found["weights"] is None
    assert found["tables"]["trtllm"] == {str(found["pays_to"]): 4}
    assert "speculation pays up to" in capsys.readouterr().out
    assert not sweep._answers(f"http://127.0.0.1:{port}/health")


def test_a_server_that_dies_or_is_another_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Catches fifteen minutes of waiting for a server that ended, and measuring whatever listens there."""
    port = sweep.free_port()
    url, log = f"http://127.0.0.1:{port}", tmp_path / "server.log"
    with (
        pytest.raises(DataError, match="exited with 3 before it answered; see .*, its last lines: no such draft"),
        sweep.served([sys.executable, "-c", "print('no such draft'); raise SystemExit(3)"], url, "/health", log),
    ):
        pass
    words = [sys.executable, str(STUB), "--port", str(port), "--tokens", "1"]
    with (
        sweep.served(words, url, "/health", log),
        pytest.raises(DataError, match="already running at"),
        sweep.served(words, url, "/health", log),
    ):
        pass
    with pytest.raises(DataError, match="can't be run"), sweep.served(["no-such-engine"], url, "/health", log):
        pass


REFUSED = [
        ((), "no server to measure"),
        (("--start", "run --port {port}"), "must contain {tokens}"),
        (("--url", "http://127.0.0.1:1"), "TOKENS=URL"), (("--url", "0=http://a", "--loads", "many"), "--loads"),
        (("--draft", "ngram", "--engine", "transformers", "--target", "demo"), "can't be started"),
        (("--draft", "ngram", "--engine", "sglang", "--target", "demo", "--widths", "1,4"), "no trees"),
]  # fmt: skip


def test_a_tune_that_can_not_be_is_refused_before_anything_runs(tmp_path, capsys):
    """Catches an arm that is refused after an hour of others, and tracebacks."""
    for words, said in REFUSED:
        assert outrider_with("tune", str(log_of(tmp_path)), "--out", str(tmp_path / "tuned"), *words) == 2
        assert said in " ".join(capsys.readouterr().err.split())
        assert not (tmp_path / "tuned").exists()


def tuned(distribution: Distribution, place: Path) -> Path:
    tune.choose(measured(distribution)).write(place / "tune.json")
    return place / "tune.json"


def test_an_engine_without_a_table_gets_the_one_length_that_wins_most(tmp_path: Path) -> None:
    """Catches the length of the lowest load, which loses at the others."""
    rise: Callable[[int], tuple[float, int]] = lambda load: (0.2, 8) if load == 1 else (0.1, 2)
    at_load: Distribution = lambda tokens, load: load * (1 + rise(load)[0] * min(tokens, rise(load)[1]))
    schedule = tuned(at_load, tmp_path)
    arm, ratio = tune.read_fixed(schedule)
    best = max(LENGTHS, key=lambda tokens: math.prod(at_load(tokens, load) for load in LOADS))
    assert arm == Arm(best) and ratio is not None and ratio > 1.1
    wish = commands.scheduled("llama.cpp", Wish(), schedule)
    assert (wish.tokens, wish.schedule) == (best, ()) and "one draft length for every load" in wish.notes[0]
    assert json.loads(schedule.read_text())["tables"]["llamacpp"] == {"spec-draft-n-max": best, "spec-draft-p-min": 0.0}
    assert commands.scheduled("vllm", Wish(), schedule).schedule == tune.read(schedule)
    with pytest.raises(ConfigError, match="leave out --tokens"):
        commands.scheduled("llamacpp", Wish(tokens=2), schedule)


def test_where_speculation_does_not_pay_the_command_is_without_and_says_so(tmp_path: Path) -> None:
    """Catches a draft that makes a server slower, deployed because somebody measured it."""
    schedule = tuned(lambda tokens, load: load * 0.8**tokens, tmp_path)
    wish = commands.scheduled("llamacpp", Wish(), schedule)
    found = commands.command("llamacpp", Draft("ngram", "target.gguf"), wish)
    assert not found.settings and "--spec-type" not in found.words
    assert "did not pay where" in found.notes[0] and "reaches 0.80 of the speed" in found.notes[0]
    assert tune.not_paying(1.1).endswith("1.10 of the speed without, within the noise")
    assert json.loads(schedule.read_text())["tables"]["llamacpp"] == {}
    (tmp_path / "old.json").write_text('{"ranges": [[1, 1024, 2]]}')
    with pytest.raises(DataError, match="is not a schedule .*'fixed'"):
        commands.scheduled("llamacpp", Wish(), tmp_path / "old.json")
