"""OpenVINO GenAI as a process beside ours: token ids in, token ids out, a line of JSON each.

    benchmarks/engines/.venv-openvino/bin/python benchmarks/engines/openvino_worker.py MODEL.gguf SLOTS THREADS
    [--lookup]

    {"prompts": [[1, 2], [3]], "new": 96}    asked; it ends with its input
    {"tokens": [[4, 5], [6]]}                answered; the first line says {"version": …}

Greedy, products in float32, keys and values as they come, no prefix kept; at most SLOTS prompts share the batch,
further ones wait.  A GGUF file must be of 16 bits: it loads none of float32.  `working` starts it from another
environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PRECISION = "f32"
DRAFTED, NGRAM = 5, 3
"""Tokens of a draft by prompt lookup, and of what is looked up, as in OpenVINO's own example."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("slots", type=int)
    parser.add_argument("threads", type=int)
    parser.add_argument("--lookup", action="store_true", help="draft by prompt lookup")
    wanted = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    import openvino_genai

    pipeline = loaded(wanted.model, wanted.slots, wanted.threads, wanted.lookup)
    print(json.dumps({"version": openvino_genai.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        tokens = continued(pipeline, asked["prompts"], asked["new"], wanted.lookup)
        print(json.dumps({"tokens": tokens}), file=answers, flush=True)
    return 0


def loaded(model: Path, slots: int, threads: int, lookup: bool) -> Any:
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.cache_size, scheduler.enable_prefix_caching = slots, 1, False
    settings = {"INFERENCE_PRECISION_HINT": PRECISION, "INFERENCE_NUM_THREADS": threads}
    return openvino_genai.ContinuousBatchingPipeline(
        str(model), scheduler, "CPU", settings | ({"prompt_lookup": True} if lookup else {})
    )


def continued(pipeline: Any, prompts: Sequence[list[int]], new: int, lookup: bool) -> list[list[int]]:
    import numpy
    import openvino

    config = pipeline.get_config()
    config.max_new_tokens, config.do_sample = new, False
    if lookup:
        config.num_assistant_tokens, config.max_ngram_size = DRAFTED, NGRAM
    given = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
    found = pipeline.generate(given, [config] * len(given))
    return [list(map(int, one.m_generation_ids[0])) for one in found]


@contextmanager
def working(
    python: Path, model: Path, slots: int, threads: int, lookup: bool
) -> Iterator[Callable[[list[list[int]], int], list[list[int]]]]:  # fmt: skip
    """(prompts, new tokens) to the tokens of the answers, by a worker that ends with the block.

    Raises FileNotFoundError where the environment is not there, ChildProcessError where the worker ended by itself.
    """
    if not python.exists():
        raise FileNotFoundError(f"no {python}: run benchmarks/engines/install_openvino.py")
    command = [python, __file__, model, slots, threads, *(["--lookup"] if lookup else [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        assert process.stdin is not None and process.stdout is not None
        given, answers = process.stdin, process.stdout

        def heard() -> Any:
            line = answers.readline()
            if line:
                return json.loads(line)
            log.seek(0)
            raise ChildProcessError("the worker of OpenVINO ended: " + " ".join(log.read().split())[-300:])

        def ask(prompts: list[list[int]], new: int) -> list[list[int]]:
            given.write(json.dumps({"prompts": prompts, "new": new}) + "\n")
            return list(heard()["tokens"])

        try:
            heard()
            yield ask
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
