"""Recognises which question a text asks, independent of task layouts and wording."""
