"""Recorded traffic, replayed to running servers, and acceptance in production."""
