"""The step of `decoding.loop` on fixed tensors, and its parts."""
