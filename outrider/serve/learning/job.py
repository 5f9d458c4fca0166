"""The training job of a drafter that learns: one version, from the texts of its folder.

    python -m outrider.serve.learning.job FOLDER

A separate process with the lowest priority and one thread.  The server starts it, and pauses it at any point while
requests are decoded.  It loads the target again, trains the served version's weights on the newest texts, and compares
the new weights with the served ones on held-out prompts.  The result goes to versions/N, with a line in the log.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from outrider import checkpoint
from outrider.config import build
from outrider.data.answers.store import Answer
from outrider.data.features.live import LiveFeatures
from outrider.drafters import find
from outrider.errors import DataError, OutriderError
from outrider.fast import NotCompiled, compile_passes
from outrider.loading import load_drafter
from outrider.nn.draft_model import DraftModel
from outrider.serve.learning import buffer
from outrider.serve.learning.buffer import Text
from outrider.serve.learning.folder import RESULT, Folder, remove_unfinished
from outrider.serve.learning.trial import Trial, compared
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.training.config import Config as TrainConfig
from outrider.training.trainer import train

LOWEST = 19
"""Niceness."""
CACHE_BYTES = 2**28
"""Maximum memory for the target's features."""
SHARE_OF_LR = 0.25
"""Share of the peak learning rate of the drafter's original training."""


PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl."""


def main(path: str) -> int:
    """Train a version; returns 0 if one was trained, whether or not it passed."""
    lower_priority()
    folder = Folder(path)
    try:
        result = make_version(folder)
    except OutriderError as error:
        folder.log("failed", reason=str(error))
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


def lower_priority() -> None:
    """Run only when the processor is idle."""
    torch.set_num_threads(1)
    with suppress(OSError):
        os.nice(LOWEST)
    with suppress(OSError, AttributeError):  # only on Linux
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def die_with_server() -> None:
    """Otherwise a paused job would outlive its server."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def make_version(folder: Folder) -> dict[str, Any]:
    """Train, compare and write a version; returns its result.  Raises OutriderError if it can't be trained."""
    began, config = time.monotonic(), folder.config
    remove_unfinished(folder.path)
    before, number = folder.state().version, folder.next_version()
    old = folder.checkpoint(before)
    training = settings_of(checkpoint.manifest_of(folder.checkpoint(0)), config.steps, config.lr, seed=number)
    texts = folder.buffer.newest("train", config.steps * training.batch)
    held_out = folder.buffer.newest("held_out", config.prompts, is_distinct=True)
    if not texts:
        raise DataError(f"{folder.path} has no texts to train on; serve some requests first")
    target = target_of(folder)
    buffer.check([*texts, *held_out], target.spec.vocabulary, folder.path)
    work = folder.place(number).with_suffix(".part")
    made = trained(target, old, texts, training, work, config.length)
    trial = compared(
        target, load_drafter(made, target), load_drafter(old, target), held_out, config.new_tokens, config.prompts // 4
    )
    result = {
        "version": number, "from": before, "passed": trial.passes, "reason": trial.reason,
        "tokens_per_step": {"old": trial.old.rows[0].tokens_per_step, "new": trial.new.rows[0].tokens_per_step},
        "gain": None if trial.gain is None else [round(value, 4) for value in trial.gain],
        "texts": len(texts), "tokens": sum(len(text.answer) for text in texts),
        "rejected": sum(len(text.rejected) for text in texts), "data": hash_of(texts), "prompts": len(held_out),
        "steps": training.last_step, "lr": training.lr, "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time(), 1),
    }  # fmt: skip
    if trial.passes and folder.settings["compile"]:
        compile_for_server(folder, made)
    finish(folder, work, trial, result)
    return result


def settings_of(manifest: Mapping[str, Any], steps: int, lr: float | None, seed: int) -> TrainConfig:
    """Training settings of a version: those of the drafter's original training, with fewer steps and a lower rate."""
    before = TrainConfig(**(manifest["training"].get("config") or {}))
    return before.model_copy(
        update={
            "steps": steps,
            "epochs": None,
            "lr": lr or SHARE_OF_LR * before.lr,
            "seed": seed,
            "save_every": steps,
            "select": 1.0,
            "reference": None,
            "calibrate": 0,
        }
    )


def trained(
    target: TransformersTarget, old: Path, texts: Sequence[Text], training: TrainConfig, work: Path, length: int
) -> Path:
    """Train the weights of `old` on the answers of these texts; returns the checkpoint, which is in `work`."""
    model = unfrozen(old, target)
    source = LiveFeatures(
        target, [answer_of(text, str(n), length) for n, text in enumerate(texts)], model.taps, batch=training.batch,
        length=length, seed=training.seed, dtype=training.dtype, cache_bytes=CACHE_BYTES, budget=training.tokens,
    )  # fmt: skip
    place = train(model, source, training, work, origin=str(old))
    (place / checkpoint.TRAINING).unlink(missing_ok=True)  # the next version starts a new optimiser
    return place


def unfrozen(folder: Path, target: TransformersTarget) -> DraftModel:
    """The draft model of a checkpoint in the precision of its training.  Raises CheckpointError for another target."""
    manifest = checkpoint.manifest_of(folder)
    checkpoint.check_binding(manifest, target, folder, quantised=True)
    module = find(manifest["kind"])
    settings = {"kind": manifest["kind"], **checkpoint.config_of(manifest, folder, target)}
    model: DraftModel = module.Model(build(module.Config, settings, "drafter"), target).to(target.device)
    checkpoint.check_taps(manifest, model, folder)
    checkpoint.load_weights(folder, model)
    return model


def answer_of(text: Text, name: str, length: int) -> Answer:
    """A training text: the answer, after as much of the prompt as fits."""
    answer = text.answer[:length]
    prompt = text.prompt[max(0, len(text.prompt) - (length - len(answer))) :]
    return Answer(name, [*prompt, *answer], [(len(prompt), len(prompt) + len(answer))])


def hash_of(texts: Sequence[Text]) -> str:
    """Identifies the training data of a version."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(json.dumps([text.prompt, text.answer]).encode())
    return digest.hexdigest()[:16]


def finish(folder: Folder, work: Path, trial: Trial, result: Mapping[str, Any]) -> None:
    """Write reports and result, then rename the folder to its final name, then log."""
    (work / "new.json").write_text(trial.new.json_text())
    (work / "old.json").write_text(trial.old.json_text())
    (work / "gate.json").write_text(json.dumps(trial.outcome.as_json(), indent=1))
    (work / RESULT).write_text(json.dumps(result, indent=1))
    work.rename(folder.place(result["version"]))
    folder.log("passed" if result["passed"] else "refused", **result)
    folder.prune()


def compile_for_server(folder: Folder, made: Path) -> None:
    """Compile this version's passes as the server runs them, if packages contain weights.

    In a separate process, since the number of threads is fixed at compilation.  If it fails, the server runs this
    drafter uncompiled.
    """
    command = [sys.executable, "-m", "outrider.serve.learning.job", str(folder.path), "--compile", str(made)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": str(folder.settings["threads"])}, check=False)


def compile_version(folder: Folder, made: str) -> int:
    """Runs in that process."""
    try:
        compile_passes(load_drafter(made, target_of(folder)))
    except NotCompiled as reason:
        print(f"not compiled: {reason}", file=sys.stderr)
        return 1
    return 0


def target_of(folder: Folder) -> TransformersTarget:
    """The server's target, loaded here; uncompiled, since packages are compiled for a number of threads."""
    settings = folder.settings["target"] | {"compile": False}
    return load_target(settings.pop("name"), **settings)


if __name__ == "__main__":
    folder, *options = sys.argv[1:]
    if options[:1] == ["--compile"]:
        raise SystemExit(compile_version(Folder(folder), options[1]))
    if options[:1] == ["--for-server"]:
        die_with_server()
    raise SystemExit(main(folder))
