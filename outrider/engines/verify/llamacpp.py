"""Continue token ids greedily with a real llama-server and note what became of its drafts, step by step.

Target and draft are computed in float32 on the processor, with caches in float32 and without flash attention, so that
texts can be equal token for token.  The server emits a request's first token from the prompt alone and drafts after it:
our side begins there too.  Its last drafts are cut at the end of what was asked for; such steps don't count.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outrider.engines import commands, llama_server
from outrider.engines.engine import method_of
from outrider.errors import DataError
from outrider.formats.gguf import layouts
from outrider.formats.gguf.layouts import FILE
from outrider.targets.hf.transformers import TransformersTarget
from outrider.weights import weights_of

SPARE = 64
"""Tokens of context beyond prompt and answer."""
FLOAT32 = ("-ctk", "f32", "-ctv", "f32", "-ctkd", "f32", "-ctvd", "f32", "-fa", "off")
ON_CPU = ("--device", "none", "-devd", "none")


def answer(
    program: Path, folder: Path, kind: str, spec_type: str, target: TransformersTarget,
    prompts: Sequence[Sequence[int]], max_new_tokens: int, length: int,
) -> dict[str, Any]:  # fmt: skip
    """What `verify.vllm` leaves as its answer: {engine, version, platform, tokens, accepted, drafted}, or with error
    where the server does not start, or ends.

    folder: holds the draft as GGUF.  spec_type: as `words.spec_type` has it.  length: tokens drafted per step.  Raises
    ExportError for a target that can't be written as GGUF.
    """
    about = {"engine": "llamacpp", "version": commands.installed("llamacpp", program), "platform": "cpu"}
    handle, name = tempfile.mkstemp(prefix="llama-server-", suffix=".log")
    os.close(handle)
    log = Path(name)
    context = max(map(len, prompts)) + max_new_tokens + length + SPARE
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-parity-") as place:
            words = [program, *models(folder, kind, target, Path(place)), *drafting(spec_type, length), *same(context)]
            with llama_server.serving(words, log) as client:
                texts = [llama_server.continued(client, prompt, max_new_tokens) for prompt in prompts]
        steps = llama_server.steps_of(log, texts)
    except DataError as error:  # the log stays: the error names it
        return {**about, "error": str(error)}
    log.unlink()
    return {
        **about, "tokens": [text.tokens for text in texts],
        "accepted": [[step.accepted for step in of_text] for of_text in steps],
        "drafted": [[step.drafted for step in of_text] for of_text in steps],
    }  # fmt: skip


def models(folder: Path, kind: str, target: TransformersTarget, place: Path) -> list[object]:
    """Arguments that name the target, which is written into `place`, and the draft; some files hold both."""
    if method_of("llamacpp", kind).in_target:
        return ["-m", folder / FILE]
    return ["-m", write_target(target, place / "target.gguf"), "-md", folder / FILE]


def write_target(target: TransformersTarget, path: Path) -> Path:
    """The target as GGUF in float32.  Raises ExportError for one that can't be written so."""
    lm = target.model
    layouts.write_file(path, layouts.header(lm, target.tokenizer, "f32"), weights_of(lm), lm, "f32")
    return path


def drafting(spec_type: str, length: int) -> list[object]:
    """Arguments for a draft of `length` tokens a step, however unsure it is."""
    return ["--spec-type", spec_type, "--spec-draft-n-max", length, "--spec-draft-p-min", 0]


def same(context: int) -> list[object]:
    """Arguments that make its arithmetic ours.  context: tokens of the only slot."""
    threads = torch.get_num_threads()
    return [*FLOAT32, *ON_CPU, "-c", context, "-np", 1, "-t", threads, "-tb", threads, "--no-warmup", "--metrics"]
