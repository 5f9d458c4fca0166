"""The outcome of a gate, rule by rule, for terminals, programs, pull requests and CI servers.  No torch.

Every rule has a verdict and a reason in one sentence.  "not measured" is a separate verdict, never a pass.  Before the
verdict, a rule has noisy figures (`Test`), which are judged together, and parts that are judged immediately.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from outrider.gate.policy import Limit, Policy, Rule
from outrider.report.bootstrap import Estimate, Interval

Verdict = Literal["pass", "warn", "stop", "not measured"]
Decision = Literal["pass", "warn", "stop", "underpowered", "refused"]
"""Verdicts of the whole gate.  underpowered: no rule stops, but there are too few prompts for a pass.  refused: nothing
was judged."""
EXIT_CODES: dict[Decision, int] = {"pass": 0, "warn": 0, "stop": 1, "refused": 2, "underpowered": 3}
Unit = Literal["new/old", "difference", "share", "count"]
COLOURS: dict[Verdict, str] = {"pass": "", "warn": "yellow", "stop": "bold white on red", "not measured": "dim"}
WORST_FIRST: tuple[Verdict, ...] = ("stop", "warn", "pass", "not measured")


@dataclass(frozen=True, slots=True)
class Part:
    """A rule in one place: over all tasks together, on one of them, or at one depth."""

    where: str
    verdict: Verdict
    reason: str
    """One sentence, without a full stop."""
    figure: float | None = None
    interval: Interval | None = None
    """95 % interval, for this part alone."""
    corrected: Interval | None = None
    """Corrected for the number of simultaneous tests; this one decides."""
    prompts: int | None = None
    is_hole: bool = False
    """Expected figures are missing."""
    is_short: bool = False
    """There are figures, but for too few prompts."""


def silent(where: str, reason: str, is_hole: bool = False) -> Part:
    """A part that was not measured, with the reason."""
    return Part(where, "not measured", reason, is_hole=is_hole)


def too_few(where: str, count: int, policy: Policy) -> Part:
    """A part with too few prompts."""
    reason = f"{count} prompt{'s are' if count != 1 else ' is'} too few, {policy.min_prompts} are needed"
    return replace(silent(where, reason), is_short=True)


@dataclass(frozen=True, slots=True)
class Test:
    """One noisy figure.  Its estimate is a log ratio or a difference; below 0 is a loss."""

    __test__ = False  # tells pytest that this class is not a test

    where: str
    estimate: Estimate
    prompts: int
    is_whole: bool = False
    """Over all tasks of a drafter at a temperature."""
    eased: str = ""
    """Why a loss only warns; empty if it stops."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule.  Its verdict is that of its worst part, or "not measured" if no part was measured."""

    rule: Rule
    measures: str
    unit: Unit
    limit: Limit
    parts: tuple[Part, ...]
    tests: tuple[Test, ...] = ()
    """Not judged yet: the threshold of each depends on their total number over all rules."""
    rises: bool = False
    """More is worse."""
    what: str = ""
    """Name of its figure in the reason."""

    @property
    def lead(self) -> Part:
        """The first of the worst parts."""
        return min(self.parts, key=lambda part: WORST_FIRST.index(part.verdict))

    @property
    def verdict(self) -> Verdict:
        return self.lead.verdict

    @property
    def reason(self) -> str:
        """One sentence: the worst part, how many others have the same verdict, and how many were not measured."""
        lead = self.lead
        same = sum(part.verdict == lead.verdict for part in self.parts) - 1 if lead.verdict in ("stop", "warn") else 0
        silent = sum(part.verdict == "not measured" for part in self.parts) if lead.verdict != "not measured" else 0
        more = f"; so {same} more" if same else ""
        more += f"; {silent} of {len(self.parts)} parts not measured" if silent else ""
        return f"{lead.where}: {lead.reason}{more}" if lead.where else lead.reason + more

    def eased(self) -> Finding:
        """This finding with every stop turned into a warning."""
        return replace(self, parts=tuple(replace(p, verdict="warn") if p.verdict == "stop" else p for p in self.parts))


@dataclass(frozen=True, slots=True)
class GateOutcome:
    """All rules and the overall verdict."""

    verdict: Decision
    findings: tuple[Finding, ...]
    headline: str
    notes: tuple[str, ...] = ()
    tests: int = 0
    """Statistical tests that share one false-alarm probability."""
    sigma: float | None = None
    """Standard deviation of the log of new/old speed over prompts."""
    widened: float = 1.0
    prompts_needed: tuple[tuple[float, int], ...] = ()
    """(loss, prompts that detect it with 80 % power)."""

    @classmethod
    def refused(cls, reason: str) -> GateOutcome:
        """The outcome of two reports that can't be compared."""
        return cls("refused", (), f"REFUSED: {reason}")

    @property
    def stops(self) -> bool:
        return self.verdict == "stop"

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]

    def finding(self, rule: str) -> Finding:
        return next(finding for finding in self.findings if finding.rule == rule)

    def as_json(self) -> dict[str, Any]:
        """Values for `json.dumps`.  Numbers that are not finite become null."""
        findings = [
            {
                "rule": f.rule, "measures": f.measures, "unit": f.unit, "verdict": f.verdict, "reason": f.reason,
                "figure": f.lead.figure, "interval": _ends(f.lead.interval),
                "parts": [
                    asdict(p) | {"interval": _ends(p.interval), "corrected": _ends(p.corrected)} for p in f.parts
                ],
            }
            for f in self.findings
        ]  # fmt: skip
        plain = {
            "schema": 1, "verdict": self.verdict, "headline": self.headline, "notes": self.notes, "tests": self.tests,
            "sigma": self.sigma, "widened": self.widened, "rules": findings,
            "prompts_needed": [{"loss": loss, "prompts": prompts} for loss, prompts in self.prompts_needed],
        }  # fmt: skip
        values: dict[str, Any] = json.loads(json.dumps(plain), parse_constant=lambda not_finite: None)
        return values

    def table(self) -> Table:
        """A line per rule, and one for each further part that warns or stops."""
        table = Table("rule")
        for name in ("figure", "95 % interval", "verdict"):
            table.add_column(name, no_wrap=True)
        table.add_column("reason")
        for finding in self.findings:
            lead = finding.lead
            table.add_row(finding.rule, *_figures(finding.unit, lead), _mark(finding.verdict), Text(finding.reason))
            for part in finding.parts:
                if part is not lead and part.verdict in ("stop", "warn"):
                    cells = _figures(finding.unit, part)
                    table.add_row(Text(f"  {part.where}"), *cells, _mark(part.verdict), Text(part.reason))
        return table

    def markdown(self) -> str:
        """The outcome as Markdown, for a pull request."""
        lines = [f"**{cell(self.headline)}**", "", "| rule | figure | 95 % interval | verdict | reason |"]
        lines.append("|---|---:|---:|---|---|")
        for finding in self.findings:
            figure, interval = _figures(finding.unit, finding.lead)
            verdict = f"**{finding.verdict.upper()}**" if finding.verdict == "stop" else finding.verdict
            lines.append(f"| {cell(finding.rule)} | {figure} | {interval} | {verdict} | {cell(finding.reason)} |")
        return "\n".join([*lines, *(f"\n{cell(note)}" for note in self.notes)]) + "\n"

    def junit(self) -> str:
        """JUnit XML with a test case per rule; a stop is a failure, "not measured" is skipped.

        An additional case fails if the gate is underpowered, and is an error if the reports can't be compared.
        """
        verdicts = [finding.verdict for finding in self.findings]
        is_short = self.verdict == "underpowered"
        is_refused = self.verdict == "refused"
        root = ElementTree.Element("testsuites")
        suite = ElementTree.SubElement(
            root, "testsuite", name="outrider gate", time="0", tests=str(len(verdicts) + is_short + is_refused),
            failures=str(verdicts.count("stop") + is_short), errors=str(int(is_refused)),
            skipped=str(verdicts.count("not measured")),
        )  # fmt: skip
        if is_short or is_refused:
            case = ElementTree.SubElement(suite, "testcase", classname="outrider.gate", name="comparison", time="0")
            kind = "failure" if is_short else "error"
            ElementTree.SubElement(case, kind, message=printable(self.headline), type=self.verdict)
        for finding in self.findings:
            case = ElementTree.SubElement(
                suite, "testcase", classname="outrider.gate", name=printable(finding.rule), time="0"
            )
            parts = "\n".join(f"{p.verdict}: {p.where or finding.rule}: {p.reason}" for p in finding.parts)
            if finding.verdict == "stop":
                ElementTree.SubElement(
                    case, "failure", message=printable(finding.reason), type="stop"
                ).text = printable(parts)
            elif finding.verdict == "not measured":
                ElementTree.SubElement(case, "skipped", message=printable(finding.reason))
            else:
                ElementTree.SubElement(case, "system-out").text = printable(
                    f"{finding.verdict}: {finding.reason}\n{parts}"
                )
        ElementTree.SubElement(suite, "system-out").text = printable("\n".join([self.headline, *self.notes]))
        ElementTree.indent(root)
        return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def cell(text: str) -> str:
    """Text that can't end a Markdown cell, start markup, or mention anyone."""
    return re.sub(r"[\\`*_\[\]<>|]", r"\\\g<0>", " ".join(text.split())).replace("@", "@\N{ZERO WIDTH SPACE}")


def printable(text: str) -> str:
    """Text without characters that XML 1.0 can't represent even when escaped."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def say_figure(unit: Unit, value: float) -> str:
    """A ratio with three decimals; a difference or a share in per cent."""
    if unit == "new/old":
        return f"{value:.3f}"
    return f"{value:.0f}" if unit == "count" else f"{100 * value:{'+' if unit == 'difference' else ''}.1f} %"


def _figures(unit: Unit, part: Part) -> tuple[str, str]:
    figure = "–" if part.figure is None else say_figure(unit, part.figure)
    return figure, " … ".join(say_figure(unit, end) for end in _ends(part.interval) or ()) or "–"


def _mark(verdict: Verdict) -> Text:
    return Text(verdict.upper() if verdict == "stop" else verdict, COLOURS[verdict])


def _ends(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]
