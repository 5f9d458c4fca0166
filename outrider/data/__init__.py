"""From conversations to the target's own answers to features; nothing on disk but token ids."""
