"""Measured costs and acceptance: on this machine, and on the user's requests."""
