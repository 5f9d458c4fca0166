"""The command line: one file for each verb, loaded when the verb is called, so that `--help` needs no torch."""

import keyword
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_install_completion_arguments

import outrider
from outrider.cli import console
from outrider.errors import ConfigError, OutriderError

HIDDEN = ""
"""Heading of verbs that the help leaves out, since others call them."""
VERBS = {
    "Steps": {
        "plan": ("plan", "Will it pay, which method, how deep, at what cost"),
        "init": ("init", "Write a run file to begin with, by flags or by asking"),
        "decode": ("decode", "Stream a continuation; what was drafted is marked"),
        "prepare": ("run", "Let the target answer the prompts"),
        "train": ("run", "Train the drafter on the target's answers"),
        "evaluate": ("evaluate", "Measure the drafter and its baselines"),
        "run": ("run", "Prepare, train and evaluate: all that a run file has"),
        "export": ("exchange", "Write a drafter in another's format, and check it"),
        "deploy": ("deploy", "The command and files with which an engine serves it"),
    },
    "Data and weights": {
        "import": ("exchange", "Make a checkpoint of a draft in another's format"),
        "calibrate": ("run", "Scale confidences by what was accepted"),
    },
    "Checks": {
        "parity": ("parity", "Are the answers the same with a drafter?"),
        "lm-eval": ("parity", "Are the scores of public tasks the same?"),
        "verify-export": ("verify", "Does an engine accept what is accepted here?"),
        "report": ("report", "Write a report's page again, or compare reports"),
        "gate": ("gate", "May this draft ship?  Compare with a baseline's report"),
    },
    "Servers": {
        "serve": ("serve", "Serve a target and its drafter to OpenAI's clients"),
        "ask": ("ask", "Ask a server, by prompt or by file, and what it cost"),
        "tune": ("tune", "Find which draft length pays at which load"),
        "replay": ("replay", "Send recorded traffic to servers, and time the answers"),
        "watch": ("watch", "Warn when a server's acceptance leaves its release's"),
    },
    "Lists": {
        "show": ("show", "A run file resolved, and the size of its drafter"),
        "drafters": ("drafters", "The drafters there are"),
        "tasks": ("tasks", "The prompt sets to measure on"),
        "formats": ("exchange", "Which drafters can be written and read in which format"),
        "doctor": ("doctor", "What this machine can do, and what to install for more"),
    },
    HIDDEN: {
        "compile": ("compile", "Compile the steps of a target and a drafter, once per machine"),
    },
}  # fmt: skip
"""Heading of the help → verb → its module in this package, and its line in the help."""
CORPUS = {
    "Commands": {
        "add": ("corpus_add", "Make a corpus of texts"),
        "list": ("corpus", "The corpora there are"),
        "stats": ("corpus", "What a corpus holds, and of which files it was made"),
        "remove": ("corpus", "Delete a corpus"),
        "verify": ("corpus", "Read a whole corpus and compare it with its checksums"),
    },
}
KEYS = {
    "Commands": {
        "add": ("keys", "Make a key, and print it once"),
        "list": ("keys", "The names that have a key"),
        "revoke": ("keys", "Remove a key"),
    },
}


LEARNING = {
    "Commands": {
        "log": ("learning", "What was trained, served, refused and rolled back"),
        "undo": ("learning", "Go back to an earlier version of the drafter"),
    },
}


class Verbs(TyperGroup):
    """Verbs listed in a table, and loaded when they are called."""

    def __init__(self, name: str, table: dict[str, dict[str, tuple[str, str]]], *, prefix: str = "", **settings: Any):
        """prefix: of the functions.  Each has its verb's name, with `_` for `-` and after a word of Python's."""
        lines = [
            TyperCommand(verb, short_help=line, rich_help_panel=heading, hidden=heading == HIDDEN)
            for heading, verbs in table.items() for verb, (_, line) in verbs.items()
        ]  # fmt: skip
        super().__init__(name=name, commands=lines, no_args_is_help=True, **settings)
        self.modules = {verb: module for verbs in table.values() for verb, (module, _) in verbs.items()}
        self.prefix = prefix

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The verb of a command line, loaded, in place of its line in the table."""
        name, _, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing:
            from outrider.cli import complete  # of no use but to the shell

            if (quick := complete.stand_in(rest)) is not None:
                return name, quick, rest
        return name, self.load(name) if name else None, rest

    def get_help_option(self, ctx: Any) -> Any:
        """Known, but without a panel of its own: all of the help fits one screen."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.hidden = True
        return option

    def load(self, name: str) -> Any:
        """A verb as a command with all its options."""
        if name not in self.modules:  # verbs of its own
            return self.commands[name]
        module = self.modules[name]
        console.quiet(parallel_tokenizers=module == "corpus_add")
        word = self.prefix + name.replace("-", "_") + "_" * keyword.iskeyword(name)
        alone = typer.Typer(add_completion=False)
        alone.command(name)(getattr(import_module(f"outrider.cli.{module}"), word))
        return _with_model(typer.main.get_command(alone))


def _with_model(command: Any) -> Any:
    """`--model` is taken for `--target`, which other tools call so."""
    given = {name for option in command.params for name in option.opts}
    for option in command.params:
        if "--target" in option.opts and "--model" not in given:
            option.opts.append("--model")
    return command


app = Verbs(
    "outrider", VERBS,
    help="Speculative decoding with exact output.  `COMMAND -h` says more; `--version`.",
    context_settings={"help_option_names": ["-h", "--help"]}, params=list(get_install_completion_arguments()),
)  # fmt: skip
for option in app.params:  # for the shell's completion; hidden, so that all of the help fits one screen
    option.hidden = True  # type: ignore[attr-defined]
app.add_command(
    Verbs(
        "corpus", CORPUS, prefix="corpus_", help="Texts to draft from: add, list, remove, stats, verify.",
        rich_help_panel="Data and weights",
    )
)  # fmt: skip
app.add_command(
    Verbs("keys", KEYS, prefix="keys_", help="API keys of a server: add, list, revoke.", rich_help_panel="Servers")
)


app.add_command(
    Verbs(
        "learning", LEARNING, prefix="learning_", help="A drafter that learns while it serves: log, undo.",
        rich_help_panel="Servers",
    )
)  # fmt: skip


def main() -> None:
    """Entry point: an OutriderError is printed as one sentence and an exit code, without a traceback."""
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
        console.fail(f"{error}; what was written before stays")
        raise SystemExit(1) from None
    except (KeyboardInterrupt, typer.Abort):
        console.remark("\nstopped; what is done stays, the same command goes on from there")
        raise SystemExit(130) from None
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong use of the command line
            error.show()
            raise SystemExit(error.exit_code) from None
        raise
