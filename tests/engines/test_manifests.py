"""What is written beside a command, checked by those who read it: Kubernetes' and compose's schemas, promtool,
PromQL."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from outrider.engines import manifests
from outrider.engines.commands import draft_of
from outrider.engines.engine import ENGINES as KNOWN
from outrider.engines.engine import Wish
from outrider.engines.manifests import Place, files_of
from outrider.engines.tuning.tune import Range
from outrider.errors import ConfigError
from outrider.serve.records.metrics import Telemetry
from tests.engines.test_commands import folder_of, outrider_with

ENGINES = sorted(name for name, engine in KNOWN.items() if engine.image is not None)
SCHEDULE = (Range(1, 8, 3), Range(9, 512, 0))
FORMATS = {"vllm": "speculators", "triton": "speculators", "sglang": "sglang", "trtllm": "sglang", "llamacpp": "gguf"}
VLLM_METRICS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
    "vllm:time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_count", "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}  # fmt: skip
METRICS = {
    "vllm": VLLM_METRICS,
    "sglang": {
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:spec_accept_length", "sglang:spec_accept_rate",
        "sglang:generation_tokens_total", "sglang:time_to_first_token_seconds_bucket",
        "sglang:request_time_per_output_token_seconds_bucket",
    },
    "llamacpp": {
        "llamacpp:tokens_predicted_total", "llamacpp:requests_processing", "llamacpp:requests_deferred",
        *(name.replace("vllm:", "llamacpp:") for name in VLLM_METRICS if "spec_decode" in name),
    },
    "trtllm": {
        "trtllm_spec_decode_acceptance_length", "trtllm_spec_decode_num_accepted_tokens_total",
        "trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_accepted_tokens_total",
        "trtllm_spec_decode_drafted_tokens_total", "trtllm_num_generation_requests", "trtllm_num_context_requests",
        "trtllm_time_to_first_token_seconds_bucket", "trtllm_time_per_output_token_seconds_bucket",
    },
    "outrider": {
        family.name + {"counter": "_total", "histogram": "_bucket"}.get(family.type, "")
        for family in Telemetry("tiny", 1).collect()
    },
}  # fmt: skip
"""Names in the sources of vLLM 0.32, SGLang 0.5.23, llama.cpp 0c1e57098 and TensorRT-LLM."""


class Deployed(NamedTuple):
    engine: str
    files: dict[str, str]
    compose: dict[str, Any]
    kubernetes: list[dict[str, Any]]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Deployed]]:
    """Files of every engine: from the hub and from disk, with a folder and without, by load where that can be; and the
    folder of those on disk."""
    place = tmp_path_factory.mktemp("deployed")
    target, gguf, found = place / "tar$get", place / "target.gguf", []
    target.mkdir(exist_ok=True)
    gguf.touch()
    for engine in ENGINES:
        is_llama = engine == "llamacpp"
        away = "target.gguf" if is_llama else "org/target"
        folder = folder_of(place, "eagle3", FORMATS[engine])
        for draft, wish in (
            (draft_of("ngram", away), Wish(extra=("--name", "$HOME"))),
            (draft_of(folder, str(gguf if is_llama else target)), Wish(schedule=() if is_llama else SCHEDULE)),
            (draft_of(folder, away), Wish(tensor_parallel=1 if is_llama else 2)),
        ):
            files = files_of(engine, draft, wish, Place(gpus=2))
            manifests_ = list(yaml.safe_load_all(files["kubernetes.yaml"]))
            found.append(Deployed(engine, files, yaml.safe_load(files["compose.yaml"]), manifests_))
    return place, found


def test_kubernetes_takes_every_manifest(deployed: tuple[Path, list[Deployed]]) -> None:
    """Catches a key that the API server or compose refuses, by Kubernetes' own strict schemas, the oldest that the
    package has, and compose_spec's parser."""
    validate = pytest.importorskip("kubernetes_validate").validate
    read = pytest.importorskip("compose_spec").PyCompose.from_yaml
    for one in deployed[1]:
        read(one.files["compose.yaml"])
        for manifest in one.kubernetes:
            validate(manifest, "1.27", strict=True)


def test_parts_of_a_manifest_name_each_other(deployed: tuple[Path, list[Deployed]]) -> None:
    """Catches a Service that selects nothing, a volume nobody made, and a probe of a port that is not open."""
    for engine, _, _, every in deployed[1]:
        found = {manifest["kind"]: manifest for manifest in every}
        pod = found["Deployment"]["spec"]["template"]
        assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        assert found["Service"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
        [container] = pod["spec"]["containers"]
        ports = {port["name"] for port in container["ports"]}
        probes = {container[name]["httpGet"]["port"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
        assert probes | {found["Service"]["spec"]["ports"][0]["targetPort"]} <= ports
        port = container["command"][container["command"].index("--http-port" if engine == "triton" else "--port") + 1]
        assert int(port) == container["ports"][0]["containerPort"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
        claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
        assert claim == found["PersistentVolumeClaim"]["metadata"]["name"]
        items = volumes.get("settings", {}).get("configMap", {}).get("items", [])
        assert {item["key"] for item in items} == set(found.get("ConfigMap", {"data": {}})["data"])


def test_nothing_is_open_beyond_the_machine_and_nothing_is_secret(deployed: tuple[Path, list[Deployed]]) -> None:
    """Catches a port on every interface, a password that everybody knows, and a token in a file."""
    for engine, files, body, every in deployed[1]:
        ports = [port for service in body["services"].values() for port in service.get("ports", ())]
        assert ports and all(str(port).startswith("127.0.0.1:") for port in ports)
        [service] = [one for one in every if one["kind"] == "Service"]
        assert service["spec"]["type"] == "ClusterIP"
        [served] = [one for one in every if one["kind"] == "Deployment"]
        assert served["spec"]["template"]["spec"]["enableServiceLinks"] is False  # a Service vllm would set VLLM_PORT
        text = "\n".join(files.values())
        assert ("tritonserver" in text) == ("--allow-grpc" in text)  # which would listen on every interface
        assert not re.search(r"(?i)password|api[-_]key|kind: Secret|hf_[A-Za-z]{8}", text)
        if engine in manifests.METRICS:
            grafana = body["services"]["grafana"]["environment"]
            assert grafana["GF_AUTH_BASIC_ENABLED"] == "false" and grafana["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
            assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"


def test_a_container_finds_every_path_of_its_command(deployed: tuple[Path, list[Deployed]]) -> None:
    """Catches a path of this machine in a container, and a $ that compose reads as a variable."""
    place = deployed[0]
    for engine, files, body, _ in deployed[1]:
        service = body["services"]["engine"]
        inside = {volume.split(":")[1] for volume in service["volumes"]}
        texts = [*service["command"], *(text for name, text in files.items() if name.startswith("container/"))]
        named = {path for text in texts for path in re.findall(r"(?:/models|/etc/outrider)/[\w./]+", text)}
        for path in named:
            assert any(path == each or path.startswith(f"{each}/") for each in inside), (engine, path, inside)
        assert str(place) not in " ".join(service["command"])
        assert not re.search(r"(?<!\$)\$(?!\$)", re.sub(r"\$\$", "", files["compose.yaml"]))
        for name in (name for name in files if name.startswith("container/")):
            assert f"{manifests.SETTINGS}/" in " ".join(service["command"])
            assert str(place) not in files[name]


@pytest.mark.parametrize("engine", sorted(manifests.METRICS))
def test_a_dashboard_asks_for_what_its_engine_has(engine: str) -> None:
    """Catches a query that Prometheus can't read, a metric that is misspelt or of another engine, and a panel over
    another."""
    parse = pytest.importorskip("promql_parser").parse
    panels = manifests.dashboard(engine, Place())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for query in queries:
        parse(query)
    prefixed = r"\b(?:outrider:|vllm:|sglang:|llamacpp:|trtllm_)\w+"
    names = {name for query in queries for name in re.findall(prefixed, query)}
    assert names and names <= METRICS[engine] and not any("_created" in query for query in queries)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["targets"] for panel in panels)
    assert len({target["refId"] for target in panels[0]["targets"]}) == len(panels[0]["targets"])


def test_a_name_that_kubernetes_refuses_is_refused() -> None:
    """Catches a manifest that can't be applied."""
    for name in ("", "Chat", "-a", "a_b", "a" * 60):
        with pytest.raises(ConfigError, match="must be up to 52"):
            files_of("vllm", draft_of("ngram", "org/target"), Wish(), Place(name))


def test_out_writes_everything_or_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a command whose files lie elsewhere, a script that does not run, and a folder that is half-written."""
    out = tmp_path / "deployed"
    assert outrider_with("deploy", "ngram", "--to", "trtllm", "--target", "org/target", "--out", str(out)) == 0
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {
        "serve.sh", "settings/trtllm.yaml", "container/trtllm.yaml", "kubernetes.yaml", "compose.yaml",
        "prometheus.yaml",
        "grafana/dashboards/speculation.json", "grafana/provisioning/datasources/prometheus.yaml",
        "grafana/provisioning/dashboards/outrider.yaml",
    }  # fmt: skip
    script = (out / "serve.sh").read_text()
    path = Path(re.findall(r"--config (\S+)", script)[0])
    assert yaml.safe_load(path.read_text())["speculative_config"]["decoding_type"] == "NGram"
    subprocess.run(["sh", "-n", str(out / "serve.sh")], check=True)
    words = ("deploy", "ngram", "--to", "vllm", "--target", "T", "--out")
    assert outrider_with(*words, str(out)) == 1
    assert "exists already" in capsys.readouterr().err
    assert outrider_with(*words, str(tmp_path / "no"), "--name", "A") == 2
    assert not list(tmp_path.glob("no*"))


def test_a_systemd_unit_starts_what_serve_sh_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a relative path or a program without one, at which systemd ends, and a % or $ that it reads itself."""
    folder = folder_of(tmp_path, "eagle3", "gguf")
    target = tmp_path / "a $5 target, 50% off.gguf"
    target.touch()
    out = tmp_path / "deployed"
    words = ("deploy", str(folder), "--to", "llama.cpp", "--target", str(target), "--name", "chat", "--out", str(out))
    assert outrider_with(*words) == 0
    unit = (out / "chat.service").read_text()
    [line] = re.findall(r"^ExecStart=(.*)$", unit, flags=re.MULTILINE)
    started = [
        json.loads(word).replace("$$", "$").replace("%%", "%") for word in re.findall(r'"(?:[^"\\]|\\.)*"', line)
    ]
    served = shlex.split((out / "serve.sh").read_text().splitlines()[-1].removeprefix("exec "))
    assert Path(started[0]).is_absolute() and Path(started[0]).name == served[0] == "llama-server"
    assert started[1:] == served[1:] and str(folder / "model.gguf") in started
    # an engine that is a package of some Python would not be found by systemd
    manifests.write(tmp_path / "vllm", "vllm", draft_of("ngram", "org/target"), Wish(), Place())
    assert not list((tmp_path / "vllm").glob("*.service"))
    if shutil.which("systemd-analyze"):
        (tmp_path / "llama-server").write_text("#!/bin/sh\n")
        (tmp_path / "llama-server").chmod(0o755)
        sound = tmp_path / "sound.service"  # it looks for the program
        sound.write_text(unit.replace(started[0], str(tmp_path / "llama-server")))
        done = subprocess.run(["systemd-analyze", "verify", str(sound)], capture_output=True, text=True)
        assert "sound.service" not in done.stderr, done.stderr


def test_a_machine_without_a_gpu_gets_the_image_for_it(tmp_path: Path) -> None:
    """Catches an image built for CUDA, and a GPU asked for, where there is none."""
    files = files_of("llamacpp", draft_of("ngram", "target.gguf"), Wish(), Place(gpus=0))
    service = yaml.safe_load(files["compose.yaml"])["services"]["engine"]
    assert service["image"] == "ghcr.io/ggml-org/llama.cpp:server" and "deploy" not in service
    assert "nvidia.com/gpu" not in files["kubernetes.yaml"] and service["image"] in files["kubernetes.yaml"]
    with pytest.raises(ConfigError, match="vLLM has no image for machines without a GPU; name one with --image"):
        files_of("vllm", draft_of("ngram", "org/target"), Wish(), Place(gpus=0))
    assert "mine" in files_of("vllm", draft_of("ngram", "T"), Wish(), Place(image="mine", gpus=0))["compose.yaml"]
