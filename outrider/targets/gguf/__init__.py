"""Targets in GGUF files, whose weights stay in the blocks of the file."""
