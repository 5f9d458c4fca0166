"""The other files of a deployment: a Triton repository, Kubernetes, compose, Prometheus and a Grafana dashboard.  No
torch.

All of them are filled-in templates.  None contains a secret: a hub token is referenced by the Kubernetes secret that
holds it.  A server listens beyond loopback only inside its own container, and compose publishes to loopback.

The dashboard shows an engine's draft metrics under our names: tokens per step is 1 + accepted / drafts. vLLM,
llama-server and `outrider serve` have counters, and vLLM and `outrider serve` also count steps without a draft; SGLang
has gauges of its last logging interval; TensorRT-LLM has both, but no count of drafts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from outrider.engines import commands
from outrider.engines.commands import Command
from outrider.engines.engine import Draft, Engine, Wish, engine_of
from outrider.engines.template import rendered
from outrider.engines.words import GGUF_FILE, REPOSITORY, downloaded
from outrider.errors import ConfigError, DataError
from outrider.storage.atomic import new_folder

PROMETHEUS, GRAFANA = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
MODELS, SETTINGS = "/models", "/etc/outrider"
"""Where a container finds models, and the files that its command needs."""
EVERY_S = 15
STARTS_S, PROBE_S = 1800, 10
SOURCE = "outrider-prometheus"
ALWAYS = ("kubernetes.yaml", "compose.yaml")
WATCHING = (
    "prometheus.yaml", "grafana/provisioning/datasources/prometheus.yaml",
    "grafana/provisioning/dashboards/outrider.yaml",
)  # fmt: skip
DASHBOARD = "grafana/dashboards/speculation.json"
METRICS: Mapping[str, Mapping[str, str | None]] = yaml.safe_load(rendered("metrics.yaml"))
"""Queries by engine, as in templates/metrics.yaml; "outrider" is `outrider serve`, which none of these files starts."""
OWN = Engine("Outrider", "", {}, {}, ())


@dataclass(frozen=True, slots=True)
class Place:
    """How an engine is deployed."""

    name: str = "outrider"
    """Name given to everything that is created."""
    image: str | None = None
    gpus: int = 1
    """GPUs per container; 0 for a machine without one."""

    def check(self) -> None:
        """Raises ConfigError for a name that Kubernetes rejects."""
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", self.name):
            raise ConfigError(
                "--name must be up to 52 of a-z, 0-9 and -, begin with a letter and end with a letter or digit, got "
                f"{self.name!r}"
            )


def inside(engine: str, draft: Draft, wish: Wish, version: str | None = None) -> Command:
    """The command in a container: models under /models, files under /etc/outrider, listening on its network."""
    mounted = mounted_target(draft)
    if mounted is not None and (Path(draft.target) / GGUF_FILE).exists() and engine == "llamacpp":
        mounted += f"/{GGUF_FILE}"
    moved = replace(draft, target=mounted or draft.target)
    if draft.folder is not None and not _fetches(engine, draft):
        moved = replace(moved, folder=Path(MODELS) / "draft", hub_id=None)
    command = commands.command(engine, moved, replace(wish, host="0.0.0.0", port=None, files=SETTINGS), version)
    return replace(command, words=(engine_of(engine).program or command.words[0], *command.words[1:]))


def _fetches(engine: str, draft: Draft) -> bool:
    """Whether the engine downloads the draft from the hub itself; llama.cpp reads only files."""
    return draft.hub_id is not None and engine != "llamacpp"


def mounted_target(draft: Draft) -> str | None:
    """Where a container finds a target that is a local file or folder; None for one on the hub."""
    target = Path(draft.target)
    return f"{MODELS}/target{'.gguf' if target.suffix == '.gguf' else ''}" if target.exists() else None


def files_of(engine: str, draft: Draft, wish: Wish, place: Place, version: str | None = None) -> dict[str, str]:
    """File name → text of everything in a deployment of this engine; names may include folders."""
    place.check()
    served = engine_of(engine)
    if served.image is None:
        return {}
    if place.gpus == 0 and place.image is None and served.cpu_image is None:
        raise ConfigError(f"{served.title} has no image for machines without a GPU; name one with --image")
    command = inside(engine, draft, wish, version)
    mounted = mounted_target(draft)
    files = dict(command.files)
    if engine == "triton":
        files = triton(place.name, mounted or draft.target, wish, command.settings)
    volumes = [] if mounted is None else [f"{Path(draft.target).absolute()}:{mounted}:ro"]
    if uses_hub := mounted is None or _fetches(engine, draft):
        volumes.append(f"hub:{MODELS}/hub")
    if draft.folder is not None and not _fetches(engine, draft):
        volumes.append(f"{downloaded(draft).absolute()}:{MODELS}/draft:ro")
    if files:
        volumes.append(f"./container:{SETTINGS}:ro")
    paths = {f"container/{name}": text for name, text in files.items()}
    values = {"command": command, "files": files, "uses_hub": uses_hub, "volumes": volumes}
    names = [*ALWAYS, *(WATCHING if engine in METRICS else ())]
    paths |= {name: manifest(name, engine, place, **values) for name in names}
    if engine in METRICS:
        paths[DASHBOARD] = json.dumps(dashboard(engine, place), indent=2) + "\n"
    return paths


def manifest(name: str, engine: str, place: Place, **values: Any) -> str:
    """One of the templates, filled in for an engine."""
    served = OWN if engine == "outrider" else engine_of(engine)
    facts = {
        "engine": engine, "served": served, "place": place,
        "image": place.image or (served.image if place.gpus else served.cpu_image),
        "watched": engine in METRICS, "asks": METRICS.get(engine), "MODELS": MODELS, "SETTINGS": SETTINGS,
        "PROMETHEUS": PROMETHEUS, "GRAFANA": GRAFANA, "SOURCE": SOURCE, "EVERY_S": EVERY_S, "STARTS_S": STARTS_S,
        "PROBE_S": PROBE_S,
    }  # fmt: skip
    return rendered(name, **facts, **values)


def dashboard(engine: str, place: Place) -> dict[str, Any]:
    """A Grafana dashboard of the engine's draft metrics; "outrider" is `outrider serve`."""
    return yaml.safe_load(manifest(DASHBOARD.replace(".json", ".yaml"), engine, place))


def triton(name: str, target: str, wish: Wish, settings: Mapping[str, Any]) -> dict[str, str]:
    """A model repository with vLLM as the backend: models/NAME/config.pbtxt and models/NAME/1/model.json."""
    arguments: dict[str, Any] = {"model": target}
    if wish.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = wish.tensor_parallel
    if settings:
        arguments["speculative_config"] = dict(settings)
    folder = f"{REPOSITORY}/{name}"
    # the backend places the model on the GPUs itself
    pbtxt = rendered("config.pbtxt", name=name)
    return {f"{folder}/config.pbtxt": pbtxt, f"{folder}/1/model.json": json.dumps(arguments, indent=2) + "\n"}


def unit(command: Command, place: Place) -> str:
    """A systemd unit that serves the draft on this machine."""
    program, *arguments = command.words
    # systemd has its own search path for programs
    words = [shutil.which(program) or f"/usr/local/bin/{program}", *map(_absolute, arguments)]
    line = " ".join(map(_systemd_word, words))
    return rendered("systemd.service", place=place, line=line, title=engine_of(command.engine).title)


def _absolute(word: str) -> str:
    """The absolute path of a model, which systemd needs; other words unchanged."""
    return str(Path(word).absolute()) if word.endswith(".gguf") else word


def _systemd_word(word: str) -> str:
    """A word quoted for systemd, where %, $ and \\ are special."""
    return json.dumps(word.replace("%", "%%").replace("$", "$$"), ensure_ascii=False)


def write(out: Path, engine: str, draft: Draft, wish: Wish, place: Place, version: str | None = None) -> list[str]:
    """Write a whole deployment into a new folder, all or nothing.  Returns the names at its top level.

    Raises DataError if the folder already exists or can't be written.
    """
    command = commands.command(engine, draft, wish, version)
    settings = triton(place.name, draft.target, wish, command.settings) if engine == "triton" else command.files
    files = {f"settings/{name}": text for name, text in settings.items()}
    files |= files_of(engine, draft, wish, place, version)
    lines = ["#!/bin/sh", "set -e", *([command.before] if command.before else []), f"exec {command.shell}", ""]
    files["serve.sh"] = "\n".join(lines)
    if not engine_of(engine).packages:
        files[f"{place.name}.service"] = unit(command, place)
    with new_folder(out, DataError) as part:
        for name, text in files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        (part / "serve.sh").chmod(0o755)
    return sorted({name.split("/")[0] for name in files})
