"""Drafters in the formats of others, both ways: one file a format, and the file's name is its name."""

from __future__ import annotations
