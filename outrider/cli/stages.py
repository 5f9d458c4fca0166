"""Output of a run's stages: plans, progress and results."""

import itertools
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from outrider import machine
from outrider.cli import console
from outrider.cli.console import bar, confirm, counted, lasting, restarted, say, sized
from outrider.data.overlap.contamination import OverlapReport
from outrider.fast import NotCompiled
from outrider.machine import measurements
from outrider.report import summary, tables
from outrider.runs import reporter as events
from outrider.runs.file import TargetConfig
from outrider.runs.reporter import Plan, Reporter, Result, Update
from outrider.targets.load import default_device
from outrider.targets.remote.served import RunTarget, ServedTarget
from outrider.training.fitting.calibrate import Calibration

MUCH_BYTES = 10_000_000_000
"""Size above which confirmation is required."""


class Printer(Reporter):
    """Prints plans, progress and results."""

    def __init__(self, is_confirmed: bool = False) -> None:
        """is_confirmed: large files may be written without asking."""
        self.began, self.is_confirmed = time.monotonic(), is_confirmed

    def writing(self, size_bytes: int, folder: Path) -> None:
        if size_bytes > MUCH_BYTES and not self.is_confirmed:
            confirm(f"at most {sized(size_bytes)} will be written to {folder}")

    def loading(self, target: TargetConfig) -> None:
        say(f"machine   {machine.describe(default_device(target.device))}")

    def loaded(self, target: RunTarget) -> None:
        spec = target.spec
        where = "; served remotely, not loaded" if isinstance(target, ServedTarget) else f" on {target.device}"
        say(
            f"target    {spec.name}: {spec.layers} layers x {spec.hidden}, {counted(target.parameters)} "
            f"parameters, {spec.precision}{where}"
        )

    def not_compiled(self, reason: NotCompiled) -> None:
        console.remark(f"the drafter runs uncompiled: {reason}", "dim")

    def looked(self, drafter: str, report: OverlapReport) -> None:
        say(f"overlap   {drafter}: {report.line()}")

    @contextmanager
    def working(self, plan: Plan) -> Iterator[Update]:
        say(_planned(plan))
        if resumed := _resumed(plan):
            say(f"          {resumed}")
        if isinstance(plan, events.TrainingPlan) and plan.schedule:
            say(f"          {plan.schedule}")
        self.began = time.monotonic()
        is_training = isinstance(plan, events.TrainingPlan)
        note = _Notes("expected " if is_training else "")
        with (
            restarted("calibration") if isinstance(plan, events.Calibrating) else nullcontext(),
            bar(plan.unit, plan.total, plan.done, is_training, plan.usual_minutes, why_slow) as update,
        ):
            yield lambda done, reading_s=(0.0, 0.0), **facts: update(done, note(**facts), reading_s)

    def finished(self, result: Result) -> None:
        seconds = time.monotonic() - self.began
        took = "took under 1 s" if seconds < 1 else f"took {lasting(seconds)}"
        match result:
            case events.Prepared():
                _say_prepared(result, took)
            case events.Stored():
                each = result.size_bytes / result.tokens
                say(f"          {sized(result.size_bytes)}, {each:,.0f} bytes per token, {took}; in {result.folder}")
            case events.Trained():
                _say_trained(result, took)
            case events.Calibrated(_, calibration):
                _say_calibrated(calibration, took)
            case events.Evaluated():
                _say_evaluated(result, took)


def why_slow() -> str:
    """Why work is slow on this machine, and what helps."""
    if measurements.is_busy():
        return "Other programs keep this machine busy; stop them and the run will speed up"
    return f"This machine is slow: {machine.describe()}; fewer train.steps, prepare.count or evaluate.prompts help"


class _Notes:
    """Figures next to the progress of a stage, from its updates."""

    def __init__(self, kind: str = ""):
        """kind: prefix of tokens per step, such as `expected `."""
        self.kind, self.pace, self.use = kind, "", ""
        self.first: tuple[float, float] | None = None
        """Time and tokens of the first update."""

    def __call__(
        self,
        tokens: float | None = None,
        loss: float | None = None,
        tokens_per_step: float | None = None,
        mfu: float | None = None,
        left_out: int = 0,
    ) -> str:
        # logged only at some steps, so the last figure is repeated
        self.pace = f"{self.kind}{tokens_per_step:.2f} tokens per step" if tokens_per_step else self.pace
        self.use = f"{100 * mfu:.0f} % of FLOPs" if mfu else self.use
        now = time.monotonic()
        self.first = self.first or (now, tokens or 0.0)
        seconds, written = now - self.first[0], (tokens or 0.0) - self.first[1]
        parts = [
            f"loss {loss:.3f}" if loss is not None else "",
            self.pace,
            f"{counted(written / seconds)} tokens/s" if written > 0 and seconds >= 1 else "",
            self.use,
            f"{left_out} left out" if left_out else "",
        ]
        return ", ".join(filter(None, parts))


def _resumed(plan: Plan) -> str:
    """Says that an earlier run is resumed; empty if there is none."""
    if not plan.done:
        return ""
    if plan.done >= plan.total:
        return f"all {plan.total} {plan.unit} are already done"
    return f"resuming from {plan.unit.removesuffix('s')} {plan.done} of {plan.total}"


def _planned(plan: Plan) -> str:
    match plan:
        case events.Preparing():
            of = "" if plan.available in (None, plan.total) else f" of {plan.available}"
            by = f"; by {summary.many(len(plan.servers), 'server')}" if plan.servers else ""
            return (
                f"prepare   {plan.total}{of} prompts from {plan.conversations}, {plan.done} already answered{by}; "
                f"at most {counted(plan.tokens)} tokens to generate, {sized(plan.size_bytes)} in {plan.folder}"
                + (f"; not used: {_reasons(plan.dropped)}" if plan.dropped else "")
            )
        case events.Storing():
            return (
                f"features  {plan.total} shards of {counted(plan.tokens)} tokens, {plan.done} already written; about "
                f"{sized(plan.size_bytes)} in {plan.folder}, {sized(plan.free_bytes)} free"
            )
        case events.TrainingPlan(model=model, source=source):
            weights = sum(weight.numel() for weight in model.parameters())
            passes = plan.total * plan.accumulate / source.steps_per_pass
            features = f"in {sized(source.bytes)} of memory" if source.is_cached else source.place
            return (
                f"train     {model.config.kind}: {counted(weights)} parameters, taps {list(model.taps)}; {plan.total} "
                f"steps of {source.size * plan.accumulate} texts, {passes:.1f} passes over "
                f"{counted(source.manifest.tokens)} tokens; "
                f"features {features}, {sized(source.disk_bytes)} of disk; checkpoint {sized(12 * weights)}"
            )
        case events.Calibrating():
            return (
                f"calibrate {plan.checkpoint}: {plan.total} prompts of {plan.task}, at most {counted(plan.tokens)} "
                f"tokens to generate at temperature {plan.temperature:g}"
            )
        case events.Evaluating():
            return (
                f"evaluate  {', '.join(plan.drafters)}: {plan.prompts} prompts per task of {', '.join(plan.tasks)}; "
                f"about {counted(plan.tokens)} tokens to generate, one interleaved run"
                + (f"; {plan.done} prompts were measured before" if plan.done else "")
            )
    raise AssertionError(plan)


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items() if count)


def _say_prepared(prepared: events.Prepared, took: str) -> None:
    if prepared.left_out:
        say(f"          {len(prepared.left_out)} rows left out; the first: {prepared.left_out[0]}")
    say(f"          {prepared.answers} answers, {counted(prepared.tokens)} training tokens, {took}; in {prepared.path}")
    if prepared.unstable:
        say(
            f"          {prepared.unstable} answers from the source are not trained on: their boundaries are "
            "ambiguous, or they were cut off"
        )
    if prepared.unanswered:
        why = "refused by the chat template, too long, or the source has none"
        say(f"          {prepared.unanswered} prompts without an answer: {why}")
    if prepared.failed:
        say(
            f"          {prepared.failed} prompts failed; rerun the same command to retry; "
            f"{'; '.join(prepared.why_failed)}"
        )
    for url, count in sorted(prepared.by_server.items()):
        say(f"          {count} answers by {url}")
    if prepared.retokenised:
        say(
            f"          {prepared.retokenised} answers arrived as text: their token ids come from the tokenizer, not "
            "from the model"
        )
    if prepared.truncated:
        say(
            f"          {prepared.truncated} answers were cut at max_new_tokens or length: they train without an end "
            "token"
        )
    if prepared.others:
        why = "not in this run (edited since, or from another run); they are not trained on"
        say(f"          {prepared.others} answers to prompts that are {why}")


def _say_trained(trained: events.Trained, took: str) -> None:
    """Loss and acceptance by depth, on training texts and on held-out ones."""
    training = trained.training
    loss = f"loss {training.loss_curve[-1][1]:.3f}" if training.loss_curve else ""
    say(f"          {'; '.join(filter(None, (loss, _accepted('expected', trained.acceptance), took)))}")
    acceptance = tuple(share for share in training.acceptance if share is not None)
    held_out = _accepted(summary.many(training.held_out or 0, "held-out answer") + ":", acceptance)
    probe = trained.probe_tokens_per_step
    measured = "" if probe is None else f"measured {probe:.2f} on a few prompts"
    if held_out or measured:
        say(f"          {'; '.join(filter(None, (held_out, measured)))}")
    say(f"          checkpoint in {trained.checkpoint}")


def _accepted(what: str, acceptance: Sequence[float]) -> str:
    """Tokens per step, and the share of drafts accepted to each depth.  acceptance: conditional on earlier depths."""
    reached = list(itertools.accumulate(acceptance, operator.mul))
    if not reached:
        return ""
    depths, shares = range(1, len(reached) + 1), (f"{100 * share:.0f}" for share in reached)
    by_depth = f"{', '.join(map(str, depths))}: {', '.join(shares)} %"
    return f"{what} {1 + sum(reached):.2f} tokens per step, accepted to depth {by_depth}"


def _say_calibrated(calibration: Calibration, took: str) -> None:
    columns = ("slot", "error before", "after", "of which noise", "temperature", "shift")
    table = console.table(*columns, right=columns)
    errors = list(zip(calibration.before, calibration.after, calibration.noise, strict=True))
    for slot, (slot_errors, *scaled) in enumerate(
        zip(errors, calibration.temperatures, calibration.shifts, strict=True)
    ):
        table.add_row(
            str(slot), *(f"{100 * error:.1f} %" for error in slot_errors), *(f"{value:.2f}" for value in scaled)
        )
    table.add_row("mean", *(f"{100 * sum(column) / len(errors):.1f} %" for column in zip(*errors, strict=True)), "", "")
    console.show(table)
    say(
        f"          fitted on {calibration.drafts[0]} drafts of {calibration.prompts[0]} prompts, evaluated on "
        f"{calibration.drafts[1]} of {calibration.prompts[1]} others; calibration error of each slot's survival in "
        f"{calibration.bins} bins; {took}"
    )


def _say_evaluated(evaluated: events.Evaluated, took: str) -> None:
    report, folder = evaluated.report, evaluated.folder
    console.out.print(tables.SummaryTable(report))
    say(f"          {summary.headline(report)}")
    if evaluated.before is not None:
        for line in summary.before_and_after(report, evaluated.before):
            say(f"tuned     {line}")
    tried = sum({row.task: row.prompts for row in report.rows}.values()) + len(report.left_out)
    left_out = (
        f", {len(report.left_out)} of {tried} left out {summary.left_out_because(report)}" if report.left_out else ""
    )
    say(f"          {summary.many(len(report.rows), 'row')} over {summary.many(tried, 'prompt')}{left_out}; {took}")
    if report.cut:
        say(f"          {summary.cut_sentence(report)}")
    if (load := report.machine_load) is not None and (load.repeated or load.contended):
        taken = max(load.waited or 0.0, load.stolen or 0.0)
        say(
            f"load      other programs took {100 * taken:.0f} % of the time; {load.repeated} of {load.runs} runs were "
            f"repeated, {load.contended} were still slowed down"
        )
    say(f"          {folder / 'report.json'}, {folder / 'report.html'}")
