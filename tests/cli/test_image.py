"""examples/Dockerfile without an engine: its commands in a plain folder that root owns, served by another user."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from verbs import outrider_with

from outrider.serve.http import keys

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "examples/Dockerfile").read_text()
NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@pytest.fixture
def image() -> Iterator[Path]:
    """A folder that everybody can read, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def files(folder: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become another user")
def test_an_image_serves_without_a_compiler_root_or_writing(image: Path, folder: Path, monkeypatch) -> None:
    """Catches packages that only their builder may read, a compiler that is needed at run time, and a server that
    needs to write or to be root."""
    target, prebuilt, key_file = image / "tiny", image / "prebuilt", image / "keys.json"
    shutil.copytree(folder, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    [build] = re.findall(r"^RUN outrider (.*)$", DOCKERFILE, re.MULTILINE)
    here = {"smollm2": str(target), "/prebuilt": str(prebuilt), "/keys.json": str(key_file), "0.0.0.0": "127.0.0.1"}
    monkeypatch.setenv("OUTRIDER_CACHE", os.environ["OUTRIDER_CACHE"])  # which the command changes
    monkeypatch.delenv("OUTRIDER_COMPILE", raising=False)
    assert outrider_with(*(here.get(word, word) for word in build.split())) == 0
    before = files(prebuilt)
    assert any(path.suffix == ".pt2" for path, _ in before)

    key = keys.add(key_file, "ann")
    key_file.chmod(0o644)
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, re.MULTILINE)
    _, *words = [here.get(word, word) for word in json.loads(entry)]
    command = [*NOBODY, sys.executable, "-m", "outrider", *words, "--port", "0", "--compile"]  # or it would fail
    environment = {
        "OUTRIDER_CACHE": str(prebuilt),
        "HOME": "/nonexistent",
        "PATH": "/nonexistent",
        "PYTHONPATH": str(ROOT),
    }
    environment |= {name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ}
    server = subprocess.Popen(
        [shutil.which("setpriv"), *command[1:]], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd="/",
    )  # fmt: skip
    try:
        said = ""
        while not (address := re.search(r"server +(http://\S+),", said)):
            line = server.stdout.readline()
            assert line, said
            said += line
        body = {"prompt": "abcabc", "max_tokens": 4, "temperature": 0}
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{address[1]}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
        assert "compiler" not in said
    finally:
        server.terminate()
        assert server.wait(60) == 0
    assert files(prebuilt) == before


def test_a_folder_of_other_files_is_left_alone(tmp_path, capsys):
    """Catches permissions that are changed in a folder that is not ours."""
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "secret").chmod(0o600)
    assert outrider_with("compile", "--target", "demo", "--out", str(tmp_path)) == 2
    assert "was not made by this command" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
