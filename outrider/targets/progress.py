"""The bar that transformers draws while it loads weights: a library draws none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def no_bars() -> Iterator[None]:
    """While this is open, transformers draws no bars; those of downloads are the hub's own and stay."""
    before = logging.set_tqdm_hook(lambda tqdm, given, named: tqdm(*given, **{**named, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)
