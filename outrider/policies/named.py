"""Policies and ways to verify, by the names that Python, run files and the command line share."""

from __future__ import annotations

import copy
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.config import nearest
from outrider.costs.kept import KeptCosts
from outrider.decoding.protocols import Drafter, Policy
from outrider.errors import ConfigError
from outrider.policies import lossy
from outrider.policies.auto import Auto
from outrider.policies.block import accept_block
from outrider.policies.fixed import Fixed
from outrider.registry import Registry
from outrider.sampling.judge import SamplingJudge

EXACT = ("standard", "block")
"""Exact ways to verify; `LOSSY` has the others."""
LOSSY = Registry("verification", ("outrider.lab.judges",), "outrider.judges")
"""Those that change the output; see `outrider.lab.judges`."""
Kept = Callable[[], KeptCosts]
POLICIES: Mapping[str, Callable[[int, Kept | None], Policy]] = {
    "fixed": lambda limit, kept: Fixed(limit),
    "auto": lambda limit, kept: Auto(limit, kept=None if kept is None else kept()),
}
"""As many nodes as the drafter offers; as many as pay, by what was accepted and measured seconds."""
GONE = ("adaptive", "by_load", "by_confidence")
"""Names of before; `auto` does what each did."""
DEFAULT = "auto"
"""The policy that is used unless another is named."""


def policy(name: str | Policy | None, drafter: Drafter, kept: Kept | None = None) -> Policy:
    """A new policy of this name for this drafter; None continues with this thread's default policy for it.

    kept: finds what steps of this drafter took in earlier processes, for a new policy that asks.  Raises ConfigError
    for an unknown name.
    """
    if name is None:
        policies: weakref.WeakKeyDictionary[Drafter, Policy] = vars(_taken).setdefault(
            "policies", weakref.WeakKeyDictionary()
        )
        if drafter not in policies:
            policies[drafter] = POLICIES[DEFAULT](drafter.limit, kept)
        return policies[drafter]
    if not isinstance(name, str):
        return name
    if name in GONE:
        raise ConfigError(f"policy {name!r} is gone; auto does what it did, so write auto")
    _known("policy", name, POLICIES)
    return POLICIES[name](drafter.limit, kept)


_taken = threading.local()
"""`policies`: by drafter, so that the next request uses earlier measurements."""


def apart(policy: Policy) -> Policy:
    """A copy that goes on from what a policy has learnt; nothing that it learns is kept."""
    there = copy.deepcopy(policy)
    if isinstance(there, Auto):
        there.kept = None
    return there


def judge(name: str | SamplingJudge | None = None, allow_lossy: bool = False) -> SamplingJudge:
    """The judge of this way to verify: `standard`, `block`, or a lossy rule with its settings, such as
    `relaxed(k=3)`.

    Raises ConfigError for an unknown name or setting, and for a lossy one unless allow_lossy.
    """
    if isinstance(name, SamplingJudge):
        return name
    name = name or "standard"
    rule = check_verification(name, allow_lossy)
    if rule is not None:
        return lossy.LossyJudge(rule)
    if allow_lossy:
        logging.getLogger(__name__).warning("allow_lossy has no effect on verification '%s': the output is exact", name)
    return SamplingJudge(accept_block if name == "block" else None)


def check_verification(name: str, allow_lossy: bool) -> lossy.LossyRule | None:
    """A new rule of a lossy name, None of an exact one.  Raises ConfigError for an unknown name or setting, and for a
    lossy one unless allow_lossy is True."""
    called = re.fullmatch(r"(\w+)\((.*)\)", name.strip(), re.DOTALL)
    own = called[1] if called else name
    _known("verification", own, [*EXACT, *LOSSY.all()])
    if own in EXACT:
        if called:
            raise ConfigError(f"verification {own!r} has no settings, got {name!r}; give its name alone")
        return None
    if allow_lossy is not True:
        raise ConfigError(
            f"verification '{name}' changes what the target would write, and allow_lossy is {allow_lossy!r}; "
            "set allow_lossy: true to allow that, or use standard or block for exact output"
        )
    module = LOSSY.find(own)
    settings = _settings(own, called[2] if called else "", module.SETTINGS)
    if module.REQUIRED and module.REQUIRED not in settings:
        raise ConfigError(
            f"verification {own!r} needs {module.REQUIRED}; write {own}({module.REQUIRED}=...), see docs/lossy.md"
        )
    rule: lossy.LossyRule = vars(module)[own](**settings)
    return rule


def _settings(name: str, text: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Settings of a lossy rule, read from `key=value, key=value`."""
    found = {}
    for part in re.split(r",\s*(?=\w+\s*=)", text) if text.strip() else ():
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            raise ConfigError(f"verification {name!r}: {part!r} is not a setting; write {name}(setting=value)")
        _known(f"setting of verification {name!r}", key, known)
        try:
            found[key] = known[key](value)
        except ValueError:
            raise ConfigError(f"verification {name!r}: {key} must be a number, got {value!r}") from None
    return found


def _known(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ConfigError(f"unknown {what} {name!r}{nearest(name, names)}")
