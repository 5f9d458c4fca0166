"""Faster passes for targets; `targets.hf.transformers`, which is below this package, finds them by name."""
