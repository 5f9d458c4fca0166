"""Traffic: recorded calls sent again to a running server, what came back and how fast, and acceptance in production."""
