"""The right command for each engine, with the options of the installed version.  No torch.

engines.yaml was written from each engine's source or documentation at the version it names; docs/deploy.md lists which
commands were actually run.  A method that an engine can't run is refused by name, with an alternative.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.drafters import method as of_kind
from outrider.drafters import methods as of_kinds
from outrider.engines import words
from outrider.engines.engine import (
    ENGINES,
    Draft,
    Engine,
    Method,
    Settings,
    Version,
    Wish,
    engine_name,
    engine_of,
    method_of,
)
from outrider.engines.tuning import tune
from outrider.errors import ConfigError, ExportError
from outrider.export.manifest import read_config, read_manifest
from outrider.formats import keys
from outrider.formats.keys import CONFIG, MANIFEST
from outrider.hub import is_local
from outrider.targets import catalog

ASKS_S = 60.0
Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Command:
    """A complete command that serves a draft, with its files and notes."""

    engine: str
    version: str
    is_assumed: bool
    """Whether the engine was not queried, so that the version is the one in engines.yaml."""
    words: tuple[str, ...]
    settings: Settings
    """Speculation settings, as the engine reads them."""
    files: Mapping[str, str]
    """File name → text of the files that the command needs."""
    before: str | None
    notes: tuple[str, ...]

    @property
    def shell(self) -> str:
        """The command as text that can be pasted into a shell."""
        return shlex.join(self.words)

    def plain(self, draft: Draft) -> dict[str, Any]:
        """The command as values for JSON, with the draft it serves."""
        return {
            "engine": self.engine, "version": self.version, "version_is_assumed": self.is_assumed, "kind": draft.kind,
            "format": draft.format, "draft": None if draft.folder is None else draft.place, "target": draft.target,
            "command": self.shell, "words": list(self.words),
            "speculative": self.settings, "files": dict(self.files), "before": self.before, "notes": list(self.notes),
        }  # fmt: skip


# ── what is deployed ──────────────────────────────────────────────────────────────────────────────────────────────────


def draft_of(place: str | Path, target: str | None = None, kind: str | None = None, format: str | None = None) -> Draft:
    """The draft in an exported or published folder, or a kind that needs no folder. place: a folder, its Hugging Face
    id, or a kind.

    kind, format: of a folder that Outrider did not export; detected as in `outrider import` unless given.  Raises
    ConfigError for a checkpoint, which no engine reads, and if the target is unknown; ExportError if the folder's own
    description can't be read.
    """
    name, folder = str(place), Path(place)
    if not folder.is_dir() and of_kind(name).is_untrained:
        return Draft(name, _target(target, {}, name))
    if not folder.is_dir() and ("/" not in name or is_local(name)):
        untrained = sorted(kind for kind, method in of_kinds().items() if method.is_untrained)
        raise ConfigError(
            f"no such folder: {place}; name an exported draft, a Hugging Face id, or {', '.join(untrained)}"
        )
    hub_id = None
    if not folder.is_dir():
        from outrider.loading import find_folder  # loads torch, which a local folder does not need

        hub_id, folder = name, find_folder(name)
    manifest = read_manifest(folder)
    if manifest and "format" not in manifest:
        raise ConfigError(f"{name} is a checkpoint, which engines don't read; {_export_first(name, manifest['kind'])}")
    config = read_config(folder)
    if manifest:
        kind, format = manifest["kind"], manifest["format"]
    elif kind is None or format is None:
        kind, format = _recognised(folder, config, kind, format)
    if kind is None or format is None:
        raise ConfigError(
            f"{name} has no {MANIFEST} and its drafter is not recognised; name its kind and format with --kind and "
            "--format"
        )
    settings, about = manifest.get("config") or {}, manifest.get("target") or {}
    taps = tuple(manifest.get("taps") or keys.layers(of_kind(kind), format, config))
    length = keys.length(of_kind(kind), format, settings, config)
    target = _target(target, about or {"name": keys.target_of(config)}, name)
    return Draft(kind, target, folder, format, length, settings, config, taps, about.get("precision"), hub_id)


def _recognised(folder: Path, config: Config, kind: str | None, format: str | None) -> tuple[str | None, str | None]:
    """(kind, format) of a folder that Outrider did not export; each is None if not recognised, since an engine may read
    formats that we can't."""
    # loads torch, which our own exports do not need
    from outrider.export.formats import candidates
    from outrider.formats.folder import read_names

    names: frozenset[str] = frozenset()
    with suppress(ExportError):  # pickles, which an engine may agree to load
        names = read_names(folder)
    matches = []
    with suppress(ExportError, ValueError):
        matches = candidates(config, format, kind, names)
    return (matches[0][1], matches[0][0]) if len(matches) == 1 else (kind, format)


def _export_first(folder: str, kind: str) -> str:
    methods = {name: engine.methods[kind] for name, engine in ENGINES.items() if kind in engine.methods}
    written = {
        name: [format for format in method.formats if format not in of_kind(kind).read_only]
        for name, method in methods.items()
    }
    choices = [(name, theirs[0]) for name, theirs in written.items() if theirs]
    if not choices:
        why = "takes a folder of" if methods else "runs"
        return f"no engine {why} {kind} that Outrider writes; use it with `outrider decode`"
    formats = dict.fromkeys(format for _, format in choices)
    readers = {format: " and ".join(name for name, theirs in choices if theirs == format) for format in formats}
    ways = "; ".join(f"`outrider export {folder} --to {format} --out NEW` for {readers[format]}" for format in formats)
    return f"export it first: {ways}"


def _target(name: str | None, about: Mapping[str, Any], place: str) -> str:
    target = name or about.get("name")
    if not target:
        raise ConfigError(f"the target of {place} is not known; name it with --target")
    return catalog.checkpoint(str(target))


# ── the command ───────────────────────────────────────────────────────────────────────────────────────────────────────


def command(name: str, draft: Draft, wish: Wish | None = None, version: str | None = None) -> Command:
    """The command with which an engine serves a draft. version: of the engine; the one in engines.yaml unless given.

    Raises ConfigError for anything this engine can't do, naming an alternative.
    """
    wish, name = wish or Wish(), engine_name(name)
    engine = ENGINES[name]
    wish, version, is_assumed = replace(wish, port=wish.port or engine.port), version or engine.version, version is None
    settings: Settings = {}
    before: str | None = None
    notes: tuple[str, ...] = wish.notes
    if wish.tokens != 0 or wish.schedule:
        method, tokens = _method(name, engine, draft, version), _tokens(draft, wish)
        _check(name, method, draft, wish, tokens)
        settings = words.SETTINGS[name](method, draft, tokens, wish)
        before = words.preparation(name, draft)
        notes = (*wish.notes, *engine.notes, *method.notes, *warnings(name, draft, wish, tokens))
    argv, files = words.WORDS[name](draft, wish, settings)
    return Command(name, version, is_assumed, (*argv, *wish.extra), settings, files, before, notes)


def scheduled(name: str, wish: Wish, path: Path) -> Wish:
    """The wish with the measurements of `outrider tune`: tokens by load, or one fixed setting if the engine has no
    table.

    For an engine without a table, raises ConfigError if the wish also sets tokens, a width or a cut-off.
    """
    title, methods = engine_of(name).title, engine_of(name).methods.values()
    if any(method.varies for method in methods):
        return replace(wish, schedule=tune.read(path))
    if wish.tokens is not None or wish.width != 1 or wish.cutoff is not None:
        raise ConfigError(
            f"{title} has no table by load, so --schedule sets them all; leave out --tokens, --width, --cutoff"
        )
    arm, ratio = tune.read_fixed(path)
    if arm.tokens:
        note = f"one draft length for every load, {arm.tokens}: {title} has no table by load"
    else:
        note = f"served without speculation, which did not pay where {path} was measured{tune.not_paying(ratio)}"
    return replace(wish, tokens=arm.tokens, width=arm.width, cutoff=arm.cutoff, notes=(*wish.notes, note))


def _method(name: str, engine: Engine, draft: Draft, version: str) -> Method:
    """Raises ConfigError for a kind or a format that this version of the engine does not read."""
    kind, title, method = draft.kind, engine.title, method_of(name, draft.kind)
    since, until = (".".join(map(str, limit)) for limit in (method.since, method.until))
    if until and numbers(version) >= method.until:
        alternative = engine.instead.get(kind) or "train a DFlash or an EAGLE-3"
        raise ConfigError(f"{title} runs {kind} only in versions before {until}, and this is {version}; {alternative}")
    if since and numbers(version) < method.since:
        raise ConfigError(f"{title} runs {kind} from version {since} on, and this is {version}; update it")
    if draft.folder is None and method.formats and not of_kind(kind).is_untrained:
        raise ConfigError(
            f"{kind} needs a trained draft; name its folder, written by `outrider export --to {method.formats[0]}`"
        )
    if draft.folder is None or draft.format in method.formats:
        return method
    if not method.formats:
        loads = {one.title: one.methods[kind].formats for one in ENGINES.values() if kind in one.methods}
        able = [f"{other} loads {kind} from a folder (export it --to {one[0]})" for other, one in loads.items() if one]
        advice = f"use `outrider deploy {kind} --to {name}`, or `outrider decode` for this one"
        raise ConfigError("; ".join([f"{title} needs no folder for {kind}", *able, advice]))
    why = _shifted(kind, str(draft.format), method.formats[0])
    reads = f"{title} reads {' or '.join(method.formats)} for {kind}{why}; export it --to {method.formats[0]}"
    raise ConfigError(f"{draft.place} is in format {draft.format}, but {reads}")


def _shifted(kind: str, format: str, other: str) -> str:
    """Why the engine would misread a folder of this format as another format; empty if it would not."""
    (key, shift), (name, theirs) = (of_kind(kind).layers.get(each, (each, 0)) for each in (format, other))
    same = key.rpartition(".")[2]
    if same != name.rpartition(".")[2] or shift == theirs:
        return ""
    return (
        f" (both have {same}, counted from {shift} in {format} and from {theirs} in {other}, so it would draft badly)"
    )


def _tokens(draft: Draft, wish: Wish) -> int:
    if wish.schedule:
        return max(one.tokens for one in wish.schedule)
    return wish.tokens or draft.length or of_kind(draft.kind).tokens


def _check(name: str, method: Method, draft: Draft, wish: Wish, tokens: int) -> None:
    """Raises ConfigError for anything the draft or this engine's method can't do."""
    kind, most = draft.kind, draft.length
    asks_more = most is not None and tokens > most
    able = lambda has: ", ".join(
        f"{other} ({each})" for other, one in ENGINES.items() for each, method in one.methods.items() if has(method)
    )
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, or 0 for no speculation, got {tokens}")
    if asks_more and of_kind(kind).is_fixed:
        has_heads = of_kind(kind).length == "heads"
        limit = f"this {kind} has {most} heads" if has_heads else f"this {kind} drafts one block of {most} tokens"
        raise ConfigError(f"--tokens {tokens} is too many: {limit}; give at most {most}")
    for setting, key, value in method.needs:
        if (current := draft.settings.get(setting) or draft.config.get(key, value)) != value:
            raise ConfigError(
                f"{engine_of(name).title} runs {kind} only with {setting}: {value}, but this draft has {current}; "
                f"train one with {setting}: {value}"
            )
    if wish.schedule and not method.varies:
        raise ConfigError(
            f"{name} can't change the draft length of {kind} by load; engines (and kinds) that can: "
            f"{able(lambda each: each.varies)}"
        )
    if wish.width > 1 and not method.trees:
        raise ConfigError(
            f"{name} drafts no trees with {kind}; engines (and kinds) that do: {able(lambda each: each.trees)}"
        )
    if wish.width > 1 and wish.schedule:
        raise ConfigError(
            "--width and --schedule exclude each other: no engine drafts trees by load; leave out one of them"
        )
    if wish.cutoff and draft.settings.get("confidence") is False:
        raise ConfigError(
            f"this {kind} has no confidence head, so it can't stop by confidence; leave out --cutoff, or train one "
            "with confidence: yes"
        )
    if wish.cutoff is not None and not method.cuts:
        raise ConfigError(
            f"{name} has no cut-off for {kind}; engines (and kinds) that have one: {able(lambda each: each.cuts)}"
        )


def warnings(name: str, draft: Draft, wish: Wish, tokens: int) -> tuple[str, ...]:
    """Known problems of this draft on this engine, one sentence each."""
    problems = []
    method = of_kind(draft.kind)
    key, _ = method.layers.get(str(draft.format), ("", 0))
    if key and draft.format not in method.guessed and draft.config and not keys.at(draft.config, key):
        problems.append(
            f"config.json names no {key.rpartition('.')[2]}: engines guess the layers, and most drafts are wrong; "
            "export it again"
        )
    place = Path(draft.target) / CONFIG
    target = keys.read_json(place) if place.exists() else {}
    if target.get("quantization_config") and draft.precision in ("float32", "bfloat16", "float16"):
        problems.append(
            f"it was trained on a target in {draft.precision}, {draft.target} is quantised: measure with that one"
        )
    mine, theirs = (config.get("max_position_embeddings") for config in (draft.config, target))
    if isinstance(mine, int) and isinstance(theirs, int) and mine < theirs:
        problems.append(f"it supports {mine} positions, the target {theirs}: beyond them its drafts are not accepted")
    if draft.length is not None and tokens > draft.length:
        problems.append(
            f"{tokens} tokens per step are more than its own {draft.length}: the last ones are rarely accepted"
        )
    if name == "vllm" and wish.schedule:
        problems.append(
            "drafting by load is switched off with data parallelism; the older runner then has piecewise graphs only"
        )
    return tuple(problems)


def numbers(version: str) -> Version:
    """0.33.0rc1 as (0, 33, 0); llama.cpp's b9999 as (9999,)."""
    match = re.match(r"\D*(\d+(?:\.\d+)*)", version)
    return tuple(int(part) for part in match[1].split(".")) if match else ()


def installed(name: str, python: str | Path) -> str:
    """The version of an engine in the environment of a Python; for llama.cpp, of a `llama-server`.

    Raises ConfigError if it is not installed.
    """
    engine = engine_of(name)
    try:
        done = subprocess.run([str(python), *engine.ask], capture_output=True, text=True, timeout=ASKS_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} can't be run: {error}; name the Python of {engine.title}'s environment") from None
    printed = done.stdout or done.stderr
    # llama.cpp's version is a commit count, and its entries here are for one commit
    version = re.search(r"commit ([0-9a-f]{7,})", printed) or re.search(r"(?:version: )?([\w.+-]*\d[\w.+-]*)", printed)
    if done.returncode or version is None:
        raise ConfigError(f"{python} has no {engine.title}; name the Python of the environment where it is installed")
    return version[1]
