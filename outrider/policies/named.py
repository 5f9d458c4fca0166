"""Policies and verification rules by the names used in Python, run files and on the command line."""

from __future__ import annotations

import copy
import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outrider.config import nearest
from outrider.costs.stored import StoredCosts
from outrider.decoding.protocols import Drafter, Policy
from outrider.errors import ConfigError
from outrider.policies import lossy
from outrider.policies.auto import Auto
from outrider.policies.block import accept_block
from outrider.policies.fixed import Fixed
from outrider.registry import Registry
from outrider.sampling.judge import SamplingJudge

EXACT = ("standard", "block")
"""Exact verification rules; `LOSSY` has the others."""
LOSSY = Registry("verification", ("outrider.lab.judges",), "outrider.judges")
"""Verification rules that change the output; see `outrider.lab.judges`."""
FindCosts = Callable[[], StoredCosts]
POLICIES: Mapping[str, Callable[[int, FindCosts | None], Policy]] = {
    "fixed": lambda limit, stored: Fixed(limit),
    "auto": lambda limit, stored: Auto(limit, stored=None if stored is None else stored()),
}
"""`fixed` drafts as many nodes as the drafter offers, `auto` as many as pay off given acceptance and measured times."""
REMOVED = ("adaptive", "by_load", "by_confidence")
"""Names of removed policies, which `auto` replaces."""
DEFAULT = "auto"
"""The policy used by default."""


def policy(name: str | Policy | None, drafter: Drafter, stored: FindCosts | None = None) -> Policy:
    """A new policy of this name for this drafter; None returns this thread's default policy for the drafter.

    stored: finds times of this drafter's steps from earlier processes; called only for a new policy that uses them.
    Raises ConfigError for an unknown name.
    """
    if name is None:
        policies: weakref.WeakKeyDictionary[Drafter, Policy] = vars(_per_thread).setdefault(
            "policies", weakref.WeakKeyDictionary()
        )
        if drafter not in policies:
            policies[drafter] = POLICIES[DEFAULT](drafter.limit, stored)
        return policies[drafter]
    if not isinstance(name, str):
        return name
    if name in REMOVED:
        raise ConfigError(f"policy {name!r} was removed; use auto, which replaces it")
    _refuse_unknown("policy", name, POLICIES)
    return POLICIES[name](drafter.limit, stored)


_per_thread = threading.local()
"""`policies`: by drafter, so that the next request reuses what was learnt."""


def snapshot(policy: Policy) -> Policy:
    """A copy that continues from what a policy has learnt but stores nothing."""
    replica = copy.deepcopy(policy)
    if isinstance(replica, Auto):
        replica.stored = None
    return replica


def judge(name: str | SamplingJudge | None = None, allow_lossy: bool = False) -> SamplingJudge:
    """The judge for this verification rule: `standard`, `block`, or a lossy rule with its settings, such as
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
    """A new lossy rule, or None if the name is that of an exact rule.  Raises ConfigError for an unknown name or
    setting, and for a lossy rule unless allow_lossy is True."""
    call = re.fullmatch(r"(\w+)\((.*)\)", name.strip(), re.DOTALL)
    rule_name = call[1] if call else name
    _refuse_unknown("verification", rule_name, [*EXACT, *LOSSY.all()])
    if rule_name in EXACT:
        if call:
            raise ConfigError(f"verification {rule_name!r} has no settings, got {name!r}; write only its name")
        return None
    if allow_lossy is not True:
        raise ConfigError(
            f"verification '{name}' changes the target's output, and allow_lossy is {allow_lossy!r}; "
            "set allow_lossy: true to allow it, or use standard or block for exact output"
        )
    module = LOSSY.find(rule_name)
    settings = _settings(rule_name, call[2] if call else "", module.SETTINGS)
    if module.REQUIRED and module.REQUIRED not in settings:
        raise ConfigError(
            f"verification {rule_name!r} needs {module.REQUIRED}; "
            f"write {rule_name}({module.REQUIRED}=...), see docs/lossy.md"
        )
    rule: lossy.LossyRule = vars(module)[rule_name](**settings)
    return rule


def _settings(name: str, text: str, types: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Settings of a lossy rule, from text such as `key=value, key=value`."""
    settings = {}
    for part in re.split(r",\s*(?=\w+\s*=)", text) if text.strip() else ():
        key, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            raise ConfigError(f"verification {name!r}: {part!r} is not a setting; write {name}(setting=value)")
        _refuse_unknown(f"setting of verification {name!r}", key, types)
        try:
            settings[key] = types[key](value)
        except ValueError:
            raise ConfigError(f"verification {name!r}: {key} must be a number, got {value!r}") from None
    return settings


def _refuse_unknown(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ConfigError(f"unknown {what} {name!r}{nearest(name, names)}")
