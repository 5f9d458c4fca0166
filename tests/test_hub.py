"""A folder that is missing is not a repository of the hub."""

from pathlib import Path

import pytest

from outrider.hub import is_local, missing_path


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-4B", "org/name_1.5"])
def test_a_repository_s_name_is_asked_of_the_hub(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a hub id that is refused as a missing folder, and a folder named like one that is then downloaded."""
    monkeypatch.chdir(tmp_path)
    assert not is_local(name) and missing_path(name) is None
    (tmp_path / name).mkdir(parents=True)
    assert is_local(name) and missing_path(name) is None
    assert "/" not in name or missing_path(f"{name}-8B") is not None


def test_a_missing_folder_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `runs/x` before any run being looked for on the network, and an owner that is a folder here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("runs/x", "./x", "../x", "/no/such", "~/no-such", "models/x", "a/b/c", "a.jsonl", "d/m.json"):
        problem = missing_path(name)
        assert is_local(name) and problem is not None and name in problem
