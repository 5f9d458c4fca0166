"""The server on the network: routes, keys, admission and the pages it serves."""
