"""Options made from the fields of a config."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field

from outrider.cli.options import Fields, with_options
from outrider.config import Config, override
from outrider.errors import ConfigError


class Demo(Config):
    name: str
    """Its name, [in brackets]."""
    tasks: tuple[str, ...] = ("a",)
    method: Sequence[str] = ()
    timeout_s: float | None = Field(None, gt=0)
    mode: Literal["fast", "slow"] = "fast"
    verbose: bool = False
    compile: bool | None = None


NAMES = "name=target tasks method timeout_s=timeout mode verbose compile"


def called(fields: Fields, *words: str) -> Any:
    """What a verb gets for these words of a command line."""
    values: list[Any] = []

    @with_options
    def verb(demo: Annotated[Any, fields], other: int = 0) -> None:
        values.append((demo, other))

    app = typer.Typer(add_completion=False)
    app.command()(verb)
    app(list(words), standalone_mode=False)
    [(value, other)] = values
    assert other == 0
    return value


def test_only_options_that_were_given_are_overrides() -> None:
    """Catches a default that overrides a run file, --no-compile that is lost, and text that YAML reads as something
    else."""
    fields = Fields(Demo, NAMES, "demo")
    assert called(fields) == []
    words = ("--target", "null", "--tasks", "x, 7,", "--timeout", "3", "--mode", "slow", "--verbose", "--no-compile")
    assert override({}, called(fields, *words)) == {
        "demo": {
            "name": "null", "tasks": ["x", "7"], "timeout_s": 3.0, "mode": "slow", "verbose": True, "compile": False,
        }
    }  # fmt: skip


def test_without_a_section_the_verb_gets_the_config() -> None:
    """Catches a default that is not the field's, an option that can't be repeated, and a value that is not checked."""
    fields = Fields(Demo, NAMES, defaults={"name": "demo"})
    assert called(fields) == Demo(name="demo")
    demo = called(fields, "--method", "a", "--method", "b", "--compile", "--timeout", "2")
    assert demo == Demo(name="demo", method=["a", "b"], compile=True, timeout_s=2.0)
    with pytest.raises(ConfigError, match="timeout_s: Input should be greater than 0"):
        called(fields, "--timeout", "0")
    with pytest.raises(Exception, match="'medium' is not one of 'fast', 'slow'"):
        called(fields, "--mode", "medium")


def test_help_is_that_of_the_fields(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches brackets that are read as markup, and a default that is not shown since the option itself has none."""
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(ValueError, match="not enough values"):  # the verb is not called
        called(Fields(Demo, NAMES, "demo"), "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "Its name, [in brackets]." in text and "[default: (fast)]" in text
