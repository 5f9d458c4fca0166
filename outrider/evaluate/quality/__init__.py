"""Quality: the same text, or one of the same law, or one as good: tokens, distributions and task scores, drafted and not."""
