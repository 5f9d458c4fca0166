"""What `outrider plan` prints: acceptance, rows, costs, the decision.  The JSON has everything."""

from __future__ import annotations

from outrider.cli import console
from outrider.cli.console import lasting, say, sized
from outrider.cli.plan_probe import around, show_probe
from outrider.plan.schema import Once, Plan, Profile, Row

SHOWN_DEPTHS = (1, 4, 7)
"""Depths in the table of break-even points; the JSON has all of them."""


def show_plan(plan: Plan) -> None:
    say(f"plan      {plan.target} on {plan.hardware}")
    for name, source in plan.acceptance.items():
        say(f"          {name}: {source}")
    if plan.probe is not None and plan.probe.rows:
        show_probe(plan.probe)
    if plan.rows:
        console.show(_rows(plan))
        console.show(_loads(plan))
        if plan.placements:
            console.show(_placements(plan))
    elif plan.break_even:
        console.show(_points(plan))
    if plan.once is not None:
        _show_once(plan.once)
    if plan.costs:
        console.show(_daily(plan))
    if plan.profile is not None:
        _show_profile(plan.profile)
    for note in plan.notes:
        say(f"          {note}")
    depths = ", ".join(f"{depth} at {load}" for load, depth in plan.depths.items())
    if depths:
        say(f"          depth by concurrent requests: {depths}")
    what = f" {plan.method}, depth {plan.depth}" if plan.method else ""
    say(f"{plan.decision}{what}", "green" if plan.decision == "ENABLE" else "yellow")
    say(f"          {plan.because}")


def _rows(plan: Plan) -> console.PlainTable:
    """The best depth of each method at the traffic's load."""
    heads = ("depth", "tokens/step", "speed-up", "plain", "draft", "rest", "memory")
    shown = console.table("ms/step", *heads, right=heads)
    load = max(1.0, (plan.demand or {})["concurrency"])
    for row in (row for (_, at), row in _best(plan).items() if at == load):
        ms = (f"{1e3 * each:.2f}" for each in (row.plain_s, row.draft_s, row.verify_s + row.other_s))
        memory = "" if row.memory_bytes is None else sized(row.memory_bytes)
        shown.add_row(row.method, str(row.depth), around(row.tokens_per_step), around(row.speedup), *ms, memory)
    return shown


def _loads(plan: Plan) -> console.PlainTable:
    """The speed-up of each method's best depth at every load, and that depth."""
    best = _best(plan)
    loads = sorted({load for _, load in best})
    heads = [f"{load:.4g}" for load in loads]
    shown = console.table("speed-up (depth) by concurrency", *heads, right=heads)
    for method in dict.fromkeys(name for name, _ in best):
        rows = [best[method, load] for load in loads]
        shown.add_row(method, *(f"{row.speedup.center or 0:.2f} ({row.depth})" for row in rows))
    return shown


def _placements(plan: Plan) -> console.PlainTable:
    """Each method's drafter on the target's device, on a device of its own, and on the CPU."""
    heads = ("devices", "speed-up", "tokens/s", "draft, ms", "memory", "texts fit")
    shown = console.table("drafter on", *heads, right=heads)
    for each in plan.placements:
        slots = "" if each.slots is None else f"{each.slots}"
        cells = str(each.devices), f"{each.speedup.center or 0:.2f}", f"{each.tokens_per_s:.0f}"
        shown.add_row(
            f"{each.method}, {each.where}", *cells, f"{1e3 * each.draft_s:.2f}", sized(each.drafter_bytes), slots
        )
    return shown


def _best(plan: Plan) -> dict[tuple[str, float], Row]:
    """The row of the best depth by method and load."""
    best: dict[tuple[str, float], Row] = {}
    for row in plan.rows:
        key = row.method, row.concurrency
        if key not in best or (row.speedup.center or 0) > (best[key].speedup.center or 0):
            best[key] = row
    return best


def _points(plan: Plan) -> console.PlainTable:
    heads = ("depth", "tokens/step needed", "per token", "pays up to")
    shown = console.table("method", *heads, right=heads)
    for point in (each for each in plan.break_even if each.depth in SHOWN_DEPTHS):
        chance = "never" if point.acceptance is None else f"{point.acceptance:.2f}"
        load = "any" if point.crossover is None else f"{point.crossover} concurrent"
        up_to = "unknown" if point.pays is None else load
        shown.add_row(point.method, str(point.depth), f"{point.tokens_per_step:.2f}", chance, up_to)
    return shown


def _show_once(once: Once) -> None:
    """Up-front cost: hours, bytes, money."""
    shown = console.table("once", "takes", "money", right=("takes", "money"))
    shown.add_row("data", lasting(3600 * (once.data_hours or 0)), _money(once.data_money))
    shown.add_row("training", lasting(3600 * (once.training_hours or 0)), _money(once.training_money))
    shown.add_row("storage, one year", sized(once.storage_bytes or 0), _money(once.storage_money))
    shown.add_row("total", "", _money(once.money))
    console.show(shown)
    for line in once.assumed:
        say(f"          {line}")


def _daily(plan: Plan) -> console.PlainTable:
    """Hours, bytes and money of a day at half, all and twice the traffic."""
    heads = ("at once", "hours", "saved", "money", "saved money", "drafter", "pays back")
    shown = console.table("a day at", *heads, right=heads)
    for cost in plan.costs:
        if cost.concurrency is None:
            shown.add_row(f"x{cost.traffic:g}", "too large for this machine")
            continue
        hours, saved = cost.device_hours_per_day, cost.device_hours_saved_per_day
        shown.add_row(
            f"x{cost.traffic:g}", f"{cost.concurrency:.1f}", _number(hours), _number(saved), _money(cost.spent_per_day),
            _money(cost.saved_per_day), "" if cost.memory_bytes is None else sized(cost.memory_bytes),
            "" if cost.pays_back_after_days is None else f"{cost.pays_back_after_days:,.1f} days",
        )  # fmt: skip
    return shown


def _show_profile(profile: Profile) -> None:
    step = (
        f"{profile.concurrency} concurrent texts of {profile.context} tokens: a plain step is bound by {profile.bound}"
    )
    say(f"profile   {profile.device}, {step}")
    needs = f"memory traffic needs {profile.memory:.0%}, matrix products {profile.compute:.0%}"
    say(f"          a kernel ran in {profile.busy:.0%} of the step; {needs}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
