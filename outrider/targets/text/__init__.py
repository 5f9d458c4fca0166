"""Text to tokens and back: chat templates, turns, end tokens, vocabularies, and streamed text."""
