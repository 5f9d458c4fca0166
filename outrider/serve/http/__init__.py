"""The HTTP server: routes, API keys, admission and the live page."""
