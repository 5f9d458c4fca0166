"""From conversations to the target's answers to features; by default, only token ids are stored on disk."""
