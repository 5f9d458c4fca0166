"""A target over several devices or processes."""
