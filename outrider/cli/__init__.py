"""The command line: one verb per stage.  Heavy modules load inside the verbs, so `--help` is instant."""

from __future__ import annotations

from collections.abc import Callable

import typer

from outrider.cli import (
    console,
    corpora,
    decode,
    deploy,
    exchange,
    gate,
    look,
    parity,
    replay,
    report,
    stages,
    tasks,
    verify,
    watch,
)
from outrider.errors import ConfigError, OutriderError

app = typer.Typer(
    name="outrider",
    help="Speculative decoding, the whole road: prepare, train, evaluate, export, decode.  The output is the target's own.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
VERBS: tuple[Callable[..., None], ...] = (
    stages.run, stages.prepare, stages.train, stages.calibrate, stages.evaluate, decode.decode,
    parity.parity, parity.lm_eval, replay.replay, gate.gate, report.report, watch.watch,
    exchange.export, verify.verify_export, deploy.deploy, deploy.tune,
    look.show, look.drafters, tasks.tasks, exchange.formats, look.doctor,
)  # fmt: skip
for verb in VERBS:
    app.command()(verb)
app.command("import")(exchange.import_)
app.add_typer(corpora.app, name="corpus")


def main() -> None:
    """Entry point: errors of ours are one sentence and an exit code, not a traceback."""
    try:
        code = app(standalone_mode=False)
        if code == 130:  # typer turns Ctrl-C into a code that it returns
            raise KeyboardInterrupt
        if isinstance(code, int) and code:
            raise SystemExit(code)
    except OutriderError as error:
        console.fail(str(error))
        raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None
    except OSError as error:
        console.fail(f"{error}; what was written before is kept")
        raise SystemExit(1) from None
    except (KeyboardInterrupt, typer.Abort):
        console.note.print("\nstopped; what was done is kept, the same command goes on from there")
        raise SystemExit(130) from None
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except Exception as error:
        if hasattr(error, "show") and hasattr(error, "exit_code"):  # wrong use of the command line
            error.show()
            raise SystemExit(error.exit_code) from None
        raise
