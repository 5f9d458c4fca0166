"""Every block of code in README and docs is run, or read by what would read it, or is named here with a reason.

Python blocks are run by test_pages.py.  Here: commands are parsed by the command line itself, and those that take
seconds are run; YAML is checked as the file that it is part of; JSON and TOML are parsed.
"""

from __future__ import annotations

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
from outrider.client import load_prices
from outrider.gate.policy import Policy
from outrider.runs.file import load
from tests.serve.running import MODEL, running
from tests.verbs import outrider_with

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVER = "asks a vLLM, which is not here; tests/targets asks servers of its own"
DRAWING = "a drawing or what a program printed, not code"
NOT_READ = {
    ("README.md", "┌────────────── drafter ──────────────┐"): DRAWING,
    ("architecture.md", "run file ──▶ runs ──▶ data ──────▶ training ─────▶ measure ──▶ report ──▶ gate"): DRAWING,
    ("deploy.md", "deploy    dflash in drafts/dflash (speculators) for Qwen/Qwen3-4B, with vLLM 0.33.0, not asked for: "
     "the flags are of this version"): DRAWING,
    ("deploy.md", "error drafts/eagle3 is in format sglang, but vLLM reads speculators or eagle for eagle3 (both have "
     "eagle_aux_hidden_state_layer_ids,"): DRAWING,
    ("deploy.md", "deployed/"): DRAWING,
    ("export.md", 'assistant = AutoModelForCausalLM.from_pretrained("served")'): "two lines of transformers' own; "
     "tests/export runs them with a folder that was exported",
    ("formats.md", "runs/NAME/"): DRAWING,
    ("index.md", "┌────────────── drafter ──────────────┐"): DRAWING,
    ("learning.md", "learned/"): DRAWING,
    ("many_devices.md", "from outrider import generate, load_target"): "several processes run it; "
     "tests/targets/test_tensor_parallel.py runs such a target",
    ("remote.md", "import outrider"): SERVER,
    ("replay.md", "replay    log.jsonl: 200 calls over 4 s (raw)"): DRAWING,
    ("tune.md", "at once     0     1     2     4  best            of none"): DRAWING,
    ("watch.md", "release   ngram at temperature 0, 400 prompts; the report also has temperature 1"): DRAWING,
}  # fmt: skip
"""Blocks that nothing here reads: page, first line, why."""
ASKING = [("client.md", "import asyncio"), ("serve.md", "from openai import OpenAI")]
"""Blocks of Python that ask a server at http://127.0.0.1:8000; they are run beside one."""
OTHERS = {
    "accelerate": "comes with the extra `accelerate`",
    "curl": "asks a server",
    "head": "prints a file that the reader wrote",
    "jq": "a program of the reader's",
    "llama-server": "an engine",
    "sqlite3": "a program of the reader's",
    "torchrun": "starts several processes; tests/training does",
    "trtllm-serve": "an engine",
}
"""Programs in commands that are not ours, and why they are not run."""
RUN = (
    "outrider formats", "outrider plan --hardware list", "outrider show --json-schema", "outrider drafters dspark",
    'outrider deploy --translate "vllm serve T --speculative-model D --num-speculative-tokens 5"', "outrider tasks",
    "outrider doctor",
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


def test_every_block_is_read_by_something_or_says_why_not() -> None:
    """Catches a new block that no test looks at."""
    read = {"python", 'python title="repeat.py"', "yaml", "json", "toml"}
    left = [block for block in BLOCKS if block.kind not in read and not is_shell(block)]
    left = [block for block in left if block.key not in NOT_READ and block.key not in ASKING]
    assert not left, f"{left[0].key} is neither run nor in NOT_READ"


def test_no_reason_is_given_for_what_is_not_there() -> None:
    """Catches an exception that outlived its block, and a command that is no longer on any page."""
    keys = {block.key for block in BLOCKS}
    assert [key for key in (*NOT_READ, *ASKING) if key not in keys] == []
    assert set(OTHERS) <= {words[0] for _, words in SHELL}
    told = {shlex.join(words) for _, words in SHELL} | {"outrider drafters dspark"}  # in a sentence of settings.md
    assert [line for line in RUN if shlex.join(shlex.split(line)) not in told] == []


@pytest.mark.parametrize(
    ("page", "words"), [pytest.param(page, words, id=f"{page}-{' '.join(words)[:60]}") for page, words in SHELL]
)
def test_a_command_is_one_that_its_program_takes(page: str, words: list[str]) -> None:
    """Catches a verb, option or argument that was renamed; make's targets, scripts, extras of pip that are gone."""
    program, *rest = words
    if program == "outrider":
        parsed(rest)
    elif program == "make":
        assert all(re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE) for target in rest)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install" and all(one in extras for one in re.findall(r"\[(\w+)\]", rest[1]))
    elif program == "python":
        told = rest[1].replace(".", "/") + ".py" if rest[0] == "-m" else rest[0]
        assert rest[:2] == ["-m", "pytest"] or (ROOT / told).exists(), f"{page} runs {told}, which is not there"
    else:
        assert program in OTHERS or program.startswith("served/"), f"{program} is not in OTHERS"
        if "outrider" in words:
            parsed(words[words.index("outrider") + 1 :])


def parsed(words: list[str]) -> None:
    """Read by the command line as far as running it."""
    context = typer.Context(cli.app)  # type: ignore[arg-type]
    name, verb, rest = cli.app.resolve_command(context, words)
    if isinstance(verb, cli.Verbs):
        name, verb, rest = verb.resolve_command(context, rest)
    verb.make_context(name, rest, parent=context)


@pytest.mark.parametrize("key", ASKING, ids=lambda key: key[0])
def test_a_block_that_asks_a_server_runs_beside_one(key: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a client's call, field or answer that was renamed."""
    [block] = [block for block in BLOCKS if block.key == key]
    target = load_target("demo")
    with running(target, load_drafter("ngram", target)) as server:
        text = block.text.replace("http://127.0.0.1:8000", server.url).replace('model="demo"', f'model="{MODEL}"')
        assert text.count(server.url) == 1 and MODEL in text
        found: dict[str, Any] = {"__name__": "docs"}
        exec(compile(text, key[0], "exec"), found)
    if "chat" in found:
        assert found["chat"].choices[0].message.content and found["chat"].usage.completion_tokens <= 32
    else:
        assert found["answer"].text and found["answer"].text in capsys.readouterr().out


@pytest.mark.parametrize("line", RUN)
def test_a_short_command_of_the_pages_runs(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert outrider_with(*shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("block", [pytest.param(one, id=one.key[1][:40]) for one in BLOCKS if one.kind == "yaml"])
def test_yaml_is_taken_by_what_reads_it(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a setting that was renamed: the block is checked as the file that it is part of."""
    monkeypatch.chdir(tmp_path)
    Path("tuned").mkdir()
    Path("tuned/cues.json").write_text('{"selected": ["So"]}')  # which one of them names
    if block.page == "gate-policy.md":
        Policy.model_validate(yaml.safe_load(block.text))
    elif block.page == "ask-files.md":
        (tmp_path / "prices.yaml").write_text(block.text)
        assert load_prices(tmp_path / "prices.yaml")
    else:
        whole = {"target": "demo", "drafter": {"kind": "ngram"}} | yaml.safe_load(block.text)
        (tmp_path / "docs.yaml").write_text(yaml.safe_dump(whole))
        load(tmp_path / "docs.yaml")


def test_json_and_toml_can_be_read() -> None:
    for block in BLOCKS:
        if block.kind == "json":
            json.loads(block.text)
        elif block.kind == "toml":
            assert tomllib.loads(block.text)
