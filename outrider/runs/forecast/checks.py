"""Checks of a run before its target loads: inputs are read, and required files are looked up."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider import loading
from outrider.checkpoint import MANIFEST, whole
from outrider.client.sending.resources import base_of
from outrider.data.answers.store import ANSWERS, StoredAnswers
from outrider.data.overlap.decontaminate import EvaluationPrompts
from outrider.data.sources.conversations import Skipped
from outrider.data.sources.mixture import NothingLeft, Selection, select
from outrider.data.split import Openings
from outrider.drafters import kinds, trains_target
from outrider.errors import ConfigError, DataError, TargetError
from outrider.hub import missing_path
from outrider.measure.config import Config as EvaluateConfig
from outrider.measure.tasks import names
from outrider.measure.tasks.names import FILES, PromptSet
from outrider.measure.tasks.prompts import draw
from outrider.retrieval.corpus import corpora
from outrider.runs.file import RunConfig
from outrider.runs.forecast.sizes import OnPaper, on_paper
from outrider.runs.forecast.weights import refuse_missing_weights
from outrider.targets import catalog
from outrider.targets.quantised import check_mode
from outrider.targets.sketch import Sketch, sketch
from outrider.training.progress import trackers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a run's stages, and facts from its target's config."""

    conversations: Selection = field(default_factory=Selection)
    """The conversations of `prepare`; every iteration reads the sources."""
    skipped: Skipped = field(default_factory=Skipped)
    drawn: Mapping[str, PromptSet] = field(default_factory=dict)
    """The prompts of `evaluate`, by task."""
    target: Sketch | None = None
    """None if the target's config can't be read."""
    paper: OnPaper = field(default_factory=lambda: OnPaper({}))

    def chosen(self, answers: StoredAnswers, settings: RunConfig) -> StoredAnswers:
        """The answers to this run's prompts; all answers if the prompts can no longer be read."""
        if not len(self.conversations):
            source = settings.prepare.label
            log.warning("%s can't be read: training on all %d answers in %s", source, len(answers), settings.answers)
            return answers
        return answers.to_prompts(self.conversations.prompt_hashes)

    @property
    def openings(self) -> Openings:
        """First messages of the conversations, for the split."""
        return Openings(self.conversations.prompt_hashes, self.conversations.openings)


def check(settings: RunConfig, stages: Collection[str]) -> Inputs:
    """Read all inputs of these stages except weights.  Raises an OutriderError for the first problem."""
    if settings.target.name not in catalog.NAMES:
        _refuse_missing("target.name", settings.target.name, "`demo`, `smollm2`, a folder, or a Hugging Face id")
    refuse_missing_weights(settings, stages)
    for mode in (settings.target.quantize, settings.drafter.get("quantize")):
        if mode is not None:
            check_mode(mode)
    _check_parts(settings.drafter, "drafter")
    if settings.train is not None and settings.train.probe_every and trains_target(settings.drafter["kind"]):
        raise ConfigError(
            f"train.probe_every {settings.train.probe_every} keeps the best drafter, but {settings.drafter['kind']} "
            "trains its target; set it to 0"
        )
    if settings.train is not None and "train" in stages:
        trackers.check(settings.train.track)
    drawn = {} if settings.evaluate is None else _check_evaluation(settings, settings.evaluate, stages)
    target = _sketch(settings)
    paper = OnPaper({})
    if target is not None:
        paper = on_paper(settings, target)
        if "train" in stages and paper.problem is not None:
            raise paper.problem
        room, length = target.spec.context, settings.prepare.length
        usual = type(settings.prepare).model_fields["length"].default  # capped at the context of the target
        if length != usual and 0 < room < length:
            raise ConfigError(
                f"prepare.length {length} is more than the context of {target.spec.name}, {room} tokens; "
                f"set at most {room}"
            )
        if "evaluate" in stages and settings.evaluate and 0 < room < settings.evaluate.max_new_tokens + 2:
            problem = f"evaluate.max_new_tokens {settings.evaluate.max_new_tokens} leaves no room for a prompt"
            raise ConfigError(f"{problem} in the target's context of {room}; choose at most {room - 2}")
    return Inputs(*_conversations(settings, stages), drawn, target, paper)


def _conversations(settings: RunConfig, stages: Collection[str]) -> tuple[Selection, Skipped]:
    """The run's conversations; empty if only training needs them and they can no longer be read."""
    skipped = Skipped()
    if "prepare" in stages:
        _check_servers(settings)
        _refuse_missing_sources(settings)
        return select(settings.prepare, skipped, _evaluated(settings)), skipped
    if "train" not in stages:
        return Selection(), skipped
    if not (settings.answers / ANSWERS).exists():
        StoredAnswers.read(settings.answers / ANSWERS)  # raises with the reason
    try:
        return select(settings.prepare, skipped, _evaluated(settings)), skipped
    except NothingLeft:
        raise
    except DataError:
        if settings.prepare.held_out is not None:  # otherwise held-out prompts would be trained on
            raise
        return Selection(), skipped


def _refuse_missing_sources(settings: RunConfig) -> None:
    prepare = settings.prepare
    named = {f"sources[{number}].path": source for number, source in enumerate(prepare.sources)}
    named = named or {"conversations": prepare.training_sources[0]}
    for key, source in (named if prepare.held_out is None else named | {"held_out": prepare.held_out}).items():
        if source.path is not None and not source.is_built_in:
            _refuse_missing(f"prepare.{key}", source.path, "a file of prompts, a data set, or stdlib:train")


def _evaluated(settings: RunConfig) -> EvaluationPrompts | None:
    """All prompts of the run's evaluation tasks; None without decontamination."""
    config = settings.evaluate
    if config is None or not settings.prepare.decontaminate:
        return None
    prompts: dict[str, Sequence[names.Prompt]] = {}
    for task in config.tasks:
        try:
            prompts[names.task_name(task)] = names.load(task, config.data, config.revisions.get(task)).prompts
        except DataError as error:  # the evaluation raises this
            log.warning("conversations are not compared with the prompts of %s: %s", task, error)
    return EvaluationPrompts(prompts)


def _check_servers(settings: RunConfig) -> None:
    """Raises ConfigError for an invalid address; warns about unused servers."""
    config = settings.prepare
    for url in config.servers:
        base_of(url)
    if config.servers and not config.regenerate:
        log.warning("prepare.servers has no effect with prepare.regenerate: false, which keeps the given answers")


def _check_evaluation(settings: RunConfig, config: EvaluateConfig, stages: Collection[str]) -> dict[str, PromptSet]:
    for task in config.tasks if {"train", "evaluate"}.intersection(stages) else ():
        if task.endswith(FILES):
            _refuse_missing("evaluate.tasks", task, "a file of prompts, or a name of `outrider tasks`")
    if "evaluate" not in stages:  # training ends by measuring a few prompts of the first task
        return {task: draw(task, config) for task in config.tasks[:1]} if "train" in stages else {}
    if config.quantize is not None:
        check_mode(config.quantize)
    checkpoint = settings.folder / "checkpoint"
    if settings.train is not None and "train" not in stages and not (whole(checkpoint) / MANIFEST).exists():
        raise ConfigError(
            f"no checkpoint in {checkpoint}; run `outrider train` first, or leave the `train:` section out"
        )
    for choice in config.baselines:
        if isinstance(choice, dict):
            _check_parts(choice, "evaluate.baselines", made=str(checkpoint) if "train" in stages else None)
        elif choice not in kinds():
            try:
                loading.describe(choice)
            except ConfigError as error:
                raise ConfigError(f"evaluate.baselines: {error}") from None
    return {task: draw(task, config) for task in config.tasks}


def _check_parts(drafter: Mapping[str, Any], where: str, made: str | None = None) -> None:
    """Raises ConfigError or DataError for a missing model or corpus.  made: a checkpoint that the run will create."""
    model = drafter.get("model")
    if isinstance(model, str) and model not in catalog.NAMES and not drafter.get("new"):
        _refuse_missing(f"{where}.model", model, "a folder, or a Hugging Face id")
    for name in drafter.get("corpora") or ():
        corpora.find(name)
    for part in (drafter.get("base"), drafter.get("retriever"), *(drafter.get("members") or ())):
        if isinstance(part, dict):
            _check_parts(part, where, made)
        elif isinstance(part, str) and part not in kinds() and part != made:
            loading.find_folder(part)


def _refuse_missing(key: str, name: str, remedy: str) -> None:
    if (problem := missing_path(name)) is not None:
        raise ConfigError(f"{key}: {problem}; give {remedy}")


def _sketch(settings: RunConfig) -> Sketch | None:
    chosen = settings.target
    try:
        return sketch(chosen.name, chosen.revision, chosen.trust_remote_code)
    except TargetError:  # `load_target` reports it
        return None
