"""What is to be deployed, how it is to run, and what each engine has: engines.yaml as values.  No torch."""

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
    """The draft that is to be deployed."""

    kind: str
    target: str
    folder: Path | None = None
    """None: nothing was trained."""
    format: str | None = None
    length: int | None = None
    """Tokens that it drafts a step."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Ours."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The folder's config.json."""
    taps: tuple[int, ...] = ()
    """Layers of the target that it reads, counted from 0; () where the folder does not name them, or it reads none."""
    precision: str | None = None
    """Number type of the target it was trained with."""
    hub_id: str | None = None
    """Its Hugging Face id, where it was named by that; `folder` is then the copy in the hub's cache."""

    @property
    def place(self) -> str:
        """What an engine is told of a trained draft: its Hugging Face id, or else its folder."""
        return self.hub_id or str(self.folder)


@dataclass(frozen=True, slots=True)
class Wish:
    """How the draft is to be run."""

    tokens: int | None = None
    """Drafted per step; the draft's own length unless given; 0 is no speculation."""
    width: int = 1
    """Children of each node of a tree; 1 is a chain."""
    cutoff: float | None = None
    """The draft stops before a token that it gives less."""
    schedule: tuple[tune.Range, ...] = ()
    """Tokens by load, instead of `tokens`."""
    host: str = "127.0.0.1"
    port: int | None = None
    tensor_parallel: int = 1
    files: str = "."
    """Where the engine finds the files that belong to the command."""
    extra: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What is said with the command."""


@dataclass(frozen=True, slots=True)
class Method:
    """One kind of drafter in one engine."""

    name: str
    """What the engine calls it."""
    formats: tuple[str, ...] = ()
    """Exported folders that it reads, the best first; () needs none."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Settings that always go with it."""
    facts: tuple[str, ...] = ()
    """Of the draft, which its settings name."""
    takes: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    """Their settings that say the same as ours: the name of ours and its value unless given; `tokens` is how many are
    drafted a step.  Of a draft without a folder, these are all that say what is drafted."""
    needs: tuple[tuple[str, str, Any], ...] = ()
    """Settings that a draft must have: ours, its key in config.json, the value."""
    in_anchor: str | None = None
    """What the engine calls it where it drafts in the anchor's slot too, if otherwise."""
    in_target: bool = False
    """The exported file holds the target too."""
    flag: str | None = None
    """Says how many tokens are drafted, where that is a flag of its own."""
    since: Version = ()
    until: Version = ()
    """The first version without it; () is none."""
    varies: bool = False
    """May draft by load."""
    trees: bool = False
    cuts: bool = False
    """Has a cut-off by confidence."""
    notes: tuple[str, ...] = ()

    def taken(self, settings: Mapping[str, Any], tokens: int) -> Settings:
        """Their settings for ours, where a value is known."""
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
    """The platform it happens on; every one unless given."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its versions, commands, flags and the kinds of drafters that it runs."""

    title: str
    version: str
    """The version that these entries describe."""
    methods: Mapping[str, Method]
    instead: Mapping[str, str]
    """What to use instead of a kind that it does not run."""
    notes: tuple[str, ...]
    names: tuple[str, ...] = ()
    """Other names that it is called by, in small letters."""
    packages: tuple[str, ...] = ()
    """Distributions, of which one is in its environment; () is a program."""
    port: int = 8000
    bad: tuple[Bad, ...] = ()
    image: str | None = None
    """That a container runs; its tag is not looked up.  None: it is not deployed so."""
    cpu_image: str | None = None
    """The image for machines without a GPU; None: there is none."""
    program: str | None = None
    """What the first word of its command is called in there, where it is another."""
    health: str = "/health"
    metrics: str | None = "/metrics"

    @property
    def ask(self) -> tuple[str, ...]:
        """Words after the Python of its environment, or the program, that print its version."""
        if not self.packages:
            return ("--version",)
        code = (
            "import importlib.metadata as m; "
            "have = {d.metadata['Name'].lower().replace('_', '-') for d in m.distributions()}; "
            f"print(m.version(next(n for n in {self.packages!r} if n in have)))"
        )
        return ("-c", code)


def _engines() -> dict[str, Engine]:
    """engines.yaml, with what each drafter says of itself."""
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
    """The key in `ENGINES` for any name of an engine.  Raises ConfigError with the nearest one, also for a format."""
    word = name.lower()
    by_name = {each: key for key, engine in ENGINES.items() for each in (key, engine.title.lower(), *engine.names)}
    if word in by_name:
        return by_name[word]
    readers = [key for key, engine in ENGINES.items() for method in engine.methods.values() if word in method.formats]
    if readers:
        engines = ", ".join(dict.fromkeys(readers))
        raise ConfigError(f"{name} is a format, not an engine; name an engine that reads it: {engines}")
    hint = nearest(word, by_name)  # without a near one, each by one name
    raise ConfigError(f"no engine {name!r}{hint if 'did you mean' in hint else nearest(word, ENGINES)}")


def engine_of(name: str) -> Engine:
    """An engine by any of its names.  Raises ConfigError with the nearest one."""
    return ENGINES[engine_name(name)]


def method_of(name: str, kind: str) -> Method:
    """How an engine runs a kind of drafter.  Raises ConfigError for one that it does not run, with what to use
    instead."""
    engine = engine_of(name)
    if kind not in engine.methods:
        others = [other for other, one in ENGINES.items() if kind in one.methods]
        can = f"{', '.join(others)} can" if others else "no engine does; use it with `outrider decode`"
        raise ConfigError(f"{engine.title} does not run {kind}: {engine.instead.get(kind, can)}")
    return engine.methods[kind]
