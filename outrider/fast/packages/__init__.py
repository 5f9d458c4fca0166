"""Graphs built ahead of time for a CPU, and where they are kept."""
