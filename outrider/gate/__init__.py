"""Was anything lost?  Reports, texts, distributions and task scores of old and new, and a verdict with its reasons."""
