"""Flags of older articles, recognised and said in today's words.  No torch.

`translate` takes a command as it stands in an article and gives the one that the engine reads now, with a note for each change.
What nothing replaces is left out, and where two settings contradict each other today's counts: the notes say so.  What else
stands in the line (`cd`, `&&`, a redirection) stays as it is.  Sources: the engines' own release notes and errors.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.engines.shell import Simple, as_json, filled, joined, parsed, plain
from outrider.errors import ConfigError, DataError

LARGEST_BATCH = 512


@dataclass(frozen=True, slots=True)
class Translation:
    """A line in today's words."""

    engine: str
    shell: str
    """To paste."""
    notes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Name to text, of settings files that had to change."""

    @property
    def words(self) -> tuple[str, ...]:
        """Of the line, without their quotes."""
        return tuple(shlex.split(self.shell))


@dataclass(slots=True)
class _Reading:
    """A command while it is translated."""

    words: list[str]
    """That stay, as they were typed."""
    old: dict[str, str]
    """Flags that are translated, without their dashes, and their values as typed; a switch is an empty string."""
    notes: list[str]
    files: dict[str, str] = field(default_factory=dict)

    def value(self, key: str) -> str | None:
        """Of a flag that is translated, without its quotes."""
        return plain(self.old[key]) if key in self.old else None


def translate(command: str) -> Translation:
    """Today's line for one of an older article.  Raises ConfigError where no engine is recognised in it."""
    line, engine = parsed(command), None
    notes: list[str] = []
    files: dict[str, str] = {}
    for part in line:
        found = _engine(part.words) if isinstance(part, Simple) else None
        if isinstance(part, Simple) and found is not None:
            engine, (_, old, translator) = found, TRANSLATORS[found]
            reading = _read(part.words, old)
            translator(reading)
            part.words = reading.words
            notes += reading.notes
            files |= reading.files
        elif isinstance(part, Simple) and any(word.startswith(V1) for word in part.words):
            notes.append(f"{V1.rstrip('=')} does nothing any more: there is one engine now")
    if engine is None:
        raise ConfigError(
            "no engine in this command; wanted one that runs vllm, sglang.launch_server, trtllm-serve or llama-server, "
            "or an image of theirs"
        )
    return Translation(engine, joined(line), tuple(notes), files)


def _engine(words: list[str]) -> str | None:
    """The engine that a command runs: a program, a module, or an image, whatever its tag."""
    names = [plain(word) for word in words]
    for engine, (marks, _, _) in TRANSLATORS.items():
        if any(re.split("[:@]", Path(name).name)[0] in marks or name.split(".")[0] in marks for name in names):
            return engine
    return None


def _read(words: list[str], old: Mapping[str, bool]) -> _Reading:
    """Take out the flags of `old`: name without dashes → whether a value follows, behind a space or a =."""
    reading, place = _Reading([], {}, []), 0
    while place < len(words):
        word = words[place]
        name, equals, _ = plain(word).partition("=")
        key = name.lstrip("-").replace("_", "-")
        place += 1
        if not name.startswith("-") or key not in old:
            reading.words.append(word)
            continue
        # a word that is quoted as a whole is quoted again, its value alone
        value = shlex.quote(plain(word).partition("=")[2]) if word[0] in "'\"" else word.partition("=")[2]
        if old[key] and not equals:
            if place == len(words):
                raise ConfigError(f"{word} has no value; the command is cut off")
            value, place = words[place], place + 1
        reading.old[key] = value
    return reading


def _put(config: dict[str, Any], name: str, value: Any, said: str, notes: list[str]) -> bool:
    """Lay an older setting beside today's, which counts where they differ.  said: how the older one is called."""
    if config.get(name, value) != value:
        notes.append(f"{said} {value} is left out: {name} is {config[name]} already; check which was meant")
        return False
    config[name] = value
    return True


def _number(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"--{key} {value}; wanted a whole number") from None


# ── vLLM ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

VLLM_KEYS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "num-speculative-tokens": ("num_speculative_tokens", _number),
    "speculative-draft-tensor-parallel-size": ("draft_tensor_parallel_size", _number),
    "spec-draft-tp": ("draft_tensor_parallel_size", _number),
    "speculative-max-model-len": ("max_model_len", _number),
    "speculative-model-quantization": ("quantization", lambda key, value: value),
    "speculative-model-revision": ("revision", lambda key, value: value),
    "ngram-prompt-lookup-max": ("prompt_lookup_max", _number),
    "ngram-prompt-lookup-min": ("prompt_lookup_min", _number),
}
"""Old flag → (key of --speculative-config, how its value is read)."""
VLLM_GONE: Mapping[str, tuple[bool, str]] = {
    "use-v2-block-manager": (False, "there is only one block manager now"),
    "speculative-disable-mqa-scorer": (False, "there is only one scorer now"),
    "disable-logprobs-during-spec-decoding": (False, "log-probabilities are true while it speculates"),
    "spec-decoding-acceptance-method": (True, "what is accepted is rejection_sample_method in the config, standard unless set"),
    "speculative-acceptance-method": (True, "what is accepted is rejection_sample_method in the config, standard unless set"),
    "typical-acceptance-sampler-posterior-threshold": (True, "typical acceptance, which changed the output, is gone"),
    "typical-acceptance-sampler-posterior-alpha": (True, "typical acceptance, which changed the output, is gone"),
}
"""Old flag → (whether a value follows, why nothing replaces it)."""
VLLM_METHODS = {"mlp_speculator": "since 0.33", "medusa": "since 0.33"}
MTP_END = "_mtp"
NAMED = ("eagle3", "dflash", "dspark", "eagle", "medusa")
"""Methods that vLLM reads off a model's name, in the order looked for."""


V1 = "VLLM_USE_V1="
CONFIG_FLAGS = ("speculative-config", "sc")
VLLM_OLD: Mapping[str, bool] = {
    **dict.fromkeys((*VLLM_KEYS, *CONFIG_FLAGS, "speculative-model", "speculative-disable-by-batch-size"), True),
    **{key: has_value for key, (has_value, _) in VLLM_GONE.items()},
}


def _vllm(reading: _Reading) -> None:
    config: dict[str, Any] = {}
    for key in CONFIG_FLAGS:
        if key in reading.old:
            config |= _vllm_config(plain(reading.old[key]), reading.notes)
    for key in reading.old:
        if key in VLLM_GONE:
            reading.notes.append(f"--{key} is left out: {VLLM_GONE[key][1]}")
        elif key in VLLM_KEYS:
            name, as_value = VLLM_KEYS[key]
            if _put(config, name, as_value(key, plain(reading.old[key])), f"--{key}", reading.notes):
                reading.notes.append(f"--{key} is {name} in --speculative-config")
    _vllm_model(reading, config)
    _vllm_load(reading, config)
    _without_v1(reading)
    if "-m" in reading.words and "vllm.entrypoints.openai.api_server" in reading.words:
        reading.notes.append("`vllm serve MODEL` is the shorter form of this module")
    if config:
        live = [name for value in reading.old.values() for name in filled(value)]
        reading.words += ["--speculative-config", as_json(config, live)]
    elif reading.old.keys() & set(CONFIG_FLAGS):
        reading.notes.append("--speculative-config is left out: it says nothing")


def _vllm_model(reading: _Reading, config: dict[str, Any]) -> None:
    """The method, which older versions read off the model's name."""
    model, notes = reading.value("speculative-model"), reading.notes
    if model == "[ngram]":
        if _put(config, "method", "ngram", "--speculative-model [ngram], method", notes):
            notes.append("--speculative-model [ngram] is method ngram in --speculative-config")
    elif model is not None and _put(config, "model", model, "--speculative-model", notes):
        found = next((name for name in NAMED if name in model.lower()), None)
        said = config.get("method")
        config.setdefault("method", found or "draft_model")
        its_name = "its name says nothing of a method" if found is None else f"its name says method {found}"
        if said is None:
            check = f"; {its_name}, which makes it {config['method']}: check that"
        else:
            check = "" if found in (None, said) else f"; {its_name}, the config {said}: check that"
        notes.append(f"--speculative-model is model in --speculative-config{check}")
    method = config.get("method")
    gone = VLLM_METHODS.get(method) if isinstance(method, str) else None
    if gone is not None:
        notes.append(f"{method} is gone {gone}: train a DFlash or an EAGLE-3, or stay below")


def _vllm_load(reading: _Reading, config: dict[str, Any]) -> None:
    """Switching off by batch, a flag or a key, is a table by load now."""
    flag, limits = "speculative-disable-by-batch-size", {}
    if "disable_by_batch_size" in config:
        limits["disable_by_batch_size"] = config.pop("disable_by_batch_size")
    if flag in reading.old:
        limits[f"--{flag}"] = _number(flag, plain(reading.old[flag]))
    for said, batch in limits.items():
        tokens = config.get("num_speculative_tokens")
        if type(batch) is not int or batch < 2 or type(tokens) is not int:
            raise ConfigError(f"{said} {batch}; wanted a batch above 1, and the number of speculative tokens beside it")
        name, table = "num_speculative_tokens_per_batch_size", [[1, batch - 1, tokens], [batch, max(LARGEST_BATCH, batch), 0]]
        if config.get(name, table) != table:
            reading.notes.append(f"{said} {batch} is left out: {name} is there already; check which was meant")
            continue
        config[name] = table
        reading.notes.append(f"{said} {batch} is {name}, a table by load: 0 tokens from {batch} requests on")


def _without_v1(reading: _Reading) -> None:
    """Leave out the variable that chose between two engines, before the program or as an option of docker."""
    kept: list[str] = []
    for word in reading.words:
        if not plain(word).startswith(V1):
            kept.append(word)
        elif kept and kept[-1] in ("-e", "--env"):
            kept.pop()
    if len(kept) < len(reading.words):
        reading.notes.append(f"{V1.rstrip('=')} is left out: there is one engine now")
    reading.words = kept


def _vllm_config(text: str, notes: list[str]) -> dict[str, Any]:
    """A --speculative-config with its old keys renamed."""
    try:
        config = json.loads(text)
    except ValueError:
        raise ConfigError(f"--speculative-config {text!r} is no JSON; quote it as a shell would") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--speculative-config {text!r} is {type(config).__name__}; wanted a JSON object of settings")
    old, new = "tensor_parallel_size", "draft_tensor_parallel_size"
    if old in config and _put(config, new, config.pop(old), old, notes):
        notes.append(f"{old} is {new}")
    method = config.get("method")
    if isinstance(method, str) and method.endswith(MTP_END):
        config["method"] = "mtp"
        notes.append(f"method {method} is mtp for every model")
    for gone in ("acceptance_method", "posterior_threshold", "posterior_alpha", "disable_mqa_scorer", "disable_logprobs"):
        if config.pop(gone, None) is not None:
            notes.append(f"{gone} is left out: it is gone")
    return config


# ── the others ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _renaming(names: Mapping[str, str | None]) -> Callable[[_Reading], None]:
    """A translator by names alone: old flag → today's; None: left out."""

    def translator(reading: _Reading) -> None:
        given = {plain(word).partition("=")[0] for word in reading.words}
        for key, value in reading.old.items():
            new = names[key]
            old = f"{'-' if len(key) < 3 else '--'}{key}"
            if new is None:
                reading.notes.append(f"{old} {value} is left out: nothing replaces it")
            elif f"--{new}" in given:
                reading.notes.append(f"{old} {value} is left out: --{new} is given already; check which was meant")
            else:
                given.add(f"--{new}")
                reading.words += [f"--{new}", value]
                reading.notes.append(f"{old} is --{new}")

    return translator


SGLANG = {"speculative-algo": "speculative-algorithm", "speculative-draft": "speculative-draft-model-path"}
LLAMACPP = {
    "draft": "spec-draft-n-max", "draft-n": "spec-draft-n-max", "draft-max": "spec-draft-n-max",
    "draft-min": "spec-draft-n-min", "draft-n-min": "spec-draft-n-min", "draft-p-min": "spec-draft-p-min",
    "draft-p-split": "spec-draft-p-split", "model-draft": "spec-draft-model", "ctx-size-draft": None, "cd": None,
}  # fmt: skip
LLAMACPP_ITS = ("spec-type", "spec-default")
TRTLLM_KEYS = {
    "acceptance_window": "acceptance_rate_window_size", "acceptance_length_threshold": "acceptance_rate_threshold",
    "speculative_model_dir": "speculative_model",
}  # fmt: skip
TRTLLM_GONE = {
    "eagle3_one_model": "there is only the one-model form", "eagle_choices": "fixed trees are gone; set use_dynamic_tree",
    "pytorch_weights_path": "it is speculative_model", "use_sa_spec": "it is sa_config now",
}  # fmt: skip
TRTLLM_FILES = {"config": True, "extra-llm-api-options": True}


def _llamacpp(reading: _Reading) -> None:
    _renaming(LLAMACPP)(reading)
    names = {word.lstrip("-").partition("=")[0] for word in map(plain, reading.words) if word.startswith("-")}
    if names & {"md", "spec-draft-model", "hfd", "spec-draft-hf"} and not names & set(LLAMACPP_ITS):
        reading.words += ["--spec-type", "draft-simple"]
        reading.notes.append("what drafts is said by --spec-type")


def _trtllm(reading: _Reading) -> None:
    for key, value in reading.old.items():
        path = Path(plain(value))
        if key != "config":
            reading.notes.append(f"--{key.replace('-', '_')} is --config")
        text = _trtllm_file(path, reading.notes)
        if text is not None:
            reading.files[path.name] = text
        reading.words += ["--config", value]


def _trtllm_file(path: Path, notes: list[str]) -> str | None:
    """The settings file with its old keys renamed; None where nothing changes or it is not here."""
    if not path.exists():
        notes.append(f"{path} is not here, so its keys were not looked at")
        return None
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} can't be read: {error}; wanted YAML") from None
    config = body.get("speculative_config") if isinstance(body, dict) else None
    if not isinstance(config, dict):
        return None
    before = len(notes)
    if config.get("decoding_type") == "Eagle":
        config["decoding_type"] = "Eagle3"
        notes.append("decoding_type Eagle is Eagle3")
    if config.get("decoding_type") in ("Medusa", "Lookahead"):
        notes.append(f"decoding_type {config['decoding_type']} is gone; train an EAGLE-3, or take NGram")
    if config.get("pytorch_weights_path") is not None:
        _put(config, "speculative_model", config["pytorch_weights_path"], "pytorch_weights_path", notes)
    for old, new in TRTLLM_KEYS.items():
        if old in config and _put(config, new, config.pop(old), old, notes):
            is_rate = old == "acceptance_length_threshold"
            notes.append(f"{old} is {new}" + ("; it is a rate now, no length: set it anew" if is_rate else ""))
    for old, why in TRTLLM_GONE.items():
        if config.pop(old, None) is not None:
            notes.append(f"{old} is left out: {why}")
    return yaml.safe_dump(body, sort_keys=False) if len(notes) > before else None


Translator = Callable[[_Reading], None]
TRANSLATORS: Mapping[str, tuple[tuple[str, ...], Mapping[str, bool], Translator]] = {
    "vllm": (("vllm", "vllm-openai"), VLLM_OLD, _vllm),
    "sglang": (("sglang",), dict.fromkeys(SGLANG, True), _renaming(SGLANG)),
    "trtllm": (("trtllm-serve", "trtllm-bench"), TRTLLM_FILES, _trtllm),
    "llamacpp": (
        ("llama-server", "llama-cli", "llama-speculative", "llama.cpp"), dict.fromkeys(LLAMACPP, True), _llamacpp,
    ),
}  # fmt: skip
"""Engine → (words that tell it, older flags and whether a value follows, its translator)."""
