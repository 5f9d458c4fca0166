"""The command line: a module per verb, loaded when the verb is called, so that `--help` does not import torch."""

import keyword
import logging
import sys
import traceback
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_install_completion_arguments

import outrider
from outrider.cli import console
from outrider.errors import ConfigError, OutriderError

HIDDEN = ""
"""Heading of verbs that the help omits: experimental ones, and those that other verbs run."""
VERBS = {
    "From plan to production": {
        "plan": ("plan", "Predict whether speculation pays, and with which method"),
        "init": ("init", "Create a run file"),
        "decode": ("decode", "Generate text, with accepted draft tokens marked"),
        "chat": ("chat", "Chat in the terminal, with accepted draft tokens marked"),
        "prepare": ("run", "Generate training answers with the target"),
        "train": ("run", "Train a drafter"),
        "evaluate": ("evaluate", "Measure drafters against the target alone"),
        "run": ("run", "Run all stages: prepare, train, evaluate"),
        "export": ("exchange", "Export a drafter to the format of an engine"),
        "deploy": ("deploy", "Print the command that serves a drafter in an engine"),
        "serve": ("serve", "Start an OpenAI-compatible server"),
    },
    "Servers": {
        "ask": ("ask", "Send a prompt, or a file of prompts, to a server"),
        "tune": ("tune", "Find the best draft length for each load"),
        "replay": ("replay", "Replay recorded traffic and time the answers"),
        "watch": ("watch", "Warn if acceptance leaves the release interval"),
    },
    "Checks": {
        "diagnose": ("diagnose", "Find out why a drafter accepts less than it could"),
        "parity": ("parity", "Check that a drafter does not change the output"),
        "lm-eval": ("parity", "Check that it does not change benchmark scores"),
        "verify-export": ("verify", "Compare acceptance in an engine and in Outrider"),
        "report": ("report", "Render a report, or compare reports"),
        "compare": ("compare", "Compare methods, such as your own, at equal minutes"),
        "gate": ("gate", "Decide whether a drafter may replace the current one"),
    },
    "Drafters and data": {
        "import": ("exchange", "Import a published draft model"),
        "calibrate": ("run", "Calibrate a drafter's confidences"),
    },
    "Information": {
        "show": ("show", "Show a run file with all defaults resolved"),
        "drafters": ("drafters", "List drafters and their settings"),
        "tasks": ("tasks", "List prompt sets for evaluation"),
        "formats": ("exchange", "List formats and engines"),
        "doctor": ("doctor", "Show what this machine supports"),
    },
    HIDDEN: {
        "compile": ("compile", "Compile the steps of a target and a drafter, once per machine"),
    },
}  # fmt: skip
"""Heading in the help → verb → its module in this package and its help line."""
GROUPS = {
    "corpus": ("Drafters and data", "Manage text corpora to draft from", {
        "add": ("corpus_add", "Build a corpus from text files"),
        "list": ("corpus", "List corpora"),
        "stats": ("corpus", "Show the contents of a corpus"),
        "remove": ("corpus", "Delete a corpus"),
        "verify": ("corpus", "Check a corpus against its checksums"),
    }),
    "keys": ("Servers", "Manage the API keys of a server", {
        "add": ("keys", "Create a key and print it once"),
        "list": ("keys", "List keys"),
        "revoke": ("keys", "Revoke a key"),
    }),
    "learning": ("Servers", "Inspect or undo online learning of a server", {
        "log": ("learning", "Show training runs, updates and rollbacks"),
        "undo": ("learning", "Go back to an earlier version of the drafter"),
    }),
    "lab": (HIDDEN, "Fit settings of experimental methods", {
        "layers": ("lab", "Search for layers to skip while drafting"),
        "cues": ("lab", "Rank words after which a small model can generate alone"),
    }),
}  # fmt: skip
"""Verb with subcommands → its heading, its help line, and its subcommands."""


class Verbs(TyperGroup):
    """Verbs listed in a table and imported when called."""

    def __init__(self, name: str, table: dict[str, dict[str, tuple[str, str]]], *, prefix: str = "", **settings: Any):
        """prefix: common prefix of the functions, which are named after the verbs with `_` for `-`, plus a trailing `_`
        for a Python keyword."""
        lines = [
            TyperCommand(verb, short_help=line, rich_help_panel=heading, hidden=heading == HIDDEN)
            for heading, verbs in table.items() for verb, (_, line) in verbs.items()
        ]  # fmt: skip
        super().__init__(name=name, commands=lines, no_args_is_help=True, **settings)
        self.modules = {verb: module for verbs in table.values() for verb, (module, _) in verbs.items()}
        self.prefix = prefix

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Load the verb in place of its table entry."""
        name, _, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing:
            from outrider.cli import complete  # needed for shell completion only

            if (quick := complete.stand_in(rest)) is not None:
                return name, quick, rest
        return name, self.load(name) if name else None, rest

    def get_help_option(self, ctx: Any) -> Any:
        """Hidden, so that the help fits one screen."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option

    def load(self, name: str) -> Any:
        """A verb as a command with all its options."""
        if name not in self.modules:  # a group
            return self.commands[name]
        module = self.modules[name]
        console.quiet(parallel_tokenizers=module == "corpus_add")
        word = self.prefix + name.replace("-", "_") + "_" * keyword.iskeyword(name)
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(import_module(f"outrider.cli.{module}"), word))
        return _with_model(typer.main.get_command(alone))


def _with_model(command: Any) -> Any:
    """Accept `--model`, the name in other tools, for `--target`."""
    flags = {flag for option in command.params for flag in option.opts}
    for option in command.params:
        if "--target" in option.opts and "--model" not in flags:
            option.opts.append("--model")
    return command


app = Verbs(
    "outrider", VERBS,
    help="Speculative decoding with exact output.  Options: `COMMAND -h`; `--version`.",
    context_settings={"help_option_names": ["-h", "--help"]}, params=list(get_install_completion_arguments()),
)  # fmt: skip
for option in app.params:  # for shell completion; hidden so that the help fits one screen
    option.hidden = True  # type: ignore[attr-defined]
for group, (heading, line, verbs) in GROUPS.items():
    hidden = heading == HIDDEN
    commands = {"Commands": verbs}
    app.add_command(Verbs(group, commands, prefix=f"{group}_", help=line, rich_help_panel=heading, hidden=hidden))


def main() -> None:
    """Entry point: an OutriderError is printed as one sentence with an exit code, without a traceback."""
    logging.lastResort = console.LogHandler(logging.WARNING)
    try:
        if sys.argv[1:] == ["--version"]:
            print(f"outrider {outrider.__version__}")
            return
        code = app(standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into a code that it returns
            raise KeyboardInterrupt
        if isinstance(code, int) and code:
            raise SystemExit(code)
    except OutriderError as error:
        console.fail(str(error))
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        console.fail(f"{error}; files written so far are kept")
        raise SystemExit(1) from None
    except (KeyboardInterrupt, typer.Abort):
        console.remark("\nstopped; rerun the same command to resume")
        raise SystemExit(130) from None
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong use of the command line
            error.show()
            raise SystemExit(error.exit_code) from None
        console.remark(traceback.format_exc())  # Python would print names and messages unescaped
        raise SystemExit(1) from None
