"""Policies and ways to verify, by the names that Python, run files and the command line share."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping

from outrider.config import nearest
from outrider.decoding.protocols import Drafter, Policy
from outrider.errors import ConfigError
from outrider.policies import lossy
from outrider.policies.adaptive import Adaptive
from outrider.policies.block import accept_block
from outrider.policies.by_confidence import ByConfidence
from outrider.policies.by_load import ByLoad
from outrider.policies.fixed import Fixed
from outrider.sampling.judge import SamplingJudge

EXACT = ("standard", "block")
"""Exact ways to verify; `lossy.RULES` has the others."""
MIN_CONFIDENCE = 0.4
"""Probability of acceptance below which `by_confidence` does not verify a node."""
POLICIES: Mapping[str, Callable[[int], Policy]] = {
    "fixed": Fixed,
    "by_confidence": lambda limit: ByConfidence(limit, MIN_CONFIDENCE),
    "adaptive": Adaptive,
    "by_load": ByLoad,
}
"""As many nodes as the drafter offers; those likely to be accepted; as many as pay, by measured seconds; those that pay
at the number of slots that are decoded."""
DEFAULT = "adaptive"
"""The policy that is used unless another is named."""


def policy(name: str | Policy | None, drafter: Drafter) -> Policy:
    """A new policy of this name for this drafter; None continues with this thread's default policy for it.

    Raises ConfigError for an unknown name.
    """
    if name is None:
        policies: weakref.WeakKeyDictionary[Drafter, Policy] = vars(_taken).setdefault(
            "policies", weakref.WeakKeyDictionary()
        )
        return policies.setdefault(drafter, POLICIES[DEFAULT](drafter.limit))
    if not isinstance(name, str):
        return name
    _known("policy", name, POLICIES)
    return POLICIES[name](drafter.limit)


_taken = threading.local()
"""`policies`: by drafter, so that the next request uses earlier measurements."""


def judge(name: str | SamplingJudge | None = None, allow_lossy: bool = False) -> SamplingJudge:
    """The judge of this way to verify.  Raises ConfigError for an unknown name, and for a lossy one unless
    allow_lossy."""
    if isinstance(name, SamplingJudge):
        return name
    name = name or "standard"
    check_verification(name, allow_lossy)
    if name in lossy.RULES:
        return lossy.LossyJudge(lossy.RULES[name]())
    if allow_lossy:
        logging.getLogger(__name__).warning("allow_lossy has no effect on verification '%s': the output is exact", name)
    return SamplingJudge(accept_block if name == "block" else None)


def check_verification(name: str, allow_lossy: bool) -> None:
    """Raises ConfigError for an unknown name, and for a lossy one unless allow_lossy is True."""
    _known("verification", name, [*EXACT, *lossy.RULES])
    if name in lossy.RULES and allow_lossy is not True:
        raise ConfigError(
            f"verification '{name}' changes what the target would write, and allow_lossy is {allow_lossy!r}; "
            "set allow_lossy: true to allow that, or use standard or block for exact output"
        )


def _known(what: str, name: str, names: Iterable[str]) -> None:
    if name not in names:
        raise ConfigError(f"unknown {what} {name!r}{nearest(name, names)}")
