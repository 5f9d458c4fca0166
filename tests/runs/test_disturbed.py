"""Stages on a full disk, and two processes in one run's folder: the results are those of an undisturbed run."""

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kills import EXPORT, RUN, STAGES, ended, files, made, start

SIZES = ("64k", "160k", "320k")
"""Of a file system on which some of the results fit."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder before each stage, and `end`."""
    place = made(tmp_path_factory.mktemp("undisturbed") / "run")
    folders = {}
    for stage in STAGES:
        folders[stage] = Path(shutil.copytree(place, place.with_name(stage)))
        assert ended(start(place, stage)) is not None, (place / "errors.log").read_text()
    return folders | {"end": place}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory, which the test may make larger."""
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("file systems can't be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def expected(undisturbed: dict[str, Path], stage: str) -> dict[str, str]:
    """The results after a stage."""
    following = [*STAGES, "end"][STAGES.index(stage) + 1]
    return files(undisturbed[following])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_on_a_full_disk_says_so_and_ends_elsewhere(
    stage: str, undisturbed: dict[str, Path], small_disk: Path
) -> None:
    """Catches a traceback, a half-written file that a resume believes, and results that are lost."""
    place = small_disk / "run"
    shutil.copytree(undisturbed[stage], place)
    held = sum(path.stat().st_blocks * 512 for path in small_disk.rglob("*"))
    for size in SIZES:
        limit = held + int(size[:-1]) * 1024
        subprocess.run(["mount", "-o", f"remount,size={limit}", small_disk], check=True)
        (place / "errors.log").unlink(missing_ok=True)
        process = start(place, stage)
        process[0].join(120)
        assert not process[0].is_alive()
        log = (place / "errors.log").read_text() if (place / "errors.log").exists() else ""
        raised = [line for line in log.splitlines() if line.startswith(("outrider.errors.", "OSError", "sqlite3"))]
        assert process[0].exitcode == 0 or not log or not raised or raised[-1].startswith("outrider.errors."), log
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    assert ended(start(place, stage)) is not None, (place / "errors.log").read_text()
    assert files(place) == expected(undisturbed, stage)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_in_one_folder_do_no_harm(stage: str, undisturbed: dict[str, Path], tmp_path: Path) -> None:
    """Catches answers that are written twice, and checkpoints of which each process writes a half."""
    place = Path(shutil.copytree(undisturbed[stage], tmp_path / "run"))
    first = start(place, stage)
    time.sleep(0.3)
    second = start(place, stage)
    outcomes = [ended(first), ended(second)]
    assert any(outcome is not None for outcome in outcomes), (place / "errors.log").read_text()
    log = (place / "errors.log").read_text()
    if None in outcomes:
        assert "outrider.errors." in log, log
    if stage != "export":  # which refuses a folder that is there
        assert ended(start(place, stage)) is not None, (place / "errors.log").read_text()
    assert files(place) == expected(undisturbed, stage)
    assert (place / RUN).exists()
    assert (place / EXPORT).exists() == (stage == "export")
