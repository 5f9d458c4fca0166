"""What a family can be trusted with: asked of a small twin of the model, once, and kept on disk.

The answer depends on class, config, attention, type, versions and our own code, never on the weights; so it is kept in
`$OUTRIDER_CACHE/selftest` under these.  The model itself is then asked only whether it agrees.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from outrider import machine
from outrider.compiled.key import code
from outrider.decoding import draft
from outrider.errors import TargetError
from outrider.targets import selftest, twin
from outrider.targets.family import Masks
from outrider.targets.own_cache import past_name
from outrider.targets.selftest import SelfTest, WrongText

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trust:
    """What was found for models like this one."""

    masks: Masks
    """Which masks the family takes."""
    found: SelfTest | None
    one_by_one: bool = False
    """Whether rows that stand at different places must pass one by one."""
    past: str | None = None
    """Name of the argument that takes a cache of the family's own kind, where it needs that."""
    refused: str | None = None
    """Why it can't be decoded; then nothing was found."""


def trust(model: PreTrainedModel, untested: Callable[[PreTrainedModel], Any]) -> Trust | None:
    """What is known of models like this one, else what a twin of it shows; None where it has none.

    untested: makes a target of a model without asking anything of it.  Raises TargetError where the family is refused.
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
    small = twin.twin(model)
    if small is None:
        log.info("no small twin of %s can be built: all is asked of the model itself", type(model).__name__)
        return None
    try:
        target = untested(small)
        found = tested(target)
    except TargetError as error:
        return Trust("none", None, refused=str(error))
    return Trust(target.family.masks, found, target.family.one_by_one, target.family.past)


def tested(target: Any) -> SelfTest:
    """What the self-test finds for the first way of holding texts that the family takes; `target.family` is then of that way.

    Raises TargetError, which names what is wrong, where it takes none.
    """
    model, family = target.model, target.family
    try:
        return selftest.selftest(target)
    except WrongText as error:
        wrong: TargetError = error
    past = past_name(model)
    # some families count columns of the longest row for all; some keep more than slots can hold
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
        raise TargetError(selftest.refusal(model, "it has no cache: nothing that a pass gives back is taken by the next"))
    raise wrong


# ── on disk ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _place(model: PreTrainedModel) -> Path:
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_")}
    own = model.config.get_text_config(decoder=True)
    kernels = own._attn_implementation, getattr(own, "_experts_implementation", None)
    sources = [
        *code(draft, sys.modules[type(model).__module__]),
        *(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))),
    ]
    asked = (
        torch.__version__,
        transformers.__version__,
        type(model).__qualname__,
        kernels,
        str(model.dtype),
        model.device.type,
    )
    digest = hashlib.sha256(repr(asked).encode() + json.dumps(config, sort_keys=True, default=str).encode())
    for source in sources:
        digest.update(source)
    return machine.cache_folder() / "selftest" / f"{digest.hexdigest()[:32]}.json"


def _read(path: Path) -> Trust | None:
    """None for a file that is missing, damaged, or was written by another version."""
    try:
        kept = json.loads(path.read_text())
        found = None if kept["found"] is None else SelfTest(**kept["found"])
        assert kept["masks"] in ("by kind", "one", "none")
        assert found is None or (found.mode in ("tree", "chain", "off") and isinstance(found.errors, dict))
        assert (found is None) == isinstance(kept["refused"], str)
        return Trust(kept["masks"], found, bool(kept["one_by_one"]), kept["past"], kept["refused"])
    except (AssertionError, AttributeError, KeyError, OSError, TypeError, ValueError):
        return None


def _write(path: Path, found: Trust) -> None:
    with suppress(OSError):  # a folder that can't be written costs the twin's passes at every load
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as part:
            json.dump(asdict(found), part)
        Path(part.name).replace(path)
