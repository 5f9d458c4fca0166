"""Packages built by another process at the lowest priority, while this one runs plain steps."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence

from outrider.fast import Compiled, folder
from outrider.storage import trusted

log = logging.getLogger(__name__)

LOG = "background.log"
"""Log file of that process, in the folder of packages."""


def build(
    steps: Sequence[Compiled], target: str, drafter: str | None, settings: Sequence[str] = (), **options: str | None
) -> None:
    """Build the packages that these steps lack, and load each as soon as it is complete.

    steps: the target's first; if it can't be compiled, nothing is built.  The other arguments are those of `outrider
    compile` for the same target and drafter: settings is its `--set`, options are by name.
    """
    missing = [step for step in steps if step.graph is None and step.is_possible]
    if not missing or (steps[0].graph is None and steps[0] is not missing[0]):
        return
    try:
        output = (trusted.private_folder(folder()) / LOG).open("ab")
    except OSError as error:
        log.warning("steps stay plain, since packages can't be stored: %s", error)
        return
    log.warning(
        "compiling in the background, one to two minutes per step, once on this machine; steps are plain until then"
    )
    named = {"target": target, "drafter": drafter, **options}
    arguments = [f"--{name}={value}" for name, value in named.items() if value is not None]
    arguments += [f"--set={setting}" for setting in settings]
    command = [sys.executable, "-m", "outrider", "compile", "--background", *arguments]
    with output:
        # in its own session, so that Ctrl-C does not end it
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    for step in missing:
        step.await_graph()
