"""A llama-server is started, asked and ended; what it did with its drafts is read step by step.  A stub stands for it;
benchmarks/engines/llama_drafters.py runs the real one."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_folder

from outrider import load_target
from outrider.config import build
from outrider.drafters import find as find_drafter
from outrider.engines import llama_server
from outrider.engines.llama_server import Answer, Step
from outrider.engines.tuning import sweep
from outrider.engines.verify import llamacpp, parity
from outrider.engines.verify.comparison import verified
from outrider.errors import ConfigError, DataError
from tests.engines.test_verify import PROMPTS, run, verb

STUB = Path(__file__).with_name("stub_llama_server.py")
NOISE = 0.05
Scripted = Callable[..., Path]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """A llama-server that answers from a script."""

    def program(**script: Any) -> Path:
        (tmp_path / "script.json").write_text(json.dumps(script))
        monkeypatch.setenv("STUB_SCRIPT", str(tmp_path / "script.json"))
        place = tmp_path / "llama-server"
        place.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
        place.chmod(0o755)
        return place

    return program


def test_steps_are_read_from_the_log_by_their_request(scripted: Scripted, tmp_path: Path) -> None:
    """Catches a step that is counted for the request after it, and drafted and accepted the wrong way round."""
    said = [{"tokens": [1, 2, 3, 4], "steps": [[3, 2], [2, 0]]}, {"tokens": [5], "steps": []}]
    program, log = scripted(answers=[*said, said[0]]), tmp_path / "log"
    with llama_server.serving([program], log) as client:
        answers = [llama_server.continued(client, [7, 8], 4) for _ in range(3)]
    assert answers[0] == Answer([1, 2, 3, 4], drafted=5, accepted=2) and answers[1].drafted == 0
    steps = [Step(drafted=3, accepted=2), Step(drafted=2, accepted=0)]
    assert llama_server.steps_of(log, answers) == [steps, [], steps]


def test_a_log_without_the_steps_is_an_error_and_no_empty_comparison(scripted: Scripted, tmp_path: Path) -> None:
    """Catches a version that logs its steps otherwise, which would compare nothing and pass."""
    program = scripted(answers=[{"tokens": [1, 2], "steps": [[3, 1]], "logged": False}])
    with llama_server.serving([program], tmp_path / "log") as client:
        answers = [llama_server.continued(client, [7], 2)]
    with pytest.raises(DataError, match="logged 0 drafted tokens in 1 requests, but its answers report 3 in 1"):
        llama_server.steps_of(tmp_path / "log", answers)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("request", "did not answer a request .*its last lines: GGML_ASSERT"),
        ("silent", "did not answer a request .*timed out.*task 0 | thinking"),
    ],
)
def test_a_server_that_dies_or_hangs_says_its_last_lines_and_is_ended(fault, said, scripted, tmp_path, monkeypatch):
    """Catches an error that names no cause, ten minutes of waiting, and a server that runs on."""
    monkeypatch.setattr(llama_server, "ANSWERS_S", 0.5)
    started: list[Any] = []
    popen = sweep.subprocess.Popen
    monkeypatch.setattr(
        sweep.subprocess, "Popen", lambda *words, **named: started.append(popen(*words, **named)) or started[-1]
    )
    with (
        pytest.raises(DataError, match=said),
        llama_server.serving([scripted(answers=[], fault=fault)], tmp_path / "log") as client,
    ):
        llama_server.continued(client, [7], 2)
    assert len(started) == 1 and started[0].returncode is not None


def test_a_server_ends_with_the_process_that_started_it(scripted: Scripted, tmp_path: Path) -> None:
    """Catches a server that keeps its port and its memory once Outrider was killed."""
    program = scripted(answers=[])
    text = (
        "import pathlib, sys, time\nfrom outrider.engines import llama_server\n"
        "with llama_server.serving([sys.argv[1]], pathlib.Path(sys.argv[2])) as client:\n"
        "    print(client.base_url.port, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", text, program, tmp_path / "log"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    url = f"http://127.0.0.1:{int(parent.stdout.readline())}/health"
    assert sweep._answers(url)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until = time.monotonic() + 10
    while sweep._answers(url):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_missing_server_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches `No such file or directory` after the models have been loaded."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(llama_server.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="no llama-server on the PATH, .*build_llama.py.*--server"):
        llama_server.program()
    with pytest.raises(ConfigError, match="no program /nowhere/llama-server; build it"):
        llama_server.program("/nowhere/llama-server")
    monkeypatch.setenv(llama_server.VARIABLE, sys.executable)
    assert llama_server.program() == Path(sys.executable).absolute()
    refused = verb(tmp_path, "--engine", "llamacpp", "--server", "/nowhere/llama-server")
    assert isinstance(refused.exception, ConfigError) and "no program /nowhere" in str(refused.exception)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A target, and a small model that is the target with noise: some of what it drafts is accepted."""
    target = load_target(make_folder(tmp_path_factory.mktemp("target")))
    module = find_drafter("small_model")
    config = build(module.Config, {"kind": "small_model", "model": target.spec.name, "length": 3}, "drafter")
    model, noise = module.Model(config, target), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.lm.parameters():
            weight += NOISE * weight.std().nan_to_num() * torch.randn(weight.shape, generator=noise)
    return target, model


def script_of(target: Any, model: Any) -> list[dict[str, Any]]:
    """What a server would say that drafts as we do."""
    begun = [text[:1] for text in run(target, parity.as_engine(model), 3).tokens]
    side = parity.ours(target, parity.as_engine(model), PROMPTS, begun, 12, 3)
    every = zip(side.tokens, side.drafted, side.accepted, strict=True)
    return [{"tokens": text, "steps": list(zip(drafted, accepted, strict=True))} for text, drafted, accepted in every]


def compare(pair: tuple[Any, Any], program: Path, monkeypatch: pytest.MonkeyPatch, place: Path) -> parity.Parity:
    monkeypatch.setattr(llamacpp, "models", lambda *given: [])  # the stub reads no files
    return verified(place, "llamacpp", None, *pair, False, PROMPTS, 12, server=str(program))


def test_a_server_that_drafts_as_we_do_is_equal_and_one_that_does_not_is_not(pair, scripted, tmp_path, monkeypatch):
    """Catches a first step that is counted from another place than ours, the version 0.5.0-dev, which every build calls
    itself, and a result that looks measured though the server refused the file."""
    found = compare(pair, scripted(answers=script_of(*pair)), monkeypatch, tmp_path)
    assert found.error is None and found.is_equal and found.texts_equal == 3 and found.steps_equal == 1
    assert found.steps[0] == found.steps[1] > 3 and 0.1 < found.depths[0].engine < 0.9
    assert (found.version, found.platform) == ("0c1e570", "cpu")
    other = script_of(*pair)
    other[1]["tokens"][5] = (other[1]["tokens"][5] + 1) % 256
    found = compare(pair, scripted(answers=other), monkeypatch, tmp_path)
    assert not found.texts_hold and found.texts_equal == 2
    found = compare(pair, scripted(answers=[], fault="start"), monkeypatch, tmp_path)
    assert "missing tensor 'fc.weight'" in str(found.error) and found.is_equal is None
