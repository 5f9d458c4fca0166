"""Checks and cost estimates of a run, before its target loads."""
