"""What transformers shows while it loads weights: a library shows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_bars() -> Iterator[None]:
    """While this is open, transformers draws no bars; those of downloads are the hub's own and stay."""
    before = logging.set_tqdm_hook(lambda tqdm, args, kwargs: tqdm(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


@contextmanager
def no_reports() -> Iterator[None]:
    """While this is open, transformers draws no bars and lists no weights that a model does not take."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_bars():
            yield
    finally:
        logging.set_verbosity(before)
