"""Decides how much to draft, and which rule verifies it."""
