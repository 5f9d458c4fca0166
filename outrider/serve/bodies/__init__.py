"""From request bodies to the engine's requests, and from its outputs to answers."""
