"""How much to draft, and which rule verifies it."""
