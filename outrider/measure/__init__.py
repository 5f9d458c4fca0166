"""Measures drafters against the target alone in the same run: acceptance, speed, latency, exactness."""
