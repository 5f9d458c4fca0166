"""Records of a server's work: counts, Prometheus metrics, and the request log."""
