"""Did anything get worse?  Compares reports, texts, distributions and task scores, and gives a verdict with its
reasons."""
