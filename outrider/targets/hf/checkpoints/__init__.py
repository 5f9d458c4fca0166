"""Checkpoints as others leave them: the class that reads one, and adapters over it."""
