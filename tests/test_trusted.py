"""What is read or run is checked first, and what is printed does nothing."""

import os
import re
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from outrider import checkpoint, config, kernels
from outrider.cli import console
from outrider.errors import CheckpointError, ConfigError, ExportError, NotCompiled
from outrider.fast import Graph
from outrider.formats import folder
from outrider.storage import trusted

# ── what is run ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file of code in a private folder."""
    path = trusted.private_folder(tmp_path / "cache") / "code.so"
    path.write_bytes(b"code")
    path.chmod(0o700)
    return path


def test_code_that_only_its_user_writes_is_run(library: Path) -> None:
    assert trusted.executable(library) == library
    (library.parent / "link.so").symlink_to(library)
    assert trusted.executable(library.parent / "link.so")


@pytest.mark.parametrize("planted", ["file", "folder", "above", "pipe"])
def test_code_that_others_may_write_is_not_run(library: Path, planted: str) -> None:
    """Catches a library that another user of the machine put, or may put, where it is loaded."""
    if planted == "pipe":
        library.unlink()
        os.mkfifo(library)
    else:
        place = {"file": library, "folder": library.parent, "above": library.parent.parent}[planted]
        place.chmod(0o777)
    with pytest.raises(OSError, match="written by others|not a regular file"):
        trusted.executable(library)


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("planted", ["file", "folder", "target"])
def test_code_of_another_user_is_not_run(library: Path, planted: str) -> None:
    """Catches a folder, a file, or a link to a file that belongs to somebody else."""
    place = library if planted != "folder" else library.parent
    given = library
    if planted == "target":
        given = library.parent / "link.so"
        given.symlink_to(library)
    os.chown(place, 1234, 1234)
    with pytest.raises(OSError, match="another user"):
        trusted.executable(given)
    if planted == "folder":
        with pytest.raises(OSError, match="another user"):
            trusted.private_folder(place)


def test_what_is_loaded_is_checked(library: Path) -> None:
    """Catches a way to run code that does not ask: kernels and native functions, and compiled packages."""
    library.chmod(0o722)
    with pytest.raises(OSError, match="written by others"):
        kernels.shared_library(library, [])
    with pytest.raises(NotCompiled, match="written by others"):
        Graph(library, None)  # type: ignore[arg-type]


def test_a_cache_is_made_private(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    assert trusted.private_folder(place).stat().st_mode & 0o777 == 0o700


# ── what is read ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_weights_are_files(tmp_path: Path, kind: str) -> None:
    """Catches a checkpoint whose weights are read for ever."""
    place = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        place.mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="not a regular file"):
        folder.read_names(tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        checkpoint.load_weights(tmp_path, None)  # type: ignore[arg-type]
    place.rmdir() if kind == "folder" else place.unlink()
    save_file({}, place)
    assert folder.read_names(tmp_path) == frozenset()


def repeated(count: int, each: str) -> str:
    """Aliases that hold eight of the one before."""
    return "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} {each.replace('*', f'*x{i - 1}')}\n" for i in range(1, count))


BOMBS = {
    "lists": repeated(12, "[*, *, *, *, *, *, *, *]"),
    "mappings": repeated(12, "{a: *, b: *, c: *, d: *, e: *, f: *, g: *, h: *}"),
    "itself": "a: &a\n  b: *a\n", "itself in a list": "a: &a [1, *a]\n", "depth": "a: " + "[" * 2000 + "]" * 2000,
    "some depth": "a: " + "{a: " * 60 + "1" + "}" * 60, "digits": "a: " + "9" * 6000, "date": "a: 2001-13-45",
    "size": "a: " + "b" * 600_000, "merge": "a: &a {b: 1}\nc: {<<: [*a, 7]}", "unhashable": "{[1]: 2}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_run_file_is_bounded(tmp_path: Path, name: str) -> None:
    """Catches memory and time that a file of a few lines takes, and a traceback in place of an error."""
    path = tmp_path / "run.yaml"
    path.write_text(BOMBS[name])
    begun = time.monotonic()
    with pytest.raises(ConfigError) as raised, config.located(path):
        config.read(path)
    assert time.monotonic() - begun < 20
    assert len(str(raised.value)) < 1000


def test_aliases_and_depth_that_people_write_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("a: &a {b: [1, {c: 2}]}\nd: *a\ne: {<<: *a, f: 3}\n")
    assert config.read(path) == {"a": (a := {"b": [1, {"c": 2}]}), "d": a, "e": a | {"f": 3}}


def test_a_device_is_no_run_file() -> None:
    with pytest.raises(ConfigError):
        config.read("/dev/zero")


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "text", ["\x1b]0;pwned\x07", "\x1b[2J", "a\rb", "\x9b2J", "a\x08b", "\u202eabc", "\ud800", "a\x00b\x7f"]
)
def test_nothing_drives_a_terminal(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a server's answer, a file's name or a model's text that moves the cursor or sets the title."""
    console.fail(f"the server says: {text} (400)")
    shown = capsys.readouterr().err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
    assert console.plain(text).encode()


@pytest.mark.parametrize("url", ["http://ann:secret@host/v1", "https://secret@host", "see http://a:b%20secret@h:1/x"])
def test_passwords_of_addresses_are_not_printed(url: str) -> None:
    assert "secret" not in console.plain(f"can't reach {url!r}: refused")
    assert "***@h" in console.plain(url)


def test_plain_text_stays_as_it_is() -> None:
    text = "naïve\tcafé\n日本語 👍 user@example.org: http://host/a@b?c=d@e"
    assert console.plain(text) == text
