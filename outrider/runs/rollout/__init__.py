"""The roll-out of a run's drafter, step by step."""
