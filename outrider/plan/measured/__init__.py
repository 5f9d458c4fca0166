"""Costs and acceptance as measured: on this machine, and on the user's own requests."""
