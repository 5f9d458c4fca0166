"""From conversations to the target's answers to features; only token ids are stored on disk."""
