"""Flags of older articles in today's words: one table, with a note for each.  No torch.

`translate` takes a command from an article and returns the one that the engine reads now.  A flag without a successor
is left out, and where an old and a new setting contradict each other the new one counts: the notes report both.  The
rest of the line (`cd`, `&&`, a redirection) stays as typed; comments are dropped, and a flag on a line of its own joins
the line before.  Sources: the engines' own release notes and errors.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter

from outrider.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Flag:
    """An older flag or key."""

    now: str | None = None
    """What it is called today, as a key of settings or as a flag; None: nothing replaces it."""
    note: str = ""
    """Why nothing replaces it, or what else is to be known."""
    has_value: bool = True
    is_number: bool = False


_TEXT = Path(__file__).with_name("flags.yaml").read_text(encoding="utf-8")
FLAGS: Mapping[str, Mapping[str, Flag]] = TypeAdapter(dict[str, dict[str, Flag]]).validate_python(yaml.safe_load(_TEXT))
BY_LOAD = "num_speculative_tokens_per_batch_size"
VLLM_METHODS = {"mlp_speculator": "since 0.33", "medusa": "since 0.33"}
NAMED = ("eagle3", "dflash", "dspark", "eagle", "medusa")
"""Methods that vLLM reads off a model's name, in the order looked for."""
V1 = "VLLM_USE_V1"
LARGEST_BATCH = 512
WORD = re.compile(
    r"""(\s*)(?:([;&|<>()]+)|((?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\;&|<>()])+)|(\S.*))""", re.DOTALL
)  # fmt: skip
"""(Blanks before, an operator of the shell, a word, or what can't be read.)"""
MODES = {
    "draft_tokens_external": ("Draft_Target", "name the draft there as speculative_model"),
    "eagle": ("Eagle3", "which wants an EAGLE-3 as speculative_model: train one"),
}
"""Mode of trtllm-build → (decoding_type, a note); the others are gone."""
TRTLLM_FILE = "trtllm.yaml"


@dataclass(frozen=True, slots=True)
class Translation:
    """An older command in the flags of today."""

    engine: str
    shell: str
    """To paste."""
    notes: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    """Name to text, of settings files that had to change."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command, without their quotes."""
        return tuple(shlex.split(self.shell))


def translate(command: str) -> Translation:
    """Today's line for one of an older article.  Raises ConfigError where no engine is recognised in it."""
    line = _Line(command)
    engine: str | None = None
    done: set[str] = set()
    for word in list(line.plain):
        name = re.split("[:@]", Path(word).name)[0]
        for program, (its_engine, marks, translator) in PROGRAMS.items():
            if (name in marks or word.split(".")[0] in marks) and program not in done:
                done.add(program)
                engine = its_engine
                translator(line, line.taken(FLAGS[program]))
    if engine is None:
        wanted = "vllm, sglang.launch_server, trtllm-serve, llama-server or an image of theirs"
        raise ConfigError(f"no engine was found in this command; give one that runs {wanted}")
    return Translation(engine, line.shell, tuple(line.notes), line.files)


# ── the line ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Old(NamedTuple):
    """A flag of the table in a line."""

    name: str
    """As typed."""
    flag: Flag
    value: str
    raw: str
    """The value as typed, with its quotes."""
    at: int
    """Number of its word."""
    last: int
    """Number of the word that its value ends with."""


class _Line:
    """A command while it is translated: its words, and what is between them, which stays."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"(?m)(^|(?<=\s))#.*$", "", text)
        text = re.sub(r"\s*\\[ \t\r]*\n\s*|\s*\n\s*(?=-)", " ", text).strip()
        self.plain: list[str] = []
        self.raw: list[str] = []
        self.gaps: list[str] = []
        """The blanks before each word."""
        self.new: dict[int, str] = {}
        """What words become; an empty text leaves one out."""
        self.notes: list[str] = []
        self.files: dict[str, str] = {}
        for gap, operator, word, rest in WORD.findall(text):
            if rest:
                raise ConfigError(
                    f"a quotation mark is not closed in {rest[:40]!r}; quote the command as a shell needs it"
                )
            self.gaps.append(gap)
            self.raw.append(operator or word)
            self.plain.append(operator or "".join(shlex.split(word)))

    @property
    def shell(self) -> str:
        """The command as one line for a shell."""
        found = ""
        for number, (gap, raw) in enumerate(zip(self.gaps, self.raw, strict=True)):
            word = self.new.get(number, raw)
            found += (gap if number not in self.new else gap[:1]) + word if word else ""
        return found.strip()

    def taken(self, table: Mapping[str, Flag]) -> list[Old]:
        """Flags of a table with their values, after a space or a =.  Raises ConfigError where a value is missing."""
        found = []
        for at, (plain, raw) in enumerate(zip(self.plain, self.raw, strict=True)):
            name, equals, value = plain.partition("=")
            flag = table.get(name.lstrip("-").replace("_", "-"))
            if flag is None or not name.startswith("-"):
                continue
            last = at
            if equals:
                # a word that is quoted as a whole is quoted again, its value alone
                typed = shlex.quote(value) if raw[0] in "'\"" else raw.partition("=")[2]
            elif flag.has_value:
                last = at + 1
                value, typed = (self.plain[last], self.raw[last]) if last < len(self.raw) else ("", "")
                if not typed or set(typed) <= set("();<>|&"):
                    raise ConfigError(f"{raw} has no value; give the whole command")
            else:
                typed = ""
            if "`" in typed or typed.endswith("$"):
                raise ConfigError(
                    f"the value of {name} is the output of another command; write the value itself, or a variable"
                )
            found.append(Old(name, flag, value, typed, at, last))
        return found

    def replace(self, old: Old, text: str = "") -> None:
        """Replace a flag and its value by a text; an empty one removes them."""
        self.new |= dict.fromkeys(range(old.at, old.last + 1), "") | {old.at: text}

    def moved(self, name: str, value: Any, flag: Flag, new: dict[str, Any], where: str = "") -> None:
        """Move an older setting to its new name; a new setting that is there already counts."""
        if flag.now is None:
            self.notes.append(f"{name} is left out: {flag.note}")
        elif new.get(flag.now, value) != value:
            self.notes.append(
                f"{name} {value} is left out: {flag.now} is {new[flag.now]} already; check which was meant"
            )
        else:
            new[flag.now] = value
            self.notes.append(f"{name} is {flag.now}{where}{flag.note and '; ' + flag.note}")

    def rename(self, table: Mapping[str, Flag], config: dict[str, Any]) -> None:
        """Give the older keys of a config today's names."""
        for key in [key for key in table if key in config]:
            self.moved(key, config.pop(key), table[key], config)


def _valued(old: Old) -> Any:
    try:
        return int(old.value) if old.flag.is_number else old.value
    except ValueError:
        raise ConfigError(f"{old.name} must be a whole number, got {old.value}") from None


# ── vLLM ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _vllm(line: _Line, olds: list[Old]) -> None:
    config: dict[str, Any] = {}
    by_key = {old.flag.now: old for old in olds}
    for old in olds:
        line.replace(old)
        if old.flag == Flag():
            config |= _vllm_config(old.value, line)
    for old in olds:
        if old.flag.now not in (None, "model", BY_LOAD) or old.flag.note:
            line.moved(old.name, _valued(old), old.flag, config, " in --speculative-config")
    if "model" in by_key:
        _vllm_model(line, by_key["model"], config)
    _vllm_method(line, config)
    _vllm_load(line, by_key.get(BY_LOAD), config)
    _without_v1(line)
    if "-m" in line.plain and "vllm.entrypoints.openai.api_server" in line.plain:
        line.notes.append("`vllm serve MODEL` is the shorter form of this module")
    if config:
        line.new[min(old.at for old in olds)] = f"--speculative-config {_as_json(config, [old.raw for old in olds])}"
    elif any(old.flag == Flag() for old in olds):
        line.notes.append("--speculative-config is left out: it is empty")


def _vllm_config(text: str, line: _Line) -> dict[str, Any]:
    """A --speculative-config with its old keys renamed."""
    try:
        config = json.loads(text)
    except ValueError:
        raise ConfigError(f"--speculative-config {text!r} is not JSON; quote it as a shell would") from None
    if not isinstance(config, dict):
        raise ConfigError(f"--speculative-config must be a JSON object of settings, got {text!r}")
    line.rename(FLAGS["vllm keys"], config)
    return config


def _vllm_model(line: _Line, old: Old, config: dict[str, Any]) -> None:
    """The method, which older versions read off the model's name."""
    if old.value == "[ngram]":
        line.moved(f"{old.name} [ngram], method", "ngram", Flag("method"), config, " ngram in --speculative-config")
        return
    found = next((name for name in NAMED if name in old.value.lower()), None)
    given = config.get("method")
    its_name = "its name names no method" if found is None else f"its name means method {found}"
    if given is None:
        config["method"] = found or "draft_model"
        check = f"{its_name}, which makes it {config['method']}: check that"
    else:
        check = "" if found in (None, given) else f"{its_name}, the config {given}: check that"
    line.moved(old.name, old.value, Flag("model", check), config, " in --speculative-config")
    config["method"] = config.pop("method")  # after the model, as one reads it


def _vllm_method(line: _Line, config: dict[str, Any]) -> None:
    """Names of methods that are others today, or gone."""
    method = config.get("method")
    if not isinstance(method, str):
        return
    if method.endswith("_mtp"):
        config["method"] = "mtp"
        line.notes.append(f"method {method} is mtp for every model")
    if method in VLLM_METHODS:
        line.notes.append(f"{method} is gone {VLLM_METHODS[method]}: train a DFlash or an EAGLE-3, or stay below")


def _vllm_load(line: _Line, old: Old | None, config: dict[str, Any]) -> None:
    """Switching off by batch, a flag or a key, is a table by load now."""
    limits = {
        "disable_by_batch_size": config.pop("disable_by_batch_size", None),
        old and old.name: old and _valued(old),
    }
    for name, batch in limits.items():
        if batch is None:
            continue
        tokens = config.get("num_speculative_tokens")
        if type(batch) is not int or batch < 2 or type(tokens) is not int:
            raise ConfigError(f"{name} must be a batch size above 1, with num_speculative_tokens set too, got {batch}")
        table = [[1, batch - 1, tokens], [batch, max(LARGEST_BATCH, batch), 0]]
        now = f"is {BY_LOAD}, a table by load: 0 tokens from {batch} requests on"
        if config.setdefault(BY_LOAD, table) != table:
            now = f"is left out: {BY_LOAD} is there already; check which was meant"
        line.notes.append(f"{name} {batch} {now}")


def _without_v1(line: _Line) -> None:
    """Leave out the variable that chose between two engines, before the program or as an option of docker."""
    for at, word in enumerate(line.plain):
        before = line.plain[at - 1] if at else ""
        if word.startswith(f"{V1}=") and before == "export":
            line.notes.append(f"{V1} does nothing any more: there is one engine now")
        elif word.startswith(f"{V1}="):
            line.new |= {at: ""} | ({at - 1: ""} if before in ("-e", "--env") else {})
            line.notes.append(f"{V1} is left out: there is one engine now")


def _as_json(value: Any, raws: list[str]) -> str:
    """A word that is compact JSON, in which the shell fills in what it fills in of these words, such as $MODEL."""
    quoted = shlex.quote(json.dumps(value, separators=(",", ":")))
    live = {name for raw in raws for name in re.findall(r"\$\w+|\$\{[^}]*\}", re.sub(r"'[^']*'|\\.", "", raw))}
    names = "|".join(map(re.escape, sorted(live, key=len, reverse=True)))
    return re.sub(names, lambda name: f"'\"{name[0]}\"'", quoted) if names else quoted


# ── the others ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _renamed(line: _Line, olds: list[Old]) -> None:
    """Flags that have another name today."""
    given = {word.partition("=")[0] for word in line.plain}
    for old in olds:
        now = f"--{old.flag.now}"
        is_new = old.flag.now is not None and now not in given
        line.replace(old, f"{now} {old.raw}" if is_new else "")
        given.add(now)
        why = old.flag.note or f"{now} is given already; check which was meant"
        line.notes.append(f"{old.name} is {now}" if is_new else f"{old.name} {old.raw} is left out: {why}")


def _llamacpp(line: _Line, olds: list[Old]) -> None:
    _renamed(line, olds)
    names = {word.lstrip("-").partition("=")[0]: at for at, word in enumerate(line.plain) if word.startswith("-")}
    drafts = [
        names[name] for name in ("md", "model-draft", "spec-draft-model", "hfd", "spec-draft-hf") if name in names
    ]
    if drafts and not names.keys() & {"spec-type", "spec-default"}:
        at = max([old.last for old in olds] + [min(at + 1, len(line.raw) - 1) for at in drafts])
        line.new[at] = f"{line.new.get(at, line.raw[at])} --spec-type draft-simple".strip()
        line.notes.append("--spec-type names what drafts")


def _trtllm(line: _Line, olds: list[Old]) -> None:
    for old in olds:
        if old.name != "--config":
            line.replace(old, f"--config {old.raw}")
            line.notes.append(f"{old.name} is --config")
        _trtllm_file(Path(old.value), line)


def _trtllm_file(path: Path, line: _Line) -> None:
    """Add the settings file, with old keys renamed, where it exists and changes."""
    if not path.exists():
        line.notes.append(f"{path} is not here, so its keys were not looked at")
        return
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} can't be read as YAML: {error}; correct it") from None
    config = body.get("speculative_config") if isinstance(body, dict) else None
    if not isinstance(config, dict):
        return
    before = len(line.notes)
    kind = config.get("decoding_type")
    if kind == "Eagle":
        config["decoding_type"] = "Eagle3"
        line.notes.append("decoding_type Eagle is Eagle3")
    if kind in ("Medusa", "Lookahead"):
        line.notes.append(f"decoding_type {kind} is gone; train an EAGLE-3, or take NGram")
    line.rename(FLAGS["trtllm keys"], config)
    if len(line.notes) > before:
        line.files[path.name] = yaml.safe_dump(body, sort_keys=False)


def _trtllm_build(line: _Line, olds: list[Old]) -> None:
    """Nothing is built today: its settings of speculation go into the file that the server reads."""
    today = f"today's builds nothing: `trtllm-serve MODEL --config {TRTLLM_FILE}` serves the model itself"
    line.notes.append(f"trtllm-build makes an engine of the older backend and stays as it is; {today}")
    config: dict[str, Any] = {}
    for old in olds:
        kind, more = MODES.get(old.value, (None, "")) if old.flag.now == "decoding_type" else (_valued(old), "")
        if kind is None:
            line.notes.append(f"{old.name} {old.value} is gone there; train an EAGLE-3, or take NGram")
        else:
            line.moved(
                f"{old.name} {old.value}", kind, replace(old.flag, note=more), config, f" {kind} in {TRTLLM_FILE}"
            )
    if "decoding_type" in config:
        extra = {"disable_overlap_scheduler": True} if config["decoding_type"] == "Draft_Target" else {}
        line.files[TRTLLM_FILE] = yaml.safe_dump({"speculative_config": config, **extra}, sort_keys=False)


Translator = Callable[[_Line, list[Old]], None]
PROGRAMS: Mapping[str, tuple[str, tuple[str, ...], Translator]] = {
    "vllm": ("vllm", ("vllm", "vllm-openai"), _vllm),
    "sglang": ("sglang", ("sglang",), _renamed),
    "trtllm": ("trtllm", ("trtllm-serve", "trtllm-bench"), _trtllm),
    "trtllm-build": ("trtllm", ("trtllm-build",), _trtllm_build),
    "llamacpp": ("llamacpp", ("llama-server", "llama-cli", "llama-speculative", "llama.cpp"), _llamacpp),
}
"""Flags' table → (engine, words that name it, its translator)."""
