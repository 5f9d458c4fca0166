"""What else a deployment needs: a Triton repository, Kubernetes, compose, Prometheus and a Grafana dashboard.  No torch.

All are made as values and written as YAML or JSON.  Nothing in them is a secret: a token for the hub is named by the Kubernetes
secret that holds it.  A server listens beyond loopback only inside its own container, and compose publishes to loopback.

The dashboard shows what an engine says of its drafts, in our words: tokens per step is 1 + kept / drafts.  vLLM and
llama-server have counters, and vLLM's tell steps without a draft too; SGLang has gauges of its last logging interval;
TensorRT-LLM has both, and no count of drafts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from outrider.engines import commands
from outrider.engines.commands import REPOSITORY, Command, Draft, Wish
from outrider.errors import ConfigError, DataError

IMAGES = {
    "vllm": "vllm/vllm-openai:v0.33.0",
    "sglang": "lmsysorg/sglang:v0.5.23",
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:1.3.0",
    "llamacpp": "ghcr.io/ggml-org/llama.cpp:server-cuda",
    "triton": "nvcr.io/nvidia/tritonserver:26.10-vllm-python-py3",
}
"""What is run unless another image is named; tags are not looked up."""
PROGRAMS = {"llamacpp": "/app/llama-server", "sglang": "python3"}
"""First words that are called otherwise in those images."""
PROMETHEUS, GRAFANA = "prom/prometheus:v3.5.0", "grafana/grafana:12.1.0"
MODELS, SETTINGS = "/models", "/etc/outrider"
"""Where a container finds models, and the files that belong to its command."""
EVERY_S = 15
WINDOW = "5m"
STARTS_S, PROBE_S = 1800, 10
Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """How an engine is deployed."""

    name: str = "outrider"
    """Of everything that is made."""
    image: str | None = None
    gpus: int = 1
    cpus: str = "8"
    memory: str = "64Gi"
    storage: str = "200Gi"
    """Of the volume that holds models."""
    shared_memory: str = "8Gi"

    def check(self) -> None:
        """ConfigError for a name that Kubernetes refuses."""
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?", self.name):
            raise ConfigError(f"name {self.name!r}; wanted up to 52 of a-z, 0-9 and -, from a letter to a letter or digit")


def inside(engine: str, draft: Draft, wish: Wish, version: str | None = None) -> Command:
    """The command as it stands in a container: models under /models, files under /etc/outrider, open to its network."""
    mounted = mounted_target(draft)
    if mounted is not None and (Path(draft.target) / "model.gguf").exists() and engine == "llamacpp":
        mounted += "/model.gguf"
    moved = replace(draft, folder=draft.folder and Path(MODELS) / "draft", target=mounted or draft.target)
    command = commands.command(engine, moved, replace(wish, host="0.0.0.0", port=None, files=SETTINGS), version)
    return replace(command, words=(PROGRAMS.get(engine, command.words[0]), *command.words[1:]))


def mounted_target(draft: Draft) -> str | None:
    """Where a container finds a target that is a file or a folder here; None for one of the hub."""
    target = Path(draft.target)
    return f"{MODELS}/target{'.gguf' if target.suffix == '.gguf' else ''}" if target.exists() else None


def files_of(engine: str, draft: Draft, wish: Wish, place: Place, version: str | None = None) -> dict[str, str]:
    """Name to text of everything that a deployment of this engine has; names may hold folders."""
    place.check()
    if engine not in IMAGES:
        return {}
    command = inside(engine, draft, wish, version)
    files = dict(command.files)
    if engine == "triton":
        files = triton(place.name, mounted_target(draft) or draft.target, wish, command.settings)
    found = {f"container/{name}": text for name, text in files.items()}
    found["kubernetes.yaml"] = written(*kubernetes(engine, command, draft, place, files))
    found["compose.yaml"] = written(compose(engine, command, draft, place))
    if engine in METRICS:
        found["prometheus.yaml"] = written(prometheus(engine, place))
        found["grafana/dashboards/speculation.json"] = json.dumps(dashboard(engine, place), indent=2) + "\n"
        found["grafana/provisioning/datasources/prometheus.yaml"] = written(_datasource())
        found["grafana/provisioning/dashboards/outrider.yaml"] = written(_dashboards())
    return found


def write(out: Path, engine: str, draft: Draft, wish: Wish, place: Place, version: str | None = None) -> list[str]:
    """Everything of a deployment in a new folder, whole or not at all.  Returns what stands at its top.

    Raises DataError where the folder is there already or can't be written.
    """
    if out.exists():
        raise DataError(f"{out} is there already; name a new folder, or delete it first")
    command = commands.command(engine, draft, wish, version)
    own = triton(place.name, draft.target, wish, command.settings) if engine == "triton" else command.files
    files = {f"settings/{name}": text for name, text in own.items()} | files_of(engine, draft, wish, place, version)
    lines = ["#!/bin/sh", "set -e", *([command.before] if command.before else []), f"exec {command.shell}", ""]
    files["serve.sh"] = "\n".join(lines)
    part = out.with_name(out.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        for name, text in files.items():
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            (part / name).write_text(text, encoding="utf-8")
        (part / "serve.sh").chmod(0o755)
        part.rename(out)
    except OSError as error:
        raise DataError(f"can't write {out}: {error.strerror}; name a folder that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return sorted({name.split("/")[0] for name in files})


class _Plain(yaml.SafeDumper):
    """Writes a value that stands in two places twice: readers of manifests don't expect anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def written(*values: Manifest) -> str:
    """YAML, a document a value."""
    return str(yaml.dump_all(values, Dumper=_Plain, sort_keys=False, width=10_000))


# ── Triton ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def triton(name: str, target: str, wish: Wish, settings: Mapping[str, Any]) -> dict[str, str]:
    """A model repository with vLLM as the backend: models/NAME/config.pbtxt and models/NAME/1/model.json."""
    arguments: Manifest = {"model": target}
    if wish.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = wish.tensor_parallel
    if settings:
        arguments["speculative_config"] = dict(settings)
    # the backend places the model on the GPUs itself
    text = f'name: "{name}"\nbackend: "vllm"\ninstance_group [ {{ count: 1 kind: KIND_MODEL }} ]\n'
    folder = f"{REPOSITORY}/{name}"
    return {f"{folder}/config.pbtxt": text, f"{folder}/1/model.json": json.dumps(arguments, indent=2) + "\n"}


# ── Kubernetes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def kubernetes(
    engine: str, command: Command, draft: Draft, place: Place, files: Mapping[str, str] | None = None
) -> list[Manifest]:  # fmt: skip
    """A volume for models, a ConfigMap where files belong to the command, a Deployment and a Service inside the cluster."""
    labels = {"app.kubernetes.io/name": place.name, "app.kubernetes.io/component": engine}
    about = lambda kind: {"name": kind, "labels": labels}
    found: list[Manifest] = [
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": about(f"{place.name}-models"),
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": place.storage}}},
        }
    ]  # fmt: skip
    if files:
        settings = about(f"{place.name}-settings")
        found.append(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": settings,
                "data": {_key(name): text for name, text in files.items()},
            }
        )
    found.append(
        {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": about(place.name),
            "spec": {
                "replicas": 1,
                # two can't have the same GPU at once
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels},
                "template": {
                    "metadata": {"labels": labels, "annotations": _scraped(engine)},
                    "spec": _pod(engine, command, draft, place, list(files or ())),
                },
            },
        }
    )  # fmt: skip
    port = commands.engine_of(engine).port
    ports = [{"name": "http", "port": port, "targetPort": "http"}]
    service = {"type": "ClusterIP", "selector": labels, "ports": ports}
    found.append({"apiVersion": "v1", "kind": "Service", "metadata": about(place.name), "spec": service})
    return found


def _scraped(engine: str) -> dict[str, str]:
    """Annotations by which Prometheus finds a pod."""
    found = commands.engine_of(engine)
    if found.metrics is None:
        return {}
    return {
        "prometheus.io/scrape": "true", "prometheus.io/port": str(found.port), "prometheus.io/path": found.metrics,
    }  # fmt: skip


def _pod(engine: str, command: Command, draft: Draft, place: Place, files: Sequence[str]) -> Manifest:
    found = commands.engine_of(engine)
    asked = {"httpGet": {"path": found.health, "port": "http"}, "periodSeconds": PROBE_S}
    mounts = [{"name": "models", "mountPath": MODELS}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes: list[Manifest] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": f"{place.name}-models"}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": place.shared_memory}},
    ]
    if files:
        mounts.append({"name": "settings", "mountPath": SETTINGS})
        items = [{"key": _key(name), "path": name} for name in files]
        volumes.append({"name": "settings", "configMap": {"name": f"{place.name}-settings", "items": items}})
    limits: Manifest = {"memory": place.memory} | ({"nvidia.com/gpu": place.gpus} if place.gpus else {})
    container: Manifest = {
        "name": "engine", "image": place.image or IMAGES[engine],
        "command": [word.replace("$(", "$$(") for word in command.words],
        "ports": [{"name": "http", "containerPort": found.port}],
        "env": _environment(draft, [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": SECRET}}]),
        "resources": {"requests": {"cpu": place.cpus, **limits}, "limits": limits},
        "volumeMounts": mounts,
        # weights load for minutes: until then nothing else asks
        "startupProbe": asked | {"failureThreshold": STARTS_S // PROBE_S},
        "readinessProbe": asked | {"timeoutSeconds": 5}, "livenessProbe": asked | {"timeoutSeconds": 10, "failureThreshold": 6},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    # of a Service called vllm, links would put VLLM_PORT=tcp://... into the environment, at which vLLM stops
    return {"automountServiceAccountToken": False, "enableServiceLinks": False, "containers": [container], "volumes": volumes}


def _key(name: str) -> str:
    """A file's name in a ConfigMap, which has no folders."""
    return name.replace("/", "_")


SECRET = {"name": "hugging-face", "key": "token", "optional": True}
"""Where a cluster keeps a token for gated models; it need not be there."""


def _environment(draft: Draft, token: Sequence[Manifest]) -> list[Manifest]:
    """Weights that come from the hub stay on the volume; local ones need no network."""
    if mounted_target(draft) is not None:
        return [{"name": "HF_HUB_OFFLINE", "value": "1"}]
    return [{"name": "HF_HOME", "value": f"{MODELS}/hub"}, *token]


# ── compose ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def compose(engine: str, command: Command, draft: Draft, place: Place) -> Manifest:
    """The engine, and beside it Prometheus and Grafana where it has metrics; all published to loopback only."""
    found = commands.engine_of(engine)
    mounted = mounted_target(draft)
    volumes = ["hub:/models/hub"] if mounted is None else [f"{Path(draft.target).absolute()}:{mounted}:ro"]
    if draft.folder is not None:
        # what was converted first is a file beside the folder
        end = "" if command.before is None else ".gguf"
        volumes.append(f"{draft.folder.absolute()}{end}:{MODELS}/draft{end}:ro")
    if command.files or engine == "triton":
        volumes.append(f"./container:{SETTINGS}:ro")
    device = {"driver": "nvidia", "count": place.gpus, "capabilities": ["gpu"]}
    served: Manifest = {
        "image": place.image or IMAGES[engine], "entrypoint": [command.words[0]],
        # compose reads $NAME as a variable
        "command": [word.replace("$", "$$") for word in command.words[1:]],
        "ports": [f"127.0.0.1:{found.port}:{found.port}"], "volumes": [volume.replace("$", "$$") for volume in volumes],
        "environment": {one["name"]: one.get("value") for one in _environment(draft, [{"name": "HF_TOKEN"}])},
        "shm_size": place.shared_memory.replace("Gi", "gb"), "restart": "unless-stopped",
    }  # fmt: skip
    if place.gpus:
        served["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    services = {"engine": served}
    names: Manifest = {} if mounted is not None else {"hub": {}}
    if engine in METRICS:
        services |= _watchers()
        names |= {"measured": {}}
    return {"name": place.name, "services": services} | ({"volumes": names} if names else {})


def _watchers() -> dict[str, Manifest]:
    """Prometheus and Grafana.  Nobody can log in to Grafana: who reaches it on loopback may look."""
    return {
        "prometheus": {
            "image": PROMETHEUS, "command": ["--config.file=/etc/prometheus/prometheus.yml"],
            "ports": ["127.0.0.1:9090:9090"], "restart": "unless-stopped",
            "volumes": ["./prometheus.yaml:/etc/prometheus/prometheus.yml:ro", "measured:/prometheus"],
        },
        "grafana": {
            "image": GRAFANA, "ports": ["127.0.0.1:3000:3000"], "restart": "unless-stopped", "depends_on": ["prometheus"],
            "environment": {
                "GF_AUTH_ANONYMOUS_ENABLED": "true", "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                "GF_AUTH_BASIC_ENABLED": "false", "GF_AUTH_DISABLE_LOGIN_FORM": "true",
            },
            "volumes": [
                "./grafana/provisioning:/etc/grafana/provisioning:ro", "./grafana/dashboards:/var/lib/grafana/dashboards:ro",
            ],
        },
    }  # fmt: skip


def prometheus(engine: str, place: Place) -> Manifest:
    """What Prometheus scrapes."""
    found = commands.engine_of(engine)
    job = {
        "job_name": place.name, "metrics_path": found.metrics, "static_configs": [{"targets": [f"engine:{found.port}"]}],
    }  # fmt: skip
    return {"global": {"scrape_interval": f"{EVERY_S}s"}, "scrape_configs": [job]}


def _datasource() -> Manifest:
    source = {
        "name": "Prometheus", "uid": SOURCE, "type": "prometheus", "access": "proxy", "url": "http://prometheus:9090",
        "isDefault": True,
    }  # fmt: skip
    return {"apiVersion": 1, "datasources": [source]}


def _dashboards() -> Manifest:
    provider = {"name": "outrider", "type": "file", "options": {"path": "/var/lib/grafana/dashboards"}}
    return {"apiVersion": 1, "providers": [provider]}


# ── the dashboard ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Metrics(NamedTuple):
    """Queries of one engine; None where it does not say."""

    tokens_per_draft: str
    """1 + kept / drafts."""
    tokens_per_step: str | None
    """Of all steps, those without a draft too."""
    acceptance: str | None
    by_position: tuple[str, str] | None
    """(Query, label that holds the position)"""
    drafted: str | None
    """Tokens a second."""
    generated: str | None
    running: str
    waiting: str | None
    ttft: str | None
    """Histogram."""
    tpot: str | None


def _rate(name: str) -> str:
    return f"sum(rate({name}[{WINDOW}]))"


def _counted(
    prefix: str,
    generated: str,
    running: str,
    waiting: str,
    ttft: str | None,
    tpot: str | None,
    steps: str | None = None,
) -> Metrics:
    """Of an engine with vLLM's counters, under its own prefix."""
    name = lambda what: f"{prefix}:spec_decode_num_{what}_total"
    drafts, positions = _rate(name("drafts")), f"sum by (position) (rate({name('accepted_tokens_per_pos')}[{WINDOW}]))"
    return Metrics(
        f"1 + {_rate(name('accepted_tokens'))} / {drafts}",
        steps,
        f"{_rate(name('accepted_tokens'))} / {_rate(name('draft_tokens'))}",
        (f"{positions} / on() group_left() {drafts}", "position"),
        _rate(name("draft_tokens")), _rate(generated), f"sum({running})", f"sum({waiting})", ttft, tpot,
    )  # fmt: skip


METRICS: Mapping[str, Metrics] = {
    "vllm": _counted(
        "vllm", "vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting",
        "vllm:time_to_first_token_seconds", "vllm:request_time_per_output_token_seconds",
        # one gap between tokens is counted a step and request; prefills write the first ones
        f"({_rate('vllm:generation_tokens_total')} - {_rate('vllm:time_to_first_token_seconds_count')}) / "
        f"{_rate('vllm:inter_token_latency_seconds_count')}",
    ),
    "llamacpp": _counted(
        "llamacpp", "llamacpp:tokens_predicted_total", "llamacpp:requests_processing", "llamacpp:requests_deferred", None, None
    ),
    "sglang": Metrics(
        "avg(sglang:spec_accept_length)", None, "avg(sglang:spec_accept_rate)", None, None,
        _rate("sglang:generation_tokens_total"),
        "sum(sglang:num_running_reqs)", "sum(sglang:num_queue_reqs)", "sglang:time_to_first_token_seconds",
        "sglang:request_time_per_output_token_seconds",
    ),
    "trtllm": Metrics(
        "avg(trtllm_spec_decode_acceptance_length)", None,
        f"{_rate('trtllm_spec_decode_num_accepted_tokens_total')} / {_rate('trtllm_spec_decode_num_draft_tokens_total')}",
        (
            f"sum by (token_position) (rate(trtllm_spec_decode_accepted_tokens_total[{WINDOW}])) / "
            f"sum by (token_position) (rate(trtllm_spec_decode_drafted_tokens_total[{WINDOW}]))",
            "token_position",
        ),
        _rate("trtllm_spec_decode_num_draft_tokens_total"),
        None,
        "sum(trtllm_num_generation_requests)", "sum(trtllm_num_context_requests)", "trtllm_time_to_first_token_seconds",
        "trtllm_time_per_output_token_seconds",
    ),
}  # fmt: skip
SOURCE = "outrider-prometheus"
SHARES = (0.5, 0.95, 0.99)
WIDTH, HEIGHT = 12, 8


def dashboard(engine: str, place: Place) -> Manifest:
    """A Grafana dashboard of what the engine says of its drafts."""
    metrics, title = METRICS[engine], commands.engine_of(engine).title
    panels = [_panel(place_, *one) for place_, one in enumerate(_panels(metrics))]
    return {
        "uid": f"{place.name}-{engine}"[:40], "title": f"{place.name}: speculation in {title}", "tags": ["outrider"],
        "schemaVersion": 39, "version": 1, "editable": False, "refresh": f"{EVERY_S}s", "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"}, "panels": panels,
    }  # fmt: skip


Panel = tuple[str, str, str, Sequence[tuple[str | None, str]]]
"""(Title, what it means, unit, [(query, legend)])"""


def _panels(metrics: Metrics) -> list[Panel]:
    found: list[Panel] = [
        ("Tokens per step", "Tokens a step writes, the bonus token included; 1 is as without drafts.", "short",
         [(metrics.tokens_per_draft, "steps with a draft"), (metrics.tokens_per_step, "all steps")]),
        ("Kept share of drafts", "Of the drafted tokens.", "percentunit", [(metrics.acceptance, "kept")]),
    ]  # fmt: skip
    if metrics.by_position is not None:
        query, label = metrics.by_position
        legend = f"position {{{{{label}}}}}"
        found.append(
            ("Kept by position", "Share of the drafts kept up to each position, from 0.", "percentunit", [(query, legend)])
        )
    tokens = [(metrics.generated, "written"), (metrics.drafted, "drafted")]
    found.append(("Tokens a second", "Drafted ones that are not kept cost and bring nothing.", "short", tokens))
    for title, about, name in (
        ("Time to the first token", "TTFT.", metrics.ttft),
        ("Time per token", "TPOT, after the first one; what speculation shortens.", metrics.tpot),
    ):
        if name is not None:
            queries = [
                (f"histogram_quantile({share}, sum by (le) (rate({name}_bucket[{WINDOW}])))", f"p{share * 100:.0f}")
                for share in SHARES
            ]
            found.append((title, about, "s", queries))
    load = [(metrics.running, "running"), (metrics.waiting, "waiting")]
    found.append(("Requests", "At many at once speculation may cost more than it brings.", "short", load))
    return found


def _panel(number: int, title: str, about: str, unit: str, queries: Sequence[tuple[str | None, str]]) -> Manifest:
    said = [(query, legend) for query, legend in queries if query is not None]
    source = {"type": "prometheus", "uid": SOURCE}
    return {
        "id": number + 1, "type": "timeseries", "title": title, "description": about, "datasource": source,
        "gridPos": {"x": WIDTH * (number % 2), "y": HEIGHT * (number // 2), "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "expr": query, "legendFormat": legend, "datasource": source}
            for at, (query, legend) in enumerate(said)
        ],
    }  # fmt: skip
