"""What a server keeps of its work: counts, Prometheus' metrics, and a line for every request."""
