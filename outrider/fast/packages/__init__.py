"""Compiled packages for a CPU: building, storing and running them."""
