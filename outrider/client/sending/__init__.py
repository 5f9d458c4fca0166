"""How a request is sent until its answer begins: rate limits, retries, connections and streams."""
