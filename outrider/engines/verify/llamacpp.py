"""Continue token ids greedily with a real llama-server and record how much of each draft was accepted, step by step.

Target and draft are computed in float32 on the CPU, with float32 caches and without flash attention, so that texts can
be equal token for token.  The server emits a request's first token from the prompt alone and drafts after it, so our
side starts there too.  Its last drafts are truncated at the end of the request; such steps don't count.
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
    """The same answer as `verify.vllm`: {engine, version, platform, tokens, accepted, drafted}, or an error if the
    server does not start, or exits.

    folder: contains the draft as GGUF. spec_type: as returned by `words.spec_type`.  length: tokens drafted per step.
    Raises ExportError for a target that can't be written as GGUF.
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
    except DataError as error:  # the log is kept, since the error refers to it
        return {**about, "error": str(error)}
    log.unlink()
    return {
        **about, "tokens": [text.tokens for text in texts],
        "accepted": [[step.accepted for step in of_text] for of_text in steps],
        "drafted": [[step.drafted for step in of_text] for of_text in steps],
    }  # fmt: skip


def models(folder: Path, kind: str, target: TransformersTarget, place: Path) -> list[object]:
    """Arguments for the target, which is written into `place`, and for the draft; some files contain both."""
    if method_of("llamacpp", kind).in_target:
        return ["-m", folder / FILE]
    return ["-m", write_target(target, place / "target.gguf"), "-md", folder / FILE]


def write_target(target: TransformersTarget, path: Path) -> Path:
    """The target as GGUF in float32.  Raises ExportError if it can't be converted."""
    lm = target.model
    layouts.write_file(path, layouts.header(lm, target.tokenizer, "f32"), weights_of(lm), lm, "f32")
    return path


def drafting(spec_type: str, length: int) -> list[object]:
    """Arguments to draft `length` tokens per step, at any confidence."""
    return ["--spec-type", spec_type, "--spec-draft-n-max", length, "--spec-draft-p-min", 0]


def same(context: int) -> list[object]:
    """Arguments that make its arithmetic match ours.  context: tokens of the only slot."""
    threads = torch.get_num_threads()
    return [*FLOAT32, *ON_CPU, "-c", context, "-np", 1, "-t", threads, "-tb", threads, "--no-warmup", "--metrics"]
