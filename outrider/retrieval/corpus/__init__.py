"""Corpora of text on disk to draft from: built once, sorted by suffix, memory-mapped."""
