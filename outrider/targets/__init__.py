"""The model whose law is kept."""
