"""Texts on disk to draft from: built once, sorted by suffix, mapped into memory."""
