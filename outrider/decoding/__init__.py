"""Speculative decoding as a textbook: draft, accept, loop.  Needs torch and nothing else."""
