"""What a family of models can do: tested once on a small model of the same config and stored on disk.

The result depends on class, config, attention, dtype, versions and our own code, but not on the weights.  It is stored
in `$OUTRIDER_CACHE/selftest` under a hash of these.  The model itself only has to agree in two passes.
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
class Capabilities:
    """What models of one class and config can do."""

    masks: Masks
    """Which masks the family takes."""
    selftest: SelfTest | None
    """Self-test of the miniature; None if the family is refused."""
    one_by_one: bool = False
    """Whether rows of different lengths must be run one by one."""
    past: str | None = None
    """Name of the argument that takes the family's own kind of cache, if it needs one."""
    refused: str | None = None
    """Why the family can't be decoded."""


def capabilities_of(model: PreTrainedModel, untested: Callable[[PreTrainedModel], Any]) -> Capabilities | None:
    """The stored capabilities of models like this one, otherwise those of its miniature; None if no miniature can be
    built.

    untested: makes a target of a model without testing it.  Raises TargetError if the family is refused.
    """
    path = _path(model)
    capabilities = _load(path)
    if capabilities is None:
        capabilities = _of_miniature(model, untested)
        if capabilities is not None:
            _save(path, capabilities)
    if capabilities is not None and capabilities.refused is not None:
        raise TargetError(capabilities.refused)
    return capabilities


def _of_miniature(model: PreTrainedModel, untested: Callable[[PreTrainedModel], Any]) -> Capabilities | None:
    small = miniature.build(model)
    if small is None:
        log.info("no miniature of %s can be built: the model itself is tested", type(model).__name__)
        return None
    try:
        target = untested(small)
        result = tested(target)
    except TargetError as error:
        return Capabilities("none", None, refused=str(error))
    return Capabilities(target.family.masks, result, target.family.one_by_one, target.family.past)


def tested(target: Any) -> SelfTest:
    """The self-test with the first kind of cache that works for the family; sets `target.family` accordingly.

    Raises TargetError with the reason if no kind works.
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


def _path(model: PreTrainedModel) -> Path:
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    text_config = model.config.get_text_config(decoder=True)
    kernels = text_config._attn_implementation, getattr(text_config, "_experts_implementation", None)
    sources = [
        *code(draft, sys.modules[type(model).__module__]),
        *(path.read_bytes() for path in sorted(Path(__file__).parents[1].rglob("*.py"))),
    ]
    versions = (
        torch.__version__,
        transformers.__version__,
        type(model).__qualname__,
        kernels,
        str(model.dtype),
        model.device.type,
    )
    settings = json.dumps(config, sort_keys=True, default=str).encode()
    digest = hashlib.sha256(b"".join([repr(versions).encode(), settings, *sources]))
    return cache.folder() / "selftest" / f"{digest.hexdigest()[:32]}.json"


def _load(path: Path) -> Capabilities | None:
    """None for a file that is missing, damaged, or was written by another version."""
    try:
        return TypeAdapter(Capabilities).validate_json(cache.read(path))
    except (OSError, ValueError):
        return None


def _save(path: Path, capabilities: Capabilities) -> None:
    # if the folder is not writable, the miniature is tested at every load
    with suppress(OSError), cache.keeping(path) as part:
        part.write_text(json.dumps(asdict(capabilities)))


def selftest_of(target: Any, capabilities: Capabilities | None, text: list[int], logits: Tensor) -> SelfTest:
    """The miniature's self-test if the target agrees with it on a text and its logits; otherwise the target's own."""
    result = None
    if capabilities is not None and capabilities.selftest is not None:
        result = selftest.agreed(target, capabilities.selftest, text, logits)
    if result is None:
        result = tested(target)
    reason = f" ({result.failed})" if result.failed else ""
    log.info("self-test of %s: %s%s", target.spec.name, result.mode, reason)
    if target.family.past is not None:
        log.warning(
            "%s has its own kind of cache, which is copied for every pass, and rows are run one by one: exact, but "
            "slow",
            target.spec.name,
        )
    return result
