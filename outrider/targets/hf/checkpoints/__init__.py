"""Checkpoints: the class that loads one, and adapters."""
