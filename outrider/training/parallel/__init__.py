"""Several processes that train one model."""
