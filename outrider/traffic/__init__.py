"""Traffic: recorded calls sent again to a running server, the answers and their times, and acceptance in production."""
