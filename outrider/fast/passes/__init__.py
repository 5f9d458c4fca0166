"""Faster ways for a target to take its passes; `targets.hf.transformers` finds them by name, since it lies below."""
