"""Flags of older articles, recognised and said in today's words.  No torch.

`translate` takes a command as it stands in an article and gives the one that the engine reads now, with a note for each change.
What nothing replaces is left out, and the note says so.  Sources: the engines' own release notes and errors.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import ConfigError, DataError

LARGEST_BATCH = 512


@dataclass(frozen=True, slots=True)
class Translation:
    """A command in today's words."""

    engine: str
    words: tuple[str, ...]
    notes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Name to text, of settings files that had to change."""

    @property
    def shell(self) -> str:
        return shlex.join(self.words)


@dataclass(slots=True)
class _Reading:
    """A command while it is translated."""

    words: list[str]
    """That stay."""
    old: dict[str, str]
    """Flags that are translated, without their dashes; a switch is an empty string."""
    notes: list[str]


def translate(command: str) -> Translation:
    """Today's command for one of an older article.  Raises ConfigError where no engine is recognised in it."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        raise ConfigError(f"the command can't be read: {error}; quote it as a shell would") from None
    words = [word for word in words if word.strip()]  # a line's end behind a backslash
    for engine, (marks, translator) in TRANSLATORS.items():
        if any(Path(word).name == mark or word.startswith(f"{mark}.") for word in words for mark in marks):
            return translator(engine, words)
    raise ConfigError(
        "no engine in this command; wanted one that runs vllm, sglang.launch_server, trtllm-serve or llama-server"
    )


def _read(words: list[str], old: Mapping[str, bool]) -> _Reading:
    """Take out the flags of `old`: name without dashes → whether a value follows, behind a space or a =."""
    reading, place = _Reading([], {}, []), 0
    while place < len(words):
        word = words[place]
        name, equals, value = word.partition("=")
        key = name.lstrip("-").replace("_", "-")
        place += 1
        if not name.startswith("-") or key not in old:
            reading.words.append(word)
            continue
        if old[key] and not equals:
            if place == len(words):
                raise ConfigError(f"{word} has no value; the command is cut off")
            value, place = words[place], place + 1
        reading.old[key] = value
    return reading


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


def _vllm(engine: str, words: list[str]) -> Translation:
    taken = dict.fromkeys([*VLLM_KEYS, "speculative-model", "speculative-disable-by-batch-size"], True)
    taken |= {"speculative-config": True, "sc": True} | {key: value for key, (value, _) in VLLM_GONE.items()}
    reading = _read(words, taken)
    config: dict[str, Any] = {}
    for key, value in reading.old.items():
        if key in ("speculative-config", "sc"):
            config |= _vllm_config(value, reading.notes)
        elif key in VLLM_GONE:
            reading.notes.append(f"--{key} is left out: {VLLM_GONE[key][1]}")
        elif key in VLLM_KEYS:
            name, as_value = VLLM_KEYS[key]
            config[name] = as_value(key, value)
            reading.notes.append(f"--{key} is {name} in --speculative-config")
    _vllm_model(reading, config)
    _vllm_load(reading, config)
    kept = [word for word in reading.words if not word.startswith("VLLM_USE_V1=")]
    if len(kept) < len(reading.words):
        reading.notes.append("VLLM_USE_V1 is left out: there is one engine now")
    if "-m" in kept and "vllm.entrypoints.openai.api_server" in kept:
        reading.notes.append("`vllm serve MODEL` is the shorter form of this module")
    if config:
        kept += ["--speculative-config", json.dumps(config, separators=(",", ":"))]
    return Translation(engine, tuple(kept), tuple(reading.notes))


def _vllm_model(reading: _Reading, config: dict[str, Any]) -> None:
    """The method, which older versions read off the model's name."""
    model = reading.old.get("speculative-model")
    if model == "[ngram]":
        config["method"] = "ngram"
        reading.notes.append("--speculative-model [ngram] is method ngram in --speculative-config")
    elif model is not None:
        config["model"] = model
        found = next((name for name in NAMED if name in model.lower()), "draft_model")
        config.setdefault("method", found)
        reading.notes.append(f"--speculative-model is model in --speculative-config; its name says method {found}: check that")
    gone = VLLM_METHODS.get(config.get("method", ""))
    if gone is not None:
        reading.notes.append(f"{config['method']} is gone {gone}: train a DFlash or an EAGLE-3, or stay below")


def _vllm_load(reading: _Reading, config: dict[str, Any]) -> None:
    limit = reading.old.get("speculative-disable-by-batch-size")
    if limit is None:
        return
    batch, tokens = _number("speculative-disable-by-batch-size", limit), config.get("num_speculative_tokens")
    if batch < 2 or not isinstance(tokens, int):
        raise ConfigError(
            f"--speculative-disable-by-batch-size {batch}; wanted a batch above 1, and --num-speculative-tokens beside it"
        )
    last = max(LARGEST_BATCH, batch)
    config["num_speculative_tokens_per_batch_size"] = [[1, batch - 1, tokens], [batch, last, 0]]
    reading.notes.append(f"--speculative-disable-by-batch-size {batch} is a table by load: 0 tokens from {batch} requests on")


def _vllm_config(text: str, notes: list[str]) -> dict[str, Any]:
    """A --speculative-config with its old keys renamed."""
    try:
        config = dict(json.loads(text))
    except (ValueError, TypeError):
        raise ConfigError(f"--speculative-config {text!r} is no JSON object; quote it as a shell would") from None
    if "tensor_parallel_size" in config:
        config["draft_tensor_parallel_size"] = config.pop("tensor_parallel_size")
        notes.append("tensor_parallel_size is draft_tensor_parallel_size")
    method = config.get("method")
    if isinstance(method, str) and method.endswith(MTP_END):
        config["method"] = "mtp"
        notes.append(f"method {method} is mtp for every model")
    batch = config.pop("disable_by_batch_size", None)
    if isinstance(batch, int) and batch > 1 and isinstance(config.get("num_speculative_tokens"), int):
        tokens = config["num_speculative_tokens"]
        config["num_speculative_tokens_per_batch_size"] = [[1, batch - 1, tokens], [batch, max(LARGEST_BATCH, batch), 0]]
        notes.append("disable_by_batch_size is num_speculative_tokens_per_batch_size")
    for gone in ("acceptance_method", "posterior_threshold", "posterior_alpha", "disable_mqa_scorer", "disable_logprobs"):
        if config.pop(gone, None) is not None:
            notes.append(f"{gone} is left out: it is gone")
    return config


# ── the others ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _renaming(names: Mapping[str, str | None]) -> Callable[[str, list[str]], Translation]:
    """A translator by names alone: old flag → today's; None: left out."""

    def translator(engine: str, words: list[str]) -> Translation:
        reading = _read(words, dict.fromkeys(names, True))
        for key, value in reading.old.items():
            new = names[key]
            dash = "-" if len(key) < 3 else "--"
            if new is None:
                reading.notes.append(f"{dash}{key} {value} is left out: nothing replaces it")
                continue
            reading.words += [f"--{new}", value]
            reading.notes.append(f"{dash}{key} is --{new}")
        return Translation(engine, tuple(reading.words), tuple(reading.notes))

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


def _llamacpp(engine: str, words: list[str]) -> Translation:
    found = _renaming(LLAMACPP)(engine, words)
    names = {word.lstrip("-").partition("=")[0] for word in found.words if word.startswith("-")}
    if names & {"md", "spec-draft-model", "hfd", "spec-draft-hf"} and not names & set(LLAMACPP_ITS):
        return Translation(
            engine, (*found.words, "--spec-type", "draft-simple"), (*found.notes, "what drafts is said by --spec-type"),
        )  # fmt: skip
    return found


def _trtllm(engine: str, words: list[str]) -> Translation:
    reading = _read(words, TRTLLM_FILES)
    files = {}
    for key, value in reading.old.items():
        path = Path(value)
        if key != "config":
            reading.notes.append(f"--{key.replace('-', '_')} is --config")
        text = _trtllm_file(path, reading.notes)
        if text is not None:
            files[path.name] = text
        reading.words += ["--config", value]
    return Translation(engine, tuple(reading.words), tuple(reading.notes), files)


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
        config.setdefault("speculative_model", config["pytorch_weights_path"])
    for old, new in TRTLLM_KEYS.items():
        if old in config:
            config[new] = config.pop(old)
            is_rate = old == "acceptance_length_threshold"
            notes.append(f"{old} is {new}" + ("; it is a rate now, no length: set it anew" if is_rate else ""))
    for old, why in TRTLLM_GONE.items():
        if config.pop(old, None) is not None:
            notes.append(f"{old} is left out: {why}")
    return yaml.safe_dump(body, sort_keys=False) if len(notes) > before else None


Translator = Callable[[str, list[str]], Translation]
TRANSLATORS: Mapping[str, tuple[tuple[str, ...], Translator]] = {
    "vllm": (("vllm",), _vllm),
    "sglang": (("sglang",), _renaming(SGLANG)),
    "trtllm": (("trtllm-serve", "trtllm-bench"), _trtllm),
    "llamacpp": (("llama-server", "llama-cli", "llama-speculative"), _llamacpp),
}
"""Engine → (words that tell it, its translator)."""
