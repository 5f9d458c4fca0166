"""Speculative decoding, whole: read draft, accept, loop, and the subject is understood.  Needs torch and nothing else."""
