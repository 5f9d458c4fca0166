"""Silences what transformers prints while it loads weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_bars() -> Iterator[None]:
    """Disables transformers' progress bars, but not those of the hub's downloads."""
    before = logging.set_tqdm_hook(lambda tqdm, args, kwargs: tqdm(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


@contextmanager
def no_reports() -> Iterator[None]:
    """Disables transformers' progress bars and its list of weights that a model does not use."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(before)
