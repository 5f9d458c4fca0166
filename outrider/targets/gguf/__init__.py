"""Targets in GGUF files, whose weights stay quantised in memory."""
