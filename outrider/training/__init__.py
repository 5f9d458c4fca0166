"""Train a drafter's model on features of its target.  Knows losses and rows, never a method."""
