"""Fitting on the target's own texts, after training a draft model or instead of it."""
