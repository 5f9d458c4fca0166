"""Errors raised to users.  Each message says what was given, what was expected, and what to do.

OutriderError
├── ConfigError       a run file, an override or an argument is wrong
├── DataError         prompts, answers or a data set can't be used
├── TargetError       the target can't be loaded, or does not support the request
├── DrafterError      a drafter can't be built, or does not fit its target
├── CheckpointError   a checkpoint is missing, damaged or made for another target
├── TrainingError     training can't continue: a loss or gradient is not finite, the disk is full
├── ExportError       a drafter can't be written or read in another format
└── NotCompiled       a step is not compiled, and the plain one is used
"""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """The first line of another library's error, for use in a message."""
    return str(error).strip().split("\n")[0]


class OutriderError(Exception):
    """Base of all errors below."""


class ConfigError(OutriderError, ValueError):
    """A run file, an override or an argument is wrong; the message names the key."""


class DataError(OutriderError, ValueError):
    """Prompts, answers or a data set can't be used; the message names the file and the line."""


class TargetError(OutriderError):
    """The target can't be loaded, or does not support the request."""


class DrafterError(OutriderError):
    """A drafter can't be built, or does not fit its target."""


class CheckpointError(OutriderError):
    """A checkpoint is missing, damaged or made for another target."""


class TrainingError(OutriderError):
    """Training can't continue; the last good checkpoint is intact."""


class ExportError(OutriderError):
    """A drafter can't be written or read in another format."""


class NotCompiled(OutriderError):
    """A step is not compiled; the message says why, and the plain one is used."""
