"""What is read or run is checked first, and what is printed does nothing."""

import json
import logging
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from report.examples import hostile_report
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from tiny import folder, talker

from outrider import checkpoint, cli, config, generation, kernels, load_drafter, load_target, machine
from outrider.cli import console
from outrider.cli.chat import read_conversation
from outrider.client.asynchronous import AsyncClient
from outrider.client.cache import ResponseCache
from outrider.client.sending.resources import base_of
from outrider.costs.stored import RunnerSeconds, StoredCosts
from outrider.data.answers import store
from outrider.drafters import find
from outrider.errors import (
    LONGEST_MESSAGE,
    CheckpointError,
    ConfigError,
    DataError,
    ExportError,
    NotCompiled,
    TargetError,
)
from outrider.fast import Graph
from outrider.fast.packages import background, shelf
from outrider.fast.packages.key import fingerprint
from outrider.formats import folder as folders
from outrider.lab import swap
from outrider.lab.drafters import layer_skip
from outrider.lab.judges import relay
from outrider.machine import measurements
from outrider.plan.measured import timings
from outrider.report.tables import SummaryTable
from outrider.storage import trusted
from outrider.storage.json_text import parse_json
from outrider.targets import catalog
from outrider.targets.hf.proof import capabilities
from outrider.targets.hf.transformers import TransformersTarget
from outrider.traffic.address import address_of

__all__ = ["folder", "talker"]

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")

# ── what is run ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A file of code in a private folder."""
    path = trusted.private_folder(tmp_path / "cache") / "code.so"
    path.write_bytes(b"code")
    path.chmod(0o700)
    return path


def test_code_that_only_its_user_writes_is_run(library: Path) -> None:
    assert trusted.own_file(library) == library
    (library.parent / "link.so").symlink_to(library)
    assert trusted.own_file(library.parent / "link.so")


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
        trusted.own_file(library)


@AS_ROOT
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
        trusted.own_file(given)
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


# ── the cache ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def figures(path: Path) -> bool:
    path.write_text(json.dumps({"ms": {"way": {"ms": 1.0}}, "processes": 3}))
    return measurements._read(path) is not None


def costs(path: Path) -> bool:
    stored = StoredCosts(path)
    stored.write({"plain": RunnerSeconds({(1, 1): 0.5}, {})})
    return bool(stored.read())


def selftest(path: Path) -> bool:
    path.write_text('{"masks": "none", "selftest": null}')
    return capabilities._load(path) is not None


def checked(path: Path) -> bool:
    package = path.with_suffix(".pt2")
    package.write_bytes(b"code")
    shelf.note_checked(package)
    return shelf.was_checked(package)


def model(path: Path) -> bool:
    (path.parent / catalog.FILES).write_text(json.dumps(catalog._stats(path.parent)))
    return catalog._is_whole(path.parent)


@pytest.mark.parametrize("stored", [figures, costs, selftest, checked, model])
@pytest.mark.parametrize("planted", ["nobody", "others", pytest.param("user", marks=AS_ROOT)])
def test_what_others_may_write_is_not_believed(
    stored: Callable[[Path], bool], planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Catches a self-test, a package's check, times or a model that another user of a shared folder wrote."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    if planted == "others":
        tmp_path.chmod(0o777)
    elif planted == "user":
        os.chown(tmp_path, 1234, 1234)
    assert stored(trusted.private_folder(tmp_path / "kept") / "one.json") == (planted == "nobody")
    assert bool(caplog.messages) == (planted != "nobody")
    assert all(re.search("written by others|another user", message) for message in caplog.messages)


def test_what_another_version_stored_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a choice between paths, their times, an allowance or a package that an older release made."""
    target = load_target("demo", compile=False)
    drafter = load_drafter("ngram", target)
    places = lambda: {
        machine._place("a question"), generation.stored_costs(target, drafter).path, timings.place(target),
        fingerprint(target.model),
    }  # fmt: skip
    now = places()
    for other in ((), ("0.0.1", *machine._versions()[1:]), (*machine._versions()[:1], "4.0.0")):
        monkeypatch.setattr(machine, "_versions", lambda other=other: other)
        assert not now & places()
        monkeypatch.undo()
    assert now == places()


@pytest.mark.parametrize("place", ["/dev/null/cache", "/proc/cache"])
def test_a_cache_that_can_not_be_written_costs_speed_alone(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a traceback in place of plain steps, or of a sentence where nothing works without the folder."""
    monkeypatch.setenv("OUTRIDER_CACHE", place)
    monkeypatch.delenv("OUTRIDER_COMPILE", raising=False)
    target = load_target("demo")
    with pytest.raises(NotCompiled, match="can't be stored"):
        target.compile()
    background.build([target.step], "demo", None)
    assert "steps stay plain, since packages can't be stored" in caplog.text
    with pytest.raises(TargetError, match="set OUTRIDER_CACHE"):
        catalog.smollm2()


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
        folders.read_names(tmp_path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        checkpoint.load_weights(tmp_path, None)  # type: ignore[arg-type]
    place.rmdir() if kind == "folder" else place.unlink()
    save_file({}, place)
    assert folders.read_names(tmp_path) == frozenset()


def refuses(error: type[Exception], read: Callable[[Path], object]) -> Callable[[Path], None]:
    def tried(path: Path) -> None:
        with pytest.raises(error) as raised:
            read(path)
        assert len(str(raised.value)) < 1000

    return tried


def is_nothing(read: Callable[[Path], object]) -> Callable[[Path], None]:
    def tried(path: Path) -> None:
        assert not read(path)

    return tried


def cached(path: Path) -> object:
    """What the client's cache has under a name; the file is put there."""
    (place := path.parent / "cache" / "ab").mkdir(parents=True, exist_ok=True)
    (place / "ab.json").unlink(missing_ok=True)
    (place / "ab.json").symlink_to(path)
    return ResponseCache(path.parent / "cache").get("ab")


def manifest(path: Path) -> object:
    (place := path.parent / "answers").mkdir(exist_ok=True)
    (place / store.MANIFEST).unlink(missing_ok=True)
    (place / store.MANIFEST).symlink_to(path)
    return store.read_manifest(place)


SMALL_FILES: dict[str, Callable[[Path], None]] = {
    "conversation": refuses(DataError, read_conversation),
    "cues": refuses(ConfigError, relay.selected),
    "swap": refuses(ConfigError, swap.swap_of),
    "sublayers": refuses(CheckpointError, lambda path: layer_skip._saved(str(path), None)),  # type: ignore[arg-type]
    "client's cache": is_nothing(cached),
    "answers' manifest": is_nothing(manifest),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "depth", "folder"])
@pytest.mark.parametrize("name", SMALL_FILES)
def test_small_files_are_files_too(tmp_path: Path, name: str, kind: str) -> None:
    """Catches a reader that waits for a pipe, fills the memory from a device, or lets Python's own error through."""
    path = tmp_path / "given.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    SMALL_FILES[name](path)


def repeated(count: int, each: str) -> str:
    """Aliases that hold eight of the one before."""
    return "x0: &x0 [1]\n" + "".join(f"x{i}: &x{i} {each.replace('*', f'*x{i - 1}')}\n" for i in range(1, count))


BOMBS = {
    "lists": repeated(12, "[*, *, *, *, *, *, *, *]"),
    "mappings": repeated(12, "{a: *, b: *, c: *, d: *, e: *, f: *, g: *, h: *}"),
    "itself": "a: &a\n  b: *a\n", "itself in a list": "a: &a [1, *a]\n", "depth": "a: " + "[" * 2000 + "]" * 2000,
    "some depth": "a: " + "{a: " * 60 + "1" + "}" * 60, "digits": "a: " + "9" * 6000, "date": "a: 2001-13-45",
    "size": "a: " + "b" * 600_000, "control": "a: \x07b",
    "merge": "a: &a {b: 1}\nc: {<<: [*a, 7]}", "unhashable": "{[1]: 2}",
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


def test_a_run_file_is_a_file(tmp_path: Path) -> None:
    """Catches a read that never ends, of the file or of its lines for an error."""
    os.mkfifo(tmp_path / "pipe")
    for place in ("/dev/zero", tmp_path / "pipe", tmp_path):
        with pytest.raises(ConfigError), config.located(place):
            config.read(place)


@pytest.mark.parametrize(
    ("kind", "setting"), [("dspark", "rank"), ("dspark", "intermediate"), ("dflash2", "rank"), ("medusa", "heads")]
)
def test_a_manifest_is_compared_with_its_weights_before_memory_is_taken(
    kind: str, setting: str, talker: TransformersTarget, tmp_path: Path
) -> None:
    """Catches a manifest of a few bytes that describes a model of many gigabytes."""
    module = find(kind)
    model = module.Model(config.build(module.Config, {"kind": kind}, "drafter"), talker)
    checkpoint.save(tmp_path / "draft", model)
    manifest = json.loads((tmp_path / "draft" / checkpoint.MANIFEST).read_text())
    manifest["config"][setting] = 10**9
    (tmp_path / "draft" / checkpoint.MANIFEST).write_text(json.dumps(manifest))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((CheckpointError, ConfigError)):
        checkpoint.load_model(tmp_path / "draft", talker)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_nested_json_is_refused_as_other_text_is() -> None:
    """Catches Python's own error for it, which readers don't expect."""
    for text in ("[" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)
    assert parse_json("[1]") == [1]


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


def test_no_renderable_drives_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a verb that prints a table, a rich text or a report without `say`."""
    table = Table("\x1b[2Jhead")
    table.add_row(Text("\x9b2J"))
    for shown in (table, Text("\x1b]0;pwned\x07"), "[b]\x1b[31m[/b]", SummaryTable(hostile_report())):
        console.out.print(shown)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", capsys.readouterr().out)


def test_what_nobody_foresaw_is_printed_as_safely(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a traceback, and a library's warning, that print a file's name as it is."""

    def fails(**_: object) -> None:
        logging.getLogger("somebody").warning("odd: %s", "\x1b]0;logged\x07")
        raise KeyError("a \x1b]0;raised\x07 http://ann:secret@host")

    monkeypatch.setattr(cli, "app", fails)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().err
    assert "logged" in shown
    assert "raised" in shown
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]|secret", shown)


SECRETS = [
    "http://ann:secret@host/v1", "https://secret@host", "see http://a:b%20secret@h:1/x", "http://ann:se@secret@host",
    "http://ann:x/secret@host", "ann:secret@host:8000/v1", 'http://ann:"secret@host', "http://h/metrics?api_key=secret&x=1",
    "http://h?x=1&access_token=secret#a", "Authorization: Bearer abc-secret-123456", "basic c2VjcmV0secret",
    "outrider-" + "secret" * 8, "sk-proj-" + "secret" * 5, "hf_" + "secret" * 6,
]  # fmt: skip


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_in_no_message(text: str) -> None:
    """Catches a password or a key in an error, printed or raised to a program."""
    for shown in (console.plain(f"can't reach {text!r}: refused"), str(DataError(f"no server at {text}; start it"))):
        assert "secret" not in shown
        assert "***" in shown


@pytest.mark.parametrize("url", SECRETS[:6])
def test_addresses_that_are_none_keep_their_secrets(url: str) -> None:
    for read in (address_of, base_of, AsyncClient):
        with pytest.raises(ConfigError) as raised:
            read(url.split()[-1].replace("host", "h:x").replace("h:1", "h:x") + "?#")
        assert "secret" not in str(raised.value)


def test_plain_text_stays_as_it_is() -> None:
    text = "naïve\tcafé\n日本語 👍 user@example.org: http://host/a@b?c=d@e http://host:8000/a@b Bearer KEY"
    assert console.plain(text) == text


def test_a_message_has_an_end() -> None:
    assert len(str(DataError("x" * 10**6))) <= LONGEST_MESSAGE
