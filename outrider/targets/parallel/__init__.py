"""Targets spread over several devices or processes."""
