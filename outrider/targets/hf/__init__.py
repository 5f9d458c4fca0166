"""Causal LMs of transformers as targets: what a family needs, read off its modules and tried on text."""
