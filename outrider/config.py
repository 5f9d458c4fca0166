"""Frozen, strict configs from YAML and key=value overrides.  Imports no torch."""

import copy
import difflib
import itertools
import json
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from outrider.errors import ConfigError, first_line
from outrider.storage.trusted import regular, whole_text

T = TypeVar("T", bound="Config")
Quantization = Literal["int8", "q8_0", "q4_0", "q4_k"]
"""How the weights of linear layers are rounded when a model is loaded."""


RENAMED = {
    "beside": "baselines", "copies": "init_from_layers", "fresh": "min_first_ngrams", "gram": "ngram",
    "grams": "ngram_hashes",
    "least": "min_confidence", "least_overlap": "min_overlap", "least_prompts": "min_prompts",
    "observed": "traced_prompts",
    "parts": "members", "runners_up": "siblings",
}  # fmt: skip
"""Old name of a setting → its current name."""
ELSEWHERE = {
    "target": "model model_name model_name_or_path model_path base_model target_model target_model_path "
              "target_model_name_or_path verifier verifier_name_or_path",
    "target.dtype": "torch_dtype",
    "target.quantize": "quantization",
    "drafter": "draft draft_model draft_model_path draft_model_name_or_path speculator speculative_config",
    "drafter.kind": "kind method algorithm speculative_algorithm speculator_type",
    "drafter.layers": "num_hidden_layers num_layers n_layers num_draft_layers",
    "drafter.heads": "num_attention_heads",
    "drafter.kv_heads": "num_key_value_heads",
    "drafter.intermediate": "intermediate_size",
    "drafter.taps": "target_layer_ids aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids",
    "drafter.vocabulary": "draft_vocab_size",
    "drafter.ttt": "ttt_length ttt_steps",
    "drafter.length": "num_speculative_tokens speculative_num_steps num_draft_tokens",
    "prepare": "data",
    "prepare.conversations": "conversations dataset dataset_name data_path train_data_path train_file train_data",
    "prepare.count": "count max_samples max_train_samples num_samples",
    "prepare.length": "length max_length max_seq_length max_seq_len model_max_length seq_length",
    "prepare.max_new_tokens": "max_tokens max_completion_length max_gen_toks",
    "train": "training",
    "train.lr": "lr learning_rate",
    "train.batch": "batch batch_size per_device_batch per_device_batch_size per_device_train_batch_size "
    "train_batch_size "
                   "micro_batch_size gradient_accumulation_steps",
    "train.epochs": "epochs epoch num_epochs num_train_epochs",
    "train.steps": "steps max_steps total_steps num_steps num_train_steps max_num_steps",
    "train.warmup": "warmup_ratio warmup_steps",
    "train.clip": "max_grad_norm grad_clip gradient_clipping",
    "train.optimizer": "optimizer optim",
    "train.loss": "loss loss_type loss_fn",
    "train.dtype": "bf16 fp16 mixed_precision",
    "train.log_every": "logging_steps log_interval log_freq",
    "train.save_every": "save_steps save_interval save_freq checkpoint_freq",
    "evaluate": "eval evaluation",
    "evaluate.tasks": "tasks benchmarks eval_tasks eval_data_path eval_dataset",
    "evaluate.prompts": "num_prompts limit",
    "evaluate.temperatures": "temperature",
    "evaluate.max_new_tokens": "max_tokens max_completion_length max_gen_toks",
    "name": "output_dir run_name",
    "drafter.block": "length block_size num_speculative_tokens",
}  # fmt: skip
"""Setting of a run file → its names in TRL, transformers, SpecForge and speculators."""
OTHER_NAMES = {name for names in ELSEWHERE.values() for name in names.split()}


class Config(BaseModel):
    """Base of all configs: frozen, unknown keys are errors, and the docstring below a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
    REMOVED: ClassVar[Mapping[str, str]] = {}
    """Former settings, and what to use instead."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for key in data:
            if key in cls.REMOVED:
                raise ValueError(f"unknown key {key!r}; it was removed, {cls.REMOVED[key]}")
            if key not in cls.model_fields:
                now = RENAMED.get(key)
                hint = f"; it is called {now!r} now" if now in cls.model_fields else _hint(str(key), cls.model_fields)
                raise ValueError(f"unknown key {key!r}{hint}")
        return {key: _coerced(cls.model_fields[key].annotation, value) for key, value in data.items()}


def _hint(key: str, fields: Iterable[str]) -> str:
    """The end of a message about an unknown key: what another trainer's setting is called here, or the nearest
    field."""
    paths = {name: [path for path, names in ELSEWHERE.items() if name in names.split()] for name in OTHER_NAMES | {key}}
    here = {name: [leaf for path in of if (leaf := path.rpartition(".")[2]) in fields] for name, of in paths.items()}
    matches = here[key] or paths[key]
    if matches and matches[0] != key:
        return f"; it is called {matches[0]!r} here"
    hint = nearest(key, fields)
    near = difflib.get_close_matches(key, [name for name, leaves in here.items() if leaves], 1)
    if near and not hint.startswith("; did you mean"):  # a typo in another trainer's name
        return f"; {near[0]!r} is called {here[near[0]][0]!r} here"
    return hint


def _coerced(annotation: Any, value: Any) -> Any:
    """Shorthands: a single value or `a,b` for a list, and 1e4 (a string in YAML) for an integer."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if is_union else (annotation,)
    plain = [
        typing.get_args(option)[0] if typing.get_origin(option) is typing.Annotated else option for option in options
    ]
    kinds = {typing.get_origin(option) or option for option in plain}
    if value is None or type(value) in kinds or isinstance(value, list | tuple):
        return value
    if tuple in kinds and typing.Literal not in kinds:
        return [part.strip() for part in value.split(",")] if isinstance(value, str) else [value]
    if int in kinds and isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?e\d+", value.strip(), re.IGNORECASE):
        return float(value)
    return value


def nearest(word: str, candidates: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest candidate, or a list of all.  Ignores case and dashes."""
    plain = {re.sub(r"[\W_]", "", name).lower(): name for name in candidates}
    close = difflib.get_close_matches(re.sub(r"[\W_]", "", word).lower(), plain, 1)
    return f"; did you mean {plain[close[0]]!r}?" if close else f"; known: {', '.join(sorted(plain.values()))}"


def build(schema: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Validate `values`.  The ConfigError names the key path, the value and what is allowed."""
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            path = ".".join(str(part) for part in (where, *problem["loc"]) if part != "")
            message = problem["msg"].removeprefix("Value error, ")
            is_section = "unknown key" in message or isinstance(problem["input"], Mapping)
            value = "" if is_section or problem["type"] == "missing" else f" (given: {_shown(problem['input'])})"
            lines.append(f"{path + ': ' if path else ''}{message}{value}")
        raise ConfigError("\n".join(lines)) from None


def _shown(value: Any) -> str:
    """A value for an error message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:396]} ..."


def read(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.  Raises ConfigError with the line for invalid YAML and duplicate keys."""
    try:
        text = _text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read run file {path}: {error}; give a readable file in UTF-8") from None
    values = _parsed(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must contain a mapping such as `target: demo`, not {type(values).__name__}")
    lines: dict[str, int] = {}
    for key, line in _keys(yaml.compose(text, yaml.SafeLoader)):
        if key in lines:
            raise ConfigError(f"{path}, line {line}: {key} is set twice, first in line {lines[key]}; leave one out")
        lines[key] = line
    return values


@contextmanager
def located(path: str | Path, overrides: Iterable[str] = ()) -> Iterator[None]:
    """Add the line of the file to a ConfigError about one of its settings, unless an override set it."""
    try:
        yield
    except ConfigError as error:
        lines = _lines(path)
        changed = [item.partition("=")[0] for item in overrides]
        raise ConfigError("\n".join(_located(part, path, lines, changed) for part in str(error).splitlines())) from None


def _text(path: str | Path) -> str:
    """The text of a file, up to one character more than a run file may have.  Raises OSError and UnicodeDecodeError."""
    with regular(Path(path)).open(encoding="utf-8") as file:
        return file.read(LONGEST + 1)


def _lines(path: str | Path) -> dict[str, int]:
    """The line of every key in a YAML file; empty if it can't be read."""
    try:
        text = _text(path)
        if len(text) > LONGEST or _brackets(text) > 4 * DEEPEST:
            return {}
        node = yaml.compose(text, yaml.SafeLoader)
        _size(node, {})
    except (OSError, RecursionError, ValueError, yaml.YAMLError):
        return {}
    return dict(_keys(node))


def _located(message: str, path: str | Path, lines: Mapping[str, int], overrides: Iterable[str]) -> str:
    unknown = re.match(r"(?:([\w.]+): )?unknown key '([^']+)'", message)
    match = unknown or re.match(r"([a-z_]\w*(?:\.\w+)*)", message)
    key = ".".join(filter(None, match.groups())) if match else ""
    while key and key not in lines:
        key = key.rpartition(".")[0]
    if not key or any(f"{item}.".startswith(f"{key}.") for item in overrides):
        return message
    return f"{path}, line {lines[key]}: {message}"


def _keys(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """(key path, line) of every key below a YAML node."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        path = f"{prefix}{key.value}"
        yield path, key.start_mark.line + 1
        yield from _keys(value, f"{path}.")


def override(values: dict[str, Any], items: Iterable[str]) -> dict[str, Any]:
    """`values` with `key.path=value` items applied; the values are YAML."""
    merged = copy.deepcopy(values)
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {item!r} must be written key.path=value, such as train.lr=3e-4")
        *parents, leaf = key.split(".")
        at = merged
        for parent in parents:
            if at.get(parent) is None:  # a resolved file has null for a missing section
                at[parent] = {}
            at = at[parent]
            if not isinstance(at, dict):
                raise ConfigError(
                    f"override {item!r}: {parent!r} is {at!r}, not a section with keys; name a key of a section"
                )
        at[leaf] = _parsed(text, f"override {item!r}: {text!r}")
    return merged


LONGEST, MOST_NODES, DEEPEST = 2**19, 50_000, 50
"""Limits of a YAML text: characters, values (aliases count each time), and nesting depth."""


def _parsed(text: str, what: str) -> Any:
    """Parse YAML.  Raises ConfigError, beginning with `what`, if it is invalid or exceeds the limits."""
    if len(text) > LONGEST:
        raise ConfigError(
            f"{what[:80]} has {len(text)} characters, more than the limit of {LONGEST}; refer to files in it instead"
        )
    if _brackets(text) > 4 * DEEPEST:  # checked first, since scanning takes time quadratic in the depth
        raise ConfigError(f"{what[:80]} is nested too deeply; correct it")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _size(node, {})
        return None if node is None else loader.construct_document(node)
    except (RecursionError, ValueError) as error:  # ValueError also for invalid dates and numbers
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else first_line(error)
        raise ConfigError(f"{what[:200]} can't be read: {reason}; correct it") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}," if mark and "\n" in text else ""
        raise ConfigError(f"{what}{place} is not YAML: {problem or str(error).splitlines()[0]}") from None


def _brackets(text: str) -> int:
    """Maximum number of open brackets."""
    steps = (1 if bracket in "[{" else -1 for bracket in re.findall(r"[\[\]{}]", text))
    return max(itertools.accumulate(steps), default=0)


def _size(node: Any, sizes: dict[int, int], depth: int = 0) -> int:
    """Number of values in a YAML node; aliases count each time.  Raises ValueError for too many, and for recursion."""
    if id(node) not in sizes:
        sizes[id(node)] = MOST_NODES  # counted on the way, so that a node inside itself exceeds the limit
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST}")
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        both = itertools.chain(*parts) if isinstance(node, yaml.MappingNode) else parts
        sizes[id(node)] = 1 + sum(_size(part, sizes, depth + 1) for part in both)
    if sizes[id(node)] > MOST_NODES:
        raise ValueError(f"it has more than {MOST_NODES} values, or one that contains itself")
    return sizes[id(node)]


def to_yaml(value: Any) -> str:
    """A value as YAML on one line, such as an override's."""
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip()


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mapping to key paths: {"a": {"b": 1}} → {"a.b": 1}."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flatten(value, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flat


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.  Raises OSError or ValueError if it can't be read.

    Duplicate keys are refused, since parsers differ in which one they use.
    """
    try:
        value = json.loads(whole_text(path), object_pairs_hook=once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, expected a mapping")
    return value


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object_pairs_hook for `json.loads` that raises ValueError for duplicate keys."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{name!r} is in it twice")
        values[name] = value
    return values
