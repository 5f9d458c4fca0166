"""The whole way of a drafter that learns: texts are stored, a job trains, the gate judges, a server swaps and goes
back."""

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Case, Workshop
from tiny import randomise
from verbs import outrider_with

from outrider import checkpoint, generation, load_drafter
from outrider.errors import ConfigError
from outrider.sampling.settings import Sampling
from outrider.serve.engine import Engine
from outrider.serve.learning import folder as folders
from outrider.serve.learning import learner as learners
from outrider.serve.learning.buffer import Text
from outrider.serve.learning.config import Learning
from outrider.serve.learning.folder import Folder, opened
from outrider.serve.learning.job import hash_of, make_version
from outrider.serve.learning.learner import FEWEST, Job, Learner
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.training.config import Config as TrainConfig
from serve.test_engine import Caller, request, served

TRAIN = TrainConfig(steps=40, batch=4, lr=4e-2, dtype="float32", loss={"ce": 1.0})
NEW = 24


@pytest.fixture(scope="module")
def float_target(folder: Path) -> TransformersTarget:
    return load_target(folder, compile=False)


@pytest.fixture(scope="module")
def given(float_target: TransformersTarget, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that knows nothing yet."""
    place = tmp_path_factory.mktemp("given") / "checkpoint"
    model = workshop.model(Case("dspark", {"anchors": 16}), float_target)
    checkpoint.save(place, model, {"config": TRAIN.model_dump(mode="json"), "step": 1})
    return place


@pytest.fixture(scope="module")
def texts(float_target: TransformersTarget) -> list[Text]:
    """What a server would have stored."""
    draw = random.Random(0)
    prompts = [[draw.randrange(33, 100) for _ in range(6)] for _ in range(160)]
    found = generation.generate(float_target, prompts, max_new_tokens=NEW, sampling=Sampling())
    return [Text(p, one.tokens, [(3, 0)] * 8) for p, one in zip(prompts, found, strict=True) if len(one.tokens) > 4]


def made(place: Path, given: Path, target: Path, **settings: Any) -> Folder:
    own = {"held_out": 3, "prompts": 40, "steps": 40, "new_tokens": NEW, "lr": 4e-2, "every_texts": 24} | settings
    return opened(Learning(folder=str(place), **own), given, {"name": str(target)}, 1)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, given: Path, folder: Path, texts: list[Text]) -> Folder:
    """A folder after one job."""
    there = made(tmp_path_factory.mktemp("learning") / "learned", given, folder)
    there.buffer.add(texts)
    make_version(there)
    return there


def copied(there: Folder, to: Path) -> Folder:
    shutil.copytree(there.path, to)
    return Folder(to)


def test_a_job_makes_a_version_that_drafts_better_and_passes(learned, float_target):
    """Catches a job that trains nothing, and one whose version the server can't load."""
    result = learned.result(1)
    assert result["passed"], result["reason"]
    assert result["gain"][1] > 1 and result["from"] == 0
    assert result["tokens_per_step"]["new"] > result["tokens_per_step"]["old"] + 0.05
    assert learned.events()[-1]["event"] == "passed"
    assert {"data", "texts", "rejected", "seconds", "reason"} <= learned.events()[-1].keys()
    new, old = (load_drafter(learned.checkpoint(version), float_target) for version in (1, 0))
    assert new.limit == old.limit
    assert learned.state().version == 0  # a server takes it, not the job
    assert result["data"] == hash_of(learned.buffer.newest("train", 160))  # and nothing that was held out
    files = {path.name for path in learned.place(1).iterdir()}
    assert files >= {"checkpoint", "result.json", "gate.json", "new.json", "old.json", "metrics.jsonl"}


def test_a_version_that_is_not_surely_better_is_refused(tmp_path, learned):
    """Catches a gate that lets pass what merely shows no loss: the same weights again."""
    there = copied(learned, tmp_path / "same")
    there.set(learning=there.config.model_dump(mode="json") | {"lr": 1e-12, "steps": 1})
    result = make_version(Folder(there.path))
    assert not result["passed"] and "NO GAIN" in result["reason"]
    assert there.events()[-1]["event"] == "refused"


def test_too_few_held_out_prompts_are_underpowered(tmp_path, learned, texts):
    there = copied(learned, tmp_path / "few")
    for path in there.buffer.files("held_out"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    result = make_version(there)
    assert not result["passed"] and "UNDERPOWERED" in result["reason"]


def test_a_job_that_was_killed_leaves_nothing_that_counts(tmp_path, learned):
    there = copied(learned, tmp_path / "killed")
    (there.path / "versions" / "2.part" / "checkpoint").mkdir(parents=True)
    assert there.versions() == [1] and there.next_version() == 2
    folders.remove_unfinished(there.path)
    assert not list(there.path.glob("versions/*.part"))


@contextmanager
def learning(target: TransformersTarget, there: Folder) -> Iterator[tuple[Learner, Callable[[int], None]]]:
    """A learner over a running engine, and what serves so many texts."""
    drafter = load_drafter(there.current, target)
    engine, draw = Engine(target, drafter, slots=4, length=64, policy="fixed"), random.Random(5)

    def serve(count: int) -> None:
        served(engine, [request([draw.randrange(33, 100) for _ in range(6)], NEW) for _ in range(count)])

    with Learner(engine, target, there) as learner, engine:
        yield learner, serve


def until(is_so: Callable[[], bool], seconds: float = 30.0) -> bool:
    ends = time.monotonic() + seconds
    while not is_so() and time.monotonic() < ends:
        time.sleep(0.02)
    return is_so()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "LOOK_S", 0.05)
    monkeypatch.setattr(learners, "BEFORE", 32)


def names(there: Folder) -> list[str]:
    return [event["event"] for event in there.events()]


def test_a_version_that_is_worse_is_rolled_back_and_not_taken_again(quick, tmp_path, learned, float_target):
    """A version that passed by mistake: its weights are noise.  Catches a guard that looks the other way."""
    there = copied(learned, tmp_path / "worse")
    there.use(1, 1)
    plant(there, float_target, version=2, origin=1)
    there.set(learning=there.config.model_dump(mode="json") | {"every_texts": 10**6})
    with learning(float_target, Folder(there.path)) as (learner, serve):
        serve(4)
        time.sleep(0.3)
        assert learner.state.version == 1  # there is nothing to compare it with yet
        serve(36)
        assert until(lambda: there.state().version == 2)
        began = time.monotonic()
        while there.state().version == 2 and time.monotonic() < began + 30:
            serve(8)
        assert there.state() == folders.State(1, 2), names(there)
        serve(2 * FEWEST)
        time.sleep(0.3)
        assert learner.state.version == 1 and learner.engine.replaced > 1
    assert there.buffer.newest("train", 5)  # what was served is stored
    assert names(there)[-2:] == ["swapped", "rolled back"]
    event = there.events()[-1]
    assert event["tokens_per_draft"]["new"] < event["tokens_per_draft"]["old"] and event["to"] == 1


def test_undo_reaches_a_running_server(quick, tmp_path, learned, float_target, capsys):
    there = copied(learned, tmp_path / "undone")
    there.use(1, 1)
    with learning(float_target, Folder(there.path)) as (learner, _serve):
        assert learner.state.version == 1
        assert outrider_with("learning", "undo", str(there.path)) == 0
        assert "version 0 is served instead of 1" in capsys.readouterr().out
        assert until(lambda: learner.state.version == 0)
        time.sleep(0.2)
        assert there.state().version == 0  # version 1 is not taken again
    assert outrider_with("learning", "log", str(there.path)) == 0
    said = capsys.readouterr().out
    assert "passed" in said and "undone" in said and "version 0 is served" in said
    assert outrider_with("learning", "undo", str(there.path)) == 2
    assert "there is nothing to undo" in capsys.readouterr().err
    assert outrider_with("learning", "log", str(there.path), "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["version"] == 0


def test_no_version_is_trained_that_costs_more_than_it_saves(quick, tmp_path, learned, float_target):
    """Catches a horizon that is read and not obeyed, and time without requests that counts as decoding."""
    there = copied(learned, tmp_path / "dear")
    for horizon_s, trains in ((1e-3, False), (1e9, True)):
        there.set(learning=there.config.model_dump(mode="json") | {"every_texts": 1, "horizon_s": horizon_s})
        with learning(float_target, Folder(there.path)) as (learner, serve):
            time.sleep(0.3)  # until the engine sleeps for the first time
            serve(8)
            assert until(lambda: learner._job is not None, 1.5) == trains


@pytest.mark.parametrize("while_busy", [False, True])
def test_the_training_stands_still_while_requests_are_there(tmp_path, learned, float_target, while_busy):
    """Catches a job that takes the processor from those who are served, and one that never goes on."""
    there = copied(learned, tmp_path / "still")
    there.set(
        learning=there.config.model_dump(mode="json") | {"every_texts": 10**6, "steps": 10**6, "while_busy": while_busy}
    )
    with learning(float_target, Folder(there.path)) as (learner, serve):
        serve(1)  # the engine has begun
        assert until(lambda: not learner._is_busy, 5)
        job = learner._job = Job(there)
        stat = Path(f"/proc/{job._process.pid}/stat")
        is_still = lambda: stat.read_text().rpartition(")")[2].split()[0] == "T"
        assert until(lambda: not is_still(), 5)
        during = []
        for _ in range(2):
            caller = Caller.of(request([40, 41], 40))
            # a signal takes a moment
            caller.on_output = lambda output: during.append(is_still() if while_busy else until(is_still, 5))
            learner.engine.submit(caller.call)
            caller.wait()
            assert until(lambda: not is_still(), 5)
        assert during and all(one is not while_busy for one in during)
    assert job.code is not None  # it ends with the server


@pytest.mark.slow
def test_a_server_trains_by_itself(quick, tmp_path, learned, float_target):
    """From traffic to a version in the log, with the real job; catches any part that does not fit the next."""
    there = copied(learned, tmp_path / "alone")
    there.use(1, 1)
    with learning(float_target, Folder(there.path)) as (_learner, serve):
        serve(48)
        # the job runs when nothing else does
        assert until(lambda: 2 in there.versions() or "failed" in names(there), 400), names(there)
    assert {"passed", "refused"} & {event["event"] for event in there.events() if event.get("version") == 2}
    assert not list(there.path.glob("versions/*.part"))


def test_drafters_that_do_not_learn_and_folders_of_others_are_refused(
    tmp_path, learned, given, folder, workshop, float_target
):
    with pytest.raises(ConfigError, match=r"'ngram' is not a checkpoint: train one with `outrider run`"):
        made(tmp_path / "a", Path("ngram"), folder)
    other = tmp_path / "other"
    checkpoint.save(other, randomise(workshop.model(Case("dspark"), float_target), 0.3))
    with pytest.raises(ConfigError, match=r"belongs to .*; name another folder in serve.learning.folder"):
        made(learned.path, other, folder)
    with pytest.raises(ConfigError, match="has no version 7; it has 0, 1"):
        learned.undo(7)


def plant(there: Folder, target: TransformersTarget, version: int, origin: int) -> None:
    """A version of noise that claims to have passed."""
    model = checkpoint.load_model(there.checkpoint(origin), target)
    torch.manual_seed(0)
    randomise(model, 0.5)
    checkpoint.save(there.place(version) / "checkpoint", model)
    result = {"version": version, "from": origin, "passed": True, "reason": "planted"}
    (there.place(version) / folders.RESULT).write_text(json.dumps(result))
