"""Text indexes for drafting without training."""
