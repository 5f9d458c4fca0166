"""The proxy configurations of docs/threat-model.md, in front of a server."""

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from outrider.targets.hf.transformers import TransformersTarget
from serve.running import Running, running

DOCS = Path(__file__).resolve().parents[2] / "docs" / "threat-model.md"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
CADDY = shutil.which("caddy")
BODY = {"prompt": "a", "max_tokens": 3}


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    with running(talker, length=64) as found:
        yield found


def block(language: str) -> str:
    """The configuration in the docs."""
    match = re.search(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    return match[1]


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def proxy(command: list[str], port: int, folder: Path) -> Iterator[str]:
    """The proxy's address, once it listens."""
    settings = os.environ | {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "proxy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=settings)
    try:
        until = time.monotonic() + 20
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        assert process.poll() is None, (folder / "proxy.log").read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def nginx(server: Running, folder: Path) -> Iterator[str]:
    assert NGINX is not None
    port = free_port()
    site = re.sub(r" *(ssl_certificate|server_name)[^\n]*\n", "", block("nginx"))
    site = site.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace("http://127.0.0.1:8000", server.url)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
    own = f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
    (folder / "nginx.conf").write_text(f"{own}http {{\naccess_log off;\n{places}{site}}}\n")
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    with proxy(command, port, folder) as url:
        yield url


@contextmanager
def caddy(server: Running, folder: Path) -> Iterator[str]:
    assert CADDY is not None
    port = free_port()
    site = block("caddy").replace("models.example.org", f"http://127.0.0.1:{port}")
    site = site.replace("127.0.0.1:8000", server.url.removeprefix("http://"))
    (folder / "Caddyfile").write_text(f"{{\nadmin off\n}}\n{site}")
    command = [CADDY, "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]
    with proxy(command, port, folder) as url:
        yield url


PROXIES = [
    pytest.param(nginx, marks=pytest.mark.skipif(NGINX is None, reason="nginx is not installed")),
    pytest.param(caddy, marks=pytest.mark.skipif(CADDY is None, reason="caddy is not installed")),
]


@pytest.mark.parametrize("start", PROXIES)
def test_a_proxy_of_the_docs_serves_texts_and_nothing_else(server: Running, tmp_path: Path, start: object) -> None:
    """Catches a configuration that the proxy refuses, that holds streams back, that shows the open pages, or that lets
    large bodies through."""
    assert callable(start)
    with start(server, tmp_path) as url, httpx.Client(base_url=url, timeout=30) as client:
        assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as answer:
            assert answer.read().endswith(b"data: [DONE]\n\n")
        for page in ("/metrics", "/stats", "/", "/health", "/v1/../metrics", "/v1/%2e%2e/metrics"):
            assert client.get(page).status_code in (400, 404), page
        with suppress(httpx.WriteError):  # it may close the connection before it has read all
            refused = client.post("/v1/completions", json=BODY | {"prompt": "a" * (5 << 20)})
            assert refused.status_code == 413 or (start is caddy and refused.status_code == 502)


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_nginx_limits_an_addresss_requests(server: Running, tmp_path: Path) -> None:
    """Catches a zone that is declared and not used: one address could send as much as it likes."""
    with nginx(server, tmp_path) as url, ThreadPoolExecutor(60) as pool, httpx.Client(timeout=60) as client:
        statuses = list(pool.map(lambda _: client.get(f"{url}/v1/models").status_code, range(200)))
    assert set(statuses) == {200, 429}
