"""The rules of the gate: what each measures, and those that need no statistical test.  No torch.

Noisy figures become tests (`figures`, `depths`); everything else becomes a part immediately.  `verdict` decides whether
a test's loss counts, since that depends on the number of tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from outrider.gate.depths import acceptance, skew
from outrider.gate.figures import clean_figure, slowest, speed, tokens_per_step
from outrider.gate.outcome import Finding, Part, Test, Unit, Verdict, silent
from outrider.gate.policy import TIMED, Limit, Policy, Rule
from outrider.gate.statistics.pairing import MatchedReports
from outrider.report.schema import Row
from outrider.report.summary import loss

MEASURES: dict[Rule, tuple[Unit, str]] = {
    "exactness": ("count", "texts that differ from the target's own, token for token"),
    "lossy rule": ("share", "total variation of a token from the target's distribution"),
    "machine": ("count", "differences that times depend on"),
    "speed": ("new/old", "geometric mean over prompts of new/old {speed}"),
    "tokens per step": ("new/old", "new/old tokens committed per target pass, over the same prompts"),
    "p99 TPOT": (
        "new/old", "new/old 99th percentile over prompts of time per output token, without the target's own drift",
    ),
    "acceptance by depth": ("new/old", "new/old share of the drafts reaching a depth that were accepted up to it"),
    "train-serve skew": ("difference", "measured acceptance minus what training predicted, at each depth"),
    "contamination": ("share", "share of prompts that the drafter may know"),
    "clean figure": ("new/old", "new/old tokens per step over prompts that no drafter knew"),
    "left out": ("difference", "share of prompts left out, minus that of the baseline"),
}  # fmt: skip
"""Every rule, in the order shown."""
SPEEDS = {"speedup": "speed-up over the target alone", "tokens_per_s": "tokens per second"}
NAMES = {"acceptance by depth": "acceptance", "train-serve skew": "acceptance against training's prediction"}
"""The name of a rule's figure in a reason, if it is not the rule's name."""


def findings(comparison: MatchedReports, policy: Policy) -> list[Finding]:
    """Every rule with its figures.  Rules that the policy turns off, or that are meaningless on different machines,
    count as not measured."""
    both = (comparison, policy)
    by_rule: dict[Rule, tuple[Limit, Iterable[Test | Part]]] = {
        "exactness": (Limit(), exactness(*both)), "lossy rule": (Limit(), lossy(*both)),
        "machine": (Limit(action="warn"), machine(comparison)), "speed": (policy.speed, speed(*both)),
        "tokens per step": (policy.tokens_per_step, tokens_per_step(*both)),
        "p99 TPOT": (policy.p99_tpot, slowest(*both)),
        "acceptance by depth": (policy.acceptance_by_depth, acceptance(comparison)),
        "train-serve skew": (policy.train_serve_skew, skew(comparison)),
        "contamination": (policy.contamination, contamination(*both)),
        "clean figure": (policy.clean_figure, clean_figure(*both)), "left out": (policy.left_out, left_out(*both)),
    }  # fmt: skip
    rules = []
    for name, (unit, measures) in MEASURES.items():
        limit, results = by_rule[name]
        void = "left out: another machine" if comparison.differences and name in TIMED else ""
        void = "off, by the policy" if limit.action == "off" else void
        checks = [silent("", void)] if void else list(results)
        tests = tuple(check for check in checks if isinstance(check, Test))
        parts = tuple(check for check in checks if isinstance(check, Part))
        measures = measures.format(speed=SPEEDS[policy.speed.by])
        rules.append(Finding(name, measures, unit, limit, parts, tests, name == "p99 TPOT", NAMES.get(name, name)))
    return rules


def exactness(comparison: MatchedReports, policy: Policy) -> Iterator[Part]:
    """Every row of the candidate, even if the baseline lacks it, except lossy rows that the policy allows."""
    rows = [row for row in comparison.new.rows if row.lossless is not False or policy.lossy_rule == "stop"]
    for row in rows:
        where = _place(row)
        if row.is_inexact:
            first = next(iter(row.different), None)
            at = "" if first is None or first.first_difference is None else f", first at token {first.first_difference}"
            reason = f": {len(row.different)} of {row.prompts} texts{at} of {first.id}" if first else ""
            yield Part(where, "stop", f"the text is not the target's own{reason}", float(len(row.different) or 1))
        elif row.plain_exact is False:
            yield Part(where, "stop", "the target alone, in the same loop, does not generate its own text")
        elif row.exact and row.compared_tokens != 0:
            equal = f"{row.prompts} texts" if row.compared_tokens is None else f"{row.compared_tokens:,} tokens"
            yield Part(where, "pass", f"{equal} equal to the target's own", 0.0, prompts=row.prompts)
        else:
            why = "sampled, so not compared" if row.temperature > 0 else "the text was not compared"
            yield silent(where, why, is_hole=row.temperature == 0)
    if not rows:
        yield silent("", "every row is under a lossy rule")


def _place(row: Row) -> str:
    return f"{row.drafter} on {row.task} at T {row.temperature:g}"


def lossy(comparison: MatchedReports, policy: Policy) -> Iterator[Part]:
    """Rows of the candidate whose acceptance rule intentionally changes the output."""
    for row in comparison.new.rows:
        where = _place(row)
        if row.lossless is False or (row.rule is not None and row.lossless is not True):
            allowed = policy.lossy_rule == "allow"
            reason = (
                f"{loss(row) or f'rule {row.rule} changes the output'}{', which the policy allows' if allowed else ''}"
            )
            yield Part(where, "warn" if allowed else "stop", reason, row.distance)
        elif row.lossless is None:
            yield silent(where, "the report does not say by which rule it was measured")
        else:
            yield Part(where, "pass", "measured under the exact rule", row.distance)


def contamination(comparison: MatchedReports, policy: Policy) -> Iterator[Part]:
    """Prompts that occur in what the drafter was trained on or drafts from."""
    tolerated = policy.contamination.tolerated
    for group in comparison.groups:
        rows = [(pair.new, pair.old) for pair in group.pairs.values()]
        new, old = ([row.clean for row in side if row.clean is not None] for side in zip(*rows, strict=True))
        checked = sum(c.checked for c in new)
        matches = sum(len(c.contaminated) for c in new)
        every = sum(row.prompts for row, _ in rows)
        is_whole = len(new) == len(rows) and checked >= policy.shared * every
        share = matches / max(1, checked if is_whole else every)
        if share <= tolerated and not is_whole:
            why = f"{every - checked} of {every} prompts could not be looked up in all of the candidate's texts"
            yield silent(group.name, why)
            continue
        reason = f"{'' if is_whole else 'at least '}{matches} of {checked if is_whole else every} prompts"
        reason += " occur in what the drafter was trained on or drafts from"
        verdict: Verdict = "pass"
        if share > tolerated:
            before = sum(len(c.contaminated) for c in old) / max(1, sum(c.checked for c in old)) if old else -1.0
            verdict = "warn" if share <= before else "stop"
            reason += f", {tolerated:.1%} tolerated{', as many as in the baseline' if verdict == 'warn' else ''}"
        yield Part(group.name, verdict, reason, share, prompts=checked)


def left_out(comparison: MatchedReports, policy: Policy) -> Iterator[Part]:
    """The share of attempted prompts that were left out."""
    new, old = comparison.new.share_left_out, comparison.old.share_left_out
    if new is None or old is None:
        yield silent("", f"the {'candidate' if new is None else 'baseline'} does not say what it left out")
        return
    reason = f"{new:.1%} of the attempted prompts were left out, {old:.1%} in the baseline"
    yield Part("", "stop" if new - old > policy.left_out.tolerated + 1e-9 else "pass", reason, new - old)


def machine(comparison: MatchedReports) -> Iterator[Part]:
    """Whether both were measured on the same machine."""
    others = comparison.differences
    missing = [name for name, r in (("candidate", comparison.new), ("baseline", comparison.old)) if not r.fingerprint]
    if missing:
        yield silent("", f"no fingerprint in the {' and the '.join(missing)}, so it may have been another machine")
    elif others:
        yield Part("", "warn", f"another machine, so times are left out: {'; '.join(others)}", float(len(others)))
    else:
        yield Part("", "pass", "the same machine, libraries and settings", 0.0)
