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

import re

SECRETS = (
    (r"://[^/\s]{0,400}@", "://***@"),  # user:password@host
    (r"://[^\s/@]{0,200}:(?!\d{1,5}(?:/|$))\S{0,400}@", "://***@"),  # a password with a slash
    (r"(?<![\w.%+~-])[\w.%+~-]{1,200}:[^\s/@:'\"]{1,400}@(?=[\w.\[-])", "***@"),  # an address without its scheme
    (r"([?&][\w.-]{0,40}(?:key|token|secret|passw|auth|sig)[\w.-]{0,40}=)[^&\s\"'#]+", r"\1***"),
    (r"\b(bearer|basic) +[\w.~+/=-]{8,}", r"\1 ***"),
    (r"\b(outrider-(?=[\w-]{40})|sk-(?=[\w-]{20})|hf_(?=\w{30}))[\w-]+", r"\1***"),
)
"""Patterns of secrets in messages, and what is shown instead; bounded, so that long texts take little time."""


def masked(text: str) -> str:
    """The text without passwords of addresses, keys in their queries and headers, and keys by their usual prefixes."""
    for pattern, shown in SECRETS:
        text = re.sub(pattern, shown, text, flags=re.IGNORECASE)
    return text


def first_line(error: Exception) -> str:
    """The first line of another library's error, for use in a message; includes the next line if the first only
    introduces it."""
    first, _, rest = str(error).strip().partition("\n")
    return f"{first} {rest.strip().partition(chr(10))[0].strip()}" if first.endswith(":") and rest.strip() else first


LONGEST_MESSAGE = 4000
"""Characters; what a file or a server said may be longer."""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 4]} ..."


class OutriderError(Exception):
    """Base of all errors below; long messages are truncated, and secrets in them are masked."""

    def __init__(self, *args: object):
        super().__init__(*(masked(_cut(arg)) if isinstance(arg, str) else arg for arg in args))


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
