"""The probe of a plan: which requests are drawn, what is counted of them, and on what a plan then rests."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import folder, talker
from verbs import outrider_with

from outrider import machine
from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.loading import load_drafter
from outrider.measure import timing
from outrider.plan import subject
from outrider.plan.measured import probe, probed, timings
from outrider.plan.measured.probe import CachedRecords, Drafts, Encoded, Replayed
from outrider.plan.measured.sample import MOST_NEW, Question, draw
from outrider.plan.schema import Plan
from outrider.policies.fixed import Fixed
from outrider.report import bootstrap
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget as Target
from outrider.traffic.logs import traces

__all__ = ["folder", "talker"]
ASKED = ("Write a Python function that sorts.", "Solve 3 + x = 20.", "Who wrote Faust?")


def log_of(path: Path, bodies: Sequence[dict[str, Any]], tokens: int | None = 12) -> Path:
    rows = [{"t": float(i), "body": body, "expected_output_tokens": tokens} for i, body in enumerate(bodies)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(path: Path, count: int = 30) -> Path:
    return log_of(path, [{"prompt": f"({i}) {ASKED[i % 3]}"} for i in range(count)])


def test_a_smaller_sample_is_the_beginning_of_a_larger_one(tmp_path: Path) -> None:
    """Catches a draw that starts anew, so that nothing of it can be used again; and the head of the log for a draw."""
    log = questions(tmp_path / "log.jsonl")
    few, many = draw(log, None, 5), draw(log, None, 12)
    assert many.questions[:5] == few.questions and len({own.number for own in many.questions}) == 12
    assert [own.number for own in few.questions] != [0, 1, 2, 3, 4]
    assert {own.number for own in draw(log, None, 5, seed=1).questions} != {own.number for own in few.questions}
    assert len(draw(log, None, 99).questions) == few.texts == 30 and sum(few.categories.values()) == 30


def test_all_requests_have_the_same_chance(tmp_path: Path) -> None:
    """Catches a draw that prefers some requests.  Of 100 seeds each is drawn 20 times, ± 4; false alarms: 1 in 1e4."""
    log = questions(tmp_path / "log.jsonl", 10)
    drawn = Counter(own.number for seed in range(100) for own in draw(log, None, 2, seed).questions)
    assert len(drawn) == 10 and all(4 < count < 36 for count in drawn.values())


def test_requests_without_a_text_are_counted_and_not_replayed(tmp_path: Path) -> None:
    """Catches generated words that are replayed as if a user had written them."""
    log = log_of(tmp_path / "log.jsonl", [
        {"prompt": "What is 1 + 1"}, {"prompt": [1, 2, 3]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
        {"prompt": "Hello", "top_p": 7.0},
    ])  # fmt: skip
    found = draw(log, None, 10)
    assert found.categories == {"math": 1, "chat": 1}
    assert found.left_out == {"more than text, or token ids": 2, "settings out of range": 1}
    hidden = tmp_path / "hidden.jsonl"
    traces.write(hidden, traces.read(log).calls(), redact=True)
    assert draw(hidden, None, 10).questions == ()
    assert draw(hidden, None, 10).left_out["lengths or hashes, no text"] == 5


def test_a_replay_draws_as_the_request_asked(tmp_path: Path) -> None:
    """Catches a temperature that is lost, and an answer longer than the log's or the request's own."""
    log = log_of(tmp_path / "log.jsonl", [{"prompt": "a", "temperature": 0.7, "top_k": -1}], tokens=None)
    (own,) = draw(log, None, 1).questions
    assert (own.sampling.temperature, own.sampling.top_k, own.new_tokens) == (0.7, 0, MOST_NEW)
    (own,) = draw(log_of(tmp_path / "short.jsonl", [{"prompt": "a", "max_tokens": 5}]), None, 1).questions
    assert (own.sampling.temperature, own.new_tokens) == (0.0, 5)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of its own for what is kept."""
    monkeypatch.setattr(timings, "folder", lambda: tmp_path / "times")
    return tmp_path / "times"


def read(number: int, sampling: Sampling | None = None, tokens: int = 12) -> Encoded:
    return Encoded(Question(number, "chat", "x", tokens, sampling or Sampling()), [65, 66, 67, 65, 66])


def test_what_was_replayed_is_not_replayed_again(talker: Target, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a probe that can't be resumed, and counts of another request or temperature."""
    methods, drafter, decoded = {"ngram": subject.method("ngram")}, Drafter(), []
    run_once = timing.run_once
    monkeypatch.setattr(timing, "run_once", lambda *args, **more: decoded.append(args) or run_once(*args, **more))
    first = probe.replay(talker, {"ngram": drafter}, [read(0), read(1, tokens=9)], CachedRecords(talker, methods))
    assert len(decoded) == 2
    again = CachedRecords(talker, methods)
    assert probe.replay(talker, {"ngram": drafter}, [read(5), read(1, tokens=9)], again)[1] == first[1]
    assert len(decoded) == 2  # request 5 asks what request 0 asked
    probe.replay(talker, {"ngram": drafter}, [read(0, Sampling(0.5, seed=1)), read(0, tokens=10)], again)
    assert len(decoded) == 4
    (file_of,) = (cache / "probes").glob("*.jsonl")
    with file_of.open("a") as file:
        file.write('{"key": "cut o')
    assert len(CachedRecords(talker, methods).records) == 4


def test_counts_are_those_of_the_steps(talker: Target, cache: Path) -> None:
    """Catches a bonus token that is left out, and more drafted tokens than the plan looks at."""
    name = "recycle"
    own = [Encoded(Question(0, "chat", "x", 40, Sampling()), list(b"abcabcabc"))]
    (found,) = probe.replay(
        talker, {name: load_drafter(name, talker)}, own, CachedRecords(talker, {name: subject.method(name)})
    )
    accepted, _ = found.steps(probe.NODES)
    assert found.tokens - len(accepted) - sum(accepted) in (0, -1)
    assert max(found.steps(probe.NODES).nodes) == probe.NODES and sum(accepted) > 0


def record(number: int, category: str, accepted: Sequence[int], **more: Any) -> Replayed:
    """Of an answer whose steps of full depth accept so many; a step that began between them would accept nothing."""
    every = tuple(tuple(range(count)) for step in accepted for count in (step, *[0] * step))
    fields = {"drafts": (Drafts(probe.NODES, every, (4,) * len(every)),), "loops": False} | more
    return Replayed(number, category, "ngram", len(every), **fields)


RECORDS = [record(i, "code" if i % 2 else "chat", [3, 2, 4, i % 3] if i % 2 else [0, 0, 1, i % 3]) for i in range(16)]


def test_an_interval_is_over_the_requests_of_its_own_category() -> None:
    """Catches an interval of other requests than those of the row, and one over steps in place of requests."""
    whole, code, chat = (next(row for row in probed.rows(RECORDS) if row.category == name) for name in
                         ("all", "code", "chat"))  # fmt: skip
    for row, own in ((whole, RECORDS), (code, RECORDS[1::2]), (chat, RECORDS[::2])):
        accepted = [each.steps(probe.NODES).accepted for each in own]
        tokens, steps = [each.tokens for each in own], [*map(len, accepted)]
        wanted = bootstrap.ratio_of_totals(tokens, steps)
        assert row.tokens_per_step.model_dump() == wanted._asdict() and row.requests == len(own)
        deep = bootstrap.ratio_of_totals([sum(a >= 2 for a in each) for each in accepted], steps)
        assert row.survival[1].model_dump() == deep._asdict()
    assert (chat.tokens_per_step.high or 9) < (code.tokens_per_step.low or 0)


def test_few_requests_have_no_interval_and_carry_no_plan() -> None:
    """Catches an interval of two requests that looks sure."""
    (whole, _) = probed.rows(RECORDS[:6:2])
    assert whole.tokens_per_step.low is None and whole.tokens_per_step.center
    assert probed.acceptance(RECORDS[:3], "x") is None and probed.acceptance(RECORDS[:5], "x") is not None


def test_a_plan_rests_on_all_steps_of_all_requests() -> None:
    """Catches shares of drafts in place of shares of steps."""
    known = probed.acceptance(RECORDS, "measured")
    row = probed.rows(RECORDS)[0]
    assert known is not None and known.basis == "probe"
    low, center, high = known.tokens(probe.NODES)
    assert (low, center, high) == pytest.approx(tuple(row.tokens_per_step.model_dump()[key] for key in
                                                     ("low", "center", "high")))  # fmt: skip
    assert known.offered == (1, 1, 1, 1, 0, 0, 0)
    none = probed.acceptance([record(i, "chat", [0, 0]) for i in range(5)], "measured")
    assert none is not None and none.tokens(7) == (1, 1, 1) and max(none.high) == 0


def test_every_depth_has_its_own_acceptance() -> None:
    """Catches the beginning of a deep curve in place of a shallow one: drafts of one token begin at other tokens."""
    counts = (2, 1, 0, 1, 1, 0, 0, 0)
    drafts = Drafts(probe.NODES, tuple(tuple(range(n)) for n in counts), (2,) * 8)
    own = replace(record(0, "code", []), tokens=8, drafts=(drafts,))
    assert own.steps(7).accepted == [2, 1, 0, 0, 0] and own.steps(1) == ([1, 0, 1, 0, 0, 0], [1] * 6)
    records = [replace(own, number=i) for i in range(6)]
    known = probed.acceptance(records, "measured")
    assert known is not None
    assert known.at(7).tokens(7)[1] == pytest.approx(8 / 5) and known.at(1).tokens(1)[1] == pytest.approx(8 / 6)
    assert known.at(1).offered == (1.0,) and known.at(9) is known


def test_a_node_of_a_branch_that_is_not_drafted_is_not_accepted() -> None:
    """Catches a tree's acceptance at the depths of smaller trees."""
    own = replace(record(0, "code", []), tokens=3, drafts=(Drafts(7, ((1, 2), (), ()), (3, 3, 3)),))
    assert own.steps(3) == ([2], [3]) and own.steps(2) == ([1, 0], [2, 2]) and own.steps(1) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("name", ["ngram", "recycle"])
def test_a_replay_knows_the_steps_of_every_depth(name: str, talker: Target) -> None:
    """Catches counts of drafts made at other tokens than decoding makes them at, and the first ones of a large draft in
    place of the likeliest that a small one holds.  Greedy, so they are the same."""
    own = Encoded(Question(0, "chat", "x", 24, Sampling()), list(b"abcabcabc"))
    found = probe.replay_one(talker, name, load_drafter(name, talker), own)
    assert len(found.drafts) == (1 if name == "ngram" else len(probe.DEPTHS))
    request, drafter = Request(own.tokens, 24, Sampling()), load_drafter(name, talker)
    for depth in probe.DEPTHS:
        accepted = timing.run_once(talker, request, drafter, Fixed(depth), shared_noise=False).accepted
        assert found.steps(depth).accepted[:-1] == accepted[:-1] and sum(accepted)


def test_drafts_that_are_said_to_be_nested_and_are_not_are_seen(talker: Target) -> None:
    """Catches a drafter that does not say that its small drafts are other ones than its large."""
    own = Encoded(Question(0, "chat", "x", 24, Sampling()), list(b"abcabcabc"))
    silent, honest = load_drafter("recycle", talker), load_drafter("recycle", talker)
    silent.nested = True
    assert probe.replay_one(talker, "recycle", silent, own) == probe.replay_one(talker, "recycle", honest, own)


def test_what_is_decoded_at_every_depth_is_said_to_take_longer(talker: Target) -> None:
    """Catches a probe that takes four times what it said."""
    drafters = [load_drafter(name, talker) for name in ("ngram", "suffix", "recycle")]
    assert probe.decodings(drafters) == 1 + 2 * len(probe.DEPTHS)


def test_requests_whose_answer_loops_are_left_out() -> None:
    """Catches a target that repeats itself and makes every lookup look good."""
    looped = record(16, "chat", [7] * 9, loops=True)
    assert probed.without_loops([*RECORDS, looped, record(16, "chat", [0])]) == (RECORDS, 1)


def planned(path: Path, *words: str) -> Plan:
    assert outrider_with("plan", *words, "--json", str(path)) == 0
    return Plan.model_validate(json.loads(path.read_text()))


def test_a_plan_says_what_it_measured_on_the_log(folder: Path, tmp_path: Path, cache: Path) -> None:
    """Catches a probe that is measured and not used, or used and not said."""
    log = questions(tmp_path / "log.jsonl", 9)
    words = ("--target", str(folder), "--log", str(log), "--probe", "7", "--method", "ngram", "--method", "eagle3")
    found = planned(tmp_path / "plan.json", *words, "--hardware", "l4")
    assert found.probe is not None and found.probe.calls == 9 and found.probe.wanted == 7
    loops = found.probe.left_out.get("the answer loops", 0)
    assert found.probe.requests == 7 - loops and {row.method for row in found.probe.rows} == {"ngram"}
    assert found.probe.categories == {"code": 3, "math": 3, "chat": 3}
    assert found.acceptance["ngram"] == f"probe: measured on {7 - loops} of your 9 requests"
    assert found.acceptance["eagle3"].startswith("published: ")
    assert {row.basis for row in found.rows if row.method == "ngram"} == {"probe"}
    bare = planned(tmp_path / "bare.json", *words)
    assert bare.decision == "NEED DATA" and "no hardware was given" in bare.because and not bare.rows
    assert bare.probe == found.probe  # kept, not replayed
    none = planned(tmp_path / "none.json", *words[:4], "--hardware", "l4", "--probe", "0")
    assert none.probe is None and none.acceptance["ngram"].startswith("published: ")
    assert "recycle" not in none.acceptance


def test_a_probe_that_would_take_long_is_cut_short_unless_it_was_asked_for(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a plan that runs for an hour because a log was named."""
    monkeypatch.setattr(probe, "seconds", lambda target, reads, drafters: [25.0] * len(reads))
    words = ("--target", str(folder), "--log", str(questions(tmp_path / "log.jsonl", 8)), "--method", "ngram")
    short = planned(tmp_path / "plan.json", *words).probe
    assert short is not None and short.requests + short.left_out.get("the answer loops", 0) == 2
    assert short.because == "all 8 would take 3 min; --probe 8 replays them"
    asked = planned(tmp_path / "plan.json", *words, "--probe", "4").probe
    assert asked is not None and asked.because is None
    assert asked.requests + asked.left_out.get("the answer loops", 0) == 4


def test_a_target_is_not_loaded_unasked_where_it_would_fill_the_memory(folder, monkeypatch) -> None:
    """Catches a plan that takes the memory of a laptop because a log was named."""
    model = subject.load_subject(str(folder), ["ngram"]).model
    assert probe.missing(str(folder), model) is None
    monkeypatch.setattr(machine, "free_memory", lambda: 4 * model.parameters)
    if not torch.cuda.is_available():
        assert "are free here" in str(probe.missing(str(folder), model))


def test_what_can_t_be_probed_is_said_and_the_plan_goes_on(folder: Path, tmp_path: Path, cache: Path) -> None:
    """Catches a plan that stops, or makes up an acceptance, where there is a config alone or a log without texts."""
    log = questions(tmp_path / "log.jsonl", 5)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    words = ("--log", str(log), "--hardware", "l4", "--target", str(bare))
    found = planned(tmp_path / "plan.json", *words)
    assert found.probe is not None and found.probe.requests == 0 and found.rows
    assert str(found.probe.because).startswith(f"no weights of {bare} are on this machine")
    assert found.acceptance["ngram"].startswith("published: ") and "recycle" not in found.acceptance
    asked = planned(tmp_path / "plan.json", *words, "--probe", "3").probe
    assert asked is not None and asked.because == f"{bare} has a config but no weights"
    hidden = tmp_path / "hidden.jsonl"
    traces.write(hidden, traces.read(log).calls(), redact=True)
    none = planned(tmp_path / "plan.json", "--log", str(hidden), "--hardware", "l4", "--target", str(folder)).probe
    assert none is not None and none.because is not None
    assert "no request in the log has text (5 lengths or hashes, no text)" in none.because
