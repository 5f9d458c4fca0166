"""How served drafters draft: chains and trees, from their own output or from several drafters at once."""
