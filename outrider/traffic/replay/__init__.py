"""Recorded requests, sent again to running servers."""
