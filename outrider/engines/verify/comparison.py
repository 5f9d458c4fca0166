"""Does an engine accept as many of an exported drafter's tokens as Outrider, and if not, why?  The whole comparison of
`verify-export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.engines import llama_server, words
from outrider.engines.engine import ENGINES, engine_of
from outrider.engines.verify import causes, chains, gguf_reader, llamacpp, parity, readers, transformers
from outrider.engines.verify.parity import Parity, Side
from outrider.errors import ConfigError
from outrider.export.formats import is_checkpoint
from outrider.export.manifest import read_manifest
from outrider.formats.gguf import layouts
from outrider.loading import describe, draft_model
from outrider.measure.tasks.names import prompts
from outrider.measure.tasks.prompts import as_tokens
from outrider.nn.draft_model import DraftModel
from outrider.targets import catalog
from outrider.targets.hf.transformers import TransformersTarget
from outrider.targets.load import load_target

LOOKED_AT = 3
"""Number of texts searched for causes."""
Say = Callable[[str], None]


def check(
    place: Path, engine: str, python: str | None, checkpoint: Path | None, server: str | None = None
) -> None:  # fmt: skip
    """Before anything is loaded, refuse what can't be compared.  server: llama.cpp's.  Raises ConfigError."""
    if engine not in parity.COMPARED:
        able = ", ".join(parity.COMPARED)
        raise ConfigError(f"drafts of {engine_of(engine).title} can't be compared; choose --engine from {able}")
    if engine == "llamacpp":
        llama_server.program(server)
    if engine == "vllm" and python is None:
        raise ConfigError("vLLM runs in its own environment; name its Python with --python VENV/bin/python")
    if engine not in parity.RUN and checkpoint is None:
        raise ConfigError(
            f"{engine} is compared by reading its folder; name the checkpoint that it was exported from with "
            "--checkpoint"
        )
    if not place.is_dir():
        raise ConfigError(f"no such folder: {place}; name one that `outrider export` wrote")
    if is_checkpoint(place):
        first = f"outrider export {place} --to {engine} --out NEW"
        raise ConfigError(f"{place} is a checkpoint, which engines don't read; export it first: `{first}`")


def sides(
    place: Path, engine: str, checkpoint: Path | None, target: str | None
) -> tuple[TransformersTarget, DraftModel]:
    """The target and the model of the checkpoint, or, without a checkpoint, the model read from the folder.

    Raises ConfigError if the target is unknown, and for a kind that can't be compared in this engine.
    """
    source = describe(checkpoint or place)
    name = target or source.target
    if name is None:
        raise ConfigError(f"{place} does not name its target; name it with --target")
    loaded = load_target(name, dtype="float32", compile=False)
    model = draft_model(source, loaded)
    kinds = _kinds(engine)
    if kinds and model.config.kind not in kinds:
        raise ConfigError(
            f"folders of {engine} can be compared for {', '.join(kinds)}, got {model.config.kind}; use --engine vllm"
        )
    return loaded, model


def _kinds(engine: str) -> tuple[str, ...]:
    """Kinds whose folders can be compared; () if the engine itself refuses the others."""
    if engine == "vllm":
        return ()
    methods = ENGINES[engine].methods.items()
    formats = () if engine in parity.RUN else (engine,)  # without runs, only its own format is compared
    return tuple(kind for kind, method in methods if set(formats or method.formats) & set(method.formats))


def prompt_tokens(target: TransformersTarget, task: str, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts of a task, of `stdlib` or of a file."""
    return [as_tokens(target, prompt) for prompt in prompts(task, count)]


def place_of(target: TransformersTarget) -> str:
    """Where the engine finds the target."""
    name = catalog.checkpoint(target.spec.name)
    return str(Path(name).absolute()) if Path(name).exists() else name


def verified(
    place: Path, engine: str, python: str | None, target: TransformersTarget, model: DraftModel, is_original: bool,
    prompts: list[list[int]], max_new_tokens: int, mend: tuple[str, ...] = (), prefix_caching: bool = False,
    say: Say = lambda text: None, server: str | None = None,
) -> Parity:  # fmt: skip
    """The whole comparison.  is_original: whether `model` is what the folder was exported from, rather than what was
    read from it.

    server: llama.cpp's program, as found by `llama_server.program`.  say: called with what is about to run.  Raises
    ConfigError if the engine can't be run.
    """
    kind, length = model.config.kind, parity.length_of(model)
    made = _Export(place, engine, target, model, prompts, length, server)
    result = Parity(engine, None, kind, read_manifest(place).get("format", "unknown"), length)
    if engine not in parity.RUN:
        # causes inside the folder itself
        some = prompts[:LOOKED_AT]
        ours = parity.ours(target, parity.as_engine(model), some, [[]] * len(some), 32, length)
        those, stage = made.causes(ours.tokens)
        return replace(result, causes=those, stage=stage, warnings=(f"{engine} was not run: the folder was read",))
    answer = made.answer(python, max_new_tokens, mend, prefix_caching, say)
    version, platform = answer["version"], answer.get("platform", "")
    warnings = tuple(parity.known_bad(engine, version, kind, platform))
    result = replace(result, version=version, platform=platform, warnings=warnings, error=answer.get("error"))
    if result.error is not None:
        return result
    begun, theirs = parity.RUN[engine], parity.side_of(answer)
    ours = parity.ours(
        target, parity.as_engine(model), prompts, [text[:begun] for text in theirs.tokens], max_new_tokens, length
    )  # fmt: skip
    result = replace(result, **parity.compared(target, prompts, ours, theirs, length, begun))
    return made.explained(result, is_original, theirs, answer.get("stages") or {}) if kind in readers.KINDS else result


@dataclass(frozen=True)
class _Export:
    """An exported folder in an engine, and its model."""

    place: Path
    engine: str
    target: TransformersTarget
    model: DraftModel
    prompts: list[list[int]]
    length: int
    """Tokens drafted per step."""
    server: str | None = None

    def answer(
        self, python: str | None, max_new_tokens: int, mend: tuple[str, ...], prefix_caching: bool, say: Say
    ) -> dict[str, Any]:  # fmt: skip
        """The engine's answer."""
        size = f"on {len(self.prompts)} prompts x {max_new_tokens} tokens"
        if self.engine == "transformers":
            say(f"running transformers {size}, one after the other")
            return transformers.answer(self.place, self.target, self.prompts, max_new_tokens, self.length)
        if self.engine == "llamacpp":
            say(f"running llama-server {size}, one after the other")
            program, config = llama_server.program(self.server), self.model.config
            spec_type = words.spec_type(config.kind, config.model_dump())
            return llamacpp.answer(
                program, self.place, config.kind, spec_type, self.target, self.prompts, max_new_tokens, self.length
            )  # fmt: skip
        say(f"running vllm {size}: about a minute to load, then no output until it is done")
        kind = self.model.config.kind
        job = {
            "target": place_of(self.target), "speculative": parity.speculative(self.place, kind, self.length),
            "prompts": self.prompts, "max_new_tokens": max_new_tokens, "slots": 8, "dtype": "float32", "mend": mend,
            "prefix_caching": prefix_caching,
            # a cached prompt is not reread, so the modules would produce no output
            "stages": kind in readers.KINDS and not prefix_caching,
        }  # fmt: skip
        return parity.asked(str(python), job)

    def read(self) -> readers.Draft:
        """The folder as its engine reads it.  Raises ExportError if it can't be read."""
        if self.engine == "llamacpp":
            return gguf_reader.of_file(self.place / layouts.FILE)
        return readers.of_folder(self.place, self.engine)

    def explained(self, result: Parity, is_original: bool, theirs: Side, answered: Mapping[str, Any]) -> Parity:
        """The measurements with their causes.  A failing reader is only a warning: the engine has already run for
        minutes."""
        try:
            if is_original:
                those, stage = self.causes(theirs.tokens)
                result = replace(result, causes=those, stage=stage)
            if result.is_equal is False and not result.causes:
                result = replace(result, guesses=self.guesses(theirs))
        except Exception as error:
            result = _warned(result, f"causes not looked for: {error}")
        if "rows" not in answered:
            return (
                _warned(result, f"its modules were not recorded: {answered['error']}")
                if "error" in answered
                else result
            )
        try:
            read, text = self.read(), chains.states(self.target, answered["text"])
            stages, first = causes.compare_stages(read, answered["rows"], text, len(self.prompts[0]), self.length)
        except Exception as error:
            return _warned(result, f"its modules were not compared: {error}")
        return replace(result, stages=stages, engine_stage=first)

    def causes(self, texts: Sequence[Sequence[int]]) -> tuple[tuple[parity.Cause, ...], tuple[str, float] | None]:
        """What in the folder changes the drafts for these texts, and the first stage whose output differs."""
        continued = list(zip(self.prompts, texts, strict=False))[:LOOKED_AT]
        texts_read = [(chains.states(self.target, [*prompt, *text]), len(prompt)) for prompt, text in continued]
        read, ours = self.read(), readers.of_model(self.model)
        differing = tuple(causes.causes(read, ours, texts_read, self.length))
        return differing, causes.first_difference(read, ours, *texts_read[0], self.length) if differing else None

    def guesses(self, theirs: Side) -> tuple[tuple[str, str, float], ...]:
        """How the engine may be misreading a sound folder."""
        steps = parity.engine_steps(self.prompts, theirs, self.length)
        some = list(zip(self.prompts, theirs.tokens, steps, strict=True))[:LOOKED_AT]
        texts = [(chains.states(self.target, [*prompt, *text]), accepted) for prompt, text, accepted in some]
        return tuple(causes.guesses(readers.of_model(self.model), texts, self.length)[:3])


def _warned(result: Parity, warning: str) -> Parity:
    return replace(result, warnings=(*result.warnings, warning))
