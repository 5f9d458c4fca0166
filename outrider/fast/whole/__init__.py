"""Whole steps in one call: verify, accept, commit, observe and propose without the host in between."""
