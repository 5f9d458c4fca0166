"""Commands in README and docs are parsed by the command line itself, short ones are run, and YAML is checked as the
file that it is part of. Python blocks are run by test_pages.py, those that ask a server here."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from outrider import cli, load_drafter, load_target
from outrider.client import load_prices, load_profiles
from outrider.gate.policy import Policy
from outrider.runs.file import load
from tests.serve.running import MODEL, running
from tests.verbs import outrider_with

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ASKING = [("client.md", "import asyncio"), ("serve.md", "from openai import OpenAI")]
"""Blocks of Python that ask a server at http://127.0.0.1:8000; they are run beside one."""
OTHERS = ("accelerate", "curl", "env", "head", "jq", "llama-server", "sqlite3", "torchrun", "trtllm-serve")
"""Programs in commands that are not ours."""
RUN = (
    "outrider plan --hardware list", "outrider show --json-schema", "outrider drafters dspark",
)  # fmt: skip
"""Commands on the pages that take seconds and need nothing: they are run."""


class Block(NamedTuple):
    page: str
    kind: str
    text: str

    @property
    def key(self) -> tuple[str, str]:
        return self.page, self.text.strip().partition("\n")[0].strip()


FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = [Block(path.name, *found) for path in PAGES for found in FENCED.findall(path.read_text())]
STARTS = re.compile(r"^(\$ )?(outrider|torchrun|accelerate|python) ")


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block: of a console those after `$`, else all lines."""
    text = re.sub(r"\s*\\\n\s*", " ", block.text)
    for line in text.splitlines():
        if "\n$ " not in f"\n{text}" or line.startswith("$ "):  # else it is what a command printed
            line = re.sub(r"\[--[^\]]*\]", "", line.removeprefix("$ "))
            words = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            words.whitespace_split, words.commenters = True, "#"
            yield from split(list(words))


def split(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line, without what follows `>`."""
    own: list[str] = []
    for word in [*words, ";"]:
        if set(word) <= set(";&|"):
            if own:
                yield own[: own.index(">")] if ">" in own else own
            own = []
        else:
            own.append(word)


def is_shell(block: Block) -> bool:
    return block.kind == "console" or (block.kind in ("", "text") and bool(STARTS.match(block.text)))


SHELL = [(block.page, words) for block in BLOCKS if is_shell(block) for words in commands(block)]


def test_a_command_is_one_that_its_program_takes() -> None:
    """Catches a verb, option or argument that was renamed; make's targets, scripts, extras of pip that are gone."""
    for page, words in SHELL:
        try:
            check(page, *words)
        except Exception as error:
            error.add_note(f"{page}: {shlex.join(words)}")
            raise


def check(page: str, program: str, *rest: str) -> None:
    if program == "outrider":
        parsed(list(rest))
    elif program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install" and all(one in extras for one in re.findall(r"\[(\w+)\]", rest[1]))
    elif program == "python":
        told = rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
        assert rest[:2] == ("-m", "pytest") or (ROOT / told).exists(), f"{page} runs {told}, which is not there"
    else:
        assert program in OTHERS or program.startswith("served/"), f"{program} is not in OTHERS"
        if "outrider" in rest:
            parsed(list(rest[rest.index("outrider") + 1 :]))


def parsed(words: list[str]) -> None:
    """Read by the command line as far as running it."""
    context = typer.Context(cli.app)  # type: ignore[arg-type]
    name, verb, rest = cli.app.resolve_command(context, words)
    if isinstance(verb, cli.Verbs):
        name, verb, rest = verb.resolve_command(context, rest)
    verb.make_context(name, rest, parent=context)


def test_a_block_that_asks_a_server_runs_beside_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a client's call, field or answer that was renamed."""
    target, found = load_target("demo"), dict[str, Any]()
    with running(target, load_drafter("ngram", target)) as server:
        for key in ASKING:
            [block] = [block for block in BLOCKS if block.key == key]
            text = block.text.replace("http://127.0.0.1:8000", server.url).replace('model="demo"', f'model="{MODEL}"')
            assert text.count(server.url) == 1 and MODEL in text
            exec(compile(text, key[0], "exec"), found | {"__name__": "docs"}, found)
    assert found["chat"].choices[0].message.content and found["chat"].usage.completion_tokens <= 32
    assert found["answer"].text and found["answer"].text in capsys.readouterr().out


def test_a_short_command_of_the_pages_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for line in RUN:
        assert outrider_with(*shlex.split(line)[1:]) == 0
        assert capsys.readouterr().out.strip()


def test_yaml_is_taken_by_what_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a setting that was renamed: a block is checked as the file that it is part of."""
    monkeypatch.chdir(tmp_path)
    Path("tuned").mkdir()
    Path("tuned/cues.json").write_text('{"selected": ["So"]}')  # which one of them names
    for block in BLOCKS:
        if block.kind == "json":
            json.loads(block.text)
        elif block.kind == "toml":
            assert tomllib.loads(block.text)
        elif block.kind != "yaml":
            continue
        elif block.page == "gate.md":
            Policy.model_validate(yaml.safe_load(block.text))
        elif block.page == "client.md":
            Path("client.yaml").write_text(block.text)
            assert (load_profiles if "settings:" in block.text else load_prices)(Path("client.yaml"))
        else:
            whole = {"target": "demo", "drafter": {"kind": "ngram"}} | yaml.safe_load(block.text)
            Path("docs.yaml").write_text(yaml.safe_dump(whole))
            load(Path("docs.yaml"))
