"""Why an exported folder drafts different tokens than its model: each part of the folder replaces the model's in turn,
and the result drafts.

A part that changes drafted tokens is reported as a cause, with its name and how much it changes.  A part that differs
but changes nothing is not.  No engine is needed: `readers` reads the folder and our model in the engine's convention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engines.verify import chains, readers
from outrider.engines.verify.chains import States
from outrider.engines.verify.parity import Cause
from outrider.engines.verify.readers import Draft
from outrider.errors import ExportError
from outrider.sampling.text import common_prefix

MAX_ANCHORS = 12
"""Anchors checked per text."""
CLOSE = 1e-3
"""Relative difference between two readings of one stage that rounding can explain."""
UNREADABLE = (KeyError, IndexError, RuntimeError)
"""Raised for a draft whose parts don't fit together."""


class Swap(NamedTuple):
    """One part of a folder that differs from the model."""

    name: str
    what: str
    parts: dict[str, Any]
    """Fields of a `Draft`, with the folder's values."""


def causes(folder: Draft, model: Draft, texts: Sequence[tuple[States, int]], length: int) -> list[Cause]:
    """What in the folder changes the drafts for these texts, worst first.  texts: (states, length of the prompt).

    Raises ExportError if the two are of different kinds.
    """
    if folder.kind != model.kind:
        raise ExportError(
            f"the folder holds a {folder.kind}, but the checkpoint a {model.kind}; name the checkpoint that the "
            "folder was exported from"
        )
    anchors = [(text, at) for text, begun in texts for at in _anchors(text, begun)]
    expected = [chains.drafted(model, text, at, length).tokens for text, at in anchors]
    results = []
    for swap in differences(folder, model):
        try:
            other = replace(model, **swap.parts)
            drafts = [chains.drafted(other, text, at, length).tokens for text, at in anchors]
        except UNREADABLE as error:
            results.append(
                Cause(swap.name, f"{swap.what}; with it, nothing can be drafted ({type(error).__name__})", 1.0)
            )
            continue
        changed = sum(a != b for one, two in zip(drafts, expected, strict=True) for a, b in zip(one, two, strict=True))
        if changed:
            results.append(Cause(swap.name, swap.what, changed / (len(anchors) * length)))
    return sorted(results, key=lambda cause: -cause.changed)


def _anchors(text: States, begun: int) -> list[int]:
    """Positions after the prompt, evenly spaced."""
    last = len(text.tokens) - 1
    step = max(1, (last - begun) // MAX_ANCHORS)
    return list(range(max(begun, 1), last + 1, step))[:MAX_ANCHORS]


def _rotation_text(rotation: readers.Rotation) -> str:
    share = f", {rotation.share:g} of a head" if rotation.share != 1 else ""
    return f"rope_theta {rotation.theta:g}{share}{', stretched by ' + rotation.scaling if rotation.scaling else ''}"


Field = tuple[str, str, str, Callable[[Any], Any]]
"""A field of a `Draft`: its name, the cause, the values in folder and model, and how each is shown."""
LAYERS: tuple[Field, ...] = (
    ("taps", "taps", "target layers {} where the model was trained on {}, outputs counted from 0", list),
    ("rotation", "RoPE", "{} where the model has {}", _rotation_text),
    ("eps", "norm", "rms_norm_eps {} where the model has {}", "{:g}".format),
)
BLOCKS: tuple[Field, ...] = (
    ("skip", "label shift", "the first token is drafted {}, in training {}",
     ("in the anchor's own slot", "in the slot after it").__getitem__),
    ("causal", "block mask", "slots of a block {} the slots after them, in training they {}",
     ("attend to", "don't attend to").__getitem__),
    ("window", "block mask", "slots attend to a window of {} positions, in training of {}", str),
    ("candidates", "weights", "the selector chooses among {} candidates, in training among {}", str),
    ("prefix", "label shift", "slots are corrected from number {} on, in training from {}", str),
    ("markov", "weights", "the head after the block is read as {}, in training it was {}", str),
)  # fmt: skip


def differences(folder: Draft, model: Draft) -> Iterator[Swap]:
    """Parts of the folder that differ from the model."""
    yield from _fields(folder, model, LAYERS)
    if names := _unequal(folder.norms, model.norms):
        yield Swap("norm", f"other weights in {_few(names)}", {"norms": folder.norms})
    if flags := folder.flags ^ model.flags:
        change = ", ".join(
            f"{flag} is {flag in folder.flags}, in training {flag in model.flags}" for flag in sorted(flags)
        )
        skipped = f"the engine skips the biases ({_few(folder.unread)}), which are in the folder and not in its config"
        name, what = ("weights", skipped) if "bias" in flags else ("norm", change)
        yield Swap(name, what, {"flags": folder.flags})
    yield from _vocabulary(folder, model)
    yield from _fields(folder, model, BLOCKS)
    names = _unequal(folder.weights, model.weights)
    if "bias" not in folder.flags and model.kind == "medusa":
        names = [name for name in names if not name.endswith(".bias")]
    if names and (shift := _shifted_heads(folder, model)):
        yield Swap("label shift", f"head k holds what the model has as head k {shift:+d}", {"weights": folder.weights})
    elif names:
        yield Swap("weights", f"other values in {_few(names)}", {"weights": folder.weights})


def _fields(folder: Draft, model: Draft, fields: Sequence[Field]) -> Iterator[Swap]:
    for field, name, what, shown in fields:
        theirs, ours = getattr(folder, field), getattr(model, field)
        if theirs != ours:
            yield Swap(name, what.format(shown(theirs), shown(ours)), {field: theirs})


def _vocabulary(folder: Draft, model: Draft) -> Iterator[Swap]:
    theirs, ours = folder.ids, model.ids
    if theirs is None or ours is None:
        is_same, moved = theirs is ours, ""
    else:
        is_same = _same(theirs, ours)
        moved = f", {int((theirs != ours).sum())} of them moved" if len(theirs) == len(ours) else ""
    if not is_same:
        change = f"d2t maps {'all' if theirs is None else len(theirs)} draft tokens{moved}; the map is not this model's"
        yield Swap("vocabulary", change, {"ids": theirs, "head": folder.head})
    elif folder.head is not None and model.head is not None and not _same(folder.head, model.head):
        yield Swap("vocabulary", "lm_head has other rows than the model", {"head": folder.head})
    if folder.mask != model.mask and model.kind != "medusa":
        yield Swap("vocabulary", f"mask token {folder.mask} where the model has {model.mask}", {"mask": folder.mask})


def _shifted_heads(folder: Draft, model: Draft) -> int:
    """The offset of Medusa's heads in the folder; 0 if there is none."""
    first = "blocks.{}.layers.0.weight".format
    for shift in (1, -1):
        ours = [k for k in range(len(model.order)) if 0 <= k + shift < len(model.order)]
        theirs = [folder.weights.get(first(k)) for k in ours]
        matched = zip(theirs, (model.weights[first(k + shift)] for k in ours), strict=True)
        if ours and all(one is not None and _same(one, other) for one, other in matched):
            return shift
    return 0


# ── layer by layer ────────────────────────────────────────────────────────────────────────────────────────────────────


def first_difference(folder: Draft, model: Draft, text: States, anchor: int, length: int) -> tuple[str, float] | None:
    """The first stage whose output differs, and its relative difference; None if none differs, or nothing can be
    drafted."""
    ours = chains.drafted(model, text, anchor, length).stages
    try:
        theirs = chains.drafted(folder, text, anchor, length).stages
    except UNREADABLE:  # already reported as a cause
        return None
    for name, value in ours.items():
        away = _away(value, theirs.get(name))
        if away > CLOSE:
            return name, away
    return None


class StageComparison(NamedTuple):
    """The engine's own modules compared with our reading of the folder."""

    stages: int
    """Number of stages compared."""
    first: tuple[str, float] | None
    """The first stage whose output differs, and its relative difference; None if none differs."""


def compare_stages(
    folder: Draft, rows: Mapping[str, Sequence[Sequence[float]]], text: States, anchor: int, length: int
) -> StageComparison:  # fmt: skip
    """Compare the outputs of an engine's modules with our reading.  rows: the last rows of each stage, as in its
    answer.

    If the two have different numbers of rows, only the last ones are compared.
    """
    both = [
        (name, value.reshape(-1, value.shape[-1]), torch.tensor(rows[name]))
        for name, value in chains.drafted(folder, text, anchor, length).stages.items() if name in rows
    ]  # fmt: skip
    by_stage = ((name, _away(ours[-len(other) :], other[-len(ours) :])) for name, ours, other in both)
    return StageComparison(len(both), next(((name, away) for name, away in by_stage if away > CLOSE), None))


def _away(value: Tensor, other: Tensor | None) -> float:
    """Relative difference of another output of a stage; 1 if its shape differs."""
    if other is None or other.shape != value.shape:
        return 1.0
    return float((other.to(value) - value).norm() / value.norm().clamp(min=1e-9))


def _unequal(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> list[str]:
    return sorted(
        name for name in theirs.keys() | ours.keys()
        if name not in theirs or name not in ours or not _same(theirs[name], ours[name])
    )  # fmt: skip


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return torch.allclose(one.double().cpu(), other.double().cpu(), rtol=1e-2, atol=1e-6)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ── how the engine reads it ───────────────────────────────────────────────────────────────────────────────────────────


class Guess(NamedTuple):
    """One way in which an engine may misread a sound folder, and the share of its steps that this would explain."""

    name: str
    what: str
    share: float


def guesses(model: Draft, texts: Sequence[tuple[States, Mapping[int, int]]], length: int) -> list[Guess]:
    """How the engine may have read the draft, judged by what it accepted; the best explanation first.

    texts: states, and anchor position → number of drafted tokens the engine accepted there.  A guess explains a step if
    exactly that many tokens of its draft would have been accepted.  Among equal guesses, "nothing is wrong" comes
    first.
    """
    steps = [(text, at, accepted) for text, accepted_at in texts for at, accepted in accepted_at.items()]
    if not steps:
        return []
    scored = []
    for name, what, draft in _suspects(model):
        try:
            right = sum(
                common_prefix(chains.drafted(draft, text, at, length).tokens, text.tokens[at + 1 :]) == accepted
                for text, at, accepted in steps
            )
        except UNREADABLE:
            continue
        scored.append(Guess(name, what, right / len(steps)))
    return sorted(scored, key=lambda guess: -guess.share)


def _suspects(model: Draft) -> Iterator[tuple[str, str, Draft]]:
    yield "none", "it reads the folder as we do", model
    for shift in (-1, 1) if model.taps else ():
        if min(model.taps) + shift >= 0:
            taps = tuple(tap + shift for tap in model.taps)
            yield "taps", f"it reads the layers {'before' if shift < 0 else 'after'} ours", replace(model, taps=taps)
    for theta in (1e4, 5e5, 1e6) if model.rotation.theta else ():
        if theta != model.rotation.theta:
            rotated = replace(model, rotation=model.rotation._replace(theta=theta))
            yield "RoPE", f"it rotates by rope_theta {theta:g}", rotated
    if model.kind in readers.BLOCKS:
        yield "block mask", "slots of a block don't attend to those after them", replace(model, causal=not model.causal)
        reason = "it normalises the context's keys of every layer with the first layer's k_norm"
        yield "norm", reason, replace(model, first_norm=True)
        yield "label shift", "it drafts from another slot of the block", replace(model, skip=1 - model.skip)
    if model.kind == "medusa":
        yield "weights", "it leaves out the biases", replace(model, flags=frozenset())
        order = (*model.order[1:], model.order[-1])
        yield "label shift", "head k drafts what head k + 1 should", replace(model, order=order)
    if model.kind in ("eagle3", "peagle"):
        flags = model.flags ^ {"norm_before_residual"}
        yield "norm", "the residual is normalised where ours is not, or not where ours is", replace(model, flags=flags)
    if model.ids is not None:
        plain = torch.arange(len(model.ids))
        yield "vocabulary", "it reads draft ids as the target's ids", replace(model, ids=plain)
