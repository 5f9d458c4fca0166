"""What the stages of a run print: before they begin, how far they are, and what came of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from rich.table import Table

from outrider import machine
from outrider.cli import console
from outrider.cli.console import bar, counted, sized, started_anew
from outrider.compiled import NotCompiled
from outrider.data.contamination import Found
from outrider.report import summary
from outrider.runs import reporter as events
from outrider.runs.file import TargetConfig
from outrider.runs.reporter import Plan, Reporter, Result, Update
from outrider.targets.load import default_device
from outrider.targets.transformers import TransformersTarget
from outrider.training.calibrate import Calibration


class Printer(Reporter):
    """Prints plans and results, and draws a bar while a stage works."""

    def loading(self, target: TargetConfig) -> None:
        say(f"machine   {machine.describe(default_device(target.device))}", soft_wrap=True)
        tell_compiling(target.compile)

    def loaded(self, target: TransformersTarget) -> None:
        spec = target.spec
        say(
            f"target    {spec.name}: {spec.layers} layers x {spec.hidden}, {counted(target.model.num_parameters())} "
            f"parameters, {spec.precision} on {target.device}"
        )

    def not_compiled(self, reason: NotCompiled) -> None:
        console.note.print(f"the drafter stays plain: {reason}", style="dim", markup=False, highlight=False)

    def looked(self, drafter: str, found: Found) -> None:
        say(f"overlap   {drafter}: {found.line()}", soft_wrap=True)

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        say(_planned(plan))
        # these two can't go on later
        what = {events.Calibrating: "calibration", events.Evaluating: "evaluation"}.get(type(plan))
        progress = bar(
            plan.unit, plan.total, plan.done, is_steady=isinstance(plan, events.Training), usual_minutes=plan.usual_minutes,
            why_slow=why_slow,
        )  # fmt: skip
        with started_anew(what) if what else nullcontext(), progress as update:
            yield lambda done, **facts: update(done, _note(**facts))

    def finished(self, result: Result) -> None:
        match result:
            case events.Prepared():
                _say_prepared(result)
            case events.Trained(checkpoint):
                say(f"          checkpoint in {checkpoint}")
            case events.Calibrated(_, calibration):
                _say_calibrated(calibration)
            case events.Evaluated():
                _say_evaluated(result)


def say(line: str, *, soft_wrap: bool = False) -> None:
    console.out.print(line, highlight=False, soft_wrap=soft_wrap, markup=False)


def tell_compiling(compile: bool | None) -> None:
    """What takes a minute is said before."""
    if compile:
        console.note.print(
            "compiling the step: about a minute, once; two the first time on a machine", style="dim", highlight=False
        )


def why_slow() -> str:
    """Why work takes long here, and what helps."""
    if machine.is_busy():
        return "Other programs keep this machine busy; end them, the run goes on where it was"
    return f"This machine is slow: {machine.describe()}; fewer train.steps, prepare.count or evaluate.prompts help"


def _note(loss: float = 0.0, tokens_per_step: float | None = None, left_out: int | None = None) -> str | None:
    """What stands beside a bar."""
    if left_out is not None:
        return f"{left_out} left out"
    return f"loss {loss:.3f}, expected {tokens_per_step:.2f} tokens per step" if tokens_per_step else None


def _planned(plan: Plan) -> str:
    match plan:
        case events.Preparing():
            return (
                f"prepare   {plan.total} prompts from {plan.conversations}, {plan.done} answered before; at most "
                f"{counted(plan.tokens)} tokens to write, {sized(plan.size_bytes)} in {plan.folder}"
            )
        case events.Training():
            features = "live" if plan.feature_bytes is None else f"in {sized(plan.feature_bytes)} of memory"
            return (
                f"train     {plan.kind}: {counted(plan.parameters)} parameters, taps {list(plan.taps)}; {plan.total} steps of "
                f"{plan.batch} texts, {plan.passes:.1f} passes over {counted(plan.tokens)} tokens; features {features}, "
                f"0 bytes of disk; checkpoint {sized(plan.checkpoint_bytes)}"
            )
        case events.Calibrating():
            return (
                f"calibrate {plan.checkpoint}: {plan.total} prompts of {plan.task}, at most {counted(plan.tokens)} tokens to "
                f"write at temperature {plan.temperature:g}"
            )
        case events.Evaluating():
            return (
                f"evaluate  {', '.join(plan.drafters)}: {plan.prompts} prompts per task of {', '.join(plan.tasks)}; about "
                f"{counted(plan.tokens)} tokens to write, one interleaved run"
            )
    raise AssertionError(plan)


def _say_prepared(found: events.Prepared) -> None:
    if found.left_out:
        say(f"          {len(found.left_out)} rows left out; the first: {found.left_out[0]}")
    say(f"          {found.answers} answers, {counted(found.tokens)} tokens to learn, in {found.path}")
    if found.unanswered:
        say(
            f"          {found.unanswered} prompts without an answer: refused by the template, no room for an answer, or none "
            "given"
        )
    if found.others:
        say(
            f"          {found.others} answers to prompts that are not asked here (edited since, or another run's); they train "
            "too: name another prepare.folder to leave them out",
            soft_wrap=True,
        )


def _say_calibrated(found: Calibration) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("slot", "error before", "after", "of which noise", "temperature", "shift"):
        table.add_column(column, justify="right")
    errors = list(zip(found.before, found.after, found.noise, strict=True))
    for slot, own in enumerate(errors):
        scaled = (f"{found.temperatures[slot]:.2f}", f"{found.shifts[slot]:.2f}")
        table.add_row(str(slot), *(f"{100 * error:.1f} %" for error in own), *scaled)
    table.add_row("mean", *(f"{100 * sum(column) / len(errors):.1f} %" for column in zip(*errors, strict=True)), "", "")
    console.out.print(table)
    say(
        f"          scaled on {found.drafts[0]} drafts of {found.prompts[0]} prompts, judged on {found.drafts[1]} of "
        f"{found.prompts[1]} others; error of each slot's survival, {found.bins} bins",
        soft_wrap=True,
    )


def _say_evaluated(found: events.Evaluated) -> None:
    report, folder = found.report, found.folder
    console.out.print(summary.table(report))
    say(f"          {summary.headline(report)}", soft_wrap=True)
    tried = sum({row.task: row.prompts for row in report.rows}.values()) + len(report.left_out)
    say(f"          {len(report.left_out)} of {tried} prompts left out, {summary.left_out_because(report)}")
    say(f"          {folder / 'report.json'}, {folder / 'report.html'}")
