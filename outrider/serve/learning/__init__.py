"""Online learning: the drafter is trained on the texts that the server generates."""
