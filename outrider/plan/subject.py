"""What a plan is about: a target and the methods that may draft for it, known by their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from outrider.drafters import kinds
from outrider.loading import describe
from outrider.plan import acceptance
from outrider.plan.acceptance import Acceptance
from outrider.plan.paper import drafts
from outrider.plan.paper.anatomy import Anatomy, context_of, of_sketch, read, sketched
from outrider.plan.paper.drafts import DraftModelOnPaper
from outrider.plan.paper.weights import stored
from outrider.report.schema import Report
from outrider.targets.sketch import Sketch


class Method(NamedTuple):
    """One way to draft that a plan judges."""

    name: str
    """As it was given: a kind, or the folder of a drafter."""
    kind: str
    settings: Mapping[str, Any]
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A target and the methods that may draft for it, known by their configs."""

    target: str
    model: Anatomy
    sketch: Sketch
    methods: Mapping[str, Method]
    drafts: Mapping[str, DraftModelOnPaper]
    accepted: Mapping[str, Acceptance] = field(default_factory=dict)
    context: int | None = None
    """Tokens that the target reads, where its config says so."""

    @property
    def unknown(self) -> list[str]:
        """Methods of whose acceptance nothing is known."""
        return [name for name in self.methods if name not in self.accepted]


def subject(
    target: str, methods: Sequence[str], weight: str | None = None, draft_model: str | None = None,
    reports: Sequence[str] = (),
) -> Subject:  # fmt: skip
    """What a plan is about.  Reads configs, manifests and reports, no weights.  Raises TargetError, ConfigError,
    DataError."""
    fields = read(target)
    sketch = sketched(fields, target)
    model = of_sketch(sketch, stored(fields, weight, target))
    found = {name: method(name) for name in methods or drafts.usual()}
    small = None
    if draft_model is not None:
        other = read(draft_model)
        small = of_sketch(sketched(other, draft_model), stored(other, None, draft_model))
    on_paper = {
        name: drafts.on_paper(own.kind, sketch, small, **own.settings) for name, own in found.items()
    }  # fmt: skip
    loaded = [(path, Report.load(path)) for path in reports]
    known = {name: value for name, own in found.items() if (value := _accepted(own, loaded)) is not None}
    return Subject(target, model, sketch, found, on_paper, known, context_of(fields))


def method(name: str) -> Method:
    """A method by its kind, or by the folder of a drafter."""
    if name in kinds():
        return Method(name, name, {}, {})
    source = describe(name)
    settings = {key: value for key, value in (source.manifest.get("config") or {}).items() if key != "kind"}
    return Method(name, source.kind, settings, source.manifest)


def _accepted(own: Method, reports: Sequence[tuple[str, Report]]) -> Acceptance | None:
    """The best that is known: a report's, the checkpoint's own, what was published."""
    for path, report in reports:
        for name in (own.name, own.kind):
            if (found := acceptance.of_report(report, name, path)) is not None:
                return found
    return acceptance.of_checkpoint(own.manifest, own.name) or acceptance.published(own.kind)


def rest_on(own: Subject, measured: Mapping[str, Acceptance], if_measured: Sequence[str] = ()) -> Subject:
    """The subject, with what was measured in place of what was known.

    if_measured: methods that nobody asked for, which stay where their acceptance was measured.
    """
    methods = {name: each for name, each in own.methods.items() if name not in if_measured or name in measured}
    known = {**own.accepted, **measured}
    return replace(own, methods=methods, accepted={name: known[name] for name in methods if name in known})
