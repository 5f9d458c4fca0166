"""What the stages of a run print: plans, progress and results."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from outrider import machine
from outrider.cli import console
from outrider.cli.console import bar, counted, restarted, say, sized
from outrider.compiled import NotCompiled
from outrider.data.contamination import Found
from outrider.report import summary, tables
from outrider.runs import reporter as events
from outrider.runs.file import TargetConfig
from outrider.runs.reporter import Plan, Reporter, Result, Update
from outrider.targets.load import default_device
from outrider.targets.transformers import TransformersTarget
from outrider.training.calibrate import Calibration


class Printer(Reporter):
    """Prints plans and results, and draws a bar while a stage works."""

    def loading(self, target: TargetConfig) -> None:
        say(f"machine   {machine.describe(default_device(target.device))}")
        tell_compiling(target.compile)

    def loaded(self, target: TransformersTarget) -> None:
        spec = target.spec
        say(
            f"target    {spec.name}: {spec.layers} layers x {spec.hidden}, {counted(target.model.num_parameters())} "
            f"parameters, {spec.precision} on {target.device}"
        )

    def not_compiled(self, reason: NotCompiled) -> None:
        console.remark(f"the drafter stays plain: {reason}", "dim")

    def looked(self, drafter: str, found: Found) -> None:
        say(f"overlap   {drafter}: {found.line()}")

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        say(_planned(plan))
        is_steady = isinstance(plan, events.Training)
        # these two can't go on later
        what = {events.Calibrating: "calibration", events.Evaluating: "evaluation"}.get(type(plan))
        with (
            restarted(what) if what else nullcontext(),
            bar(plan.unit, plan.total, plan.done, is_steady, plan.usual_minutes, why_slow) as update,
        ):
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


def tell_compiling(compile: bool | None) -> None:
    """What takes a minute is said before."""
    if compile:
        console.remark("compiling the step: about a minute, once; two the first time on a machine", "dim")


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
            of = "" if plan.available in (None, plan.total) else f" of {plan.available}"
            return (
                f"prepare   {plan.total}{of} prompts from {plan.conversations}, {plan.done} answered before; at most "
                f"{counted(plan.tokens)} tokens to write, {sized(plan.size_bytes)} in {plan.folder}"
            )
        case events.Training(model=model, source=source):
            weights, passes = sum(weight.numel() for weight in model.parameters()), plan.total / source.steps_per_pass
            features = f"in {sized(source.bytes)} of memory" if source.is_cached else "live"
            return (
                f"train     {model.config.kind}: {counted(weights)} parameters, taps {list(model.taps)}; {plan.total} steps of "
                f"{source.size} texts, {passes:.1f} passes over {counted(source.manifest.tokens)} tokens; features {features}, "
                f"0 bytes of disk; checkpoint {sized(12 * weights)}"
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
        why = "refused by the template, no room for an answer, or none given"
        say(f"          {found.unanswered} prompts without an answer: {why}")
    if found.others:
        why = "not asked here (edited since, or another run's); they do not train"
        say(f"          {found.others} answers to prompts that are {why}")


def _say_calibrated(found: Calibration) -> None:
    columns = ("slot", "error before", "after", "of which noise", "temperature", "shift")
    table = console.table(*columns, right=columns)
    errors = list(zip(found.before, found.after, found.noise, strict=True))
    for slot, (own, *scaled) in enumerate(zip(errors, found.temperatures, found.shifts, strict=True)):
        table.add_row(str(slot), *(f"{100 * error:.1f} %" for error in own), *(f"{value:.2f}" for value in scaled))
    table.add_row("mean", *(f"{100 * sum(column) / len(errors):.1f} %" for column in zip(*errors, strict=True)), "", "")
    console.out.print(table)
    say(
        f"          scaled on {found.drafts[0]} drafts of {found.prompts[0]} prompts, judged on {found.drafts[1]} of "
        f"{found.prompts[1]} others; error of each slot's survival, {found.bins} bins"
    )


def _say_evaluated(found: events.Evaluated) -> None:
    report, folder = found.report, found.folder
    console.out.print(tables.SummaryTable(report))
    say(f"          {summary.headline(report)}")
    tried = sum({row.task: row.prompts for row in report.rows}.values()) + len(report.left_out)
    say(f"          {len(report.left_out)} of {tried} prompts left out, {summary.left_out_because(report)}")
    say(f"          {folder / 'report.json'}, {folder / 'report.html'}")
