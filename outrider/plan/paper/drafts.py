"""Cost of each method's drafts on paper: passes, weights, cache, prompts.

A kind with layers is built from its settings without values (device meta), and its weights are counted.  Its cost is
`each` if it drafts one token per pass, `once` for a block per pass, `lookup` without a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.config import build
from outrider.drafters import find, method, methods, trained
from outrider.errors import ConfigError, DrafterError
from outrider.method import Cost
from outrider.nn.draft_model import DraftModel
from outrider.plan.paper import weights as formats
from outrider.plan.paper.anatomy import Anatomy, Attention
from outrider.plan.paper.hardware import Place
from outrider.plan.paper.roofline import pass_of, prefill_seconds
from outrider.targets.sketch import Sketch

SEQUENTIAL = ("markov_w2", "weight_hh", "weight_ih")
"""Weights of a small head applied to the tokens of a block one after another."""
EMBEDDINGS = ("embed", "markov_w1")
FUSING = "fc.weight"
CONTEXT = ("k_proj", "v_proj")
"""Weights of a block drafter that are applied to the text, not only to blocks."""


@dataclass(frozen=True)
class DraftModelOnPaper:
    """A method's draft model."""

    kind: str
    way: Cost
    model: Anatomy | None
    """None for lookups."""
    sequential: int = 0
    """Number of weights that are read once per token of a block."""
    config: Any = None
    """Its settings; None for lookups and other language models."""
    trains_head: bool = False
    """Whether it has an output layer of its own instead of the target's."""
    fusing_weights: int = 0
    """Weights that fuse the target's states, once per token of the text."""
    context_weights: int = 0
    """Weights of keys and values."""

    @property
    def weight_bytes(self) -> float:
        """Memory of its weights, without a head shared with the target."""
        return 0.0 if self.model is None else self.model.parameters * self.model.weight.bytes

    def cache_bytes(self, tokens: float) -> float:
        return 0.0 if self.model is None else self.model.cache_bytes(tokens)

    def seconds(self, place: Place, batch: float, depth: int, context: float) -> float:
        """Seconds to draft `depth` tokens for every text."""
        if self.model is None or depth < 1:
            return 0.0
        # each pass ends in a head and a choice, each with the fixed time of a layer
        overhead = 2 * place.efficiency.layer_s
        if self.way == "each":
            return depth * (pass_of(self.model, place, batch, 1, context).seconds + overhead)
        each = self.sequential * self.model.weight.bytes / place.bandwidth + place.efficiency.layer_s
        sequential = depth * each if self.sequential else 0.0
        return pass_of(self.model, place, batch, depth, context).seconds + overhead + sequential

    def training_flops(self, target: Anatomy, length: float, learnt: float) -> float:
        """Operations of training on one text of `length` tokens, of which the last `learnt` are trained on.

        Two per weight and row forward and four backward; two backward where a weight is frozen.  Rows are anchors times
        the tokens of a block, or times unrolled steps.  Attention, a few per cent, and the target's own pass are left
        out.
        """
        if self.model is None:
            return 0.0
        depth = getattr(self.config, "block", None) or getattr(self.config, "ttt", None)
        anchors = min(learnt, getattr(self.config, "anchors", None) or learnt)
        rows = learnt if depth is None else anchors * depth
        slots = rows + anchors * (not getattr(self.config, "anchor_predicts", True))
        if self.way == "once" and depth is not None:
            layers = self.context_weights * length + (self.model.read - self.fusing_weights) * slots
        else:  # its first step reads every pair of the text
            layers = (self.model.read - self.fusing_weights) * (length + slots - anchors)
        head = (6 if self.trains_head else 4) * self.model.head + 2 * target.head
        # the target's states, which are fused, need no gradient
        return 4 * self.fusing_weights * length + 6 * layers + (head + 6 * self.sequential) * rows

    def prompt_seconds(self, place: Place, tokens: float) -> float:
        """Seconds to read a prompt, after the target has read it."""
        return 0.0 if self.model is None else prefill_seconds(self.model, place, tokens)


def kinds_on_paper() -> list[str]:
    """Kinds whose cost is known on paper; others must be timed."""
    return sorted(kind for kind, each in methods().items() if each.cost is not None)


def default_methods() -> tuple[str, ...]:
    """Kinds that a plan compares by default: with published acceptance, and available for any target."""
    return tuple(sorted((kind for kind, each in methods().items() if each.usual), key=lambda kind: method(kind).usual))


def extra_methods() -> tuple[str, ...]:
    """Kinds that a plan compares in addition if it may measure."""
    return tuple(sorted(kind for kind, each in methods().items() if each.is_added))


def on_paper(kind: str, target: Sketch, model: Anatomy | None = None, **settings: Any) -> DraftModelOnPaper:
    """A kind's draft model for this target.  Raises ConfigError for a kind whose cost on paper is unknown.

    model: the language model of small_model.  settings: of the kind, as in a run file.
    """
    find(kind)  # an unknown kind is refused with the nearest name
    way = method(kind).cost
    if way is None:
        raise ConfigError(
            f"the cost of {kind} on paper is unknown; choose one of {', '.join(kinds_on_paper())}, or use --measure"
        )
    if way == "lookup":
        return DraftModelOnPaper(kind, way, None)
    if trained(kind) is None or method(kind).is_model:
        if model is None:
            raise ConfigError(f"{kind} drafts with another language model; name it with --draft-model")
        return DraftModelOnPaper(kind, way, model, trains_head=True)
    return _counted(kind, way, target, settings)


def _counted(kind: str, way: Cost, target: Sketch, settings: Mapping[str, Any]) -> DraftModelOnPaper:
    module: Any = find(kind)
    config = build(module.Config, {"kind": kind, **settings}, "drafter")
    try:
        with torch.device("meta"):
            model: DraftModel = module.Model(config, target)
    except DrafterError as error:
        raise ConfigError(f"{kind} does not fit {target.spec.name}: {error}") from None
    counts = {name: weight.numel() for name, weight in model.named_parameters()}
    total = sum(counts.values())
    size_of = lambda *parts: sum(size for name, size in counts.items() if any(part in name for part in parts))
    sequential, tables = size_of(*SEQUENTIAL), size_of(*EMBEDDINGS)
    trunk: Any = getattr(model, "backbone", model)
    spec, layers = target.spec, len(getattr(trunk, "layers", ()))
    vocabulary = getattr(config, "vocabulary", None) or spec.vocabulary
    own_head = size_of("head.lm_head")
    head = own_head or vocabulary * spec.hidden
    weight = formats.NAMED[formats.DTYPES.get(spec.dtype, "bf16")]
    anatomy = Anatomy(
        name=kind, layers=max(layers, 1), hidden=spec.hidden, vocabulary=vocabulary, context=spec.context,
        parameters=total, read=total - tables - own_head - sequential, head=head,
        expert=0, experts=0, experts_per_token=0, attention=_attention(config, spec, layers, weight.bytes),
        weight=weight, expert_weight=weight, head_bytes=weight.bytes,
    )  # fmt: skip
    return DraftModelOnPaper(
        kind, way, anatomy, sequential, model.config, bool(own_head), size_of(FUSING), size_of(*CONTEXT)
    )


def _attention(config: Any, spec: Any, layers: int, size: float) -> tuple[Attention, ...]:
    heads, shared, width = (
        getattr(config, name, None) or getattr(spec.sizes, name, None) or 0
        for name in ("heads", "kv_heads", "head_dim")
    )
    if not layers or not heads * shared * width:
        return ()
    numbers, made = 2 * shared * width, 4 * heads * width
    return (Attention(layers, None, layers * numbers * size, layers * made),)
