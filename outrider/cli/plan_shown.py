"""What `outrider plan` prints: acceptance, rows, costs, rules of the field, the decision.  The JSON has everything."""

from __future__ import annotations

from outrider.cli import console
from outrider.cli.console import lasting, say, sized
from outrider.cli.plan_probe import around, show_probe
from outrider.plan.schema import Once, Plan, Profile, Row

SHOWN_DEPTHS = (1, 4, 7)
"""Of the table of break-even points; the JSON has them all."""


def show_plan(found: Plan) -> None:
    say(f"plan      {found.target} on {found.hardware}")
    for name, source in found.acceptance.items():
        say(f"          {name}: {source}")
    if found.probe is not None and found.probe.rows:
        show_probe(found.probe)
    if found.rows:
        console.show(_rows(found))
        console.show(_loads(found))
    elif found.break_even:
        console.show(_points(found))
    if found.once is not None:
        _show_once(found.once)
    if found.costs:
        console.show(_daily(found))
    if found.profile is not None:
        _show_profile(found.profile)
    _show_rules(found)
    for note in found.notes:
        say(f"          {note}")
    depths = ", ".join(f"{depth} at {load}" for load, depth in found.depths.items())
    if depths:
        say(f"          depth by requests at once: {depths}")
    what = f" {found.method}, depth {found.depth}" if found.method else ""
    say(f"{found.decision}{what}", "green" if found.decision == "ENABLE" else "yellow")
    say(f"          {found.because}")


def _rows(found: Plan) -> console.FittedTable:
    """The best depth of each method at the traffic's load."""
    heads = ("depth", "tokens/step", "speed-up", "plain", "draft", "rest", "memory")
    shown = console.table("ms a step", *heads, right=heads)
    load = max(1.0, (found.demand or {})["concurrency"])
    for row in (row for (_, at), row in _best(found).items() if at == load):
        ms = (f"{1e3 * each:.2f}" for each in (row.plain_s, row.draft_s, row.verify_s + row.other_s))
        memory = "" if row.memory_bytes is None else sized(row.memory_bytes)
        shown.add_row(row.method, str(row.depth), around(row.tokens_per_step), around(row.speedup), *ms, memory)
    return shown


def _loads(found: Plan) -> console.FittedTable:
    """The speed-up of each method's best depth at every load, and that depth."""
    best = _best(found)
    loads = sorted({load for _, load in best})
    heads = [f"{load:.4g}" for load in loads]
    shown = console.table("speed-up (depth) at once", *heads, right=heads)
    for method in dict.fromkeys(name for name, _ in best):
        rows = [best[method, load] for load in loads]
        shown.add_row(method, *(f"{row.speedup.center or 0:.2f} ({row.depth})" for row in rows))
    return shown


def _best(found: Plan) -> dict[tuple[str, float], Row]:
    """The row of the best depth by method and load."""
    best: dict[tuple[str, float], Row] = {}
    for row in found.rows:
        key = row.method, row.concurrency
        if key not in best or (row.speedup.center or 0) > (best[key].speedup.center or 0):
            best[key] = row
    return best


def _points(found: Plan) -> console.FittedTable:
    heads = ("depth", "tokens/step needed", "chance a token", "pays up to")
    shown = console.table("method", *heads, right=heads)
    for point in (each for each in found.break_even if each.depth in SHOWN_DEPTHS):
        chance = "never" if point.acceptance is None else f"{point.acceptance:.2f}"
        up_to = "unknown" if point.pays is None else "any" if point.crossover is None else f"{point.crossover} at once"
        shown.add_row(point.method, str(point.depth), f"{point.tokens_per_step:.2f}", chance, up_to)
    return shown


def _show_once(own: Once) -> None:
    """What comes before serving: hours, bytes, money."""
    shown = console.table("once", "takes", "money", right=("takes", "money"))
    shown.add_row("data", lasting(3600 * (own.data_hours or 0)), _money(own.data_money))
    shown.add_row("training", lasting(3600 * (own.training_hours or 0)), _money(own.training_money))
    shown.add_row("storage, a year", sized(own.storage_bytes or 0), _money(own.storage_money))
    shown.add_row("together", "", _money(own.money))
    console.show(shown)
    for line in own.assumed:
        say(f"          {line}")


def _daily(found: Plan) -> console.FittedTable:
    """Hours, bytes and money of a day at half, all and twice the traffic."""
    heads = ("at once", "hours", "saved", "money", "saved money", "drafter", "pays back")
    shown = console.table("a day at", *heads, right=heads)
    for cost in found.costs:
        if cost.concurrency is None:
            shown.add_row(f"x{cost.traffic:g}", "more than the machine can do")
            continue
        hours, saved = cost.device_hours_per_day, cost.device_hours_saved_per_day
        shown.add_row(
            f"x{cost.traffic:g}", f"{cost.concurrency:.1f}", _number(hours), _number(saved), _money(cost.spent_per_day),
            _money(cost.saved_per_day), "" if cost.memory_bytes is None else sized(cost.memory_bytes),
            "" if cost.pays_back_after_days is None else f"{cost.pays_back_after_days:,.1f} days",
        )  # fmt: skip
    return shown


def _show_rules(found: Plan) -> None:
    """Rules of the field: whether they hold here, and what we measured."""
    for rule in found.rules:
        holds = {True: "holds here", False: "does not hold here", None: "can't be told here"}[rule.holds]
        say(f"rule      {rule.says}: {holds}")
        say(f"          here: {rule.here}")
        say(f"          measured: {rule.measured}")


def _show_profile(own: Profile) -> None:
    step = f"{own.concurrency} at once of {own.context} tokens: a plain step is bound by {own.bound}"
    say(f"profile   {own.device}, {step}")
    needs = f"its bytes need {own.memory:.0%}, its products {own.compute:.0%}"
    say(f"          a kernel ran in {own.busy:.0%} of it; {needs}")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
