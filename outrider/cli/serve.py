"""`outrider serve`: an OpenAI-compatible server, or answers to a file of requests."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from outrider import checkpoint, machine
from outrider import config as configs
from outrider.cli import console
from outrider.cli.console import bar, say, sized
from outrider.cli.options import DRAFTERS_OWN, TARGET_OPTIONS, DrafterName, DrafterSettings, Fields, with_options
from outrider.cli.stages import Printer
from outrider.decoding.protocols import Drafter
from outrider.drafters import kinds
from outrider.drafters.mix import Mix
from outrider.errors import ConfigError
from outrider.fast.packages import background
from outrider.loading import describe, load_drafter
from outrider.policies import named
from outrider.runs import file as runs
from outrider.runs.baselines import Choice, compile_drafter, parted
from outrider.runs.file import TargetConfig
from outrider.serve import batch
from outrider.serve.config import Config
from outrider.serve.engine import Engine
from outrider.serve.http import server
from outrider.serve.http.admission import Admission
from outrider.serve.http.api import make_app
from outrider.serve.http.keys import KeyRing
from outrider.serve.learning import folder as learning
from outrider.serve.learning.learner import Learner
from outrider.serve.records.metrics import Telemetry
from outrider.serve.records.request_log import RequestLog
from outrider.serve.records.traces import Traces
from outrider.serve.service import Post, Service
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target, work_for_first
from outrider.training.progress.checkpoints import chosen

RUN_FILES = (".yaml", ".yml")
OPTIONS = (
    "host port name slots length policy verification allow_lossy keys allow_anonymous drain_s=drain request_log "
    "log_prompts"
)
PREFIX_SHARE = 0.1
"""Default share of free memory for the prefix cache."""


class Served(NamedTuple):
    """Target, drafter and settings of a server."""

    target: TargetConfig
    drafter: Choice | None
    config: Config


@with_options
def serve(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUNFILE KEY=VALUE",
            show_default=False,
            help="A run file, whose target and trained drafter are served; and settings, such as serve.queue=64.",
        ),
    ] = None,
    *,
    target_overrides: Annotated[list[str], Fields(TargetConfig, TARGET_OPTIONS, "target", DRAFTERS_OWN)],
    drafter: DrafterName = None,
    settings: DrafterSettings = None,
    serve_overrides: Annotated[list[str], Fields(Config, OPTIONS, "serve")],
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log to standard error, with a JSON line per request.")
    ] = False,
    batch_in: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Answer the requests in a JSONL file, without a server.")
    ] = None,
    batch_out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the answers go; requests with an answer are skipped.")
    ] = None,
) -> None:
    """Serve a target and its drafter over an OpenAI-compatible API."""
    served = _served(what or (), [*serve_overrides, *target_overrides], drafter, settings or ())
    work_for_first(served.target.tensor_parallel)
    if verbose:
        _log_all()
    if (batch_in is None) != (batch_out is None):
        raise ConfigError(
            "--batch-in and --batch-out must be given together: the file of requests, and the file for the answers"
        )
    named.check_verification(served.config.verification, served.config.allow_lossy)
    if batch_in is not None and batch_out is not None:
        _answer_file(served, batch_in, batch_out)
    else:
        _answer_clients(served)


def _log_all() -> None:
    """Send the server's log to standard error."""
    handler, logger = console.LogHandler(), logging.getLogger("outrider.serve")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _answer_clients(served: Served) -> None:
    config = served.config
    sock = server.bound(config)  # first, so that an occupied port is reported before minutes of loading
    keys = None if config.keys is None else KeyRing(config.keys)
    with _service(served) as (service, post), sock:
        telemetry = service.engine.telemetry
        app = make_app(service, telemetry, lambda: admission.is_closed)
        admission = Admission(app, config, keys, telemetry)
        what = "the keys of " + str(config.keys) if keys else "no key is required"
        line = f"server    {server.address_of(sock)}, model {service.name}; {what}; Ctrl-C stops"
        remark = lambda text: console.remark(f"          {text}")
        http_server = server.Server(admission, service, post, remark, ready=lambda: say(line))
        server.run(http_server, sock)
    say("          stopped" if http_server.unfinished else "          stopped; all running requests have finished")


def _answer_file(served: Served, source: Path, to: Path) -> None:
    total, before = batch.check(source, to)
    say(f"batch {total} requests from {source}, {before} already answered; answers go to {to}")
    if before == total:
        return
    with _service(served) as (service, post), bar("requests", total, before) as update:
        tell = lambda done, refused: update(before + done, f"{refused} refused" if refused else "")
        refused = batch.run(service, post, source, to, tell)
    say(f"          {total - before} answered, {refused} of them refused; {to}")


@contextmanager
def _service(served: Served) -> Iterator[tuple[Service, Post]]:
    """The service with its running engine; prints their settings."""
    config, printer = served.config, Printer()
    path, traces = config.request_log, None if config.traces is None else Traces(config.traces)
    log = RequestLog(None if path is None else Path(path), log_prompts=config.log_prompts, traces=traces)
    with log:
        machine.set_up_process()
        # In a short-lived thread: OpenMP keeps a pool per computing thread, and with more pool threads than cores,
        # decoding threads sleep at every barrier instead of spinning, which makes a step six times as slow.
        with ThreadPoolExecutor(1, "outrider-load") as loading:
            service, post, learner = loading.submit(_loaded, served, printer, log).result()
        with ExitStack() as running:
            if learner is not None:
                running.enter_context(learner)
                say(f"learning from served requests, version {learner.state.version}; log in {learner.folder.path}")
            running.enter_context(service.engine)
            _say_engine(service.engine, config)
            yield service, post


def _loaded(served: Served, printer: Printer, log: RequestLog) -> tuple[Service, Post, Learner | None]:
    config = served.config
    learned = _learned(served)
    printer.loading(served.target)
    target = load_target(served.target.name, **served.target.model_dump(exclude={"name"}))
    printer.loaded(target)
    drafter, label, names = _drafter(served, target, printer, learned)
    if served.target.compile is None and isinstance(target, TransformersTarget):
        _compile_in_background(served, learned, target, drafter)
    name, post = config.name or _name_of(target.spec.name), Post()
    telemetry = Telemetry(name, config.slots, drafter=label)
    memory_bytes = None if config.memory_gb is None else int(config.memory_gb * 1e9)
    engine = Engine(
        target, drafter, slots=config.slots, length=config.length, memory_bytes=memory_bytes, queue=config.queue,
        policy=config.policy, verification=named.judge(config.verification, config.allow_lossy),
        prefix_bytes=_prefix_bytes(config, target), telemetry=telemetry, post=post, interval_s=config.interval_s,
        drafter_timeout_s=config.drafter_timeout_s,
    )  # fmt: skip
    telemetry.length = engine.length
    learner = None if learned is None else Learner(engine, target, learned)
    return Service(engine, target, config, name=name, drafters=names, log=log), post, learner


def _prefix_bytes(config: Config, target: TransformersTarget) -> int:
    """Memory for the prefix cache, in bytes."""
    configured = config.prefix_bytes
    return int(PREFIX_SHARE * machine.free_memory(target.device)) if configured is None else configured


def _compile_in_background(
    served: Served, learned: learning.Folder | None, target: TransformersTarget, drafter: Drafter | None
) -> None:
    section, kind, settings = served.target, None, dict[str, Any]()
    if section.trust_remote_code:  # the other process would run that code too
        return
    if served.drafter is not None:
        kind, settings = (served.drafter, {}) if isinstance(served.drafter, str) else parted(served.drafter)
    background.build(
        [target.step, *(drafter.steps if drafter else ())], section.name,
        kind if learned is None else str(learned.current),
        [f"{key}={json.dumps(value)}" for key, value in settings.items()],
        dtype=section.dtype, revision=section.revision,
    )  # fmt: skip


def _learned(served: Served) -> learning.Folder | None:
    """The folder of a learning drafter.  Raises ConfigError for a drafter that can't learn, before anything loads."""
    if served.config.learning is None:
        return None
    kind = served.drafter if isinstance(served.drafter, str | None) else parted(served.drafter)[0]
    return learning.opened(served.config.learning, kind or "none", served.target.model_dump(), torch.get_num_threads())


def _drafter(
    served: Served, target: TransformersTarget, printer: Printer, learned: learning.Folder | None
) -> tuple[Drafter | None, str, list[str]]:
    """The drafter, its label, and the drafter names that a request may choose from."""
    if served.drafter is None:
        say("drafter   none: plain decoding, or drafts from a request's prediction")
        return None, "", []
    kind, options = (served.drafter, {}) if isinstance(served.drafter, str) else parted(served.drafter)
    drafter = load_drafter(kind if learned is None else learned.current, target, **options)
    if served.target.compile:
        compile_drafter(drafter, printer)
    if learned is not None:
        learned.set(compile=any(step.graph is not None for step in drafter.steps))
    names = list(drafter.names) if isinstance(drafter, Mix) else [str(kind)]
    of = f" of {', '.join(names)}" if isinstance(drafter, Mix) else ""
    say(f"drafter   {kind}{of}: at most {drafter.limit} tokens per step")
    return drafter, str(kind), names


def _name_of(target: str) -> str:
    """A target's name for clients: only the last part of a path, which is private."""
    return Path(target).resolve().name if Path(target).exists() else target


def _say_engine(engine: Engine, config: Config) -> None:
    most, each = engine.scheduler.tokens or engine.slots * engine.length, engine.scheduler.cache.column_bytes
    size = f", up to {sized(most * each)} of keys and values" if each else ""
    kept = engine.prefixes.budget_bytes
    shared = f"{sized(kept)} for the prefix cache" if kept else "no prefix cache"
    lossy = f", verification {config.verification}" if config.verification != "standard" else ""
    say(
        f"engine    {engine.slots} slots of {engine.length:,} tokens{size}; {shared}; a queue of {config.queue} texts; "
        f"policy {config.policy}{lossy}"
    )
    say(f"steps     {engine.runner.words}")


# ── what is served ────────────────────────────────────────────────────────────────────────────────────────────────────


def _served(what: Sequence[str], options: Sequence[str], drafter: str | None, settings: Sequence[str]) -> Served:
    """Target, drafter and settings, from a run file or names.  Raises ConfigError."""
    words = [word for word in what if not re.match(r"[A-Za-z_][\w.]*=", word)]
    overrides = [*(word for word in what if word not in words), *options]
    if len(words) > 1 or any(not word.endswith(RUN_FILES) for word in words):
        raise ConfigError(
            f"{words[-1]!r} is neither a run file (.yaml) nor a setting (key=value); use --target for a target and "
            "--drafter for a drafter"
        )
    if settings and not drafter:
        raise ConfigError(f"--set {settings[0]} needs a drafter; name one with --drafter")
    choice: Choice | None = drafter
    if drafter and settings:
        choice = {"kind": drafter, **configs.override({}, settings)}
    return _of_file(words[0], overrides, choice) if words else _by_names(overrides, choice)


def _of_file(path: str, overrides: Sequence[str], drafter: Choice | None) -> Served:
    run, _ = runs.load(path, overrides)
    config = run.serve or Config()
    if drafter is not None:
        return Served(run.target, drafter, config)
    if run.train is None:
        return Served(run.target, run.drafter.get("from", run.drafter), config)
    trained = chosen(run.folder)
    if not checkpoint.is_there(trained):
        raise ConfigError(f"no checkpoint in {trained}; run `outrider train {path}` first, or name one with --drafter")
    return Served(run.target, str(trained), config)


def _by_names(overrides: Sequence[str], drafter: Choice | None) -> Served:
    values = configs.override({}, overrides)
    if others := sorted(values.keys() - {"serve", "target"}):
        raise ConfigError(f"{others[0]}: settings begin with serve. or target., such as serve.queue=64")
    name = drafter if isinstance(drafter, str) or drafter is None else drafter["kind"]
    trained = None if name is None or name in kinds() else describe(name)
    section = {"name": (trained and trained.target) or "demo", **values.get("target", {})}
    config = configs.build(Config, values.get("serve", {}), "serve")
    return Served(configs.build(TargetConfig, section, "target"), drafter, config)
