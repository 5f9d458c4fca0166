"""What is deployed, how it runs, and what each engine supports: engines.yaml as Python values.  No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from outrider.config import nearest
from outrider.drafters import methods
from outrider.engines.tuning import tune
from outrider.errors import ConfigError

Settings = dict[str, Any]
Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft to deploy."""

    kind: str
    target: str
    folder: Path | None = None
    """None if nothing was trained."""
    format: str | None = None
    length: int | None = None
    """Tokens drafted per step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Our settings of the drafter."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config.json."""
    taps: tuple[int, ...] = ()
    """Target layers whose outputs it reads, counted from 0; () if the folder does not name them, or it reads none."""
    precision: str | None = None
    """dtype of the target it was trained with."""
    hub_id: str | None = None
    """Its Hugging Face id, if it was given by id; `folder` is then the copy in the hub's cache."""

    @property
    def place(self) -> str:
        """How a trained draft is passed to an engine: its Hugging Face id, or else its folder."""
        return self.hub_id or str(self.folder)


@dataclass(frozen=True, slots=True)
class Wish:
    """How to run the draft."""

    tokens: int | None = None
    """Tokens drafted per step; defaults to the draft's own length; 0 turns speculation off."""
    width: int = 1
    """Children of each node of a tree; 1 is a chain."""
    cutoff: float | None = None
    """Drafting stops before a token less likely than this."""
    schedule: tuple[tune.Range, ...] = ()
    """Tokens by load, in place of `tokens`."""
    host: str = "127.0.0.1"
    port: int | None = None
    tensor_parallel: int = 1
    files: str = "."
    """Where the engine finds the files that the command needs."""
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Notes printed with the command."""


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of drafter in one engine."""

    name: str
    """The engine's name for it."""
    formats: tuple[str, ...] = ()
    """Formats of exported folders that it reads, best first; () needs no folder."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are always passed."""
    facts: tuple[str, ...] = ()
    """Facts about the draft that the settings must include."""
    takes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Engine settings equivalent to ours: our name, and a default value; `tokens` is the number drafted per step.  A
    draft without a folder is described by these alone."""
    needs: tuple[tuple[str, str, Any], ...] = ()
    """Settings that a draft must have: our name, the key in config.json, the value."""
    in_anchor: str | None = None
    """The engine's name for it if it also drafts in the anchor's slot; None if the name is the same."""
    in_target: bool = False
    """Whether the exported file also contains the target."""
    flag: str | None = None
    """The flag for the number of drafted tokens, if there is one."""
    since: Version = ()
    until: Version = ()
    """The first version that no longer has it; () if there is none."""
    varies: bool = False
    """Whether the draft length may depend on the load."""
    trees: bool = False
    cuts: bool = False
    """Whether it has a confidence cut-off."""
    notes: tuple[str, ...] = ()

    def taken(self, settings: Mapping[str, Any], tokens: int) -> Settings:
        """Engine settings for those of ours that have a value."""
        ours = {"tokens": tokens, **settings}
        values = {name: ours.get(key, default) for name, (key, default) in self.takes.items()}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Bad:
    """A kind that some versions draft wrongly, or not at all."""

    kind: str
    versions: str
    """A regular expression."""
    what: str
    platform: str = ""
    """The affected platform; every one unless given."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its versions, commands, flags and the kinds of drafters it runs."""

    title: str
    version: str
    """The version that these entries describe."""
    methods: Mapping[str, Method]
    instead: Mapping[str, str]
    """What to use instead of a kind that it does not run."""
    notes: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Aliases, in lower case."""
    packages: tuple[str, ...] = ()
    """Distributions, one of which is in its environment; () for a standalone program."""
    port: int = 8000
    bad: tuple[Bad, ...] = ()
    image: str | None = None
    """The container image; its tag is not checked.  None if it is not deployed in a container."""
    cpu_image: str | None = None
    """The image for machines without a GPU; None if there is none."""
    program: str | None = None
    """The first word of its command in the container, if different."""
    health: str = "/health"
    metrics: str | None = "/metrics"

    @property
    def ask(self) -> tuple[str, ...]:
        """Arguments to the Python of its environment, or to the program, that print its version."""
        if not self.packages:
            return ("--version",)
        code = (
            "import importlib.metadata as m; "
            "have = {d.metadata['Name'].lower().replace('_', '-') for d in m.distributions()}; "
            f"print(m.version(next(n for n in {self.packages!r} if n in have)))"
        )
        return ("-c", code)


def _engines() -> dict[str, Engine]:
    """engines.yaml, combined with what each drafter declares."""
    text = Path(__file__).with_name("engines.yaml").read_text(encoding="utf-8")
    engines: dict[str, dict[str, Any]] = yaml.safe_load(text)
    for name, engine in engines.items():
        same = engine.pop("like", name)
        runs = {kind: dict(each.engines[same]) for kind, each in methods().items() if same in each.engines}
        bad = [{"kind": kind, **one} for kind, each in runs.items() for one in each.pop("bad", ())]
        instead = {kind: each.instead[same] for kind, each in methods().items() if same in each.instead}
        engine |= {"methods": {kind: each for kind, each in runs.items() if each}, "instead": instead}
        engine["bad"] = bad if same == name else []
    return TypeAdapter(dict[str, Engine]).validate_python(engines)


ENGINES: Mapping[str, Engine] = _engines()


def engine_name(name: str) -> str:
    """The key in `ENGINES` for any name of an engine.  Raises ConfigError with the closest match, also for a format."""
    word = name.lower()
    by_name = {each: key for key, engine in ENGINES.items() for each in (key, engine.title.lower(), *engine.names)}
    if word in by_name:
        return by_name[word]
    readers = [key for key, engine in ENGINES.items() for method in engine.methods.values() if word in method.formats]
    if readers:
        engines = ", ".join(dict.fromkeys(readers))
        raise ConfigError(f"{name} is a format, not an engine; name an engine that reads it: {engines}")
    hint = nearest(word, by_name)  # without a close match, one name of each
    raise ConfigError(f"no engine {name!r}{hint if 'did you mean' in hint else nearest(word, ENGINES)}")


def engine_of(name: str) -> Engine:
    """An engine by any of its names.  Raises ConfigError with the closest match."""
    return ENGINES[engine_name(name)]


def method_of(name: str, kind: str) -> Method:
    """How an engine runs a kind of drafter.  Raises ConfigError, with an alternative, for a kind that it does not
    run."""
    engine = engine_of(name)
    if kind not in engine.methods:
        others = [other for other, one in ENGINES.items() if kind in one.methods]
        can = f"{', '.join(others)} can" if others else "no engine does; use it with `outrider decode`"
        raise ConfigError(f"{engine.title} does not run {kind}: {engine.instead.get(kind, can)}")
    return engine.methods[kind]
