"""What a family of models can do: tested once on a small model of the same config, and stored on disk.

The result depends on class, config, attention, type, versions and our own code, never on the weights; so it is stored
in `$OUTRIDER_CACHE/selftest` under these.  The model itself is then only checked for agreement.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from outrider.decoding import draft
from outrider.errors import TargetError
from outrider.storage import cache
from outrider.storage.sources import code
from outrider.targets.cache.own import past_name
from outrider.targets.hf.family import Masks
from outrider.targets.hf.proof import miniature, selftest
from outrider.targets.hf.proof.selftest import SelfTest, WrongText

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """What was found for models like this one."""

    masks: Masks
    """Which masks the family takes."""
    found: SelfTest | None
    one_by_one: bool = False
    """Whether rows of different lengths must pass one by one."""
    past: str | None = None
    """Name of the argument that takes a cache of the family's own kind, where it needs that."""
    refused: str | None = None
    """Why it can't be decoded; then nothing was found."""


def trust(model: PreTrainedModel, untested: Callable[[PreTrainedModel], Any]) -> Trust | None:
    """What is known of models like this one, else what a test of its miniature finds; None where it has none.

    untested: makes a target of a model without testing it.  Raises TargetError where the family is refused.
    """
    path = _place(model)
    found = _read(path)
    if found is None:
        found = _asked(model, untested)
        if found is not None:
            _write(path, found)
    if found is not None and found.refused is not None:
        raise TargetError(found.refused)
    return found


def _asked(model: PreTrainedModel, untested: Callable[[PreTrainedModel], Any]) -> Trust | None:
    small = miniature.build(model)
    if small is None:
        log.info("no miniature of %s can be built: all is tested on the model itself", type(model).__name__)
        return None
    try:
        target = untested(small)
        found = tested(target)
    except TargetError as error:
        return Trust("none", None, refused=str(error))
    return Trust(target.family.masks, found, target.family.one_by_one, target.family.past)


def tested(target: Any) -> SelfTest:
    """The result of the self-test for the first kind of cache that the family works with; `target.family` is set to it.

    Raises TargetError, which names what is wrong, where no kind works.
    """
    model, family = target.model, target.family
    try:
        return selftest.selftest(target)
    except WrongText as error:
        wrong: TargetError = error
    past = past_name(model)
    # some families count columns of the longest row for all; some store more than slots can hold
    ways: list[dict[str, Any]] = [{"one_by_one": True}]
    if past is not None and family.rotary is None:
        ways.append({"past": past})
    for way in ways:
        target.family = replace(family, **way)
        try:
            return selftest.selftest(target)
        except WrongText as error:
            wrong = error
    if past is None:
        raise TargetError(selftest.refusal(model, "it has no cache: no output of a pass is an input of the next one"))
    raise wrong


# ── on disk ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(model: PreTrainedModel) -> Path:
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    own = model.config.get_text_config(decoder=True)
    kernels = own._attn_implementation, getattr(own, "_experts_implementation", None)
    sources = [
        *code(draft, sys.modules[type(model).__module__]),
        *(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))),
    ]
    asked = (
        torch.__version__,
        transformers.__version__,
        type(model).__qualname__,
        kernels,
        str(model.dtype),
        model.device.type,
    )
    settings = json.dumps(config, sort_keys=True, default=str).encode()
    digest = hashlib.sha256(b"".join([repr(asked).encode(), settings, *sources]))
    return cache.folder() / "selftest" / f"{digest.hexdigest()[:32]}.json"


def _read(path: Path) -> Trust | None:
    """None for a file that is missing, damaged, or was written by another version."""
    try:
        return TypeAdapter(Trust).validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _write(path: Path, found: Trust) -> None:
    # without a folder to write to, the miniature is tested at every load
    with suppress(OSError), cache.keeping(path) as part:
        part.write_text(json.dumps(asdict(found)))


def trusted(target: Any, known: Trust | None, text: list[int], logits: Tensor) -> SelfTest:
    """What is known of models like this one, where it agrees on the logits of a text; else the result of a
    self-test."""
    found = (known and known.found and selftest.agreed(target, known.found, text, logits)) or tested(target)
    reason = f" ({found.failed})" if found.failed else ""
    log.info("self-test of %s: %s%s", target.spec.name, found.mode, reason)
    if target.family.past is not None:
        log.warning(
            "%s stores of a text what slots can't hold: every pass copies its own cache, and rows pass one by one; "
            "exact, and slow", target.spec.name,
        )  # fmt: skip
    return found
