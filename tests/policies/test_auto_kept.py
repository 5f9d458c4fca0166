"""What `auto` learnt of seconds is there for the next process; a simulated clock, as in test_auto."""

from __future__ import annotations

from pathlib import Path

import pytest
from contracts.parties import Oracle
from policies.test_auto import CHANCES, CLOCKS, LIMIT, Clock, World, alike

from outrider.costs.passes import PassSeconds
from outrider.costs.steps import StepCosts, StepSize
from outrider.costs.stored import RunnerSeconds, StoredCosts, cost_key
from outrider.generation import stored_costs
from outrider.policies.auto import Auto
from outrider.policies.named import snapshot


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(("chances", "slots"), [("fair", 1), ("falling", 4), ("good", 16)])
def test_the_next_process_tries_nothing_again(clock, chances, slots):
    """Catches costs that are kept and not read, or read as those of other sizes: the first steps of a process would
    try depths that earlier ones found not to pay."""
    World(slots, CLOCKS[clock](), CHANCES[chances]).play(Auto(LIMIT, stored=StoredCosts("these")), 600)
    again, fresh = (World(slots, CLOCKS[clock](), CHANCES[chances], seed=1) for _ in range(2))
    again.play(Auto(LIMIT, stored=StoredCosts("these")), 40)
    fresh.play(Auto(LIMIT), 40)
    assert again.rate(40) >= 0.93 * again.best()
    assert again.rate(40) >= 0.99 * fresh.rate(40)


def test_what_was_kept_is_corrected():
    """Catches a process that believes the one before it, on a machine that has become slower in one part alone."""
    World(1, Clock(64, 0.01, 0.02), alike(0.8)).play(Auto(LIMIT, stored=StoredCosts("these")), 600)
    slower = World(1, Clock(2, 0.5, 0.3), alike(0.8)).play(Auto(LIMIT, stored=StoredCosts("these")), 900)
    assert slower.rate(300) >= 0.95 * slower.best()
    faster = World(1, Clock(64, 0.01, 0.002), alike(0.8)).play(Auto(LIMIT, stored=StoredCosts("these")), 900)
    assert faster.rate(300) >= 0.95 * faster.best()


def test_another_number_of_slots_is_tried():
    """Catches costs of one text taken for those of sixteen."""
    World(1, CLOCKS["dear rows"](), alike(0.8)).play(Auto(LIMIT, stored=StoredCosts("these")), 300)
    many = World(16, CLOCKS["dear rows"](), alike(0.8)).play(Auto(LIMIT, stored=StoredCosts("these")), 400)
    assert {0, 1, LIMIT} <= set(many.depths(400)[:12])
    assert many.rate(200) >= 0.95 * many.best()


@pytest.mark.parametrize("table", [None, PassSeconds({(1, 1): 1.0, (1, 5): 2.0, (8, 1): 3.0, (8, 5): 9.0})])
def test_costs_are_read_as_they_were_kept(table):
    """Catches slots confused with their bits, nodes with tokens, and a scale that is lost or counted twice."""
    costs = StepCosts(4, table)
    for live in (1, 8):
        for nodes in (0, 2, 4):
            size = StepSize(live, nodes, live * (1 + nodes), min(nodes, 1))
            costs.add(size, [(0.01 * live * nodes, 0.5 * live + nodes)] * 3, 1)
    kept = StoredCosts("these")
    kept.write({"plain": costs.seconds})
    again = StepCosts(4, None, kept.read()["plain"])
    for live in (1, 8):
        for nodes in (0, 2, 4):
            tokens, kind = live * (1 + nodes), min(nodes, 1)
            assert again.verify(live, tokens, kind) == pytest.approx(costs.verify(live, tokens, kind))
            assert again.verify(live, tokens, kind) == pytest.approx(0.5 * live + nodes)
            assert again.draft(live, nodes) == pytest.approx(costs.draft(live, nodes))
        assert not again.untried(live)
    assert again.untried(100) == [4, 4, 4, 0, 0, 0, 2, 2, 1, 1]


def test_a_damaged_file_is_none_and_a_busy_machine_keeps_nothing(folder):
    """Catches a trace for a file that was cut, times that can't be, and times that other programs made."""
    kept = StoredCosts("these")
    assert kept.read() == {}
    kept.write({"plain": RunnerSeconds({(1, 1): 1.0}, {(1, 2): 0.5})})
    assert kept.read() == {"plain": RunnerSeconds({(1, 1): 1.0}, {(1, 2): 0.5})} and StoredCosts("others").read() == {}
    StoredCosts("these", lambda: True).write({})
    assert kept.read()
    for damaged in ("", "[]", '{"plain": 3}', '{"plain": {"passes": [[1, 1, 0]], "drafts": []}}', "\x00"):
        kept.path.write_text(damaged)
        assert kept.read() == {}
    assert [path.name for path in folder.iterdir()] == [kept.path.name]


def test_a_copy_for_traces_keeps_nothing():
    """Catches the slow steps of a traced prompt in what the next process believes."""
    policy = Auto(LIMIT, stored=StoredCosts("these"))
    World(1, CLOCKS["dear rows"](), alike(0.8)).play(snapshot(policy), 100)
    assert not StoredCosts("these").read() and policy.step == 0
    World(1, CLOCKS["dear rows"](), alike(0.8)).play(policy, 100)
    assert StoredCosts("these").read()


def test_costs_are_those_of_one_drafter(target, folder):
    """Catches seconds of another drafter, or of one of another size, taken for this one's."""
    drafters = [Oracle([[1]], 60, depth) for depth in (3, 4)]
    assert cost_key(drafters[0]) == cost_key(Oracle([[2]], 60)) != cost_key(drafters[1])
    paths = [stored_costs(target, each).path for each in drafters]
    assert paths[0] != paths[1] and stored_costs(target, Oracle([[2]], 60)).path == paths[0]
