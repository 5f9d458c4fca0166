"""States from a running vLLM server, by vLLM's connector for hidden states: for targets larger than this machine.

The server is started with the arguments from `launch_arguments`; it needs a CUDA device.  Every text is sent as a
completion of one token, and the response names a safetensors file: token_ids [S], and hidden_states [S, L, H] of the
requested layers.  vLLM counts layers from 1; the last id, the number of layers, is the state before the final norm.

S tokens, L layers, H hidden size, T taps.
"""

from __future__ import annotations

import errno
import fcntl
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from outrider.data.answers.store import Answer
from outrider.errors import DataError

CHECK_EVERY = 64
"""The log-probabilities of every 64th text are checked."""
MOST_DIFFERENCE = 0.05
"""Largest mean difference of log-probabilities due to rounding; a wrong layer differs by 0.1 or more."""
Finish = Callable[[Tensor], Tensor]
"""The target's final norm."""


def engine_layers(taps: Sequence[int], layers: int) -> list[int]:
    """The engine's ids of the taps and of the state before the final norm.  layers: number of layers of the target."""
    return [*(tap + 1 for tap in taps), layers]


def launch_arguments(taps: Sequence[int], layers: int, folder: str, writers: int = 8) -> list[str]:
    """Arguments for `vllm serve TARGET` that make it write these taps and the final states into a folder."""
    ids = list(dict.fromkeys(engine_layers(taps, layers)))
    speculation = {
        "method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
    }  # fmt: skip
    transfer = {
        "kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "shared_storage_path": folder, "use_synchronization_lock": True, "num_writer_threads": writers,
        },
    }  # fmt: skip
    return ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]


class EngineStates:
    """Computes the `States` of texts on a vLLM server, several at a time."""

    def __init__(
        self, server: str, model: str, taps: Sequence[int], layers: int, finish: Finish, *, in_flight: int = 8,
        timeout_s: float = 120.0, transport: httpx.BaseTransport | None = None,
        head: Callable[[Tensor], Tensor] | None = None,
    ):  # fmt: skip
        """server: its URL; its folder of states must be visible here.  finish: the target's final norm.

        head: the target's; with it, every `CHECK_EVERY`-th text is compared with the server's log-probabilities.
        """
        self._head, self._finish, self._in_flight, self._timeout_s = head, finish, in_flight, timeout_s
        self._ids = engine_layers(taps, layers)
        self._unique = list(dict.fromkeys(self._ids))
        self._url, self._model = f"{server.rstrip('/').removesuffix('/v1')}/v1/completions", model
        self._client = httpx.Client(timeout=timeout_s, transport=transport)

    def __call__(self, texts: Sequence[Answer]) -> Iterator[tuple[int, Tensor, Tensor]]:
        with ThreadPoolExecutor(self._in_flight) as pool:
            for number, (taps, hidden) in enumerate(pool.map(self._read, range(len(texts)), texts)):
                yield number, taps, hidden

    def _read(self, number: int, text: Answer) -> tuple[Tensor, Tensor]:
        """Taps [S, T, H] and final states [S, H] of one text; its file is removed."""
        is_checked = self._head is not None and number % CHECK_EVERY == 0
        response = self._request(text, is_checked)
        path = Path(response["kv_transfer_params"]["hidden_states_path"])
        states = read_states(path, text, self._unique, self._timeout_s)
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        where = [self._unique.index(layer) for layer in self._ids]
        hidden = self._finish(states[:, where[-1]])
        if is_checked:
            self._check(text, hidden, response)
        return states[:, where[:-1]], hidden

    def _check(self, text: Answer, hidden: Tensor, response: Mapping[str, Any]) -> None:
        """Raises DataError if the final states don't give the server's log-probabilities: another layer or norm."""
        assert self._head is not None
        entries = response["choices"][0]["prompt_logprobs"][1 : len(text.tokens)]
        logprobs = [entry[str(token)]["logprob"] for entry, token in zip(entries, text.tokens[1:], strict=True)]
        if not (error := check_states(hidden, text.tokens, logprobs, self._head)) <= MOST_DIFFERENCE:
            raise DataError(
                f"{self._url}: the final states of text {text.id} give log-probabilities that differ from the server's "
                f"by {error:.2g}, and rounding explains at most {MOST_DIFFERENCE}; does it serve the same weights, in "
                "the same precision?"
            )

    def _request(self, text: Answer, is_checked: bool) -> dict[str, Any]:
        """Let the server read a text; returns its response, which names the file of states."""
        body = {"model": self._model, "prompt": list(text.tokens), "max_tokens": 1, "temperature": 0.0}
        try:
            response = self._client.post(self._url, json=body | ({"prompt_logprobs": 0} if is_checked else {}))
            response.raise_for_status()
            content: dict[str, Any] = response.json()
            content["kv_transfer_params"]["hidden_states_path"]
            return content
        except (httpx.HTTPError, ValueError) as error:
            raise DataError(
                f"{self._url} did not read text {text.id}: {error}; look at its log and run again"
            ) from error
        except (KeyError, TypeError):
            raise DataError(
                f"{self._url} names no hidden_states_path: it was started without the connector for hidden states; "
                "start it with the arguments in docs/features.md"
            ) from None


def read_states(path: Path, text: Answer, layers: Sequence[int], timeout_s: float = 120.0) -> Tensor:
    """States [S, L, H] of a text from the connector's file, once it is complete.

    Raises DataError for a file with other tokens or another number of layers, and if none appears within `timeout_s`.
    """
    _wait(path, timeout_s)
    try:
        tensors = load_file(path)
        tokens, states = tensors["token_ids"].flatten().tolist(), tensors["hidden_states"]
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"{path} is not a file of hidden states ({error}); look at the server's log") from error
    count = len(text.tokens)
    # an engine may append the generated token
    if tokens[:count] != list(text.tokens) or len(states) < count:
        raise DataError(
            f"{path} holds {len(states)} states of tokens other than those of text {text.id}, which has {count}; start "
            "the server without prefix caching (--no-enable-prefix-caching), and run again"
        )
    if states.ndim != 3 or states.shape[1] != len(layers):
        raise DataError(
            f"{path} has states of shape {tuple(states.shape)}, expected {len(layers)} layers {list(layers)}; start "
            "the server with the arguments in docs/features.md"
        )
    return states[:count]


def _wait(path: Path, timeout_s: float) -> None:
    """Return once the file exists and its writer has released NAME.lock."""
    until, lock = time.monotonic() + timeout_s, path.with_name(f"{path.name}.lock")
    while not path.exists() or (lock.exists() and _is_held(lock)):
        if time.monotonic() >= until:
            raise DataError(f"{path} was not written within {timeout_s:g} s; is its folder on this machine?")
        time.sleep(0.01)


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.ENOENT):
            raise
    return False


def check_states(
    states: Tensor, tokens: Sequence[int], logprobs: Sequence[float], head: Callable[[Tensor], Tensor]
) -> float:
    """Mean absolute difference between the server's log-probabilities of a text and those of its final states.

    states [S, H] after the final norm; logprobs: of tokens 1, 2, …  The right layer differs by rounding, its
    neighbours by about 0.1.
    """
    log_p = head(states[:-1]).float().log_softmax(-1)
    of_tokens = log_p.gather(1, torch.tensor(list(tokens[1:]), device=log_p.device)[:, None])[:, 0].cpu()
    return float((of_tokens - torch.tensor(logprobs)).abs().mean())
