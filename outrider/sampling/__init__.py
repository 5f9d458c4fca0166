"""Sampling: a request's settings, penalties, grammars, stop strings, and the judge that applies them."""
