"""Prompt sets by name, and the prompts of an evaluation."""
