"""Costs on paper, from a model's config and a device's data sheet."""
