"""What a run will take, and what is wrong with it, before its target loads."""
