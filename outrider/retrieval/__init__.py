"""Text indexes that need no training."""
