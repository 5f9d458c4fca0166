"""What tests of formats share: a target that reads bytes, and one whose tokenizer llama.cpp can read."""

from pathlib import Path
from typing import Any

import pytest
from gguf_targets import Made, make_target
from tiny import make_folder

from outrider import load_target


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def target(folder: Path) -> Any:
    return load_target(folder)


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_target(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="session")
def made(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Drafters for `bpe` and their files."""
    return Made(bpe, tmp_path_factory.mktemp("made"))
