"""What tests of engines share."""

from pathlib import Path

import pytest
from published import LAYOUTS, Sizes
from tiny import make_folder

from outrider import load_target
from outrider.export.reading import import_folder


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a checkpoint of a DFlash for it."""
    place = tmp_path_factory.mktemp("home")
    target = load_target(make_folder(place / "target", num_hidden_layers=8))
    folder = LAYOUTS["zlab_dflash"](Sizes(target)).write(place / "published")
    import_folder(folder, place / "checkpoint", target)
    return place
