"""May this draft ship?  Reports of old and new, paired prompt by prompt, rules over them, a verdict a rule."""
