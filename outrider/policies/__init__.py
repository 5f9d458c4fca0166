"""How much to draft, and by which rule to judge."""
