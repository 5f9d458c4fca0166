"""Every error that Outrider raises for its users.  Each message says what was given, what was wanted, what to do.

OutriderError
├── ConfigError       a run file, an override or an argument is wrong
├── DataError         prompts, answers or a data set can't be used
├── TargetError       the target can't be loaded, or can't do what was asked
├── DrafterError      a drafter can't be built, or does not fit its target
├── CheckpointError   a checkpoint is missing, damaged or made for another target
├── TrainingError     training can't go on: a loss or a gradient is not finite, no place to save
├── ExportError       a checkpoint can't be written in, or read from, an outside format
└── NotCompiled       there is no compiled step, and the plain one is used
"""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """What an error of another program says, as part of our own sentence."""
    return str(error).strip().split("\n")[0]


class OutriderError(Exception):
    """Base of all errors below."""


class ConfigError(OutriderError, ValueError):
    """A run file, an override or an argument is wrong; the message names the key."""


class DataError(OutriderError, ValueError):
    """Prompts, answers or a data set can't be used; the message names the file and the line."""


class TargetError(OutriderError):
    """The target can't be loaded, or can't do what was asked."""


class DrafterError(OutriderError):
    """A drafter can't be built, or does not fit its target."""


class CheckpointError(OutriderError):
    """A checkpoint is missing, damaged or made for another target."""


class TrainingError(OutriderError):
    """Training can't go on; the last good checkpoint stays as it was."""


class ExportError(OutriderError):
    """A checkpoint can't be written in, or read from, an outside format."""


class NotCompiled(OutriderError):
    """There is no compiled step; the message says why, and the plain path is used."""
