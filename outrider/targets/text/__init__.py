"""Where text becomes tokens and back: templates, turns, end tokens, vocabularies, and texts that grow."""
