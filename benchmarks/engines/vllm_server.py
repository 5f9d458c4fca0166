"""vLLM as a server beside ours: `serve_vllm.sh` on a free port, ended with all its processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engines.llama_cpp import ready

HERE = Path(__file__).resolve().parent
PYTHON = HERE / ".venv" / "bin" / "python"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 2}
PATIENCE = 3
"""Times two minutes: its first start on a machine compiles for one of them."""


@contextmanager
def serving(
    slots: int, speculative: dict[str, Any] | None = None, prefix_caching: bool = False
) -> Iterator[httpx.Client]:
    """The demo target, compiled, in float32; prefix_caching: what prompts share is read once.

    Raises FileNotFoundError where the environment is not there, ChildProcessError where the server did not start.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"no {PYTHON}: run benchmarks/engines/install.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        HERE / "serve_vllm.sh", "--port", port, "--max-num-seqs", slots, "--no-enforce-eager",
        f"--{'' if prefix_caching else 'no-'}enable-prefix-caching",
        "--per-request-spec-decode-metrics", "none", "--speculative-config", json.dumps(speculative),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                if not any(ready(client, process) for _ in range(PATIENCE)):
                    log.seek(0)
                    raise ChildProcessError("vLLM did not start: " + " ".join(log.read().split())[-300:])
                yield client
        finally:
            ended(process)


def ended(process: subprocess.Popen[bytes]) -> None:
    """Stop a server; what is left of its session is killed."""
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
