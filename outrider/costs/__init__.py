"""Cost of a step: seconds by slots, tokens of the pass and nodes of the draft, measured once or while decoding."""
