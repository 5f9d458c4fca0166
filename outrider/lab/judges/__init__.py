"""Rules that change the output, one file per rule; only with allow_lossy, and measured.

A file has a function of its own name that makes a `policies.lossy.LossyRule` of its settings; SETTINGS, those that may
be given as text, and how each is read; and REQUIRED, the setting without which it has no meaning, or "".
"""
