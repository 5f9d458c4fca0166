"""What steps cost: seconds by slots, tokens of a pass and nodes of a draft, timed once or learnt while decoding."""
