"""What a plan is about: a target and the methods to compare, read from their configs."""

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
    """A method to compare."""

    name: str
    """A kind, or the folder of a drafter, as the user wrote it."""
    kind: str
    settings: Mapping[str, Any]
    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A target and the methods to compare, read from their configs."""

    target: str
    model: Anatomy
    sketch: Sketch
    methods: Mapping[str, Method]
    drafts: Mapping[str, DraftModelOnPaper]
    accepted: Mapping[str, Acceptance] = field(default_factory=dict)
    context: int | None = None
    """Context length of the target, if its config has it."""

    @property
    def without_acceptance(self) -> list[str]:
        """Methods whose acceptance is unknown."""
        return [name for name in self.methods if name not in self.accepted]


def load_subject(
    target: str, methods: Sequence[str], weight: str | None = None, draft_model: str | None = None,
    reports: Sequence[str] = (),
) -> Subject:  # fmt: skip
    """Read configs, manifests and reports, but no weights.  Raises TargetError, ConfigError, DataError."""
    fields = read(target)
    sketch = sketched(fields, target)
    model = of_sketch(sketch, stored(fields, weight, target))
    by_name = {name: method(name) for name in methods or drafts.default_methods()}
    draft = None
    if draft_model is not None:
        draft_fields = read(draft_model)
        draft = of_sketch(sketched(draft_fields, draft_model), stored(draft_fields, None, draft_model))
    drafts_on_paper = {
        name: drafts.on_paper(each.kind, sketch, draft, **each.settings) for name, each in by_name.items()
    }  # fmt: skip
    loaded_reports = [(path, Report.load(path)) for path in reports]
    accepted = {name: value for name, each in by_name.items() if (value := _accepted(each, loaded_reports)) is not None}
    return Subject(target, model, sketch, by_name, drafts_on_paper, accepted, context_of(fields))


def method(name: str) -> Method:
    """A method by kind, or by the folder of a drafter."""
    if name in kinds():
        return Method(name, name, {}, {})
    source = describe(name)
    settings = {key: value for key, value in (source.manifest.get("config") or {}).items() if key != "kind"}
    return Method(name, source.kind, settings, source.manifest)


def _accepted(method: Method, reports: Sequence[tuple[str, Report]]) -> Acceptance | None:
    """The best available source: a report, then the checkpoint's own evaluation, then published values."""
    for path, report in reports:
        for name in (method.name, method.kind):
            if (accepted := acceptance.of_report(report, name, path)) is not None:
                return accepted
    return acceptance.of_checkpoint(method.manifest, method.name) or acceptance.published(method.kind)


def with_measured(subject: Subject, measured: Mapping[str, Acceptance], if_measured: Sequence[str] = ()) -> Subject:
    """The subject with measured acceptance.

    if_measured: methods that were not requested, to be dropped unless their acceptance was measured.
    """
    methods = {name: each for name, each in subject.methods.items() if name not in if_measured or name in measured}
    accepted = {**subject.accepted, **measured}
    return replace(subject, methods=methods, accepted={name: accepted[name] for name in methods if name in accepted})
