"""The model that verifies."""
