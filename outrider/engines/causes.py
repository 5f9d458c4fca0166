"""Why an exported folder drafts otherwise than the model it was made from: each part put into the model in turn, and drafted.

Whatever part changes what is drafted is a cause, by its name and by how much; one that differs and changes nothing is none.
This needs no engine: the folder is read by `readers`, in the engine's convention, and so is our own model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engines import readers
from outrider.engines.parity import Cause
from outrider.engines.readers import Draft, States
from outrider.errors import ExportError

PLACES = 12
"""Anchors looked at in a text."""
CLOSE = 1e-3
"""Relative difference between two readings of one stage that rounding explains."""


class Swap(NamedTuple):
    """One part of a folder that is not as in the model."""

    name: str
    what: str
    parts: dict[str, Any]
    """Fields of a `Draft`, the folder's."""


def causes(folder: Draft, model: Draft, texts: Sequence[tuple[States, int]], length: int) -> list[Cause]:
    """What in the folder changes the drafts of these texts, the worst first.  texts: states, and how long each prompt is.

    Raises ExportError where the two are not of one kind.
    """
    if folder.kind != model.kind:
        raise ExportError(f"the folder holds a {folder.kind}, the checkpoint a {model.kind}; name the one it was exported from")
    places = [(seen, at) for seen, begun in texts for at in _anchors(seen, begun)]
    wanted = [readers.drafted(model, seen, at, length).tokens for seen, at in places]
    found = []
    for swap in differences(folder, model):
        try:
            other = readers.swapped(model, **swap.parts)
            drafts = [readers.drafted(other, seen, at, length).tokens for seen, at in places]
        except (KeyError, IndexError, RuntimeError) as error:
            found.append(Cause(swap.name, f"{swap.what}; with it nothing can be drafted ({type(error).__name__})", 1.0))
            continue
        changed = sum(a != b for one, two in zip(drafts, wanted, strict=True) for a, b in zip(one, two, strict=True))
        if changed:
            found.append(Cause(swap.name, swap.what, changed / (len(places) * length)))
    return sorted(found, key=lambda cause: -cause.changed)


def _anchors(seen: States, begun: int) -> list[int]:
    """Places behind the prompt, evenly."""
    last = len(seen.tokens) - 1
    step = max(1, (last - begun) // PLACES)
    return list(range(max(begun, 1), last + 1, step))[:PLACES]


def differences(folder: Draft, model: Draft) -> Iterator[Swap]:
    """Parts of the folder that are not as in the model."""
    if folder.taps != model.taps:
        said = f"target layers {list(folder.taps)} where the model was trained on {list(model.taps)}, outputs counted from 0"
        yield Swap("taps", said, {"taps": folder.taps})
    if folder.rotation != model.rotation:
        yield Swap("RoPE", f"{_rotation(folder)} where the model has {_rotation(model)}", {"rotation": folder.rotation})
    if folder.eps != model.eps:
        yield Swap("norm", f"rms_norm_eps {folder.eps:g} where the model has {model.eps:g}", {"eps": folder.eps})
    if names := _unequal(folder.norms, model.norms):
        yield Swap("norm", f"other weights in {_few(names)}", {"norms": folder.norms})
    if flags := folder.flags ^ model.flags:
        yield _flags(folder, model, flags)
    yield from _vocabulary(folder, model)
    if folder.skip != model.skip:
        first = {0: "in the anchor's own slot", 1: "in the slot behind it"}
        said = f"the first token is drafted {first[folder.skip]}, in training {first[model.skip]}"
        yield Swap("label shift", said, {"skip": folder.skip})
    if folder.causal != model.causal:
        said = f"slots of a block {_sight(folder)} the slots behind them, in training they {_sight(model)}"
        yield Swap("block mask", said, {"causal": folder.causal})
    if folder.prefix != model.prefix:
        said = f"slots are corrected from number {folder.prefix} on, in training from {model.prefix}"
        yield Swap("label shift", said, {"prefix": folder.prefix})
    if folder.markov != model.markov:
        said = f"the head behind the block is read as {folder.markov}, in training it was {model.markov}"
        yield Swap("weights", said, {"markov": folder.markov})
    yield from _weights(folder, model)


def _flags(folder: Draft, model: Draft, flags: frozenset[str]) -> Swap:
    said = ", ".join(f"{flag} is {flag in folder.flags}, in training {flag in model.flags}" for flag in sorted(flags))
    if "bias" in flags:
        said = (
            f"the biases ({_few(folder.unread)}) stand in the folder, its config doesn't announce them: the engine skips them"
        )
    return Swap("weights" if "bias" in flags else "norm", said, {"flags": folder.flags})


def _vocabulary(folder: Draft, model: Draft) -> Iterator[Swap]:
    theirs, own = folder.ids, model.ids
    if (theirs is None) != (own is None) or (theirs is not None and own is not None and not _same(theirs, own)):
        count = "all" if theirs is None else f"{len(theirs)}"
        other = (
            "" if theirs is None or own is None or len(theirs) != len(own) else f", {int((theirs != own).sum())} of them moved"
        )
        parts = {"ids": theirs, "head": folder.head}
        yield Swap("vocabulary", f"d2t maps {count} draft tokens{other}; the map is not this model's", parts)
    elif folder.head is not None and model.head is not None and not _same(folder.head, model.head):
        yield Swap("vocabulary", "lm_head has other rows than the model", {"head": folder.head})
    if folder.mask != model.mask and model.kind != "medusa":
        yield Swap("vocabulary", f"mask token {folder.mask} where the model has {model.mask}", {"mask": folder.mask})


def _weights(folder: Draft, model: Draft) -> Iterator[Swap]:
    names = _unequal(folder.weights, model.weights)
    if "bias" not in folder.flags and model.kind == "medusa":
        names = [name for name in names if not name.endswith(".bias")]
    if not names:
        return
    if shift := _shifted_heads(folder, model):
        yield Swap("label shift", f"head k holds what the model has as head k {shift:+d}", {"weights": folder.weights})
    else:
        yield Swap("weights", f"other values in {_few(names)}", {"weights": folder.weights})


def _shifted_heads(folder: Draft, model: Draft) -> int:
    """By how much Medusa's heads stand elsewhere; 0 where they don't."""
    count = len(model.order)
    for shift in (1, -1):
        pairs = [(k, k + shift) for k in range(count) if 0 <= k + shift < count]
        both = [
            (folder.weights.get(f"blocks.{a}.layers.0.weight"), model.weights[f"blocks.{b}.layers.0.weight"]) for a, b in pairs
        ]
        if pairs and all(one is not None and _same(one, other) for one, other in both):
            return shift
    return 0


# ── layer by layer ────────────────────────────────────────────────────────────────────────────────────────────────────


def first_difference(folder: Draft, model: Draft, seen: States, anchor: int, length: int) -> tuple[str, float] | None:
    """The first stage whose outcome differs, and by how much of its size; None where none does, or nothing can be drafted."""
    own = readers.drafted(model, seen, anchor, length).stages
    try:
        theirs = readers.drafted(folder, seen, anchor, length).stages
    except (KeyError, IndexError, RuntimeError):  # among the causes already
        return None
    for name, value in own.items():
        away = _away(value, theirs.get(name))
        if away > CLOSE:
            return name, away
    return None


class Heard(NamedTuple):
    """The engine's own modules beside our reading of the folder."""

    stages: int
    """How many were compared."""
    first: tuple[str, float] | None
    """The first that comes out otherwise, and by how much of its size; None where none does."""


def heard(
    folder: Draft, rows: Mapping[str, Sequence[Sequence[float]]], seen: States, anchor: int, length: int
) -> Heard:  # fmt: skip
    """What an engine's modules said while it drafted, against our reading.  rows: the last of each stage, as in its answer.

    Of a stage of which the two have not equally many rows the last are compared.
    """
    both = [
        (name, value.reshape(-1, value.shape[-1]), torch.tensor(rows[name]))
        for name, value in readers.drafted(folder, seen, anchor, length).stages.items() if name in rows
    ]  # fmt: skip
    found = ((name, _away(own[-len(other) :], other[-len(own) :])) for name, own, other in both)
    return Heard(len(both), next(((name, away) for name, away in found if away > CLOSE), None))


def _away(value: Tensor, other: Tensor | None) -> float:
    """How far another outcome of a stage lies, as a share of its size; 1 where it is of another shape."""
    if other is None or other.shape != value.shape:
        return 1.0
    return float((other.to(value) - value).norm() / value.norm().clamp(min=1e-9))


def _unequal(theirs: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    return sorted(
        name for name in theirs.keys() | own.keys()
        if name not in theirs or name not in own or not _same(theirs[name], own[name])
    )  # fmt: skip


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not (one.is_floating_point() and other.is_floating_point()):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return torch.allclose(one.double().cpu(), other.double().cpu(), rtol=1e-2, atol=1e-6)


def _rotation(draft: Draft) -> str:
    turn = draft.rotation
    share = f", {turn.share:g} of a head" if turn.share != 1 else ""
    return f"rope_theta {turn.theta:g}{share}{', stretched by ' + turn.scaling if turn.scaling else ''}"


def _sight(draft: Draft) -> str:
    return "don't see" if draft.causal else "see"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ── what the engine makes of it ───────────────────────────────────────────────────────────────────────────────────────


class Guess(NamedTuple):
    """One way in which an engine may read a sound folder wrongly, and how many of its steps that would explain."""

    name: str
    what: str
    share: float


def guesses(model: Draft, texts: Sequence[tuple[States, Mapping[int, int]]], length: int) -> list[Guess]:
    """By the pattern of what an engine kept: how it may have read the draft, the best explanation first.

    texts: states, and for places of anchors how many drafted tokens the engine kept there.  A guess explains a step where its
    draft would have been kept exactly so far.  The first guess of equal ones is that nothing is wrong.
    """
    steps = [(seen, at, kept) for seen, found in texts for at, kept in found.items()]
    if not steps:
        return []
    scored = []
    for name, what, draft in _suspects(model):
        try:
            right = sum(_kept(readers.drafted(draft, seen, at, length).tokens, seen, at) == kept for seen, at, kept in steps)
        except (KeyError, IndexError, RuntimeError):
            continue
        scored.append(Guess(name, what, right / len(steps)))
    return sorted(scored, key=lambda guess: -guess.share)


def _kept(draft: Sequence[int], seen: States, anchor: int) -> int:
    """How many tokens of a draft the text goes on with."""
    following = seen.tokens[anchor + 1 :]
    return next((i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b), min(len(draft), len(following)))


def _suspects(model: Draft) -> Iterator[tuple[str, str, Draft]]:
    yield "none", "it reads the folder as we do", model
    for shift in (-1, 1) if model.taps else ():
        if min(model.taps) + shift >= 0:
            taps = tuple(tap + shift for tap in model.taps)
            yield "taps", f"it takes the layers {'before' if shift < 0 else 'behind'} ours", readers.swapped(model, taps=taps)
    if model.rotation.theta:
        for theta in (1e4, 5e5, 1e6):
            if theta != model.rotation.theta:
                turn = model.rotation._replace(theta=theta)
                yield "RoPE", f"it turns by rope_theta {theta:g}", readers.swapped(model, rotation=turn)
    if model.kind in readers.BLOCKS:
        yield "block mask", "slots of a block don't see those behind them", readers.swapped(model, causal=not model.causal)
        said = "it norms the context's keys of every layer by the first layer's k_norm"
        yield "norm", said, readers.swapped(model, first_norm=True)
        yield "label shift", "it drafts from another slot of the block", readers.swapped(model, skip=1 - model.skip)
    if model.kind == "medusa":
        yield "weights", "it leaves out the biases", readers.swapped(model, flags=frozenset())
        order = (*model.order[1:], model.order[-1])
        yield "label shift", "head k drafts what head k + 1 should", readers.swapped(model, order=order)
    if model.kind in ("eagle3", "peagle"):
        flags = model.flags ^ {"norm_before_residual"}
        yield "norm", "the residual is normed where ours is not, or not where ours is", readers.swapped(model, flags=flags)
    if model.ids is not None:
        plain = torch.arange(len(model.ids))
        yield "vocabulary", "it takes draft ids for the target's", readers.swapped(model, ids=plain)
