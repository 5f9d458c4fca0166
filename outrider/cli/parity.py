"""`outrider parity` and `outrider lm-eval`: check that a drafter changes neither texts nor benchmark scores."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.checkpoint import checksum
from outrider.cli import console
from outrider.cli.console import bar, counted, place_of_json, say, write_json
from outrider.cli.options import Chat, DrafterSettings, JsonTo, Overrides, TargetName
from outrider.config import override
from outrider.decoding.protocols import Drafter
from outrider.errors import ConfigError
from outrider.gate.parity import GreedyComparison, compare, compare_samples, prompts_of
from outrider.gate.statistics.two_samples import Samples
from outrider.gate.texts import compare_texts
from outrider.loading import load_drafter
from outrider.runs.baselines import parted
from outrider.runs.file import load
from outrider.runs.reporter import Reporter
from outrider.runs.stages import target_of
from outrider.sampling.settings import Sampling
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target
from outrider.targets.text.cuts import sentence
from outrider.training.progress.checkpoints import chosen

if TYPE_CHECKING:
    from outrider.gate.harness import TaskRun

LONGEST = 64
"""Longest prompt for sampling, in tokens: any prompt will do for a test of distributions, and short ones are fast."""
STYLES = {
    "equal": "green",
    "equivalent": "green",
    "no difference": "green",
    "tie": "yellow",
    "not enough prompts": "yellow",
}


@console.restarted("comparison")
def parity(
    file: Annotated[Path | None, typer.Argument(help="Run file (YAML); or use --target and --drafter.")] = None,
    overrides: Overrides = None,
    target: Annotated[str | None, typer.Option(help="`demo`, `smollm2`, a folder, or a Hugging Face id.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter kind or checkpoint folder.")] = None,
    settings: DrafterSettings = None,
    dtype: Annotated[str | None, typer.Option(help="Number type of the target, such as bfloat16.")] = None,
    prompts: Annotated[str, typer.Option(help="`stdlib`, a task, or a file of prompts.")] = "stdlib",
    count: Annotated[int, typer.Option(min=1, help="Prompts continued greedily.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Above 0, also test sampled texts.")] = 0.0,
    samples: Annotated[int, typer.Option(min=1, help="Texts sampled per prompt, with and without the drafter.")] = 200,
    sampled_prompts: Annotated[int, typer.Option(min=1)] = 2,
    sampled_tokens: Annotated[int, typer.Option(min=1, help="Length of a sampled text.")] = 12,
    alpha: Annotated[float, typer.Option(min=1e-6, max=0.5, help="Probability of a false alarm.")] = 0.01,
    slots: Annotated[int, typer.Option(min=1, help="Concurrent prompts.")] = 8,
    seed: int = 0,
    texts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Compare two files of answers (JSONL) instead; give it twice."),
    ] = None,
    json_to: JsonTo = None,
) -> None:
    """Check that a drafter does not change the output.  Exit code 1 if a difference can't be explained by rounding: a
    bug, a different distribution, or a different text."""
    place_of_json(json_to)
    if texts:
        _texts(texts, json_to)
        return
    if not (file or drafter):
        raise ConfigError(
            "nothing to compare; give a run file, or --drafter NAME with --target NAME, or --texts FILE twice"
        )
    if file and (target or drafter or settings or dtype):
        raise ConfigError(
            f"{file} names the target and the drafter; leave out --target, --drafter, --set and --dtype, or leave "
            "out the file"
        )
    if file:
        loaded, built, name, weights = _of_run_file(file, overrides)
    else:
        loaded, name = load_target(target or "demo", dtype=dtype), drafter or ""
        weights = checksum(name)
        built = load_drafter(name, loaded, **override({}, settings or ()))
    ids, read = prompts_of(loaded, prompts, max(count, sampled_prompts if temperature else 1), max_new_tokens, seed)
    say(
        f"parity    {name} against plain: {len(read[:count])} prompts of {prompts}, greedy; at most "
        f"{counted(2 * len(read[:count]) * max_new_tokens)} tokens to generate"
    )
    with bar("texts", 2 * len(read[:count])) as update:
        greedy = compare(
            loaded, read[:count], built, max_new_tokens=max_new_tokens, slots=slots, ids=ids[:count], on_prompt=update
        )
    _say_greedy(greedy)
    results: dict[str, Any] = {
        "target": loaded.spec.name, "drafter": name, "weights": weights, "greedy": greedy.as_json(), "sampled": None,
    }  # fmt: skip
    has_failed = greedy.verdict == "bug"
    if temperature:
        short = [tokens[-LONGEST:] for tokens in read[:sampled_prompts]]
        say(
            f"sampled   {samples} texts of each of {len(short)} prompts at temperature {temperature:g}, with and "
            f"without; {counted(2 * samples * len(short) * sampled_tokens)} tokens to generate"
        )
        with bar("texts", 2 * samples * len(short)) as update:
            drawn = compare_samples(
                loaded, short, built, sampling=Sampling(temperature), samples=samples, max_new_tokens=sampled_tokens,
                slots=max(slots, 32), alpha=alpha, seed=seed, on_text=update,
            )  # fmt: skip
        _say_samples(drawn)
        results["sampled"] = drawn.as_json()
        has_failed = has_failed or drawn.verdict == "different"
    write_json(json_to, results)
    if has_failed:
        raise typer.Exit(1)


def _of_run_file(file: Path, overrides: list[str] | None) -> tuple[TransformersTarget, Drafter, str, str | None]:
    """The run's target, its trained drafter, the drafter's name, and the checksum of its weights."""
    run, _ = load(file, overrides or [])
    loaded = target_of(run, Reporter())
    kind, settings = parted(run.drafter)
    if run.train is None:
        return loaded, load_drafter(kind, loaded, **settings), kind, checksum(kind)
    folder = chosen(run.folder)
    return loaded, load_drafter(folder, loaded), kind, checksum(folder)


def _say_greedy(comparison: GreedyComparison) -> None:
    table = console.table(
        "prompt", "tokens", "shared", "verdict", "margin", "strays", right=("tokens", "shared", "margin")
    )
    for pair in comparison.pairs:
        margin = (
            "-" if pair.margin is None else f"{pair.margin.units:.2f}" if pair.margin.units < 1e6 else "beyond rounding"
        )
        strays = pair.margin.strays if pair.margin else "-"
        table.add_row(
            pair.id,
            str(pair.tokens),
            str(pair.shared),
            pair.verdict,
            margin,
            strays,
            style=STYLES.get(pair.verdict, "red"),
        )
    console.show(table)
    verdicts = Counter(pair.verdict for pair in comparison.pairs)
    say(
        f"          {verdicts['equal']} of {len(comparison.pairs)} texts equal, {verdicts['tie']} ties; margins are in "
        f"units of {comparison.dtype} rounding, and at most {comparison.allowed:g} counts as a tie; every drafted "
        f"token is within {comparison.worst:.2f} of the most likely one"
    )
    _say_verdict(comparison.verdict)


def _say_samples(samples: Samples) -> None:
    table = console.table("test", "statistic", "chance", "allowed", "", right=("statistic", "chance", "allowed"))
    for test in samples.tests:
        table.add_row(
            test.name, f"{test.statistic:.4g}", f"{test.chance:.4f}", f"{test.allowed:.4f}",
            "differs" if test.differs else "",
            style="red" if test.differs else "",
        )  # fmt: skip
    console.show(table)
    say(
        f"          {samples.samples} texts of each of {samples.prompts} prompts in each set; a total variation of "
        f"{samples.detectable:.3f} at one position is detectable with 80 % power; false alarms: {samples.alpha:g}"
    )
    _say_verdict(samples.verdict)


def _say_verdict(verdict: str) -> None:
    say(f"verdict   {verdict}", STYLES.get(verdict, "bold white on red"))


def _texts(paths: list[Path], json_to: str | None) -> None:
    """Compare two files of answers.  Exit code 1 if they differ."""
    if len(paths) != 2:
        raise ConfigError(f"--texts must be given 2 times, once for each file of answers, got {len(paths)}")
    comparison = compare_texts(*paths)
    table = console.table("prompt", "first difference", str(paths[0]), str(paths[1]))
    for pair in comparison.pairs:
        if pair.excerpts is not None:
            table.add_row(pair.id, f"character {pair.first_character}", *(repr(text) for text in pair.excerpts))
    if comparison.equal < len(comparison.pairs):
        console.show(table)
    equal = f"{comparison.equal} of {len(comparison.pairs)} texts equal"
    say(f"          {equal}; without tokens, a rounding tie can't be told from a bug")
    _say_verdict(comparison.verdict)
    write_json(json_to, comparison.as_json())
    if comparison.verdict == "different":
        raise typer.Exit(1)


# ── lm-evaluation-harness ─────────────────────────────────────────────────────────────────────────────────────────────


@console.restarted("evaluation")
def lm_eval(
    tasks: Annotated[str, typer.Argument(metavar="TASK[,TASK]", help="Tasks of lm-eval, or of --include-path.")],
    target: TargetName = "demo",
    drafter: Annotated[str, typer.Option(help="Drafter kind or checkpoint folder.")] = "ngram",
    settings: DrafterSettings = None,
    dtype: Annotated[str | None, typer.Option(help="Number type of the target, such as bfloat16.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Prompts per task; all unless given.")] = None,
    include_path: Annotated[
        str | None,
        typer.Option(
            "--include-path", metavar="FOLDER", help="Folder with your own tasks; their Python code is executed."
        ),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Concurrent prompts.")] = 1,
    chat: Chat = False,
    margin: Annotated[
        float, typer.Option(min=1e-6, help="Score difference that is considered equal; 0.01 is one point.")
    ] = 0.01,
    max_gen_toks: Annotated[
        int, typer.Option(min=1, help="Maximum tokens of an answer, for tasks that set no limit.")
    ] = 256,
    json_to: JsonTo = None,
) -> None:
    """Score tasks of lm-evaluation-harness with and without a drafter.  Exit code 1 if greedy answers or scores
    differ."""
    # lm-eval reads it when imported; its progress bars would overwrite ours
    os.environ.setdefault("TQDM_DISABLE", "1")
    place_of_json(json_to)
    try:
        from outrider.gate.harness import Job, both
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "lm_eval":
            raise
        raise ConfigError("lm-eval is not installed; pip install 'outrider[eval]'") from None
    names = tuple(name.strip() for name in tasks.split(",") if name.strip())
    if not names:
        raise ConfigError("no task is named; give one or more, such as gsm8k,mmlu")
    job = Job(
        tasks=names, target=target, drafter=drafter, settings=override({}, settings or ()), dtype=dtype, limit=limit,
        include_path=include_path, slots=slots, chat=chat, margin=margin, max_gen_toks=max_gen_toks,
    )  # fmt: skip
    say(
        f"lm-eval   {', '.join(names)} on {target}: plain, then with {drafter}; "
        f"{'all' if limit is None else f'at most {limit}'} prompts of each, {slots} side by side"
    )
    with bar("tasks", len(names)) as update:
        runs = both(job, lambda stage, done, of: update(0, f"{stage}: {done} of {of}"))
    _say_runs(runs, margin)
    write_json(
        json_to, {"target": target, "drafter": drafter, "margin": margin, "tasks": [run.as_json() for run in runs]}
    )
    if not all(run.holds for run in runs):
        raise typer.Exit(1)


def _say_runs(runs: list[TaskRun], margin: float) -> None:
    numbers = ("plain", "drafted", "equal", "plain s", "drafted s", "speed-up", "tokens per step")
    table = console.table("task", "metric", *numbers, "verdict", right=numbers)
    for run in runs:
        for i, score in enumerate(run.scores):
            speed = (
                f"{run.speedup:.2f}" if run.speedup else "-",
                f"{run.tokens_per_step:.2f}" if run.tokens_per_step else "-",
            )
            shared = ("", "", "", "", "", "") if i else (
                f"{run.equal} of {run.answers}", f"{run.plain_s:.1f}", f"{run.drafted_s:.1f}", *speed, run.verdict,
            )  # fmt: skip
            table.add_row(
                "" if i else run.task, score.metric, f"{score.plain:.4f}", f"{score.drafted:.4f}", *shared,
                style=STYLES.get(run.verdict, "red") if run.holds else "red",
            )  # fmt: skip
    console.show(table)
    for run in runs:
        if run.cut:
            say(f"          {run.task}: {sentence(run.cut)}")
        if not run.holds and not run.is_sampled:
            say(
                f"          {run.task}: {run.answers - run.equal} of {run.answers} greedy answers differ, but "
                "none should; `outrider parity` tells a rounding tie from a bug",
                "red",
            )  # fmt: skip
        needed = max((score.equivalence.needed for score in run.scores if score.equivalence), default=0)
        if run.verdict == "not enough prompts":
            say(
                f"          {run.task}: {run.prompts} prompts are too few to show equal scores within {margin:g}; "
                f"it takes about {needed:,}"
            )
