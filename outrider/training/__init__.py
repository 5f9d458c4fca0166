"""Train a drafter's model on features of its target.  Handles losses and rows, and is independent of the method."""
