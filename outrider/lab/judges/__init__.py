"""Rules that change the output, one module per rule; only with allow_lossy, and with measured effects.

A module has a function of its own name that makes a `policies.lossy.LossyRule` from its settings; SETTINGS, from those
that can be given as text to their parsers; and REQUIRED, the name of its required setting, or "".
"""
