"""Memories of text that need no training."""
