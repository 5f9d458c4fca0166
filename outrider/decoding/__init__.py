"""Speculative decoding in textbook form: draft, accept, loop.  Needs only torch."""
