"""The step of `decoding.loop` as tensors that stay where they are, and the parts of it."""
