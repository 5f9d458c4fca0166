"""How one request is sent until its answer begins: rates, retries, connections and streams."""
