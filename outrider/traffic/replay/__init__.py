"""Recorded requests, replayed to running servers."""
