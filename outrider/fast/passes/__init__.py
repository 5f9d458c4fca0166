"""Faster passes for targets; `targets.hf.transformers`, which is in a lower layer, finds them by name."""
