"""That a family of models decodes here as it should: a self-test on a miniature, and its verdict on disk."""
