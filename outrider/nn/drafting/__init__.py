"""How drafters draft in serving: chains and trees, from their own output or from several drafters at once."""
