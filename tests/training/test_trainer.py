"""Training 2N steps is N, a stop, and N more; what is not finite is named; a good checkpoint is never lost."""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from data.test_regenerate import room_of
from safetensors.torch import load_file

from outrider import checkpoint
from outrider.checkpoint import manifest_of
from outrider.drafters import find
from outrider.errors import CheckpointError, ConfigError, TrainingError
from outrider.nn.draft_model import Batch
from outrider.storage.lock import held
from outrider.targets.hf.transformers import TransformersTarget
from outrider.training import losses, trainer
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.progress.metrics import Metrics
from outrider.training.step import Joined, rate
from outrider.training.trainer import train
from training.bench import SETTINGS, fit, make_model, make_source


class Stop(Exception):
    """Stands for any crash."""


def stopper(at: int, stop: Callable[[], None]) -> Callable[[int, Mapping[str, Any]], None]:
    def on_step(step: int, found: Mapping[str, Any]) -> None:
        if step == at:
            stop()

    return on_step


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


def crash() -> None:
    raise Stop


def stopped(folder: Path, target: TransformersTarget, at: int = 3, stop: Any = interrupt, **settings: Any) -> Path:
    """A training that was stopped after this step."""
    with pytest.raises(KeyboardInterrupt):
        fit(folder, target, on_step=stopper(at, stop), **settings)
    return folder


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Without the time it took."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row[key] for key in row if key not in ("seconds", "tokens_per_s", "mfu")} for row in rows]


def written(folder: Path) -> dict[str, bytes]:
    """Every file of a checkpoint."""
    return {path.name: path.read_bytes() for path in sorted((folder / "checkpoint").iterdir())}


def same_training(folder: Path, other: Path) -> None:
    """Weights, moments, random state and metrics, bit for bit."""
    for name in (checkpoint.WEIGHTS, checkpoint.TRAINING):
        mine, theirs = load_file(folder / "checkpoint" / name), load_file(other / "checkpoint" / name)
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    assert metrics(folder) == metrics(other)
    facts = [checkpoint.manifest_of(place / "checkpoint")["training"] for place in (folder, other)]
    assert facts[0] | {"seconds": 0} == facts[1] | {"seconds": 0}


def step_of(folder: Path) -> int:
    return checkpoint.manifest_of(folder / "checkpoint")["training"]["step"]


@pytest.fixture(scope="module")
def whole(talker: TransformersTarget, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders of trainings that nothing stopped, by settings."""
    made: dict[str, Path] = {}

    def find(**settings: Any) -> Path:
        key = json.dumps(settings)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("whole")
            fit(made[key], talker, **settings)
        return made[key]

    return find


@pytest.mark.parametrize(("at", "number"), [(1, signal.SIGINT), (3, signal.SIGTERM)])
def test_a_training_stopped_by_a_signal_goes_on_bit_for_bit(at, number, talker, whole, tmp_path) -> None:
    """Catches a moment, a random state, a step or a line of metrics that is lost."""
    before = signal.getsignal(number)
    stopped(tmp_path, talker, at, functools.partial(interrupt, number))
    assert signal.getsignal(number) is before
    assert step_of(tmp_path) == at
    torch.manual_seed(99)
    seen: list[int] = []
    fit(tmp_path, talker, seed=99, on_step=lambda step, _: seen.append(step))
    assert seen == list(range(at + 1, 7))
    same_training(tmp_path, whole())


@pytest.mark.parametrize("at", [2, 3])
def test_a_training_stopped_by_a_crash_goes_on_from_its_last_save_bit_for_bit(at, talker, whole, tmp_path) -> None:
    """Catches steps that are logged twice, or skipped, where the crash came between two saves or right before one."""
    with pytest.raises(Stop):
        fit(tmp_path, talker, on_step=stopper(at, crash))
    saved = at - 1 if at % 2 else at - 2
    assert (step_of(tmp_path) if saved else 0) == saved
    fit(tmp_path, talker, seed=99 if saved else 1)
    same_training(tmp_path, whole())


def test_other_arithmetic_goes_on_bit_for_bit_too(talker, whole, tmp_path) -> None:
    """Catches weights that are saved in the precision of the passes, and state of Muon or of the loss that is lost."""
    settings = {"dtype": "bfloat16", "optimizer": "muon", "loss": {"lk_lambda": 1.0}}
    stopped(tmp_path, talker, **settings)
    fit(tmp_path, talker, seed=99, **settings)
    same_training(tmp_path, whole(**settings))


def test_a_resumed_training_keeps_the_type_that_was_chosen_for_it(talker, whole, tmp_path, monkeypatch) -> None:
    """Catches `auto` that is chosen anew, where the machine is another or was measured again: half in each type is
    neither."""
    monkeypatch.setattr(trainer.machine, "training_dtype", lambda device: "float32")
    stopped(tmp_path, talker, dtype="auto")
    monkeypatch.setattr(trainer.machine, "training_dtype", lambda device: "bfloat16")
    fit(tmp_path, talker, seed=99, dtype="auto")
    same_training(tmp_path, whole())
    assert manifest_of(tmp_path / "checkpoint")["training"]["config"]["dtype"] == "float32"


def test_lk_lambda_goes_by_the_overlap_that_was_found_of_late(talker, tmp_path, monkeypatch) -> None:
    """Catches a loss that is never told, one that is told of another step, and looks that hang on what is logged."""
    told: list[float] = []
    real = losses.lk_lambda
    heard = lambda draft, target, labels, near=0.0: told.append(near) or real(draft, target, labels, near)
    monkeypatch.setitem(losses.DIVERGENCES, "lk_lambda", heard)
    monkeypatch.setattr(trainer, "LOOK_EVERY", 2)
    found: list[float | None] = []
    note = lambda step, said: found.append(said.get("overlap"))
    fit(tmp_path, talker, on_step=note, loss={"lk_lambda": 1.0}, log_every=5)
    assert [value is None for value in found] == [False, True, False, True, False, False]
    steps = list(dict.fromkeys(told))
    assert steps == [0.0, found[0], found[2], found[4]] and 0 < found[0] < 1


def test_muon_turns_inner_matrices_alone(talker: TransformersTarget) -> None:
    """Catches an embedding, an output layer or a norm that Muon would flatten, and a weight that neither moves."""
    model = make_model(talker)
    names = {id(weight): name for name, weight in model.named_parameters()}
    adam, muon = (
        {names[id(weight)] for group in part.param_groups for weight in group["params"]}
        for part in Optimizers(model, "muon", talker.spec.vocabulary, 0.0).parts
    )
    assert adam | muon == set(names.values()) and not adam & muon
    assert {"backbone.fc.weight", "backbone.layers.0.self_attn.q_proj.weight"} <= muon
    assert {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "backbone.norm.weight"} <= adam


def test_a_second_ctrl_c_stops_at_once(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a training that can't be left while a step or a save hangs."""

    def twice() -> None:
        interrupt()
        interrupt()
        raise AssertionError("still running")

    stopped(tmp_path, talker, 1, twice)
    assert not (tmp_path / "checkpoint").exists()


def test_a_finished_training_is_left_alone(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches `outrider run`, run twice, that trains on or writes anew; the second model gets the trained weights."""
    first = fit(tmp_path, talker)
    before, lines = written(tmp_path), (tmp_path / "metrics.jsonl").read_bytes()
    second = fit(tmp_path, talker, seed=99, on_step=lambda step, found: pytest.fail(f"step {step}"))
    assert written(tmp_path) == before
    assert (tmp_path / "metrics.jsonl").read_bytes() == lines
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_two_do_not_train_in_one_folder(talker, tmp_path, monkeypatch) -> None:
    """Catches two processes whose steps stand in one another's metrics and checkpoints."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)
    with (
        held(tmp_path, AssertionError()),
        pytest.raises(TrainingError, match=f"another process is training in {tmp_path}; wait for it, or give this run"),
    ):
        fit(tmp_path, talker)
    assert list(tmp_path.iterdir()) == []


def test_lines_of_metrics_wait_for_room(tmp_path: Path) -> None:
    """Catches a line that is torn, lost or written twice, and a file emptied before its shorter self is there."""
    with Metrics(tmp_path, 0) as written:
        with room_of(50):
            for step in range(1, 6):
                written.write({"step": step, "loss": 0.5})
        assert (tmp_path / "metrics.jsonl").stat().st_size == 50
        written.write({"step": 6, "loss": 0.5})
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    with room_of(60), pytest.raises(TrainingError, match="lacks its last"), Metrics(tmp_path, 6) as written:
        written.write({"step": 7, "loss": 0.5})
    whole = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(1, 9))
    (tmp_path / "metrics.jsonl").write_text(whole)
    with room_of(20), pytest.raises(TrainingError, match="can't write"):
        Metrics(tmp_path, 4)
    assert (tmp_path / "metrics.jsonl").read_text() == whole


@pytest.mark.parametrize("damage", [b"{}", b"{5}", b"\xff}", b'{"step": "a"}'], ids=str)
def test_a_damaged_line_of_metrics_is_left_out_and_said(damage, tmp_path, caplog) -> None:
    """Catches a run that can't go on for one bad line of what nothing reads."""
    good = [json.dumps({"step": step, "loss": 0.5}).encode() for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], damage, good[1], b'{"step": 3, "lo']))
    Metrics(tmp_path, 2)
    assert [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert "line 2 can't be read" in caplog.text


def test_other_answers_are_not_other_steps(talker, tmp_path) -> None:
    """Catches a loop that looks at more of its source than `batch(step)`, and a batch that comes in two steps."""
    asked: list[int] = []
    source = make_source(talker)

    class Counted:
        manifest, counts = source.manifest, source.counts

        def batch(self, step: int) -> Batch:
            asked.append(step)
            return source.batch(step)

    fit(tmp_path, talker, source=Counted(), steps=3, accumulate=2)
    assert asked == list(range(6))


class Planted:
    """A source whose batches from step `at` on hold bad numbers in the first text of one tensor."""

    def __init__(self, source: Any, name: str, value: float, at: int):
        self.source, self.name, self.value, self.at, self.manifest = source, name, value, at, source.manifest
        self.counts = source.counts

    def batch(self, step: int) -> Batch:
        batch = self.source.batch(step)
        if step < self.at:
            return batch
        bad = getattr(batch, self.name).clone()
        bad[0] = self.value
        return dataclasses.replace(batch, **{self.name: bad})


def test_a_bad_feature_is_named_and_the_good_checkpoint_stays(talker, tmp_path) -> None:
    """Catches a NaN that is trained on, blamed on another tensor, or saved over the last good weights."""
    stopped(tmp_path, talker, skip=0)
    before = written(tmp_path)
    with pytest.raises(TrainingError, match=r"^step 4: .*first bad tensor: batch\.hidden \(\d, .*train\.lr"):
        fit(tmp_path, talker, source=Planted(make_source(talker), "hidden", float("inf"), 3), skip=0)
    assert written(tmp_path) == before


def test_weights_that_went_bad_are_taken_from_the_last_checkpoint(talker, tmp_path, caplog) -> None:
    """Catches a training that goes on with bad weights, writes them."""
    model, spoilt = make_model(talker), [3]

    def spoil(step: int, found: Mapping[str, Any]) -> None:
        if step in spoilt:
            with torch.no_grad():
                model.get_parameter("backbone.fc.weight").flatten()[0] = float("nan")

    settings = Config(**SETTINGS | {"steps": 12, "save_every": 1, "skip": 2})
    with pytest.raises(TrainingError, match="step 3: backbone.fc.weight is not finite, so no checkpoint is written"):
        train(model, make_source(talker), settings, tmp_path / "saved", on_step=spoil)
    assert step_of(tmp_path / "saved") == 2
    model, settings = make_model(talker), Config(**SETTINGS | {"steps": 12, "save_every": 50, "skip": 2})
    with pytest.raises(KeyboardInterrupt):
        train(model, make_source(talker), settings, tmp_path, on_step=stopper(2, interrupt))
    train(model := make_model(talker), make_source(talker), settings, tmp_path, on_step=spoil)
    assert "step 6: " in caplog.text and "the weights of the last checkpoint are restored" in caplog.text
    assert step_of(tmp_path) == 12
    with pytest.raises(KeyboardInterrupt):
        train(make_model(talker), make_source(talker), settings, tmp_path / "ever", on_step=stopper(2, interrupt))
    spoilt += range(4, 99)
    with pytest.raises(TrainingError, match=r"^step 9: .*weight backbone.fc.weight .*The last checkpoint is intact"):
        train(model := make_model(talker), make_source(talker), settings, tmp_path / "ever", on_step=spoil)


def test_what_a_crash_left_beside_a_whole_checkpoint_is_deleted(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a run that was killed in its last save, and has an old checkpoint beside the new one for ever."""
    fit(tmp_path, talker)
    for end in (".old", ".part"):
        shutil.copytree(tmp_path / "checkpoint", tmp_path / f"checkpoint{end}")
    fit(tmp_path, talker)
    assert sorted(path.name for path in tmp_path.glob("checkpoint*")) == ["checkpoint", "checkpoints"]
    (tmp_path / "checkpoint").rename(tmp_path / "checkpoint.old")  # the last whole one: it stays until there is another
    fit(tmp_path, talker)
    assert step_of(tmp_path) == 6


def test_other_settings_do_not_resume(talker, tmp_path) -> None:
    """Catches a checkpoint that is half one training and half another; the message names every key that differs."""
    stopped(tmp_path, talker, 1)
    before = written(tmp_path)
    for kind, change, named in (
        ("vanilla", {"lr": 2e-2}, "train.lr was 0.01, is 0.02"), ("rnn", {}, "drafter.markov was vanilla, is rnn"),
        ("vanilla", {"loss": {"kl": 1.0}}, "train.loss was {'ce': 0.1, 'tv': 1.8}, is {'kl': 1.0}"),
        ("vanilla", {"dtype": "bfloat16", "batch": 3},
         "train.batch was 2, is 3; train.dtype was float32, is bfloat16"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError) as caught:
            fit(tmp_path, talker, kind, **change)
        assert f"other settings: {named}; set them back, give the run another name, or" in str(caught.value)
        assert written(tmp_path) == before


def test_a_training_goes_on_where_its_steps_are_raised(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a longer training that is refused, that begins again, or whose rate jumps."""
    at = 6
    for place in (tmp_path / "once", tmp_path / "twice"):
        fit(place, talker, warmup=0.25)
        assert step_of(place) == at
    fit(tmp_path / "once", talker, steps=12, warmup=0.25)
    stopped(tmp_path / "twice", talker, at + 1, steps=12, warmup=0.25)
    fit(tmp_path / "twice", talker, steps=12, warmup=0.25)
    same_training(tmp_path / "once", tmp_path / "twice")
    rates = [row["lr"] for row in metrics(tmp_path / "once")]
    assert len(rates) == 12
    first = SETTINGS["lr"] * rate(at, Config(**SETTINGS, warmup=0.25))
    assert min(first, rates[at]) == first < max(rates[at:]) < SETTINGS["lr"] and rates[-1] < 0.1 * SETTINGS["lr"]


def test_fewer_steps_than_were_trained_are_refused(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a training of 6 steps that is called one of 4."""
    fit(tmp_path, talker)
    with pytest.raises(CheckpointError, match=r"trained to step 6, and train\.steps 4 is less"):
        fit(tmp_path, talker, steps=4)


def test_an_end_that_moves_is_probed_again(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches a longer training that shows the acceptance of the shorter one."""
    for steps in (2, 4, 4):
        config = Config(**(SETTINGS | {"steps": steps}))
        train(make_model(talker), make_source(talker), config, tmp_path, probe=lambda model: {"probed": 1.0})
    assert [row["step"] for row in metrics(tmp_path) if "probed" in row] == [2, 4]


def test_epochs_are_passes_over_the_texts(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches epochs that are rounded down, and a checkpoint that does not know its steps: 7 texts are 4 batches of
    2."""
    fit(tmp_path, talker, steps=None, epochs=1.5)
    assert step_of(tmp_path) == 6
    fit(tmp_path, talker)  # and 6 steps are the same training
    assert step_of(tmp_path) == 6
    for wrong in ({"epochs": 2}, {"steps": None}):
        with pytest.raises(ValueError, match="leave one out"):
            Config(**(SETTINGS | wrong))


def test_the_rate_rises_and_falls() -> None:
    """Catches a first step at rate 0, a peak that is missed, and a rate that rises again at the end."""
    config = Config(steps=100, warmup=0.1)
    rates = [rate(step, config) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert [rate(step, Config(steps=1, warmup=0)) for step in range(1)] == [1.0]


def test_a_rate_that_joins_another_curve_does_not_jump() -> None:
    """Catches a rate that leaps to the new curve, overshoots it, or stays on the old one."""
    short, long = Config(steps=100, warmup=0.1), Config(steps=300, warmup=0.1)
    for step in (60, 100):
        joined = Joined(step, rate(step, short))
        rates = [rate(at, long, joined) for at in range(step, 300)]
        most = 1.5 * max(abs(rate(at + 1, long) - rate(at, long)) for at in range(30, 299)) + 1 / joined.length(long)
        jumps = [abs(a - b) for a, b in itertools.pairwise([joined.rate, *rates])]
        assert max(jumps) < most
        after = joined.length(long)
        assert rates[after:] == [rate(at, long) for at in range(step + after, 300)] and rates[-1] < 0.01


def test_what_a_drafter_has_not_is_refused(talker, tmp_path) -> None:
    """Catches a typo in `extra` that leaves the term it meant at weight 1, and a setting that is ignored in silence."""
    with pytest.raises(ConfigError, match="no extra loss 'confidance'; did you mean 'confidence'"):
        fit(tmp_path, talker, extra={"confidance": 0.0}, steps=2)
    module = find("medusa")
    model = module.Model(module.Config(heads=2, nodes=4), talker)
    with pytest.raises(ConfigError, match=r"drafter 'medusa' has none of its own; leave it out"):
        train(model, make_source(talker), Config(steps=1, recompute=True), tmp_path)
