"""Recorded requests, read from several formats."""
