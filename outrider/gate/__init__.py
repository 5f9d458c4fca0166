"""Did anything get worse?  Compares reports, texts, distributions and task scores, and returns a verdict with
reasons."""
