"""Serve in vLLM: the command for an exported drafter, and where vLLM is installed the server and a request to it.

    $ python examples/export.py && python examples/serve_in_vllm.py [FOLDER] [TARGET]

FOLDER is what examples/export.py wrote; TARGET is a folder or hub id, the demo's own unless given.
"""

import shutil
import subprocess
import sys
import time

import httpx

from outrider.engines import commands
from outrider.engines.engine import Wish

URL = "http://127.0.0.1:8000"


def wait(server: subprocess.Popen[bytes]) -> None:
    """Until the server answers; raises where it ended before."""
    while server.poll() is None:
        try:
            httpx.get(f"{URL}/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(1)
    raise SystemExit(f"vLLM ended with exit code {server.returncode}")


def main(folder: str = "served", target: str | None = None) -> None:
    draft = commands.draft_of(folder, target)
    command = commands.command("vllm", draft, Wish(port=8000))
    print(command.shell)
    if shutil.which(command.words[0]) is None:
        print("vLLM is not installed here; run this command where it is")
        return
    with subprocess.Popen(command.words) as server:
        try:
            wait(server)
            asked = {"model": draft.target, "prompt": "import json\n", "max_tokens": 48, "temperature": 0}
            print(httpx.post(f"{URL}/v1/completions", json=asked, timeout=120).json()["choices"][0]["text"])
            counted = httpx.get(f"{URL}/metrics").text.splitlines()
            print("\n".join(line for line in counted if line.startswith("vllm:spec_decode_num")))
        finally:
            server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
