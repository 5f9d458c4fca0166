"""States from a vLLM server's connector, on files in its layout; a real server needs a CUDA device."""

import fcntl
import json
import os
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from outrider.data.answers.store import Answer
from outrider.data.features.cache import Binding, build
from outrider.data.features.cached import CachedFeatures
from outrider.data.features.engine_states import EngineStates, engine_layers, launch_arguments, read_states
from outrider.data.features.live import LiveFeatures
from outrider.errors import DataError
from outrider.targets.hf.transformers import TransformersTarget

TAPS = (0, 2)


def texts(count: int = 5) -> list[Answer]:
    return [Answer(f"t{i}", [i] + [100 + i] * (12 + i), [(4, 12)]) for i in range(count)]


class Server:
    """Answers as vLLM does, and writes what its connector would: outputs of layers by ids counted from 1."""

    def __init__(self, target: TransformersTarget, folder: Path, layers: list[int], off_by: int = 0):
        self.target, self.folder, self.layers, self.off_by = target, folder, layers, off_by
        self.bodies: list[dict[str, Any]] = []
        self.transport = httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        tokens = torch.tensor([body["prompt"]])
        wanted = tuple(max(0, layer - 1 - self.off_by) for layer in self.layers)
        hidden, taps = self.target.read(tokens, wanted)
        path = self.folder / f"{uuid.uuid4()}.safetensors"
        save_file({"token_ids": tokens[0], "hidden_states": taps[0].contiguous()}, path)
        answer: dict[str, Any] = {"choices": [{"text": "a"}], "kv_transfer_params": {"hidden_states_path": str(path)}}
        if "prompt_logprobs" in body:
            logprobs = self.target.head(hidden[0]).log_softmax(-1)
            rows = [{str(token): {"logprob": float(logprobs[i, token])}} for i, token in enumerate(body["prompt"][1:])]
            answer["choices"][0]["prompt_logprobs"] = [None, *rows]
        return httpx.Response(200, json=answer)


def engine(target: TransformersTarget, server: Server, **how: Any) -> EngineStates:
    return EngineStates(
        "http://engine:8000/v1", "tiny", TAPS, target.spec.layers, target.finish, transport=server.transport,
        head=target.head, **how,
    )  # fmt: skip


def test_states_of_an_engine_are_those_of_the_target(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches layers that are off by one, a final norm that is missing or applied twice, and files that stay."""
    files = tmp_path / "files"
    files.mkdir()
    server = Server(talker, files, engine_layers(TAPS, talker.spec.layers))
    mine = Binding.of(talker, None, TAPS, "float32", encoding="bf16", source="vllm")
    build(tmp_path / "cache", texts(), engine(talker, server), mine, head=talker.head, shard_tokens=60)
    assert len(server.bodies) == 5 and not list(files.iterdir())
    assert all(body["max_tokens"] == 1 for body in server.bodies)
    found = CachedFeatures(talker, texts(), mine, tmp_path / "cache", batch=5, length=64, recheck_every=1).batch(0)
    live = LiveFeatures(talker, texts(), TAPS, batch=5, length=64).batch(0)
    real = live.documents > 0
    torch.testing.assert_close(found.taps[real], live.taps[real], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.hidden[real], live.hidden[real], rtol=1e-2, atol=1e-2)


def test_a_layer_beside_the_right_one_is_refused(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches the commonest fault of such captures, which trains drafters that nothing accepts, and a KeyError."""
    server = Server(talker, tmp_path, engine_layers(TAPS, talker.spec.layers), off_by=2)
    with pytest.raises(DataError, match="the final states of text t0 give log-probabilities that differ .* by"):
        list(engine(talker, server)(texts()))
    for status, wrong in ((200, "names no hidden_states_path"), (500, "did not read text t0")):
        transport = httpx.MockTransport(lambda _, status=status: httpx.Response(status, json={"choices": []}))
        states = EngineStates("http://engine", "tiny", TAPS, 4, talker.finish, transport=transport)
        with pytest.raises(DataError, match=wrong):
            list(states(texts()))


def test_a_file_is_read_when_its_writer_lets_go(talker: TransformersTarget, tmp_path: Path) -> None:
    """Catches half a file that is read while it is written; one that never comes is named."""
    path, text = tmp_path / "states.safetensors", texts(1)[0]
    count = len(text.tokens)
    lock = path.with_name(f"{path.name}.lock")
    with lock.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        save_file({"token_ids": torch.tensor(text.tokens), "hidden_states": torch.zeros(count, 3, 4)}, path)
        writer = threading.Timer(0.2, lambda: save_states(path, text, held))
        writer.start()
        began = time.monotonic()
        assert bool((read_states(path, text, (1, 3, 4)) == 1).all())
        assert time.monotonic() - began > 0.1
        writer.join()
    with pytest.raises(DataError, match="was not written within 0.1 s; is its folder on this machine"):
        read_states(tmp_path / "none", text, (1,), timeout_s=0.1)


def save_states(path: Path, text: Answer, held: Any) -> None:
    save_file({"token_ids": torch.tensor(text.tokens), "hidden_states": torch.ones(len(text.tokens), 3, 4)}, path)
    fcntl.flock(held, fcntl.LOCK_UN)


@pytest.mark.parametrize(
    ("tokens", "shape", "wrong"),
    [
        ([9, 9], (2, 3, 4), "holds 2 states of tokens other than those of text t0"),
        (
            None,
            (5, 3, 4),
            "holds 5 states of tokens other than those of text t0, which has 13; start the server without prefix",
        ),
        (None, (13, 2, 4), r"has states of shape \(13, 2, 4\), expected 3 layers \[1, 3, 4\]; start"),
    ],
)
def test_a_file_of_something_else_is_refused(tokens: Any, shape: Any, wrong: str, tmp_path: Path) -> None:
    """Catches short captures, which a prefix cache makes, and captures of other layers or of another request."""
    text, path = texts(1)[0], tmp_path / "states.safetensors"
    save_file({"token_ids": torch.tensor(tokens or text.tokens), "hidden_states": torch.zeros(shape)}, path)
    with pytest.raises(DataError, match=wrong):
        read_states(path, text, [1, 3, 4])


def test_the_arguments_name_the_layers_from_one() -> None:
    """Catches taps that a server counts otherwise, and a last layer that is asked for twice."""
    arguments = launch_arguments((1, 17, 32), 36, "/dev/shm/states")
    speculation, transfer = json.loads(arguments[1]), json.loads(arguments[3])
    assert speculation["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 18, 33, 36]
    assert transfer["kv_connector_extra_config"]["shared_storage_path"] == "/dev/shm/states"
    twice = json.loads(launch_arguments((1, 35), 36, "/x")[1])
    assert twice["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 36]


@pytest.fixture
def served(folder: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A vLLM server with the connector, and its folder."""
    place, port = tmp_path / "states", 8123
    place.mkdir()
    command = ["vllm", "serve", str(folder), "--port", str(port), "--no-enable-prefix-caching"]
    process = subprocess.Popen(
        [*command, *launch_arguments(TAPS, 4, str(place))], env=os.environ | {"VLLM_NO_USAGE_STATS": "1"}
    )
    try:
        until = time.monotonic() + 300
        while time.monotonic() < until and process.poll() is None:
            try:
                if httpx.get(f"http://localhost:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield f"http://localhost:{port}", place
    finally:
        process.terminate()
        process.wait()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or shutil.which("vllm") is None, reason="needs a CUDA device and vLLM"
)
def test_a_real_server_writes_what_is_read(served: tuple[str, Path], folder: Path, talker: TransformersTarget) -> None:
    """Catches a connector whose files or ids have changed."""
    states = EngineStates(served[0], str(folder), TAPS, talker.spec.layers, talker.finish, head=talker.head)
    for number, taps, hidden in states(texts()):
        live, tapped = talker.read(torch.tensor([texts()[number].tokens], device=talker.device), TAPS)
        torch.testing.assert_close(taps.float(), tapped[0].float().cpu(), rtol=0.05, atol=0.05)
        torch.testing.assert_close(hidden.float().cpu(), live[0].float().cpu(), rtol=0.05, atol=0.05)
