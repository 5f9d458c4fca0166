"""Targets on a server: one that verifies drafts, and one whose answers and states train a drafter here."""
