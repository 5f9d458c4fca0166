"""Memory and time of training steps, from two measured steps, and the largest batch that fits, in tokens.

Rows of a batch are independent, and logits are computed in chunks, so memory and time of a step are a constant plus a
linear part in its rows.  Two steps on random texts and states determine both; nothing is trained and no target is read.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outrider import machine
from outrider.data.answers.store import ANSWERS, Answer, StoredAnswers
from outrider.data.texts import CutAnswers
from outrider.drafters import find
from outrider.errors import ConfigError
from outrider.measure import peak_memory
from outrider.nn.blocks import recompute
from outrider.nn.draft_model import Batch, DraftModel
from outrider.runs.file import RunConfig
from outrider.runs.forecast.checks import Inputs
from outrider.runs.forecast.preview import Line
from outrider.targets.load import default_device
from outrider.targets.sketch import Sketch
from outrider.training.config import Config
from outrider.training.optimizers import Optimizers
from outrider.training.step import optimise
from outrider.training.trainer import with_dtype

ROWS = (4, 8)
"""Rows of the two measured batches."""
LEFT_FREE = 0.1
"""Share of the free memory that a plan does not use."""
clock = time.perf_counter
REPEATS = 3
"""Number of repeated steps, the fastest of which is used."""


class Measured(NamedTuple):
    """One batch of rows."""

    rows: int
    peak_bytes: int
    """In addition to weights, gradients and moments."""
    seconds: float


class Costs(NamedTuple):
    """Memory and time of a training step as functions of its rows."""

    width: int
    """Tokens of a row."""
    first: Measured
    second: Measured

    def peak_bytes(self, rows: int) -> int:
        """Memory for this many rows at once, in addition to weights, gradients and moments."""
        return round(self._at(rows, self.first.peak_bytes, self.second.peak_bytes))

    def seconds(self, rows: int) -> float:
        """Time of a step with this many rows in total, including the optimiser."""
        return self._at(rows, self.first.seconds, self.second.seconds)

    def _at(self, rows: int, first: float, second: float) -> float:
        each = max(0.0, (second - first) / (self.second.rows - self.first.rows))
        return max(first + each * (rows - self.first.rows), min(first, second))


class Plan(NamedTuple):
    """The largest batch that fits, in tokens, and its cost."""

    tokens: int
    batches: int
    """Batches per step."""
    peak_bytes: int
    seconds: float
    """Time per step."""


def costs(model: DraftModel, config: Config, answers: Sequence[Answer], width: int) -> Costs:
    """Measure two steps of a copy of this model.

    answers: used to make rows of `width` tokens.  Raises ConfigError if this system does not report peak memory.
    """
    model = copy.deepcopy(model, {id(model.target): model.target}).float().train()  # the target is shared
    recompute(model, config.recompute)
    dtype = getattr(torch, config.dtype)
    optimizer = Optimizers(model, config.optimizer, model.target.spec.vocabulary, config.weight_decay, dtype)
    first = [random_batch(model, answers, width, rows) for rows in ROWS]
    optimise(model, optimizer, first[:1], config, 0, False)  # allocates moments and gradients
    one, two = (step_of(model, optimizer, config, batch) for batch in first)
    return Costs(width, one, two)


def fitting(
    model: DraftModel, config: Config, answers: Sequence[Answer], width: int, free_bytes: int
) -> tuple[Costs, Config]:  # fmt: skip
    """Like `costs`, with the measured settings: `recompute` is set if `config.tokens` or a batch does not fit
    otherwise."""
    measured, rows = costs(model, config, answers, width), math.ceil((config.tokens or config.batch * width) / width)
    fits = measured.peak_bytes(max(1, rows)) <= (1 - LEFT_FREE) * free_bytes
    if fits or config.recompute or not recompute(model, False):
        return measured, config
    config = config.model_copy(update={"recompute": True})
    return costs(model, config, answers, width), config


def step_of(model: DraftModel, optimizer: Optimizers, config: Config, batch: Batch) -> Measured:
    """Peak and time of one step over this batch."""
    device, best = model.target.device, math.inf
    if not peak_memory.reset(device):
        raise ConfigError("this system does not report peak memory; choose train.batch by trial")
    before = peak_memory.peak_bytes(device) or 0
    for _ in range(REPEATS):
        began = clock()
        optimise(model, optimizer, [batch], config, 1, False)
        best = min(best, clock() - began)
    return Measured(len(batch.tokens), (peak_memory.peak_bytes(device) or before) - before, best)


def random_batch(model: DraftModel, answers: Sequence[Answer], width: int, rows: int) -> Batch:
    """Rows of `width` tokens with the loss masks of some of these answers and random states of the target's shape."""
    spec, device = model.target.spec, model.target.device
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocabulary, (rows, width), generator=noise)
    learn, documents = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    chosen = spread(answers, rows * max(1, width * len(answers) // sum(len(answer.tokens) for answer in answers)))
    following = itertools.cycle([chosen[i] for i in torch.randperm(len(chosen), generator=noise).tolist()])
    answer, most = next(following), 0
    for row in range(rows):
        begin = texts = 0
        while not texts or begin + len(answer.tokens) <= width:
            for start, end in answer.learn:
                learn[row, begin + start : begin + end] = True
            texts += 1
            documents[row, begin : begin + len(answer.tokens)] = texts
            begin, answer = begin + len(answer.tokens), next(following)
        most = max(most, texts)
    dtype = getattr(torch, spec.dtype)
    hidden = torch.randn(rows, width, spec.hidden, generator=noise).to(device, dtype)
    taps = torch.randn(rows, width, len(model.taps), spec.hidden, generator=noise).to(device, dtype)
    return Batch(tokens.to(device), learn.to(device), documents.to(device), taps, hidden, per_row=most)


def spread(answers: Sequence[Answer], count: int) -> list[Answer]:
    """A sample of answers, evenly spaced by the number of tokens trained on: a batch is padded to its longest row, so
    the first answers could be misleading."""
    ordered = sorted(answers, key=lambda answer: sum(end - start for start, end in answer.learn))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


def planned(costs: Costs, step_tokens: int, free_bytes: int | None = None) -> Plan:
    """The largest batch that fits into free memory, up to a whole step of `step_tokens` tokens.

    Raises ConfigError if not even one row fits.
    """
    free = machine.free_memory() if free_bytes is None else free_bytes
    all_rows = max(1, math.ceil(step_tokens / costs.width))
    fits = [rows for rows in range(1, all_rows + 1) if costs.peak_bytes(rows) <= (1 - LEFT_FREE) * free]
    if not fits:
        raise ConfigError(
            f"one text of {costs.width} tokens takes {costs.peak_bytes(1) / 2**20:,.0f} MiB, and "
            f"{free / 2**20:,.0f} MiB are free; set a lower prepare.length or fewer drafter.anchors"
        )
    batches = math.ceil(all_rows / max(fits))
    rows = math.ceil(all_rows / batches)
    return Plan(rows * costs.width, batches, costs.peak_bytes(rows), costs.seconds(all_rows))


# ── of a run file ─────────────────────────────────────────────────────────────────────────────────────────────────────


class StandIn(Sketch):
    """A target's sketch with a random embedding and head, which take the same memory and time as the real ones."""

    def __init__(self, sketch: Sketch, device: torch.device):
        super().__init__(sketch.config, sketch.spec, sketch.mask_token)
        self.device = device
        noise = torch.Generator(device).manual_seed(0)
        size, dtype = (self.spec.vocabulary, self.spec.hidden), getattr(torch, self.spec.dtype)
        self.rows = torch.randn(size, generator=noise, device=device, dtype=dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.rows.dtype) @ self.rows.T

    head_rows = embedding_rows = embed


def lines(settings: RunConfig, inputs: Inputs) -> list[Line]:
    """Results of two measured steps of this run, and the largest batch that fits.

    Raises ConfigError for a method that can't be built without its target's weights.
    """
    module, kind = find(settings.drafter["kind"]), settings.drafter["kind"]
    if settings.train is None or inputs.target is None or not hasattr(module, "Model"):
        raise ConfigError(
            "--measure needs a train: section, a trainable drafter and a target whose config is available"
        )
    if inputs.paper.parameters is None:
        raise ConfigError(f"--measure can't build {kind!r} without its target's weights; leave it out")
    device = default_device(settings.target.device)
    config = with_dtype(settings.train, settings.folder, device)
    drafter = settings.drafter_config
    if getattr(drafter, "init_from_layers", None) is not None:
        drafter = drafter.model_copy(update={"init_from_layers": None})
    model: DraftModel = module.Model(drafter, StandIn(inputs.target, device)).to(device)
    answers, length = _answers(settings, inputs), min(settings.prepare.length, inputs.target.spec.context)
    width = max(len(answer.tokens) for answer in answers)
    mean = sum(len(answer.tokens) for answer in answers) / len(answers)
    weights = inputs.target.parameters * getattr(torch, inputs.target.spec.dtype).itemsize
    free = machine.free_memory() - weights
    measured, chosen = fitting(model, config, answers, min(width, length), free)
    plan = planned(measured, round(config.batch * config.accumulate * mean), free)
    extra = ", train.recompute=true" if chosen.recompute else ""
    return [
        Line("train", f"measured: memory of a step of {plan.tokens:,} tokens at once", plan.peak_bytes, "bytes"),
        Line("train", "measured: a step, without the target's passes", plan.seconds / 60, "minutes"),
        Line("train", "fits here", f"train.tokens={plan.tokens}{extra}, {plan.batches} batches per step"),
    ]


def _answers(settings: RunConfig, inputs: Inputs) -> list[Answer]:
    """A few hundred answers of this run; before there are any, one text of full length, all of it trained on."""
    length = (
        settings.prepare.length if inputs.target is None else min(settings.prepare.length, inputs.target.spec.context)
    )
    path = settings.answers / ANSWERS
    if path.exists():
        return CutAnswers(inputs.chosen(StoredAnswers.read(path), settings), length)[:512]
    return [Answer("full", [0] * length, [(1, length)])]
